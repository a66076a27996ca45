"""`LLM` for asyncio: the engine runs in a thread, and asynchronous generators yield the tokens."""

from __future__ import annotations

import asyncio
import sys
import traceback
from asyncio import AbstractEventLoop
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from threading import Lock, Thread, current_thread
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from specdec_core.api.outputs import StreamOutput
from specdec_core.api.prompts import Messages, Prompt, Prompts, TokenizedPrompt
from specdec_core.api.session import Session
from specdec_core.api.streams import Stream, send
from specdec_core.config.fields import shown
from specdec_core.config.sampling import SamplingParams
from specdec_core.config.speculative import SpeculativeConfig
from specdec_core.config.structured_outputs import StructuredOutputs
from specdec_core.engine.metrics import Metric
from specdec_core.errors import ConfigError, SpecdecError

Params = SamplingParams | Sequence[SamplingParams] | None


class AsyncLLM:
    """`LLM` for asyncio, with the same keywords. Requests that run at the same time are batched.

    `generate` and `chat` return asynchronous generators. Closing a generator, or cancelling the task that reads it,
    cancels its requests. A wrong prompt raises an error in its own generator only. An error in an engine step is raised
    in the generators of all requests that the error ended. The other requests and the engine continue, unless the
    device has failed (`DeviceError`) or the engine's thread has ended by an error (`failure`, `is_healthy`). Shut the
    engine down with `await llm.shutdown()` or `async with`.

    engine: its methods are for its own thread. Any thread may read `target`, `num_speculative_tokens`, `max_num_seqs`,
        `longest_step_s`, `is_dead` and `failure`.
    """

    def __init__(self, model: str | Path, **keywords: Any) -> None:
        self._session = _in_a_thread(partial(Session, model, **keywords))
        self.engine = self._session.engine
        self._lock = Lock()  # of the three below
        self._commands: deque[Callable[[], None]] = deque()
        self._thread: Thread | None = None
        self._is_shut_down = False
        self._streams: set[Stream] = set()  # the engine thread's
        self._num_done = 0  # steps and commands
        self._lost: SpecdecError | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether prompts can be run. False after `shutdown` and after a `failure`. Any thread may use this health
        check."""
        return not self._is_shut_down and self.failure is None

    @property
    def failure(self) -> SpecdecError | None:
        """Why no prompt can be run until the process is started again: the device has failed (`DeviceError`), or the
        engine's thread has ended by an error. None: neither has happened. Any thread may use this."""
        return self.engine.failure or self._lost

    @property
    def progress(self) -> int | None:
        """A number that grows with each step and each command that the engine's thread has ended; None: it has nothing
        to do. If it stays the same, a step hangs. Any thread may use this."""
        return None if self._thread is None else self._num_done

    def describe_work(self) -> str:
        """The calls that the engine's thread is in, as lines of a traceback; "" if it has nothing to do. Any thread may
        use this to find out where a step hangs."""
        thread = self._thread
        frame = None if thread is None else sys._current_frames().get(thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    @property
    def speculative_config(self) -> SpeculativeConfig | tuple[SpeculativeConfig, ...] | None:
        """How this AsyncLLM speculates, complete with what was left out; a tuple for several methods. None: plain
        decoding."""
        return self._session.speculative_config

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.shutdown()

    def generate(
        self, prompts: Prompts, sampling_params: Params = None, *, stream: bool = True, stream_interval_s: float = 0.0
    ) -> AsyncGenerator[StreamOutput, None]:
        """Complete one prompt or several, yielding new tokens after each step. The arguments are those of
        `LLM.generate`. An output's `prompt_index` is the index of its prompt. If one prompt is wrong, none is run.

        stream: False: yield each completion once, when it is complete, which takes less time.
        stream_interval_s: after an output, the fewest seconds until the next one of the same completion. It then has
            all tokens since, so that fast models do not spend their time on outputs of one token. The last one comes
            at once. 0: yield tokens after each step. Raises ConfigError if it is negative, not finite, or given
            together with stream=False.
        """
        if not 0 <= stream_interval_s < inf or (stream_interval_s and not stream):
            beside = "" if stream else " beside stream=False"
            raise ConfigError(
                f"stream_interval_s={shown(stream_interval_s)}{beside} is no time between outputs of a stream: give "
                f"seconds from 0 on, with stream=True"
            )
        interval_s = stream_interval_s if stream else inf
        return self._generate(lambda: self._session.prompts.read(prompts), sampling_params, interval_s)

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[StreamOutput, None]:
        """Answer one conversation, yielding new tokens after each step. The arguments are those of `LLM.chat`."""
        read = partial(
            self.tokenize_chat,
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._generate(lambda: [read()], sampling_params)

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> TokenizedPrompt:
        """Tokenize a prompt as `generate` does. Any thread may call this. A server does so for long prompts, which
        would hold up the engine's thread, and gives `generate` the token ids. Raises ConfigError.

        add_special_tokens: whether the tokenizer adds its own, such as the one that begins a text.
        """
        (found,) = self._session.prompts.read([prompt], add_special_tokens=add_special_tokens)
        return found

    def tokenize_chat(
        self,
        messages: Messages,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokenizedPrompt:
        """Turn a conversation into a tokenized prompt as `chat` does. Any thread may call this. Raises ConfigError."""
        arguments = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        (found,) = self._session.prompts.read_chats([messages], arguments, chat_template_kwargs or {})
        return found

    def compile_grammar(self, wanted: StructuredOutputs) -> None:
        """Compile the `structured_outputs` of sampling parameters, so that the engine's thread need not. Any thread may
        call this. A server does so before it calls `generate`, since a large schema takes seconds. Raises ConfigError
        if the grammar is wrong or nothing can compile it."""
        self.engine.compile_ahead(wanted)

    def get_tokenizer(self) -> Any:
        """The tokenizer from transformers; None with skip_tokenizer_init=True."""
        return self._session.prompts.tokenizer

    def get_metrics(self) -> list[Metric]:
        """The engine's metrics: counts since this object was created, and how busy the engine is now. Each has a `name`
        and a `value`. Waits for the end of a step that is running, so an event loop should use `read_metrics`."""
        reading = None if current_thread() is self._thread else self._reading()
        return self._session.read_metrics() if reading is None else reading.result()

    async def read_metrics(self) -> list[Metric]:
        """`get_metrics`, read by the engine's thread between two steps."""
        reading = self._reading()
        return self._session.read_metrics() if reading is None else await asyncio.wrap_future(reading)

    def _reading(self) -> Future[list[Metric]] | None:
        """Let the engine's thread read the metrics. None after `shutdown`, when there is no such thread."""
        found: Future[list[Metric]] = Future()

        def read() -> None:
            if not found.set_running_or_notify_cancel():
                return
            try:
                found.set_result(self._session.read_metrics())
            except BaseException as error:
                found.set_exception(error)

        return found if self._post(read) else None

    async def shutdown(self) -> None:
        """Cancel all requests, close the proposers and end the engine's thread. Unfinished generators raise
        SpecdecError. May be called again. Raises PluginError if a proposer fails to close."""
        errors: list[BaseException] = []
        with self._lock:
            self._is_shut_down = True
            self._commands.append(partial(self._end_all, errors))
            thread = self._started_thread()
        await asyncio.to_thread(thread.join)
        if errors:
            raise errors[0]

    async def _generate(
        self, read: Callable[[], list[TokenizedPrompt]], sampling_params: Params, interval_s: float = 0.0
    ) -> AsyncGenerator[StreamOutput, None]:
        stream = Stream(asyncio.get_running_loop(), interval_s)
        if not self._post(partial(self._submit, stream, read, sampling_params)):
            raise SpecdecError("this AsyncLLM was shut down: make another one")
        is_over = False
        try:
            while (output := await stream.queue.get()) is not None:
                yield output
            is_over = True
            if stream.error is not None:
                raise stream.error
        finally:
            if not is_over:
                self._post(partial(self._end, stream))

    def _post(self, command: Callable[[], None]) -> bool:
        """Queue a command (a callable), which the engine's thread runs between two steps. After `shutdown`, returns
        False and queues nothing."""
        with self._lock:
            if not self._is_shut_down:
                self._commands.append(command)
                self._started_thread()
            return not self._is_shut_down

    def _started_thread(self) -> Thread:
        if self._thread is None:
            self._thread = Thread(target=self._work, name="specdec-engine")
            self._thread.start()
        return self._thread

    # The methods below run in the engine's thread.

    def _work(self) -> None:
        """Run queued commands and engine steps until there is no work left. This is the loop of the engine's thread.
        The thread then ends, and the next command starts a new one."""
        try:
            while self._has_work():
                self._run_commands()
                if self._streams:
                    self._attempt(self._session.step)
                    self._send_outputs()
        except BaseException as error:  # not a step's or a command's, but one of this thread
            self._give_up(error)

    def _has_work(self) -> bool:
        """Whether there are commands or streams. If there are none, the thread ends."""
        with self._lock:
            if not self._commands and not self._streams:
                self._thread = None
            return self._thread is not None

    def _run_commands(self) -> None:
        for _ in range(len(self._commands)):  # those that come meanwhile wait for a step
            self._attempt(self._commands[0])
            self._commands.popleft()  # now, so that `_give_up` finds one that did not come to its end

    def _give_up(self, error: BaseException) -> None:
        """End all streams, since this thread has failed, and refuse prompts from now on."""
        self._lost = SpecdecError(
            f"the engine's thread ended by {type(error).__name__}: {error}. No prompt can be run any more: restart the "
            f"process"
        )
        self._lost.__cause__ = error
        for stream in self._streams:
            stream.end(self._lost)
        self._streams.clear()
        while self._has_work():
            with suppress(BaseException):
                self._commands.popleft()()

    def _attempt(self, work: Callable[[], None]) -> None:
        """Run a queued command or an engine step. An error is raised in the streams (generators) whose requests it
        ended, or in all streams if it ended no request."""
        try:
            work()
        except BaseException as error:
            self._send_outputs()
            is_unfinished = self._session.engine.is_unfinished
            hit = [s for s in self._streams if not all(map(is_unfinished, s.running))] or list(self._streams)
            for stream in hit:  # set all errors before any stream is told of an abort
                self._streams.remove(stream)
                stream.end(error)
            self._attempt(partial(self._session.cancel, [list(stream.running) for stream in hit]))
        finally:
            self._num_done += 1

    def _submit(self, stream: Stream, read: Callable[[], list[TokenizedPrompt]], sampling_params: Params) -> None:
        if self._lost is not None:
            stream.end(self._lost)
            return
        try:
            submitted = self._session.submit(read(), sampling_params, stream.add, is_streamed=stream.is_streamed)
        except BaseException as error:
            stream.end(error)
            return
        stream.running.update(chain.from_iterable(submitted))
        if stream.running:
            self._streams.add(stream)
        else:  # a list of no prompts
            stream.end(None)

    def _send_outputs(self) -> None:
        """Send what is due of all streams to their generators, and end streams that are complete. Each call into an
        event loop wakes it, so each loop gets one."""
        now_s, by_loop = perf_counter(), defaultdict[AbstractEventLoop, list[tuple[Stream, StreamOutput | None]]](list)
        for stream in [each for each in self._streams if each.due_s <= now_s]:
            by_loop[stream.loop] += [(stream, output) for output in stream.take_due(now_s)]
            if not stream.running:
                self._streams.remove(stream)
                by_loop[stream.loop].append((stream, None))
        for loop, outputs in by_loop.items():
            if outputs and not send(loop, outputs):
                for stream in [each for each in self._streams if each.loop is loop]:
                    self._end(stream)

    def _end(self, stream: Stream, error: BaseException | None = None) -> None:
        """End a stream (a generator), which raises `error` if one is given, and cancel its unfinished requests."""
        if stream in self._streams:
            self._streams.remove(stream)
            stream.end(error)
            self._session.cancel([list(stream.running)])

    def _end_all(self, errors: list[BaseException]) -> None:
        for stream in list(self._streams):
            self._attempt(partial(self._end, stream, SpecdecError("the AsyncLLM was shut down meanwhile")))
        try:
            self._session.close()
        except BaseException as error:
            errors.append(error)


def _in_a_thread(build: Callable[[], Session]) -> Session:
    """Call `build` in a thread that ends with it, and return or raise what it does.

    OpenMP keeps a team of threads for each thread that computes. If there are more of them than cores, they no longer
    wait actively, and the steps of small models take twice as long. So only the engine's thread may have a team.
    """
    found: Future[Session] = Future()

    def run() -> None:
        try:
            found.set_result(build())
        except BaseException as error:
            found.set_exception(error)

    thread = Thread(target=run, name="specdec-load", daemon=True)  # Ctrl-C does not wait for it
    thread.start()
    result = found.result()
    thread.join()  # its team has ended, too
    return result
