"""Late observations: a proposer observes a request for which drafting was turned off for a while.

Meanwhile the engine keeps the target's hidden states of that request. The proposer observes all of them at once before
its next draft for the request. If the engine has dropped the hidden states instead, it does not ask the proposer to
draft for that request again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from ledger import LEDGER, Ledger, Page
from offered import Offered

from specdec_core import Draft, SamplingParams
from specdec_core.engine import arrears as storing, observer as observing
from specdec_core.engine.arrears import Arrears

LEDGER_CONFIG = {"method": "ledger", "num_speculative_tokens": 2}
PROMPTS = [[3, 4, 3, 4, 5, 5, 5, i] for i in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture
def ledger_llm(make_llm: Callable[..., Any]) -> Callable[..., Any]:
    def make(**keywords: Any) -> Any:
        return make_llm(LEDGER_CONFIG, plugins=Offered(LEDGER), **keywords)

    return make


def observer_of(llm: Any) -> Any:
    return llm.engine._speculation.drafters[0].observer


def proposer_of(llm: Any) -> Ledger:
    proposer: Ledger = llm.engine._speculation.drafters[0].proposer.proposer
    return proposer


def pages(llm: Any, prompts: list[list[int]] = PROMPTS) -> list[Page]:
    return [proposer_of(llm).ended[tuple(prompt)] for prompt in prompts]


def assert_alike(found: list[Page], expected: list[Page]) -> None:
    """Assert that in two runs the proposer observed equal tokens and hidden states of each request.

    Only the tokens that were observed in both runs are compared. A proposer never observes a request's last tokens if
    drafting is turned off for them.
    """
    for one, other in zip(found, expected, strict=True):
        common = min(len(one.token_ids), len(other.token_ids))
        assert one.token_ids[:common] == other.token_ids[:common]
        assert common > len(PROMPTS[0])
        pairs = zip(one.features[:common], other.features[:common], strict=True)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)


def phases(seed: int) -> Callable[[Any], bool]:
    """Return a function that takes a request and returns whether drafting is turned off for it.

    For each request, drafting is turned off at a random 60% of all sequence lengths.
    """
    rng = np.random.default_rng(seed)
    plan = rng.random((len(PROMPTS), 64)) < 0.6
    return lambda request: bool(plan[int(request.token_ids[7]), request.num_tokens])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("chunk", [7, 512])
def test_late_observations_are_whole(ledger_llm: Any, generate: Any, chunk: int, seed: int) -> None:
    always, sometimes = (ledger_llm(max_num_batched_tokens=chunk) for _ in range(2))
    observer_of(sometimes).is_off = phases(seed)
    observer_of(sometimes)._max_tokens = observer_of(sometimes)._most_each = observer_of(sometimes)._room = 10**6
    expected = generate(always, PROMPTS, GREEDY)
    assert generate(sometimes, PROMPTS, GREEDY) == expected
    assert_alike(pages(sometimes), pages(always))
    assert max(max(page.sizes) for page in pages(sometimes)) > min(chunk, 8), "nothing was observed late"
    assert sum(map(len, proposer_of(sometimes).asked)) > 10


def test_what_another_proposer_drafted_is_observed_late(
    make_llm: Any, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft tokens that were accepted are stored like others, if another proposer drafted them."""
    config = {"method": ["ledger", "other"], "num_speculative_tokens": 2}
    always, sometimes = (make_llm(config, plugins=Offered(LEDGER, evolve(LEDGER, name="other"))) for _ in range(2))
    kept, keep = [], Arrears.keep

    def recorded(self: Any, requests: Any, counts: Any, features: Any) -> None:
        kept.extend(n for r, n in zip(requests, counts, strict=True) if r.num_computed > r.num_prompt_tokens)
        keep(self, requests, counts, features)

    monkeypatch.setattr(Arrears, "keep", recorded)
    observer_of(sometimes).is_off = phases(1)
    expected = generate(always, PROMPTS, GREEDY)
    assert not kept
    assert generate(sometimes, PROMPTS, GREEDY) == expected
    assert_alike(pages(sometimes), pages(always))
    assert max(kept) > 1, "no draft token was accepted"


@pytest.mark.parametrize("at_once", [1, 3, 16])
def test_a_method_that_is_not_asked_observes_late_what_another_one_drafted(
    make_llm: Any, generate: Any, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(storing, "NUM_GATHERED", at_once)
    config = {"method": ["ledger", "other"], "num_speculative_tokens": 2}
    always, sometimes = (make_llm(config, plugins=Offered(LEDGER, evolve(LEDGER, name="other"))) for _ in range(2))
    idle, late = sometimes.engine._speculation.drafters[0], 12
    idle.observer.is_off = lambda request: request.num_tokens < len(PROMPTS[0]) + late
    idle.stays_idle = lambda requests, *, is_prefill, is_beside=False: (
        not is_prefill and all(map(idle.observer.is_off, requests))
    )
    widths, keep = [], Arrears.keep_accepted

    def recorded(self: Any, requests: Any, wanted: Any, verdict: Any, features: Any) -> None:
        widths.append(int(verdict.num_accepted.max()))
        keep(self, requests, wanted, verdict, features)

    monkeypatch.setattr(Arrears, "keep_accepted", recorded)
    expected = generate(always, PROMPTS, GREEDY)
    assert not widths
    assert generate(sometimes, PROMPTS, GREEDY) == expected
    assert_alike(pages(sometimes), pages(always))
    assert max(widths) > 0, "no draft token was accepted"
    assert min(len(page.token_ids) for page in pages(sometimes)) > len(PROMPTS[0]) + late


def test_what_was_drafted_and_cut_is_observed_at_once(make_llm: Any, generate: Any) -> None:
    """A request that is off is tried again, and its draft tokens are cut. A draft model has computed them, and learns
    from the observation that none was accepted."""
    llm = make_llm(LEDGER_CONFIG | {"adaptive_draft_length": True}, plugins=Offered(LEDGER))
    (drafter,), steps = llm.engine._speculation.drafters, count()
    drafter.observer.is_off = lambda request: True
    drafter.budget.share = lambda requests, limits, so_far: [0 if next(steps) % 4 else limit for limit in limits]
    drafter.budget.keep = lambda draft, **of: Draft.from_chains([[]] * draft.batch_size)
    generate(llm, PROMPTS[:1], GREEDY)
    (page,) = pages(llm, PROMPTS[:1])
    assert page.sizes[1:6] == [1, 3, 1, 3, 1]


def test_without_hidden_states_there_is_no_bound(make_llm: Any) -> None:
    blind = evolve(LEDGER, plan=lambda *args: evolve(LEDGER.plan(*args), taps=()))
    llm = make_llm(LEDGER_CONFIG, plugins=Offered(blind), max_num_batched_tokens=16)
    observer, engine = observer_of(llm), llm.engine
    observer.is_off = lambda request: True
    request_id = engine.add_request([3, 4] * 30, GREEDY)
    for _ in range(6):
        engine.step()
    assert not observer.is_lost(engine._requests[request_id])


def test_many_requests_have_room(ledger_llm: Any) -> None:
    """Each may have as many tokens as a step, and is lost with more."""
    llm = ledger_llm(max_num_batched_tokens=16)
    observer, engine = observer_of(llm), llm.engine
    observer.is_off = lambda request: True
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(8):
        engine.step()
    assert observer._arrears.num_tokens > 2 * 16
    assert not any(observer.is_lost(engine._requests[each]) for each in ids)
    for _ in range(8):
        engine.step()
    assert all(observer.is_lost(engine._requests[each]) for each in ids)


def test_an_interrupt_while_storing_leaves_nothing(ledger_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ledger_llm()
    observer, keep = observer_of(llm), Arrears.keep
    observer.is_off = lambda request: True

    def interrupted(self: Any, *args: Any) -> None:
        num_tokens = self.num_tokens
        keep(self, *args)
        self.num_tokens = num_tokens  # it comes before this line
        raise KeyboardInterrupt

    monkeypatch.setattr(Arrears, "keep", interrupted)
    llm.engine.add_request(PROMPTS[0], GREEDY)
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    assert not llm.engine.has_unfinished
    assert (observer._arrears.num_tokens, observer._arrears._num_rows) == (0, 0)


def test_a_request_that_is_off_is_not_observed(ledger_llm: Any, generate: Any) -> None:
    llm = ledger_llm()
    observer_of(llm).is_off = lambda request: request.token_ids[7] == 2
    generate(llm, PROMPTS, GREEDY)
    assert [page.token_ids == [] for page in pages(llm)] == [i == 2 for i in range(5)]
    assert not any("request-2" in asked for asked in proposer_of(llm).asked)
    assert observer_of(llm)._arrears.num_tokens == 0, "what was kept of it is dropped with it"


def test_a_request_that_asks_for_no_drafts_is_not_observed(ledger_llm: Any) -> None:
    llm = ledger_llm()
    params = [SamplingParams(temperature=0, max_tokens=8, num_speculative_tokens=n) for n in (0, 2)]
    llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]], params, use_tqdm=False)
    assert [page.token_ids == [] for page in pages(llm, PROMPTS[:2])] == [True, False]
    assert observer_of(llm)._arrears.num_tokens == 0


def test_what_became_of_nodes_is_observed_at_once(ledger_llm: Any, generate: Any) -> None:
    """If a request has draft tokens in a forward pass, the proposer observes their hidden states right after that
    forward pass, even if drafting was turned off meanwhile."""
    llm = ledger_llm()
    observer, proposer = observer_of(llm), proposer_of(llm)
    drafted: set[str] = set()
    propose = proposer.propose

    def turned_off_after(batch: Any) -> Any:
        drafted.update(request.id for request in batch.requests)
        return propose(batch)

    proposer.propose = turned_off_after  # type: ignore[method-assign]
    observer.is_off = lambda request: request.id in drafted
    expected = generate(ledger_llm(), PROMPTS, GREEDY)
    assert generate(llm, PROMPTS, GREEDY) == expected
    for page in pages(llm):
        assert len(page.token_ids) > len(PROMPTS[0]), "the root of its draft, at least"


def test_no_late_observation_is_larger_than_the_bound(ledger_llm: Any, generate: Any) -> None:
    llm = ledger_llm(max_num_batched_tokens=16)
    observer = observer_of(llm)
    observer.is_off = phases(1)
    generate(llm, [[*prompt, *range(24)] for prompt in PROMPTS], GREEDY)
    assert max(sum(each.host_num_valid) for each in proposer_of(llm).observations) <= 16


def test_the_proposer_is_not_asked_about_requests_that_exceeded_the_bound(ledger_llm: Any, generate: Any) -> None:
    llm = ledger_llm()
    observer, lost = observer_of(llm), set()
    observer._max_tokens = 20
    observer.is_off = lambda request: request.num_tokens < 20
    may_draft = observer.may_draft

    def noted(request: Any) -> bool:
        lost.update({request.id} if observer.is_lost(request) else ())
        return may_draft(request)

    observer.may_draft = noted
    generate(llm, PROMPTS, GREEDY)
    assert len(lost) > 1
    asked = {request_id for each in proposer_of(llm).asked for request_id in each}
    assert asked.isdisjoint(lost)
    assert asked | lost == {f"request-{i}" for i in range(5)}


def test_a_long_request_does_not_push_out_the_others(ledger_llm: Any) -> None:
    llm = ledger_llm()
    observer, engine = observer_of(llm), llm.engine
    observer._max_tokens = 40
    observer.is_off = lambda request: True
    short = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:2]]
    engine.step()
    long = engine.add_request([*PROMPTS[2], *range(30)], GREEDY)
    engine.step()
    assert [observer.is_lost(engine._requests[each]) for each in (*short, long)] == [False, False, True]


def test_requests_that_cannot_draft_any_more_are_not_observed(ledger_llm: Any, generate: Any) -> None:
    llm = ledger_llm()
    observer = observer_of(llm)
    observer._plan = evolve(observer._plan, max_model_len=len(PROMPTS[0]) + 4)
    generate(llm, PROMPTS, GREEDY)
    assert {len(page.token_ids) <= len(PROMPTS[0]) + 4 for page in pages(llm)} == {True}
    assert {len(page.token_ids) >= len(PROMPTS[0]) for page in pages(llm)} == {True}


def test_where_all_are_off_nothing_is_stored_of_requests_that_cannot_draft_any_more(
    make_llm: Any, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(LEDGER_CONFIG | {"adaptive_draft_length": True}, plugins=Offered(LEDGER))
    (drafter,) = llm.engine._speculation.drafters
    drafter.budget._choose = lambda rows, limits, so_far: [0] * len(limits)
    drafter.budget.retries._debt.add(1e9)
    drafter.observer._plan = evolve(drafter.observer._plan, max_model_len=len(PROMPTS[0]) + 9)
    last, rests = [], []
    keep, put_off = Arrears.keep, drafter.observer.put_off_plain
    drafter.observer.put_off_plain = lambda *of: (rests.append(len(of[2])), put_off(*of))

    def recorded(self: Any, requests: Any, counts: Any, passes: Any, starts: Any = None) -> None:
        starts = starts or [request.num_computed for request in requests]
        ends = [start + n * len(passes) for start, n in zip(starts, counts, strict=True)]
        last.extend(end - 1 for end, n in zip(ends, counts, strict=True) if n)
        keep(self, requests, counts, passes, starts)

    monkeypatch.setattr(Arrears, "keep", recorded)
    generate(llm, PROMPTS, GREEDY)
    assert sum(rests) > 15, "some request was not off"
    assert max(rests) > 1
    assert max(last) == len(PROMPTS[0]) + 7


def test_rows_of_requests_that_are_gone_are_freed() -> None:
    """The requests of a forward pass share a tensor, which must not stay in memory for one of them alone."""
    arrears, requests = Arrears(torch.device("cpu")), [_request(i) for i in range(8)]
    features = [{"final": torch.randn(8 + num_padding, 3)} for num_padding in (0, 2, 1, 2, 0)]
    for step, each in enumerate(features):
        arrears.keep(requests, [1] * 8, [each])
        assert arrears.num_tokens == arrears._num_rows == 8 * (step + 1)
    for request in requests[:5]:
        arrears.drop(request)
    last = torch.randn(3, 3)
    arrears.keep(requests[5:], [1] * 3, [{"final": last}])
    assert arrears.num_tokens == arrears._num_rows == 15 + 3
    for i in (5, 6, 7):
        late = arrears.take([requests[i]])
        assert late is not None
        stored = [*(each["final"][i] for each in features), last[i - 5]]
        assert torch.equal(late.features["final"], torch.stack(stored))
        assert (late.starts, late.token_ids.tolist(), late.next_token_ids.tolist()) == ((2,), [2, 3, 4, 5, 6, 7], [8])
    assert arrears.num_tokens == arrears._num_rows == 0


def test_nothing_is_copied_where_all_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    arrears, requests = Arrears(torch.device("cpu")), [_request(i) for i in range(8)]
    arrears.keep(requests, [1] * 8, [{"final": torch.randn(8, 3)} for _ in range(5)])
    monkeypatch.setattr("specdec_core.engine.arrears._features", lambda places: pytest.fail("copied"))
    for request in requests:
        arrears.drop(request)
    arrears.keep([_request(8)], [1], [{"final": torch.randn(1, 3)}])
    assert arrears.num_tokens == arrears._num_rows == 1


def test_padding_does_not_stay_in_memory() -> None:
    """A forward pass of one token has padded hidden states."""
    arrears, requests = Arrears(torch.device("cpu")), [_request(0)]
    features = [{"final": torch.randn(4, 3)} for _ in range(150)]
    for each in features:
        arrears.keep(requests, [1], [each])
    ((segment, _),) = arrears._places["request-0"]
    storages = {each["final"].untyped_storage().data_ptr(): each["final"].untyped_storage() for each in segment.steps}
    assert sum(storage.nbytes() for storage in storages.values()) / 4 / 3 == 2 * 64 + 4 * 22
    requests[0].token_ids = np.arange(153)
    late = arrears.take(requests)
    assert late is not None
    assert torch.equal(late.features["final"], torch.stack([each["final"][0] for each in features]))


def _request(number: int) -> Any:
    return SimpleNamespace(id=f"request-{number}", num_computed=2, token_ids=np.arange(9))


def test_a_request_that_was_dropped_drafts_again_after_a_preemption(ledger_llm: Any) -> None:
    llm = ledger_llm()
    observer = observer_of(llm)
    observer._max_tokens, is_off = 4, True
    observer.is_off = lambda request: is_off
    request_id = llm.engine.add_request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=30))
    request = llm.engine._requests[request_id]
    for _ in range(4):
        llm.engine.step()
    is_off = False
    llm.engine.step()
    assert proposer_of(llm).asked == []
    llm.engine._scheduler.preempt(request)
    llm.engine._speculation.reset(request)
    for _ in range(3):
        llm.engine.step()
    assert proposer_of(llm).asked == [[request_id]] * 2


def a_forward_pass_is_lost(patch: pytest.MonkeyPatch) -> None:
    keep, calls = Arrears.keep, count()
    patch.setattr(Arrears, "keep", lambda self, *of: keep(self, *of) if next(calls) % 3 else None)


def features_of_another_token(patch: pytest.MonkeyPatch) -> None:
    take = Arrears.take

    def turned(self: Any, requests: Any) -> Any:
        late = take(self, requests)
        if late is None:
            return None
        return evolve(late, features={tap: each.roll(1, dims=0) for tap, each in late.features.items()})

    patch.setattr(Arrears, "take", turned)


def the_token_that_follows_is_an_old_one(patch: pytest.MonkeyPatch) -> None:
    take = Arrears.take

    def stale(self: Any, requests: Any) -> Any:
        late = take(self, requests)
        return None if late is None else evolve(late, next_token_ids=late.token_ids[late.last_rows])

    patch.setattr(Arrears, "take", stale)


def rows_of_another_request(patch: pytest.MonkeyPatch) -> None:
    rows = observing.final_rows
    patch.setattr(observing, "final_rows", lambda *of: np.roll(rows(*of), 1))


def shown_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arrears, "_remove", lambda self, request: None)


@pytest.fixture(
    params=[
        a_forward_pass_is_lost,
        features_of_another_token,
        the_token_that_follows_is_an_old_one,
        rows_of_another_request,
        shown_twice,
    ],
    ids=lambda fault: fault.__name__,
)
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    request.param(monkeypatch)
    return


def test_faults_are_noticed(fault: None, ledger_llm: Any, generate: Any) -> None:
    with pytest.raises(Exception, match=r"a gap|has not seen|^assert"):  # noqa: PT012
        for seed in range(3):
            test_late_observations_are_whole(ledger_llm, generate, 512, seed)
