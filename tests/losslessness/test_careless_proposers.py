"""If a proposer breaks its contract, the error names the proposer. The engine aborts running requests and continues
waiting ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import pytest
import torch
from attrs import evolve
from reference import NUM_TOKENS

from specdec_core import LLM, Draft, Plan, PluginError, Plugins, Proposer, ProposerSpec, SamplingParams
from specdec_core.engine.safe_draft import PendingCheck, SafeDrafts

pytestmark = pytest.mark.parametrize("model_dir", ["llama"], indirect=True, scope="session")
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
RUNNING, WAITING = (2, 11), (5, 8)  # of the prompts: two that are too long to run to their end together, and two short
NUM_BLOCKS = 8
VOCAB_SIZE = 200


@attrs.frozen
class NoOptions:
    pass


class Careless(Proposer):
    """A proposer that drafts nothing.

    faults: functions by method name. Each is called once, in place of the method, and its result is returned.
    """

    def __init__(self) -> None:
        self.faults: dict[str, Callable[..., Any]] = {}

    def propose(self, batch: Any) -> Any:
        return self._once("propose", batch) or Draft.from_chains([[]] * len(batch.requests))

    def start(self, request: Any) -> None:
        self._once("start", request)

    def observe(self, observation: Any) -> None:
        self._once("observe", observation)

    def reset(self, request: Any) -> None:
        self._once("reset", request)

    def finish(self, request: Any, reason: str) -> None:
        self._once("finish", request)

    def _once(self, method: str, argument: Any) -> Any:
        return self.faults.pop(method)(argument) if method in self.faults else None


def careless_llm(model_dir: Any, **spec: Any) -> LLM:
    class PluginsWithCareless:
        def __init__(self) -> None:
            self._installed = Plugins.load()

        def proposer(self, name: str) -> ProposerSpec:
            return ProposerSpec("careless", NoOptions, api=1, **spec)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._installed, name)

    return LLM(
        str(model_dir),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=2,
        num_kv_blocks=NUM_BLOCKS,
        plugins=PluginsWithCareless(),
        speculative_config={"method": "careless", "num_speculative_tokens": 5},
    )


@pytest.fixture(scope="module")
def proposer() -> Careless:
    return Careless()


@pytest.fixture(scope="module")
def engine(model_dir: Any, proposer: Careless) -> Any:
    return careless_llm(model_dir, build=lambda config, context: proposer).engine


@pytest.fixture
def outcome(
    engine: Any, proposer: Careless, prompts: list, references: list, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str | None, list]]:
    """Return a function that runs four requests while the proposer has faults.

    Two requests are running and two are waiting when the faults happen. The function asserts that the engine then works
    like a new one, and returns the error's message (None: no error) and the finish reasons.

    The function's parameters:

    is_read: whether the engine validates drafts on the host (True) or on their device (False).
    faults: callables that are called in place of the proposer's methods, by method name.
    """

    def run(*, is_read: bool = True, **faults: Callable[..., Any]) -> tuple[str | None, list]:
        monkeypatch.setattr(engine._speculation.drafters[0], "reads_drafts", is_read)
        proposer.faults = faults
        ended: dict[str, Any] = {}
        is_wrong_draft = "propose" in faults

        def listen(request: Any, pieces: Any) -> None:
            if request.finish_reason is not None:
                assert request.id not in ended
                ended[request.id] = request

        def run_to_the_end() -> None:
            while engine.has_unfinished:
                with untouched(engine, monkeypatch) if is_wrong_draft else nullcontext():
                    engine.step()

        message = None
        ids = [engine.add_request(prompts[i], PARAMS, listen) for i in (*RUNNING, *WAITING)]
        try:
            run_to_the_end()
        except PluginError as error:
            message = str(error)
        run_to_the_end()
        assert not faults, "it had no chance"
        again = [engine.add_request(prompts[i], PARAMS, listen) for i in (*RUNNING, *WAITING)]
        run_to_the_end()
        expected = [references[i] for i in (*RUNNING, *WAITING)]
        for request_id, right in zip((*ids, *again), expected * 2, strict=True):
            output = ended[request_id].output_token_ids
            assert output == right[: len(output)]
            assert len(output) == NUM_TOKENS or ended[request_id].finish_reason == "abort"
        assert [ended[request_id].finish_reason for request_id in again] == ["length"] * 4
        engine.kv.check_integrity()
        assert engine.kv.num_free_blocks == NUM_BLOCKS
        return message, [ended[request_id].finish_reason for request_id in ids]

    return run


@contextmanager
def untouched(engine: Any, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Context manager around an engine step: check that a failed step has no side effects.

    A failed step must emit no token, move no keys or values, and write only to the KV-cache slots of its own forward
    pass.
    """
    kv, requests = engine.kv, list(engine._requests.values())
    lengths = [request.num_tokens for request in requests]
    before = [storage.clone() for group in kv._groups for storage in (group.keys, group.values)]
    own, moved = [-1], []
    metadata, compact, advance = kv.metadata, kv.compact, kv.advance

    def addressed(*args: Any) -> Any:
        found = metadata(*args)
        own.extend(found.slot_mapping.tolist())
        return found

    with patch.context() as watching:
        watching.setattr(kv, "metadata", addressed)
        watching.setattr(kv, "compact", lambda *args: (moved.append(args), compact(*args)))
        watching.setattr(kv, "advance", lambda *args: (moved.append(args), advance(*args)))
        try:
            yield
        except PluginError:
            assert not moved
            assert [request.num_tokens for request in requests] == lengths
            after = [storage for group in kv._groups for storage in (group.keys, group.values)]
            for old, new in zip(before, after, strict=True):
                others = torch.ones(old.shape[1], dtype=torch.bool)
                others[own] = False
                assert torch.equal(old[:, others].nan_to_num(), new[:, others].nan_to_num())
            raise


def sound() -> Draft:
    """Make a valid draft of two trees.

    The first tree has three sampled nodes, of which the first and the last are siblings. The second tree has a sampled
    node and a deterministic one.
    """
    return Draft(
        token_ids=torch.tensor([1, 2, 3, 4, 5]),
        parents=torch.tensor([-1, 0, -1, -1, -1], dtype=torch.int32),
        offsets=(0, 3, 5),
        max_depth=2,
        q=torch.full((3, VOCAB_SIZE), 1 / VOCAB_SIZE),
        q_rows=torch.tensor([0, 1, 0, 2, -1], dtype=torch.int32),
        scores=torch.full((5,), 0.5),
    )


def changed(name: str, index: Any, value: Any) -> Draft:
    """Return the valid draft of `sound` with one change: at `index`, the tensor called `name` is `value`."""
    tensor = getattr(sound(), name).clone()
    tensor[index] = value
    return evolve(sound(), **{name: tensor})


def with_changes(**changes: Any) -> Draft:
    return evolve(sound(), **changes)


def mapped(mapping: list[int]) -> Draft:
    """Return the valid draft of `sound` with `q` over a draft vocabulary.

    mapping: the target's token id for each token of the draft vocabulary.
    """
    q = torch.full((3, len(mapping)), 1 / len(mapping))
    return with_changes(q=q, q_to_target=torch.tensor(mapping))


def sparse(q_ids: Any = None, **changes: Any) -> Draft:
    """Return the valid draft of `sound` with a sparse `q`: each row holds the probabilities of three tokens, whose ids
    are in q_ids."""
    q_ids = torch.tensor([[1, 3, 9], [9, 2, 0], [7, 4, 5]]) if q_ids is None else q_ids
    return with_changes(q=torch.full((3, 3), 1 / 3), q_ids=q_ids, **changes)


def a_chain(parents: list[int], **changes: Any) -> Draft:
    """Return the draft of `sound` as two chains of deterministic nodes. The first three nodes belong to the first
    request, the last two to the second.

    parents: the parents of the five nodes.
    """
    parents = torch.tensor(parents, dtype=torch.int32)
    return with_changes(parents=parents, q=None, q_rows=None, is_chain=True, **changes)


FULL_INDEX = torch.arange(5, dtype=torch.int32)
MALFORMED: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: [[1]], r"propose returned \[\[1\]\], not a Draft"),
    "too many nodes": (lambda: Draft.from_chains([[1] * 6, []]), r"drafted \[6, 0\] nodes where at most \[5, 5\]"),
    "a tree too few": (lambda: Draft.from_chains([[1]]), r"offsets are \(0, 1\): .* each of the 2 trees"),
    "a tree too many": (lambda: Draft.from_chains([[1]] * 3), r"offsets are \(0, 1, 2, 3\)"),
    "offsets that fall": (lambda: with_changes(offsets=(0, 6, 5)), r"offsets are \(0, 6, 5\)"),
    "offsets from 1": (lambda: with_changes(offsets=(1, 3, 5)), r"offsets are \(1, 3, 5\): give 0 and the end"),
    "offsets in a tensor": (lambda: with_changes(offsets=torch.tensor([0, 3, 5])), "offsets are tensor"),
    "offsets of fractions": (lambda: with_changes(offsets=(0, 2.5, 5)), r"offsets are \(0, 2.5, 5\)"),
    "fewer nodes than offsets say": (lambda: with_changes(offsets=(0, 3, 4)), r"token_ids is torch.int64 \[5\], not"),
    "token ids in a list": (lambda: with_changes(token_ids=[1] * 5), "token_ids is a list: give a tensor"),
    "token ids int32": (lambda: with_changes(token_ids=FULL_INDEX), "token_ids is torch.int32 .* not torch.int64"),
    "token ids on another device": (lambda: with_changes(token_ids=sound().token_ids.to("meta")), "is on meta, not on"),
    "token ids past the vocabulary": (lambda: changed("token_ids", 2, 200), "token_ids are 1 to 200, allowed .* 199"),
    "token ids below 0": (lambda: changed("token_ids", 2, -1), "token_ids are -1 to 5, allowed are 0 to 199"),
    "parents int64": (lambda: with_changes(parents=sound().parents.long()), "parents is torch.int64 .* torch.int32"),
    "too few parents": (lambda: with_changes(parents=sound().parents[:4]), r"parents is torch.int32 \[4\], not"),
    "a parent that comes later": (lambda: changed("parents", 0, 1), "parent does not precede it: give an earlier node"),
    "its own parent": (lambda: changed("parents", 1, 1), "parent does not precede it"),
    "a parent in another tree": (lambda: changed("parents", 4, 1), "parent does not precede it"),
    "a parent below -2": (lambda: changed("parents", 1, -3), "-1 for the root or -2 for a dead node"),
    "a tree that claims to be a chain": (lambda: with_changes(is_chain=True), "is_chain is set, but"),
    "a chain with a dead node in the middle": (
        lambda: a_chain([-1, -2, 0, -1, 0]),
        "is_chain is set, .* dead nodes last",
    ),
    "max_depth 0": (lambda: with_changes(max_depth=0), "max_depth is 0: .* 1 to 5 here"),
    "max_depth too small": (lambda: with_changes(max_depth=1), "max_depth is 1, but a node lies deeper"),
    "max_depth too large": (lambda: with_changes(max_depth=10**9), "max_depth is 1000000000: .* 1 to 5 here"),
    "max_depth of another kind": (lambda: with_changes(max_depth=None), "max_depth is None"),
    "a chain deeper than it says": (
        lambda: evolve(Draft.from_chains([[1, 2, 3], [1]]), max_depth=2),
        "max_depth is 2, but a node lies deeper",
    ),
    "q without q_rows": (lambda: with_changes(q_rows=None), "of q and q_rows one is None"),
    "q_rows without q": (lambda: with_changes(q=None), "of q and q_rows one is None"),
    "q of one dimension": (lambda: with_changes(q=torch.ones(200)), r"q is torch.float32 \[200\].* two dimensions"),
    "q in bfloat16": (lambda: with_changes(q=sound().q.bfloat16()), "q is torch.bfloat16 .* not torch.float32"),
    "q of another width": (lambda: with_changes(q=torch.ones(3, 1)), "q has 1 columns where the target has 200"),
    "q with NaN": (lambda: changed("q", (1, 7), float("nan")), "q is nan at its least"),
    "q with infinity": (lambda: changed("q", (1, 7), float("inf")), "rows sum to 1.0.* to inf: give probabilities"),
    "q below 0": (lambda: changed("q", (0, slice(7, 9)), torch.tensor([-0.1, 0.11])), "q is -0.1.* at its least"),
    "q that is logits": (lambda: with_changes(q=torch.zeros(3, 200)), "rows sum to 0.0 to 0.0: give probabilities"),
    "q_rows int64": (lambda: with_changes(q_rows=sound().q_rows.long()), "q_rows is torch.int64 .* not torch.int32"),
    "q_rows past the last": (lambda: changed("q_rows", 3, 3), "q_rows are -1 to 3, allowed are -1 to 2"),
    "q_rows below -1": (lambda: changed("q_rows", 4, -2), "q_rows are -2 to 2, allowed are -1 to 2"),
    "a sampled node after a chosen one": (lambda: changed("q_rows", 0, -1), "sampled node stands after a chosen sib"),
    "a sampled node between chosen ones": (
        lambda: with_changes(
            parents=torch.full((5,), -1, dtype=torch.int32), q_rows=torch.tensor([-1, 0, -1, -1, -1], dtype=torch.int32)
        ),
        "sampled node stands after a chosen sib",
    ),
    "siblings from two rows": (lambda: changed("q_rows", 2, 1), "siblings were sampled from different rows"),
    "a token that cannot be drawn": (
        lambda: with_changes(q=torch.eye(VOCAB_SIZE)[[1, 2, 9]]),
        "token 3 was sampled from a row of q that gives it no probability",
    ),
    "a draft vocabulary of another width": (
        lambda: with_changes(q_to_target=torch.arange(9)),
        r"q_to_target is torch.int64 \[9\], not torch.int64 \[200\]",
    ),
    "a draft vocabulary past the target's": (lambda: mapped([1, 2, 3, 4, 200]), "q_to_target are 1 to 200, allowed"),
    "a draft vocabulary that names a token twice": (lambda: mapped([1, 2, 3, 4, 4]), "names a token id twice"),
    "a sibling drawn twice without replacement": (
        lambda: evolve(changed("token_ids", 2, 1), with_replacement=False),
        "two sampled siblings are both token 1, which cannot be drawn twice",
    ),
    "a token outside of the draft vocabulary": (lambda: mapped([1, 2, 3, 9]), "token 4 was sampled from a row"),
    "q_ids that name a token twice": (lambda: sparse(torch.tensor([[1, 3, 3], [9, 2, 0], [7, 4, 5]])), "token 3 twice"),
    "q_ids past the vocabulary": (
        lambda: sparse(torch.tensor([[1, 3, 200], [9, 2, 0], [7, 4, 5]])),
        "q_ids are 0 to 200, allowed are 0 to 199",
    ),
    "q_ids below 0": (lambda: sparse(torch.tensor([[1, 3, -1], [9, 2, 0], [7, 4, 5]])), "q_ids are -1 to 9, allowed"),
    "q_ids of another width": (
        lambda: sparse(torch.arange(6).view(3, 2)),
        r"q_ids is torch.int64 \[3, 2\], not .* \[3, 3\]",
    ),
    "q_ids int32": (lambda: sparse(torch.arange(9).view(3, 3).int()), "q_ids is torch.int32 .* not torch.int64"),
    "q_ids beside q_to_target": (lambda: sparse(q_to_target=torch.arange(3)), "both q_ids and q_to_target are given"),
    "a token that q_ids does not name": (
        lambda: sparse(torch.tensor([[1, 8, 9], [9, 2, 0], [7, 4, 5]])),
        "token 3 was s",
    ),
    "scores that are NaN": (lambda: changed("scores", 1, float("nan")), "scores are nan to nan, allowed are 0 to 1"),
    "scores above 1": (lambda: changed("scores", 1, 2), "scores are 0.5 to 2.0, allowed are 0 to 1"),
}
ABORTED = ["abort", "abort", "length", "length"]


@pytest.mark.parametrize(
    ("name", "is_read"),
    [  # by day each is checked in one of the two places
        pytest.param(
            name,
            is_read,
            id=f"{name}-{'on the host' if is_read else 'on its device'}",
            marks=() if (i % 2 == 0) == is_read else pytest.mark.nightly,
        )
        for i, name in enumerate(MALFORMED)
        for is_read in (True, False)
    ],
)
def test_malformed_drafts(outcome: Any, name: str, is_read: bool) -> None:
    malformed, says = MALFORMED[name]
    message, reasons = outcome(is_read=is_read, propose=lambda batch: malformed())
    assert message is not None
    assert message.startswith("proposer 'careless' failed in a step: ")
    assert re.search(says, message), message
    assert reasons == ABORTED


SOUND: dict[str, Callable[[], Draft]] = {
    "sampled": sound,
    "siblings without replacement": lambda: with_changes(with_replacement=False),
    "float64": lambda: with_changes(q=sound().q.double()),
    "sums that are a little off": lambda: with_changes(q=sound().q * 1.0009),
    "a draft vocabulary": lambda: mapped([5, 4, 3, 2, 1]),
    "dead nodes below a dead one": lambda: with_changes(
        parents=torch.tensor([-2, 0, 1, -1, -2], dtype=torch.int32), max_depth=1, q=None, q_rows=None
    ),
    "dead nodes in any order": lambda: evolve(
        with_changes(parents=torch.full((5,), -2, dtype=torch.int32)),
        q_rows=torch.tensor([-1, 0, -1, 1, 2], dtype=torch.int32),
    ),
    "a chain with a dead tail": lambda: a_chain([-1, 0, -2, -2, 0]),
    "a few tokens in each row of q": sparse,
    "dead nodes with any q and scores": lambda: evolve(
        with_changes(parents=torch.tensor([-1, -2, 1, -2, -1], dtype=torch.int32)),
        q=torch.cat([sound().q[:1], torch.full((2, VOCAB_SIZE), float("nan"))]),
        q_rows=torch.tensor([0, 1, 2, 0, -1], dtype=torch.int32),
        scores=torch.tensor([0.5, float("nan"), -1, 2, 0.5]),
    ),
    "no nodes": lambda: evolve(Draft.from_chains([[], []]), max_depth=5),
}


@pytest.mark.parametrize("draft", SOUND.values(), ids=SOUND)
@pytest.mark.parametrize("is_read", [True, False], ids=["on the host", "on its device"])
def test_sound_drafts(outcome: Any, is_read: bool, draft: Callable[[], Draft]) -> None:
    assert outcome(is_read=is_read, propose=lambda batch: draft()) == (None, ["length"] * 4)


def test_a_doubt_that_nobody_settles_is_noticed(outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingCheck, "resolve", lambda check, verdict: verdict.on_host())
    message, _ = outcome(is_read=False, propose=lambda batch: MALFORMED["a parent in another tree"][0]())
    assert message is None


def test_a_draft_that_is_not_made_safe_is_noticed(engine: Any, outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: if the engine's check on the device does not replace malformed drafts, a token id past the
    vocabulary raises IndexError in the embedding."""
    of = SafeDrafts.of
    monkeypatch.setattr(SafeDrafts, "of", lambda drafts, draft, **more: (draft, of(drafts, draft, **more)[1]))
    with pytest.raises(IndexError):
        outcome(is_read=False, propose=lambda batch: MALFORMED["token ids past the vocabulary"][0]())
    while engine.has_unfinished:
        engine.step()


def fail(*args: Any) -> Any:
    raise ZeroDivisionError("a bug in this plugin")


def leave(*args: Any) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize("method", ["start", "propose", "observe", "reset", "finish"])
@pytest.mark.parametrize("fault", [fail, leave])
def test_exceptions(outcome: Any, fault: Callable[..., Any], method: str) -> None:
    """An exception in any method of the proposer becomes an error that names the proposer.

    Both running requests are aborted. If `finish` raises, its own request has ended already and keeps its finish
    reason.
    """
    message, reasons = outcome(**{method: fault})
    assert message is not None
    error = "ZeroDivisionError: a bug in this plugin" if fault is fail else "SystemExit: 3"
    assert message.startswith(f"proposer 'careless' failed in a step: {error}")
    assert reasons == (["length", *ABORTED[1:]] if method == "finish" else ABORTED)


def test_all_requests_of_a_closed_stream_end_though_one_fails(model_dir: Any, prompts: list) -> None:
    proposer = Careless()
    llm = careless_llm(model_dir, build=lambda config, context: proposer)
    outputs = llm.stream([{"prompt_token_ids": prompts[i]} for i in (*RUNNING, *WAITING)], PARAMS)
    next(outputs)
    proposer.faults = {"finish": fail}
    with pytest.raises(PluginError, match="a bug in this plugin"):
        outputs.close()
    assert not llm.engine.has_unfinished


def test_a_proposer_that_cannot_be_built_or_planned_is_named(model_dir: Any) -> None:
    with pytest.raises(PluginError, match="'careless' could not be built: ZeroDivisionError: a bug"):
        careless_llm(model_dir, build=fail)
    with pytest.raises(PluginError, match="'careless' could not plan what it needs: ZeroDivisionError: a bug"):
        careless_llm(model_dir, build=fail, plan=fail)
    with pytest.raises(PluginError, match="plan returned None, not a Plan"):
        careless_llm(model_dir, build=fail, plan=lambda *args: None)
    with pytest.raises(PluginError, match="'careless' could not be built: TypeError: build returned None, which has"):
        careless_llm(model_dir, build=lambda *args: None)


@pytest.mark.parametrize("size", [-1, 1.5, float("nan"), "1", True])
@pytest.mark.parametrize("field", ["scratch_slots", "weight_bytes"])
def test_a_plan_with_sizes_that_are_none_is_refused(model_dir: Any, field: str, size: Any) -> None:
    with pytest.raises(PluginError, match=f"'careless' could not plan what it needs: .*{field}={size!r}: give a whole"):
        careless_llm(model_dir, build=fail, plan=lambda *args: Plan(**{field: size}))
