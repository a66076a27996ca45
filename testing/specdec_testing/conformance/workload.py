"""The requests that the conformance kit runs with every proposer."""

from __future__ import annotations

from itertools import cycle

from attrs import evolve, frozen

from specdec_core.config.sampling import SamplingParams
from specdec_core.engine.request import Request

MAX_TOKENS = 8
BLOCK_SIZE = 4
"""Tokens per KV-cache block in the kit's engines."""
LONG = 490
"""Length of a prompt that almost fills the kit's targets, which take 512 tokens."""

PROMPTS: tuple[tuple[int, ...], ...] = (
    (7, 2),
    (3, 1, 4, 1, 5) * 5,
    (11,) * 9,
    tuple(token * 7 % 31 for token in range(40)),
    (8, 9, 2, 8, 9, 6, 8, 9),
)


@frozen
class Ask:
    """A request: a prompt, as token ids, with sampling parameters. All requests of a run have different seeds."""

    prompt: tuple[int, ...]
    params: SamplingParams


def asks(temperature: float, first_seed: int, num_speculative_tokens: int) -> list[Ask]:
    """Return five requests with different prompts and different limits on the number of draft tokens.

    first_seed: the seed of the first request. Each further request has the next seed.
    num_speculative_tokens: the largest limit on draft tokens.
    """
    budgets = cycle([None, 1, 3, 2, None])
    return [
        Ask(
            prompt,
            SamplingParams(
                temperature=temperature,
                max_tokens=MAX_TOKENS,
                seed=first_seed + i,
                ignore_eos=True,
                num_speculative_tokens=None if most is None else min(most, num_speculative_tokens),
            ),
        )
        for i, (prompt, most) in enumerate(zip(PROMPTS, budgets, strict=False))
    ]


def plain(ask: Ask) -> Ask:
    """Return the request without its own limit on draft tokens (num_speculative_tokens), which an engine without
    speculative decoding refuses."""
    return evolve(ask, params=evolve(ask.params, num_speculative_tokens=None))


def off_now_and_then(request: Request) -> bool:
    """Return whether speculation is turned off for a request. It is off for two output tokens, on for the next two, and
    so on; for odd seeds it begins with on. The kit puts this function in place of `Observer.is_off`."""
    return ((request.num_tokens - request.num_prompt_tokens) // 2 + request.seed) % 2 == 0


def one_token() -> list[Ask]:
    return [Ask((5,), SamplingParams(temperature=0.0, max_tokens=4, seed=1, ignore_eos=True))]


def last() -> list[Ask]:
    """Return a list of one short request, whose seed no other request has."""
    return [Ask((8, 9, 2, 8, 9), SamplingParams(temperature=0.0, max_tokens=3, seed=2, ignore_eos=True))]


def long() -> list[Ask]:
    """Return a list of one request that runs up to the target's maximum length."""
    return [Ask((3, 1, 4, 1, 5) * (LONG // 5), SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))]


def many_seeds() -> list[Ask]:
    """Return requests with the same prompt and different seeds. All have the same output because of top_k=1, so the
    proposer drafts after the same tokens with many seeds."""
    params = SamplingParams(temperature=0.7, top_k=1, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [Ask(PROMPTS[1], evolve(params, seed=1000 + i)) for i in range(48)]
