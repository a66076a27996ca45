"""Drafts never hold up prompts, are dealt out evenly, and no request starves. Everything is counted in steps."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import pytest
from attrs import evolve, frozen
from full_trees import FULL_TREES, FullTrees
from hypothesis import HealthCheck, example, given, settings, strategies as st
from nightly import IS_NIGHTLY
from offered import Offered

from specdec_core import SamplingParams
from specdec_core.engine.request import Request
from specdec_core.engine.scheduler import Schedule, Scheduler

LONG = SamplingParams(temperature=0, max_tokens=450)
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
Patch = pytest.MonkeyPatch


def prompt_of(length: int, number: int = 0) -> list[int]:
    return [(3 * i + number * (i % 5 + 1)) % 48 for i in range(length)]


@pytest.fixture
def make_engine(make_llm: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes an engine. num_nodes: draft tokens per request and step; 0: plain decoding."""

    def make(num_nodes: int, **keywords: Any) -> Any:
        config = {"method": "full_trees", "num_speculative_tokens": num_nodes} if num_nodes else None
        keywords = {"max_model_len": 512, "num_kv_blocks": 4000, **keywords}
        return make_llm(config, plugins=Offered(FULL_TREES), **keywords).engine

    return make


def proposer_of(engine: Any) -> FullTrees:
    (drafter,) = engine._speculation.drafters
    proposer: FullTrees = drafter.proposer.proposer
    return proposer


def drafts_go_first(patch: Patch) -> None:
    """A deliberate fault: running requests take their whole drafts before other requests take known tokens."""

    def schedule(self: Scheduler) -> Schedule:
        found, room = Schedule(), self._max_num_batched_tokens
        for request in self.running:
            if not room:
                break
            first = len(found.requests)
            room -= self._extend(request, room, found)
            budget = min(self._limit(request, len(self.running)), room)
            found.budgets[first] = budget if budget and self._reserve(request, 1, budget) else 0
            room -= found.budgets[first]
        self._admit(room, found)
        return found

    patch.setattr(Scheduler, "schedule", schedule)


# Decoding requests, nodes of each one's tree, max_num_batched_tokens, tokens of the prompt that arrives later.
STARVED = {"twice the tokens of a step": (10, 40, 128, 250), "trees of 59 nodes": (8, 59, 256, 500)}


def num_steps_to_first_token(make_engine: Any, num_nodes: int, num_decoding: int, room: int, prompt: int) -> int:
    engine = make_engine(num_nodes, max_num_batched_tokens=room, max_num_seqs=16)
    for number in range(num_decoding):
        engine.add_request(prompt_of(4, number), LONG)
    for _ in range(4):
        engine.step()
    assert not num_nodes or proposer_of(engine).num_drafted.total() > 2 * room
    last = engine.add_request(prompt_of(prompt), ONE_TOKEN)
    for number in range(1, 50):
        engine.step()
        if not engine.is_unfinished(last):
            assert engine.load.num_running == num_decoding
            return number
    return 50


@pytest.mark.parametrize("case", STARVED)
def test_drafts_do_not_hold_up_a_prompt(case: str, make_engine: Any, record_property: Any) -> None:
    num_decoding, num_nodes, room, prompt = STARVED[case]
    assert num_decoding * num_nodes >= room
    plain = num_steps_to_first_token(make_engine, 0, num_decoding, room, prompt)
    drafting = num_steps_to_first_token(make_engine, num_nodes, num_decoding, room, prompt)
    record_property("steps", f"{plain} without drafts, {drafting} with them")
    assert drafting <= 2 * plain


def test_a_prompt_that_drafts_hold_up_is_noticed(make_engine: Any, monkeypatch: Patch) -> None:
    num_decoding, num_nodes, room, prompt = STARVED["twice the tokens of a step"]
    drafts_go_first(monkeypatch)
    assert num_steps_to_first_token(make_engine, num_nodes, num_decoding, room, prompt) == 50


def spread_of_drafts(make_engine: Any, room: int) -> tuple[float, int]:
    """Run 7 requests that want 8 draft tokens each for 100 steps. Return how far the request with the most or fewest
    draft tokens is from the mean, and how many draft tokens there were.

    room: the number of draft tokens that fit into a step, for all requests together.
    """
    engine = make_engine(8, max_num_batched_tokens=7 + room)
    for number in range(7):
        engine.add_request(prompt_of(2, number), LONG)
    while proposer_of(engine).num_drafted.total() == 0:
        engine.step()
    proposer_of(engine).num_drafted.clear()
    engine._speculation._watch = None  # it would measure some steps without drafts
    for _ in range(100):
        engine.step()
    totals = [proposer_of(engine).num_drafted[request_id] for request_id in engine._requests]
    assert len(totals) == 7, "a request has ended"
    mean = sum(totals) / 7
    return max(abs(total - mean) for total in totals), sum(totals)


@pytest.mark.parametrize("room", [20, 40, 3])
def test_drafts_are_dealt_out_evenly(room: int, make_engine: Any) -> None:
    distance, total = spread_of_drafts(make_engine, room)
    assert total == 100 * room
    assert distance <= ceil(room / 7)


def test_uneven_drafts_are_noticed(make_engine: Any, monkeypatch: Patch) -> None:
    never = property(lambda self: 0, lambda self, turn: None)
    monkeypatch.setattr(Request, "draft_turn", never, raising=False)
    distance, _ = spread_of_drafts(make_engine, 20)
    assert distance > 3


def test_drafts_that_all_fit_are_not_shortened(make_engine: Any) -> None:
    engine = make_engine(8, max_num_batched_tokens=7 * 9)
    for number in range(7):
        engine.add_request(prompt_of(4 + number, number), LONG)
    for _ in range(12):
        engine.step()
    budgets = proposer_of(engine).budgets[1:]
    assert len(budgets) >= 10
    assert {tuple(step.values()) for step in budgets} == {(8,) * 7}


def test_requests_with_a_seed_do_not_depend_on_the_batch(make_engine: Any) -> None:
    params = [SamplingParams(temperature=t, seed=i, max_tokens=24) for i, t in enumerate((0.0, 0.8, 1.0, 0.0, 0.6))]
    prompts = [prompt_of(3 + 9 * number, number) for number in range(len(params))]

    def outputs(num_nodes: int, room: int, max_num_seqs: int) -> list[list[int]]:
        engine = make_engine(num_nodes, max_num_batched_tokens=room, max_num_seqs=max_num_seqs)
        found: dict[str, list[int]] = {}
        for prompt, its in zip(prompts, params, strict=True):
            request_id = engine.add_request(prompt, its, lambda request, _: found.update({
                request.id: request.output_token_ids}))  # fmt: skip
            found[request_id] = []
        while engine.has_unfinished:
            engine.step()
        if num_nodes:
            assert len({budget for step in proposer_of(engine).budgets for budget in step.values()}) > 2
        return list(found.values())

    alone = outputs(0, 64, max_num_seqs=1)
    assert outputs(12, 16, max_num_seqs=8) == alone


@frozen
class Arrival:
    """A request of a run. step: when it is submitted. max_draft_tokens: None: as many as the engine allows."""

    step: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_draft_tokens: int | None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.integers(0, 12),
        st.integers(1, 60),
        st.integers(1, 40),
        st.one_of(st.none(), st.integers(0, 30)),
    ),
    min_size=1,
    max_size=9,
).map(lambda arrivals: sorted(arrivals, key=lambda arrival: arrival.step))

BLOCK_SIZE, MAX_MODEL_LEN = 4, 100


@frozen
class Run:
    """What happened to the requests of a run, in the order of their arrival.

    first_tokens: the number of steps from a request's arrival to its first output token.
    ends: the same to its last output token.
    num_pauses: how often a decoding request got no output token in a step, though it was not preempted.
    """

    first_tokens: list[int]
    ends: list[int]
    num_pauses: int
    num_preempted: int


def run(engine: Any, arrivals: list[Arrival], most_steps: int) -> Run:
    ids: list[str] = []
    first: dict[str, int] = {}
    ends: dict[str, int] = {}
    coming, step, num_pauses, num_preempted = list(arrivals), 0, 0, 0
    while coming or engine.has_unfinished:
        while coming and coming[0].step <= step:
            new = coming.pop(0)
            params = SamplingParams(
                temperature=0, max_tokens=new.num_output_tokens, num_speculative_tokens=new.max_draft_tokens
            )
            ids.append(engine.add_request(prompt_of(new.num_prompt_tokens, len(ids)), params))
        decoding = [request for request in engine._scheduler.running if request.is_decoding]
        report = engine.step()
        step += 1
        num_preempted += report.num_preempted
        num_pauses += sum(
            not report.output_per_request.get(request.id) and request not in engine._scheduler.waiting
            for request in decoding
        )
        for request_id, arrival in zip(ids, arrivals, strict=False):
            if report.output_per_request.get(request_id):
                first.setdefault(request_id, step - arrival.step)
            if not engine.is_unfinished(request_id):
                ends.setdefault(request_id, step - arrival.step)
        assert step < most_steps, "a request has not ended"
    engine.kv.check_integrity()
    return Run([first[each] for each in ids], [ends[each] for each in ids], num_pauses, num_preempted)


def check_bounds(engine: Any, arrivals: list[Arrival], room: int, max_num_seqs: int, *, is_kv_ample: bool) -> Run:
    """Run the requests and check how many steps each has to wait.

    The oldest request is never preempted and computes a token or more in every step. So request k has ended
    sum(prompt_j + output_j for j <= k) steps after its arrival, whatever happens to younger requests.

    If no request is preempted, a request gets its first token much earlier. A step computes a known token of each
    running request, and fills the other places with prompts in the order of their arrival. At most `seats` requests
    run, with seats = min(max_num_seqs, max_num_batched_tokens). So as long as an admitted prompt is incomplete after a
    step, the step has computed max_num_batched_tokens - seats + 1 prompt tokens or more. Otherwise every running
    request got an output token: either all older requests have theirs, too, or all seats are taken, and the oldest
    request has an output token fewer to go. That makes sum(prompt_j for j <= k) / (max_num_batched_tokens - seats + 1)
    steps, and sum(output_j for j < k) more if there are more requests than seats.
    """
    prompts = [arrival.num_prompt_tokens for arrival in arrivals]
    outputs = [arrival.num_output_tokens for arrival in arrivals]
    found = run(engine, arrivals, most_steps=20 + sum(prompts) + sum(outputs))
    seats = min(max_num_seqs, room)
    for k in range(len(arrivals)):
        assert found.ends[k] <= sum(prompts[: k + 1]) + sum(outputs[: k + 1])
        if is_kv_ample:
            for_prompts = ceil(sum(prompts[: k + 1]) / (room - seats + 1))
            for_seats = sum(outputs[:k]) if len(arrivals) > seats else 0
            assert found.first_tokens[k] <= for_prompts + for_seats
    if is_kv_ample:
        assert found.num_preempted == 0
    return found


BUSY = [*(Arrival(0, 2, 90, None) for _ in range(3)), Arrival(6, 40, 5, None)]
"""A prompt arrives while requests decode whose drafts would fill every step of 40 tokens."""
GROWING = [Arrival(i, 6 + i, 60, None) for i in range(9)]
"""Requests that together outgrow a KV cache of 30 blocks."""


def engine_for(make_engine: Any, num_nodes: int, room: int, max_num_seqs: int, num_blocks: int = 400) -> Any:
    return make_engine(
        num_nodes,
        max_num_batched_tokens=room,
        max_num_seqs=max_num_seqs,
        num_kv_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
    )


@settings(
    max_examples=300 if IS_NIGHTLY else 10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    arrivals=ARRIVALS,
    num_nodes=st.integers(1, 30),
    room=st.integers(1, 48),
    max_num_seqs=st.integers(1, 8),
    short_of_blocks=st.integers(MAX_MODEL_LEN // BLOCK_SIZE, 60) | st.none(),
)
@example(arrivals=BUSY, num_nodes=30, room=40, max_num_seqs=8, short_of_blocks=None)
@example(arrivals=GROWING, num_nodes=10, room=30, max_num_seqs=8, short_of_blocks=30)
def test_each_request_advances_within_a_bounded_number_of_steps(
    arrivals: list[Arrival],
    num_nodes: int,
    room: int,
    max_num_seqs: int,
    short_of_blocks: int | None,
    make_engine: Any,
) -> None:
    """`check_bounds` has the bounds and their reasons. A decoding request gets a token in every step, unless one is
    preempted."""
    engine = engine_for(make_engine, num_nodes, room, max_num_seqs, short_of_blocks or 400)
    arrivals = [evolve(a, max_draft_tokens=a.max_draft_tokens and min(num_nodes, a.max_draft_tokens)) for a in arrivals]
    found = check_bounds(engine, arrivals, room, max_num_seqs, is_kv_ample=short_of_blocks is None)
    assert found.num_pauses == 0


def test_requests_are_preempted_in_a_short_cache(make_engine: Any) -> None:
    found = check_bounds(engine_for(make_engine, 10, 30, 8, 30), GROWING, 30, 8, is_kv_ample=False)
    assert found.num_preempted > 3


def test_requests_that_starve_are_noticed(make_engine: Any, monkeypatch: Patch) -> None:
    drafts_go_first(monkeypatch)
    with pytest.raises(AssertionError):
        check_bounds(engine_for(make_engine, 30, 40, 8), BUSY, 40, 8, is_kv_ample=True)


def test_preempted_requests_that_lose_their_place_are_noticed(make_engine: Any, monkeypatch: Patch) -> None:
    def preempt(self: Scheduler, request: Request) -> None:
        self._evict(request)
        self.running.remove(request)
        self.waiting.append(request)

    monkeypatch.setattr(Scheduler, "preempt", preempt)
    with pytest.raises(AssertionError):
        check_bounds(engine_for(make_engine, 10, 30, 8, 30), GROWING, 30, 8, is_kv_ample=False)
