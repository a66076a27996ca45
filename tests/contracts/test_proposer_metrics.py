"""A proposer's own metrics are shown with the engine's, whatever the plugin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from attrs import evolve
from full_trees import FULL_TREES, FullTrees
from offered import Offered

from specdec_core import Counter, Gauge, PluginError, SamplingParams
from specdec_core.engine.named_proposer import NamedProposer

GREEDY = SamplingParams(temperature=0, max_tokens=6)


class Counting(FullTrees):
    def metrics(self) -> Sequence[Counter | Gauge]:
        return [Counter("num_calls", len(self.budgets)), Gauge("last_budget", min(self.budgets[-1].values()))]


class Failing(FullTrees):
    def metrics(self) -> Sequence[Counter | Gauge]:
        raise ZeroDivisionError("no calls")


class Lists(FullTrees):
    def metrics(self) -> Any:
        return {"num_calls": 3}


class OfAnotherClass:
    """A proposer that does not inherit from `Proposer`, so it lacks the methods that came later."""

    def __init__(self, proposer: FullTrees) -> None:
        for name in ("start", "propose", "observe", "reset", "finish"):
            setattr(self, name, getattr(proposer, name))


@pytest.fixture
def llm_of(make_llm: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes an LLM whose proposer is built by `build(context)`, and generates with it."""

    def make(build: Callable[[Any], Any], **keywords: Any) -> Any:
        spec = evolve(FULL_TREES, build=lambda config, context: build(context))
        llm = make_llm({"method": "full_trees", "num_speculative_tokens": 3}, plugins=Offered(spec), **keywords)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], GREEDY, use_tqdm=False)
        return llm

    return make


def own(llm: Any, prefix: str = "vllm") -> list[Any]:
    return [metric for metric in llm.get_metrics() if metric.name.startswith(f"{prefix}:spec_decode_full_trees_")]


def check_own(llm: Any) -> None:
    num_calls = len(llm.engine._speculation.drafters[0].proposer.proposer.budgets)
    assert num_calls > 1
    names = ("full_trees_num_calls", "full_trees_last_budget")
    expected = [Counter(f"mine:spec_decode_{names[0]}", num_calls), Gauge(f"mine:spec_decode_{names[1]}", 1)]
    assert own(llm, "mine") == expected


def test_a_proposer_s_metrics_are_shown(llm_of: Any) -> None:
    with llm_of(Counting, metrics_prefix="mine") as llm:
        check_own(llm)
    check_own(llm)


def test_metrics_without_the_proposer_s_name_are_noticed(llm_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NamedProposer, "metrics", lambda self: list(self.proposer.metrics()))
    with pytest.raises(AssertionError):
        check_own(llm_of(Counting, metrics_prefix="mine"))


@pytest.mark.parametrize("build", [FullTrees, lambda context: OfAnotherClass(FullTrees(context))])
def test_a_proposer_without_metrics(build: Any, llm_of: Any) -> None:
    llm = llm_of(build)
    assert own(llm) == []
    assert llm.get_metrics()


@pytest.mark.parametrize(
    ("build", "why"), [(Failing, "ZeroDivisionError: no calls"), (Lists, "'num_calls' is not a metric")]
)
def test_a_fault_in_metrics_names_the_proposer(build: Any, why: str, llm_of: Any) -> None:
    llm = llm_of(build)
    with pytest.raises(PluginError, match=f"proposer 'full_trees' failed to tell its metrics: .*{why}"):
        llm.get_metrics()
