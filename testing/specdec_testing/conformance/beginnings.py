"""Requests with common prefixes, run one after another, so that each may find blocks of earlier ones in the prefix
cache."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from specdec_core.api.llm import LLM
from specdec_core.config.sampling import SamplingParams
from specdec_testing.conformance.recording import Journal
from specdec_testing.conformance.runs import Run, run_engine
from specdec_testing.conformance.workload import BLOCK_SIZE, MAX_TOKENS, Ask


def asks() -> dict[str, list[Ask]]:
    """Greedy and sampled requests, in groups by their common prefix.

    "prefix": all share three KV-cache blocks. One prompt is exactly these blocks; the others share two more tokens.
        Tests add `continued` requests to this group.
    "fill": the first request ends before anything is drafted for it; the others begin with its whole prompt.
    "lookahead": all share three KV-cache blocks but differ in the token after them.
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
    """A request whose prompt is the prompt of `ask`, its output and one more token."""
    return Ask((*ask.prompt, *output, 4), evolve(ask.params, seed=1000 + (ask.params.seed or 0)))


def run_in_turn(llm: LLM, asked: Sequence[Ask], journal: Journal) -> Run:
    """Run requests in one engine, one after another."""
    runs = [run_engine(llm, [ask], journal) for ask in asked]
    return Run(
        journal, [output for run in runs for output in run.outputs], num_cached=sum(run.num_cached for run in runs)
    )
