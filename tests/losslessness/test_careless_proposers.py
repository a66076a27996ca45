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
from careless_drafts import MALFORMED, SOUND
from reference import NUM_TOKENS

from specdec_core import LLM, Draft, Plan, PluginError, Plugins, Proposer, ProposerSpec, SamplingParams
from specdec_core.engine import drafter

pytestmark = pytest.mark.parametrize("model_dir", ["llama"], indirect=True, scope="session")
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
RUNNING, WAITING = (2, 11), (5, 8)  # of the prompts: two that are too long to run to their end together, and two short
NUM_BLOCKS = 8


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


@pytest.mark.parametrize("draft", SOUND.values(), ids=SOUND)
@pytest.mark.parametrize("is_read", [True, False], ids=["on the host", "on its device"])
def test_sound_drafts(outcome: Any, is_read: bool, draft: Callable[[], Draft]) -> None:
    assert outcome(is_read=is_read, propose=lambda batch: draft()) == (None, ["length"] * 4)


def test_a_wrong_draft_that_goes_on_is_noticed(engine: Any, outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: if the engine does not heed the check on the device, a token id past the vocabulary raises
    IndexError in the embedding."""
    monkeypatch.setattr(drafter, "read", lambda draft, is_wrong: (draft, False))
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
