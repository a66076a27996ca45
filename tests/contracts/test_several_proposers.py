"""Several proposers in one engine: the engine meets the needs in all their plans, and verifies their drafts as one
tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve, frozen
from ledger import LEDGER, LedgerConfig
from offered import Offered

from specdec_core import (
    BuildContext,
    ConfigError,
    Draft,
    KVLayout,
    Plan,
    Proposer,
    ProposerBatch,
    ProposerSpec,
    RequestView,
    SamplingParams,
    SpeculativeConfig,
    StaticTree,
    TokenTree,
    grow,
)
from specdec_core.api.arguments import prepare
from specdec_core.drafting import combining
from specdec_core.engine import speculation
from specdec_core.engine.design import unite
from specdec_core.engine.engine import Engine

PROMPTS = [[3, 4, 3, 4, 5, 5, 5, i] for i in range(6)]


@frozen
class DrawnConfig:
    pass


class Drawn(Proposer):
    """A proposer of a small tree. It samples all draft tokens from one fixed distribution."""

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
    """A proposer that drafts the request's last token, repeated up to four times."""

    def __init__(self, config: GuessConfig, context: BuildContext) -> None:
        self.device = context.device

    def propose(self, batch: ProposerBatch) -> Draft:
        pairs = zip(batch.requests, batch.max_draft_tokens, strict=True)
        return Draft.from_chains([[int(request.token_ids[-1])] * min(4, most) for request, most in pairs], self.device)


GUESS = ProposerSpec(
    name="guess", config=GuessConfig, build=Guess, api=1, plan=lambda config, target, n: Plan(observes=False)
)


@frozen
class KnowingConfig:
    parity: int


class Knowing(Proposer):
    """A proposer that drafts right tokens for half of the requests, and wrong tokens for the others.

    The tokens are right if the last token id of the prompt has the parity given in the config.

    text: the outputs of plain decoding. Keys are the prompts' last token ids.
    """

    text: ClassVar[dict[int, list[int]]] = {}

    def __init__(self, config: KnowingConfig, context: BuildContext) -> None:
        self.parity, self.device = config.parity, context.device

    def propose(self, batch: ProposerBatch) -> Draft:
        pairs = zip(batch.requests, batch.max_draft_tokens, strict=True)
        return Draft.from_chains([self.chain(request, min(3, most)) for request, most in pairs], self.device)

    def chain(self, request: RequestView, most: int) -> list[int]:
        last = int(request.token_ids[request.num_prompt_tokens - 1])
        done = len(request.token_ids) - request.num_prompt_tokens
        known = self.text[last][done : done + most]
        return known if last % 2 == self.parity else [(token + 1) % 8 for token in known]


KEEPING = evolve(
    GUESS,
    name="keeping",
    plan=lambda config, target, n: Plan(kv_layout=KVLayout(1, 1, 8, 8, target.dtype, keeps_nodes=True)),
)

EVEN, ODD = (
    ProposerSpec(
        name=name, config=KnowingConfig, build=Knowing, api=1, plan=lambda config, target, n: Plan(observes=False)
    )
    for name in ("even", "odd")
)


def config_of(method: str, options: Any, num_tokens: int = 8) -> SpeculativeConfig:
    return SpeculativeConfig(method=method, num_speculative_tokens=num_tokens, options=options)


LEDGER_CONFIG = config_of("ledger", LedgerConfig(top_tokens=2))
EVEN_CONFIG, ODD_CONFIG = config_of("even", KnowingConfig(0)), config_of("odd", KnowingConfig(1))
DRAWN_CONFIG, GUESS_CONFIG = config_of("drawn", DrawnConfig()), config_of("guess", GuessConfig())


@pytest.fixture
def engine_of(target: Path) -> Callable[..., Engine]:
    def make(*configs: SpeculativeConfig, **keywords: Any) -> Engine:
        settings = {"dtype": "float32", "num_kv_blocks": 128, "max_model_len": 64, "skip_tokenizer_init": True}
        prepared = prepare(target, **{**settings, **keywords})
        return Engine.build(prepared.config, Offered(LEDGER, DRAWN, GUESS, EVEN, ODD, KEEPING), configs or None)

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


def one_sampled(i: int) -> SamplingParams:
    """Return sampling parameters for request i: request 0 samples, all others are greedy."""
    return greedy(i) if i else sampled(i)


def test_chosen_drafts_give_the_text_of_plain_decoding(engine_of: Any) -> None:
    for params in (greedy, sampled):
        assert outputs(engine_of(LEDGER_CONFIG, GUESS_CONFIG), params) == outputs(engine_of(), params)


def test_greedy_requests_with_a_sampled_proposer_do_too(engine_of: Any) -> None:
    for params in (greedy, one_sampled):
        found, expected = outputs(engine_of(DRAWN_CONFIG, GUESS_CONFIG), params), outputs(engine_of(), params)
        assert found[1:] == expected[1:]


def num_accepted(engine: Engine, params: Callable[[int], SamplingParams] = greedy) -> int:
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, params(i))
    total = 0
    while engine.has_unfinished:
        total += engine.step().num_accepted
    return total


@pytest.fixture
def accepted_of(engine_of: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that takes configs of proposers, runs all these proposers in one engine, and returns how many
    draft tokens were accepted."""
    monkeypatch.setattr(
        Knowing, "text", {prompt[-1]: text for prompt, text in zip(PROMPTS, outputs(engine_of(), greedy), strict=True)}
    )
    return lambda *configs, **more: num_accepted(engine_of(*configs), **more)


def loses_one(drafts: Sequence[Draft], max_draft_tokens: Sequence[int]) -> Draft:
    return drafts[0]


def loses_the_other(drafts: Sequence[Draft], max_draft_tokens: Sequence[int]) -> Draft:
    return drafts[1]


@pytest.mark.parametrize("fault", [None, loses_one, loses_the_other])
def test_both_are_drafted_and_accepted(fault: Any, accepted_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two proposers that know different requests get far more draft tokens accepted together than either alone.

    Negative control: a fault drops the drafts of one proposer.
    """
    if fault is not None:
        monkeypatch.setattr(speculation, "combine_drafts", fault)
    alone = [accepted_of(EVEN_CONFIG), accepted_of(ODD_CONFIG)]
    assert min(alone) > 20
    assert (accepted_of(EVEN_CONFIG, ODD_CONFIG) > 1.5 * max(alone)) == (fault is None)


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


def test_parents_that_are_mixed_up_are_noticed(
    engine_of: Any, accepted_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong parents in the second proposer's tree reduce the acceptance rate, but never change a greedy output."""
    both = DRAWN_CONFIG, EVEN_CONFIG
    expected, accepted = outputs(engine_of(), one_sampled), accepted_of(*both, params=one_sampled)
    original = combining._Tree.hang_on

    def wrong(self: Any, other: Any, most: int) -> None:
        original(self, type(other)(other.token_ids, [-1] * len(other.parents)), most)

    monkeypatch.setattr(combining._Tree, "hang_on", wrong)
    assert outputs(engine_of(*both), one_sampled)[1:] == expected[1:]
    assert accepted_of(*both, params=one_sampled) < accepted


def test_each_drafts_as_many_as_its_own_config_says(engine_of: Any) -> None:
    engine = engine_of(config_of("guess", GuessConfig(), 2), config_of("drawn", DrawnConfig(), 8))
    asked: list[int] = []
    propose = Guess.propose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Guess, "propose", lambda self, batch: (asked.extend(batch.max_draft_tokens), propose(self, batch))[1]
        )
        outputs(engine, greedy)
    assert set(asked) == {1, 2}


@pytest.mark.parametrize(("key", "value"), [("verifier", "traversal"), ("disable_by_batch_size", 3)])
def test_what_an_engine_has_once_may_not_differ(key: str, value: Any, engine_of: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key}=.* of 'drawn' and .* of 'guess' differ"):
        engine_of(DRAWN_CONFIG, evolve(GUESS_CONFIG, **{key: value}))


def test_a_cache_of_nodes_is_not_combined(engine_of: Any) -> None:
    """A proposer that keeps the keys and values of its draft tokens cannot run beside other proposers. In the combined
    tree, its draft tokens would have other KV-cache slots."""
    with pytest.raises(ConfigError, match="'keeping' cannot draft beside other methods"):
        engine_of(config_of("keeping", GuessConfig()), DRAWN_CONFIG)
