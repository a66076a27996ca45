"""After Ctrl-C at any point, and after a second Ctrl-C while the engine cleans up after the first one, the engine works
like a new one."""

from __future__ import annotations

import contextlib
import dis
import gc
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

import attrs
import pytest
import torch
from nightly import IS_NIGHTLY

from specdec_core import LLM, Draft, Engine, Plugins, Proposer, ProposerSpec, SamplingParams, SpecdecError
from specdec_core.engine.scheduler import Scheduler
from specdec_core.kv.block_pool import BlockPool
from specdec_core.models.attention import PagedAttention

PROMPTS = [{"prompt_token_ids": [5, 6, 7, 5, 6, i]} for i in range(8, 11)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
METHODS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    "suffix": {"method": "suffix"},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 2},
}


def make_llm(speculative_config: dict | None, **more: Any) -> LLM:
    """Make an LLM that runs two requests at a time."""
    settings = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 64, "disable_log_stats": True, **more}
    return LLM("tiny", speculative_config=speculative_config, **settings)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens_of(make_llm(None))


@pytest.fixture(autouse=True)
def silent_finalizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide KeyboardInterrupts raised in a finalizer, which Python only prints."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


class Tracer:
    """Raises KeyboardInterrupt at the k-th point at which Python handles signals, counted from the call of `begin`.
    Only points in the code of specdec and contextlib count."""

    def __init__(self, k: int) -> None:
        self._k = k
        self.names: list[str] = []  # of the functions in which the points so far are
        self.place = ""

    @property
    def num_places(self) -> int:
        return len(self.names)

    def begin(self) -> None:
        sys.settrace(self._trace)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if _is_ours(frame.f_code.co_filename):
                frame.f_trace, frame.f_trace_opcodes = self._trace, True
            frame = frame.f_back

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not _is_ours(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in _places(frame.f_code):
            self.names.append(frame.f_code.co_qualname)
            if self.num_places == self._k:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


def _is_ours(path: str) -> bool:
    return "/specdec_" in path or path == contextlib.__file__


@cache
def _places(code: CodeType) -> frozenset[int]:
    """Return the offsets of the bytecode instructions before which Python handles signals: the instruction after a
    call, the one after the start of a function, and the target of the backward jump that ends each iteration of a loop.

    A real interrupt is raised by the call or the jump itself, the tracer's one only at the next instruction. An offset
    is left out if these two instructions have different exception handlers, as where a `with` block ends in
    `return f()`.
    """
    instructions = list(dis.get_instructions(code))
    handlers = {
        offset: (entry.target, entry.depth)
        for entry in reversed(dis._parse_exception_table(code))  # type: ignore[attr-defined]
        for offset in range(entry.start, entry.end, 2)
    }
    found = set()
    for looking, following in pairwise(instructions):
        if looking.opname.startswith("JUMP_BACKWARD"):
            after = looking.argval
        elif looking.opname in ("RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX"):
            after = following.offset
        else:
            continue
        if handlers.get(looking.offset) == handlers.get(after):
            found.add(after)
    return frozenset(found)


def generate(llm: LLM, tracer: Tracer, is_second: bool) -> None:
    """Generate while the tracer raises KeyboardInterrupt, and catch it.

    is_second: whether the tracer starts after a first KeyboardInterrupt, raised during the first request. If not, the
        tracer starts at once.
    """

    def interrupt(logits: torch.Tensor, token_ids: Any) -> torch.Tensor:
        if len(token_ids) > 8 and not tracer.num_places:
            tracer.begin()
            raise KeyboardInterrupt
        return logits

    params = [attrs.evolve(PARAMS, logits_processors=[interrupt] if is_second else None), *[PARAMS] * 2]
    before = sys.gettrace()  # measuring coverage sets one
    try:
        if not is_second:
            tracer.begin()
        llm.generate(PROMPTS, params, use_tqdm=False)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


CASES = [
    *[(method, True) for method in METHODS],
    *[pytest.param(method, False, marks=pytest.mark.nightly) for method in METHODS],
]


@pytest.mark.parametrize(("method", "is_second"), CASES, ids=str)
def test_interrupts_wherever_they_come(method: str, is_second: bool, expected: list) -> None:
    """After an interrupt at any point, later outputs are right, no request is left, and all blocks are free.

    The test interrupts at evenly spaced points; nightly runs use more of them.

    is_second: interrupt only at points after a first interrupt.
    """
    llm = make_llm(METHODS[method])
    tokens_of(llm)
    num_free = llm.engine.kv.num_free_blocks
    counting = Tracer(0)
    generate(llm, counting, is_second)
    assert counting.num_places > 300
    most = (10**9 if is_second else 400) if IS_NIGHTLY else (25 if is_second else 10)
    points = range(1, counting.num_places + 1, max(1, counting.num_places // most))
    num_reached = 0
    for k in points:
        tracer = Tracer(k)
        generate(llm, tracer, is_second)
        num_reached += bool(tracer.place)
        assert tokens_of(llm) == expected, tracer.place
        assert not llm.engine.has_unfinished, tracer.place
        llm.engine.kv.check_integrity()
        assert llm.engine.kv.num_free_blocks == num_free, tracer.place
        assert not torch.is_inference_mode_enabled(), tracer.place
    assert num_reached > 0.8 * len(points), "not as many places as when they were counted"


def interrupt_the_end_of(context: str, number: int, llm: LLM, patch: pytest.MonkeyPatch) -> list[Any]:
    """Interrupt a run of the LLM as the number-th context of this name ends. Returns the context's generator, which has
    not ended, in a list."""
    leave = contextlib._GeneratorContextManager.__exit__
    ended: list[Any] = []

    def interrupted(self: Any, *error: Any) -> Any:
        if self.gen.gi_code.co_qualname == context:
            ended.append(self.gen)
            if len(ended) == number:
                raise KeyboardInterrupt
        return leave(self, *error)

    patch.setattr(contextlib._GeneratorContextManager, "__exit__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokens_of(llm)
    patch.undo()
    return ended[number - 1 : number]


def test_an_interrupt_at_the_end_of_a_proposers_call_leaves_inference_mode(
    expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context of a proposer's call may then end late, when it is garbage-collected, after that of the step."""
    llm = make_llm(METHODS["ngram"])
    interrupt_the_end_of("NamedProposer.called", 5, llm, monkeypatch).clear()
    gc.collect()
    assert not torch.is_inference_mode_enabled()
    assert tokens_of(llm) == expected


CALLS: list[str] = []


class Interrupted(Proposer):
    """A proposer that raises KeyboardInterrupt at the end of certain calls.

    at: the calls, such as "propose" or "finish abort". Each entry raises once.
    """

    at: list[str] = []  # noqa: RUF012

    def start(self, request: Any) -> None:
        self._end("start")

    def propose(self, batch: Any) -> Draft:
        self._end("propose")
        return Draft.from_chains([[]] * len(batch.requests))

    def finish(self, request: Any, reason: str) -> None:
        self._end(f"finish {reason}")

    def _end(self, call: str) -> None:
        CALLS.append(call)
        if call in self.at:
            self.at.remove(call)
            raise KeyboardInterrupt


@attrs.frozen
class NoOptions:
    pass


class PluginsWithInterrupted:
    def __init__(self) -> None:
        self._installed = Plugins.load()

    def proposer(self, name: str) -> ProposerSpec:
        return ProposerSpec("interrupted", NoOptions, build=lambda config, context: Interrupted(), api=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._installed, name)


@pytest.fixture
def interrupted() -> Iterator[Callable[..., LLM]]:
    CALLS.clear()

    def make(*at: str) -> LLM:
        config = {"method": "interrupted", "num_speculative_tokens": 2}
        llm = make_llm(config, plugins=PluginsWithInterrupted())
        Interrupted.at[:] = at
        return llm

    yield make
    CALLS.clear()


@pytest.mark.parametrize("at", [("propose", "finish abort"), ("finish length",), ("start", "finish abort")], ids=str)
def test_a_proposer_hears_of_the_end_again_if_that_was_interrupted(
    interrupted: Callable[..., LLM], at: tuple[str, ...], expected: list
) -> None:
    llm = interrupted(*at)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False)
    assert tokens_of(llm) == expected
    assert CALLS.count("start") == 4
    num_ends = sum(call.startswith("finish") for call in CALLS)
    assert num_ends == 5, "one more than there were requests"


def test_what_was_left_halfway_is_ended_before_a_new_request(interrupted: Callable[..., LLM]) -> None:
    llm = interrupted("propose", "finish abort")
    ended: list[str | None] = []
    llm.engine.add_request([1, 2], PARAMS, lambda request, pieces: ended.append(request.finish_reason))
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for _ in range(3):
            llm.engine.step()
    assert llm.engine.has_unfinished
    llm.engine.add_request([3, 4], PARAMS)
    assert CALLS[-2:] == ["finish abort"] * 2
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert ended[-1] == "abort"
    assert CALLS[-1] == "finish length"


def test_a_request_that_never_reached_the_queue_is_ended() -> None:
    """If an interrupt comes before a new request is in the waiting queue, the next call aborts the request."""
    llm = make_llm(None)
    engine, reasons = llm.engine, []
    engine.add_request([5, 6, 7], PARAMS, lambda request, pieces: reasons.append(request.finish_reason))
    engine._scheduler.waiting.clear()
    (found,) = tokens_of(llm)[:1]
    assert (len(found), reasons, engine.has_unfinished) == (PARAMS.max_tokens, ["abort"], False)


def test_a_request_that_waits_on_holds_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt comes while a request is admitted. Without an `LLM`, which would cancel it, it is admitted again."""
    engine = make_llm(None).engine
    num_free, reserve = engine.kv.num_free_blocks, Scheduler._reserve

    def interrupted(self: Any, *args: Any) -> bool:
        assert reserve(self, *args)
        monkeypatch.undo()
        raise KeyboardInterrupt

    request_id = engine.add_request([5, 6, 7], PARAMS)
    monkeypatch.setattr(Scheduler, "_reserve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.is_unfinished(request_id)
    while engine.has_unfinished:
        engine.step()
    engine.kv.check_integrity()
    assert engine.kv.num_free_blocks == num_free


def test_a_pass_that_ends_late_does_not_end_another_one(monkeypatch: pytest.MonkeyPatch, expected: list) -> None:
    """The context of a forward pass that was interrupted may end when it is garbage-collected, during another one."""
    llm = make_llm(None)
    left = interrupt_the_end_of("PagedAttention.using", 1, llm, monkeypatch)
    using = PagedAttention.using

    @contextlib.contextmanager
    def with_a_late_end(self: Any, *args: Any, **keywords: Any) -> Iterator[None]:
        with using(self, *args, **keywords):
            while left:
                left.pop().close()
            yield

    monkeypatch.setattr(PagedAttention, "using", with_a_late_end)
    assert tokens_of(llm) == expected


def test_several_are_cancelled_though_an_interrupt_comes(interrupted: Callable[..., LLM]) -> None:
    """Cancelling several requests cancels all of them, even if an interrupt comes while one of them is finished."""
    llm = interrupted("finish abort")
    ids = [llm.engine.add_request([1, i], PARAMS) for i in range(5)]
    llm.engine.step()
    with pytest.raises(KeyboardInterrupt):
        llm.engine.cancel(*ids)
    with contextlib.suppress(StopIteration):
        llm.engine.step()
    assert not llm.engine.has_unfinished
    assert CALLS.count("finish abort") == 3, "two had started, and one of them hears it twice"


def test_what_was_left_of_a_cancellation_is_ended_when_someone_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_llm(None).engine
    ids = [engine.add_request([1, i], PARAMS) for i in range(5)]
    engine.step()

    def interrupted(self: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "_end_cancelled", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.cancel(*ids)
    assert engine.has_unfinished
    load = engine.load
    assert (load.num_running, load.num_waiting, load.kv_usage) == (0, 0, 0.0)
    engine.forget()


def test_a_step_within_a_step_is_refused(interrupted: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = interrupted()
    monkeypatch.setattr(Interrupted, "start", lambda self, request: llm.engine.step())
    llm.engine.add_request([1, 2], PARAMS)
    with pytest.raises(SpecdecError, match="a step is under way"):
        llm.engine.step()
    monkeypatch.undo()
    assert len(tokens_of(llm)) == 3


def test_the_block_pool_loses_no_block() -> None:
    """If KeyboardInterrupt is raised before any bytecode instruction of the block pool, no block is lost.

    This test is stricter than needed: real signals are handled only after calls.
    """

    def use(pool: BlockPool) -> None:
        pool.add("a")
        pool.add("b")
        for size in (40, 9, 100, 100, 20):
            pool.grow("a", size)
            pool.grow("b", size)
        pool.shrink("a", 30)
        pool.drop("b")
        pool.add("b")
        pool.grow("b", 5)
        pool.drop("a")

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_left
        if frame.f_code.co_filename != sys.modules[BlockPool.__module__].__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            num_left -= 1
            if num_left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    k, before = 0, sys.gettrace()
    while True:
        k += 1
        num_left, pool = k, BlockPool(32, 8)
        try:
            sys.settrace(trace)
            use(pool)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        held = [name for name in "ab" if name in pool]
        tables = [row[: len(pool.blocks(name))].tolist() for name, row in zip(held, pool.tables(held), strict=True)]
        assert tables == [pool.blocks(name) for name in held], f"the {k}th instruction"
        for name in "ab":
            pool.drop(name)
        pool.check_integrity()
        assert pool.num_free == 32, f"the {k}th instruction"
        if num_left > 0:
            break
    assert k > 300
