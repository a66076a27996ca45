"""Requests that begin with the same tokens. They run one after another, so that a later request can find KV-cache
blocks of earlier ones in the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from specdec_core.api.llm import LLM
from specdec_core.config.sampling import SamplingParams
from specdec_testing.conformance.recording import Journal
from specdec_testing.conformance.runs import Run, run_engine
from specdec_testing.conformance.workload import BLOCK_SIZE, MAX_TOKENS, Ask


def asks() -> dict[str, list[Ask]]:
    """Return groups of requests, {name of the group: requests}. The prompts of a group begin with the same tokens.
    Greedy and sampled requests alternate.

    "prefix": the prompts share three KV-cache blocks. One prompt ends after these blocks.
    "fill": the first request ends after one output token, before its first draft. The other prompts begin with its
        prompt.
    "lookahead": the prompts share three KV-cache blocks and differ in the next token.
    """
    size = 3 * BLOCK_SIZE
    prefix = tuple(token * 11 % 37 for token in range(size + 2))
    fill = tuple(token * 5 % 41 + 1 for token in range(size + 3))
    lookahead = tuple(token * 13 % 43 + 2 for token in range(size))
    (first, *others) = _asks([fill, (*fill, 5), (*fill, 8, 3)], 400)
    return {
        "prefix": _asks([(*prefix, 5, 9), (*prefix, 6, 1, 2), (*prefix, 7, 9, 5, 9, 5), prefix[:size]], 300),
        "fill": [evolve(first, params=evolve(first.params, max_tokens=1)), *others],
        "lookahead": _asks([(*lookahead, 5, 9), (*lookahead, 6, 9), (*lookahead, 7, 1, 4)], 500),
    }


def _asks(prompts: Sequence[tuple[int, ...]], first_seed: int) -> list[Ask]:
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    return [
        Ask(prompt, evolve(params, temperature=0.8 * (i % 2), seed=first_seed + i)) for i, prompt in enumerate(prompts)
    ]


def continued(ask: Ask, output: Sequence[int]) -> Ask:
    """Return a request whose prompt is the prompt of `ask`, followed by `output` and one more token."""
    return Ask((*ask.prompt, *output, 4), evolve(ask.params, seed=1000 + (ask.params.seed or 0)))


def run_in_turn(llm: LLM, asked: Sequence[Ask], journal: Journal) -> Run:
    """Run requests in one engine, each to its end before the next one starts. Returns the outputs of all requests."""
    runs = [run_engine(llm, [ask], journal) for ask in asked]
    return Run(
        journal, [output for run in runs for output in run.outputs], num_cached=sum(run.num_cached for run in runs)
    )
