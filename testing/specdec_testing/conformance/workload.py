"""The requests with which every proposer is run."""

from __future__ import annotations

from itertools import cycle

from attrs import evolve, frozen

from specdec_core.config.sampling import SamplingParams
from specdec_core.engine.request import Request

MAX_TOKENS = 8
BLOCK_SIZE = 4
"""Of the KV cache of the kit's engines."""
LONG = 490
"""Tokens of a prompt that leaves little room in the kit's targets."""

PROMPTS: tuple[tuple[int, ...], ...] = (
    (7, 2),
    (3, 1, 4, 1, 5) * 5,
    (11,) * 9,
    tuple(token * 7 % 31 for token in range(40)),
    (8, 9, 2, 8, 9, 6, 8, 9),
)


@frozen
class Ask:
    """A prompt with sampling parameters. Each request of a run has another seed."""

    prompt: tuple[int, ...]
    params: SamplingParams


def asks(temperature: float, first_seed: int, num_speculative_tokens: int) -> list[Ask]:
    """Five requests, each with its own num_speculative_tokens."""
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
    """The same request without num_speculative_tokens, which an engine without speculation refuses."""
    return evolve(ask, params=evolve(ask.params, num_speculative_tokens=None))


def off_now_and_then(request: Request) -> bool:
    """For `Observer.is_off`: off for two steps, on for two steps, starting with "on" for requests with odd seeds."""
    return ((request.num_tokens - request.num_prompt_tokens) // 2 + request.seed) % 2 == 0


def one_token() -> list[Ask]:
    return [Ask((5,), SamplingParams(temperature=0.0, max_tokens=4, seed=1, ignore_eos=True))]


def last() -> list[Ask]:
    """A short request with a seed of its own."""
    return [Ask((8, 9, 2, 8, 9), SamplingParams(temperature=0.0, max_tokens=3, seed=2, ignore_eos=True))]


def long() -> list[Ask]:
    """A request up to the target's maximum length."""
    return [Ask((3, 1, 4, 1, 5) * (LONG // 5), SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))]


def many_seeds() -> list[Ask]:
    """Requests with different seeds and top_k=1: their output is the same, so the proposer draws after the same tokens
    many times."""
    params = SamplingParams(temperature=0.7, top_k=1, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [Ask(PROMPTS[1], evolve(params, seed=1000 + i)) for i in range(48)]
