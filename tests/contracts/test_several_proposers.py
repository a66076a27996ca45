"""Several proposers in one engine: their plans are united, and their drafts verified as one tree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from ledger import LEDGER, LedgerConfig
from offered import Offered

from specdec_core import (
    BuildContext,
    Draft,
    Plan,
    Proposer,
    ProposerBatch,
    ProposerSpec,
    SamplingParams,
    SpeculativeConfig,
    StaticTree,
    TokenTree,
    grow,
)
from specdec_core.api.arguments import prepare
from specdec_core.drafting import combining
from specdec_core.engine.build import unite
from specdec_core.engine.engine import Engine

PROMPTS = [[3, 4, 3, 4, 5, 5, 5, i] for i in range(6)]


@frozen
class DrawnConfig:
    pass


class Drawn(Proposer):
    """A small tree drawn from one distribution, whatever came before."""

    def __init__(self, config: DrawnConfig, context: BuildContext) -> None:
        self.logits = torch.linspace(0, 2, context.target.vocab_size)

    def propose(self, batch: ProposerBatch) -> Draft:
        tree = StaticTree(batch, TokenTree.parse([(0,), (1,), (0, 0)]), "probabilistic")
        roots = self.logits.expand(len(batch.requests), -1)
        return grow(tree, roots, lambda level: self.logits.expand(len(level.token_ids), -1))


DRAWN = ProposerSpec(
    name="drawn", config=DrawnConfig, build=Drawn, api=1, plan=lambda config, target, n: Plan(observes=False)
)


@frozen
class GuessConfig:
    pass


class Guess(Proposer):
    """The last token again and again."""

    def __init__(self, config: GuessConfig, context: BuildContext) -> None:
        self.device = context.device

    def propose(self, batch: ProposerBatch) -> Draft:
        pairs = zip(batch.requests, batch.max_draft_tokens, strict=True)
        return Draft.from_chains([[int(request.token_ids[-1])] * min(4, most) for request, most in pairs], self.device)


GUESS = ProposerSpec(
    name="guess", config=GuessConfig, build=Guess, api=1, plan=lambda config, target, n: Plan(observes=False)
)


def config_of(method: str, options: Any, num_tokens: int = 8) -> SpeculativeConfig:
    return SpeculativeConfig(method=method, num_speculative_tokens=num_tokens, options=options)


LEDGER_CONFIG = config_of("ledger", LedgerConfig(top_tokens=2))
DRAWN_CONFIG, GUESS_CONFIG = config_of("drawn", DrawnConfig()), config_of("guess", GuessConfig())


@pytest.fixture
def engine_of(target: Path) -> Callable[..., Engine]:
    def make(*configs: SpeculativeConfig, **keywords: Any) -> Engine:
        settings = {"dtype": "float32", "num_kv_blocks": 128, "max_model_len": 64, "skip_tokenizer_init": True}
        prepared = prepare(target, **{**settings, **keywords})
        return Engine(prepared.config, Offered(LEDGER, DRAWN, GUESS), configs or None)

    return make


def outputs(engine: Engine, params: Callable[[int], SamplingParams]) -> list[list[int]]:
    found: dict[int, list[int]] = {}

    def listener_of(i: int) -> Any:
        def hear(request: Any, pieces: Any) -> None:
            if request.finish_reason is not None:
                found[i] = request.output_token_ids

        return hear

    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, params(i), listener_of(i))
    verifiers = set()
    while engine.has_unfinished:
        verifiers.add(engine.step().verifier)
    engine.verifiers = verifiers  # type: ignore[attr-defined]
    engine.kv.check_integrity()
    return [found[i] for i in range(len(PROMPTS))]


def greedy(i: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=30)


def sampled(i: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=i, max_tokens=30)


def test_chosen_drafts_give_the_text_of_plain_decoding(engine_of: Any) -> None:
    for params in (greedy, sampled):
        assert outputs(engine_of(LEDGER_CONFIG, GUESS_CONFIG), params) == outputs(engine_of(), params)


def test_greedy_requests_with_a_sampled_proposer_do_too(engine_of: Any) -> None:
    assert outputs(engine_of(DRAWN_CONFIG, GUESS_CONFIG), greedy) == outputs(engine_of(), greedy)


def test_both_are_drafted_and_accepted(engine_of: Any) -> None:
    """More than either alone."""
    counts = []
    for configs in ((LEDGER_CONFIG, GUESS_CONFIG), (LEDGER_CONFIG,), (GUESS_CONFIG,)):
        engine = engine_of(*configs)
        for prompt in PROMPTS:
            engine.add_request(prompt, greedy(0))
        reports = []
        while engine.has_unfinished:
            reports.append(engine.step())
        counts.append(sum(report.num_accepted for report in reports))
    assert counts[0] >= max(counts[1:]) > 0


def test_a_sampled_tree_and_chosen_nodes_are_verified_together(engine_of: Any) -> None:
    engine = engine_of(DRAWN_CONFIG, GUESS_CONFIG, LEDGER_CONFIG)
    seen: list[Draft] = []
    run = engine._runner.run
    engine._runner.run = lambda schedule, draft: (seen.append(draft), run(schedule, draft))[1]  # type: ignore[method-assign]
    outputs(engine, sampled)
    both = [d for d in seen if d.q_rows is not None and (d.q_rows >= 0).any() and (d.q_rows < 0).any()]
    assert len(both) > 10
    assert "traversal" in engine.verifiers  # type: ignore[attr-defined]


def test_the_plans_are_united(engine_of: Any) -> None:
    plans = [
        Plan(taps=("input.1", "final"), scratch_slots=3, weight_bytes=5, max_model_len=40, top_tokens=2),
        Plan(taps=("final", "input.0"), scratch_slots=7, weight_bytes=1, observes=False, output_rows=True),
    ]
    united = unite(plans)
    assert united.taps == ("input.1", "final", "input.0")
    assert (united.scratch_slots, united.weight_bytes, united.top_tokens) == (7, 6, 2)
    assert (united.observes, united.output_rows, united.max_model_len) == (True, True, None)
    assert unite([]) == Plan(observes=False)


def test_each_has_what_its_own_plan_says(engine_of: Any) -> None:
    engine = engine_of(GUESS_CONFIG, LEDGER_CONFIG)
    outputs(engine, greedy)
    ledger = engine._speculation.drafters[1].proposer.proposer
    assert {tuple(each.features) for each in ledger.observations} == {("input.1",)}
    assert all(each.top_tokens is not None for each in ledger.observations)


def test_parents_that_are_mixed_up_are_noticed(engine_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of the second draft that hang on the wrong ones cost acceptance, never the text."""
    expected = outputs(engine_of(), greedy)
    original = combining._Tree.hang_on

    def wrong(self: Any, other: Any, most: int) -> None:
        original(self, type(other)(other.token_ids, [-1] * len(other.parents)), most)

    monkeypatch.setattr(combining._Tree, "hang_on", wrong)
    assert outputs(engine_of(DRAWN_CONFIG, GUESS_CONFIG), greedy) == expected
