"""Measures what serving costs: tokens per second of `spec-decode serve` at a concurrency of 16, over those of
`LLM.generate` for the same prompts, and the CPU time of the server's event loop.

    python benchmarks/serving.py     # writes benchmarks/results/serving.json

The client, the server and its engine share the machine's cores. Each round runs the load through `LLM.generate` in a
process of its own, as whole answers and as streams, in an order that is drawn. One of the two engines is always idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import cycle, islice
from multiprocessing import get_context
from os import sysconf
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any
from urllib.parse import urlsplit

import heldout
from measuring import RESULTS, command, machine, write
from random_models import prompt, save_qwen3

from specdec_core import LLM, SamplingParams

CONCURRENCY, NUM_PROMPTS = 16, 64
MODES = ("generate", "whole", "streams")
MOST_BYTES = 2**24
"""Of an answer."""
SECONDS_PER_TICK = 1 / sysconf("SC_CLK_TCK")
Prompt = str | list[int]


class Server:
    """A running `spec-decode serve`.

    start_s: the seconds from the command until it answered.
    """

    def __init__(self, model: str, arguments: Sequence[str]) -> None:
        line = [str(Path(sys.executable).with_name("spec-decode")), "serve", model, "--port", "0", *arguments]
        started = perf_counter()
        with tempfile.NamedTemporaryFile("w+") as log:  # a pipe that nothing reads would fill up
            self._process = subprocess.Popen(line, stderr=log)
            while "Serving " not in (text := Path(log.name).read_text(encoding="utf-8")):
                assert self._process.poll() is None, text
                sleep(0.01)
            self.start_s = perf_counter() - started
        url = urlsplit(text.partition("Serving ")[2].split()[2])
        self.address, self.model = (str(url.hostname), url.port), model

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    @property
    def event_loop_s(self) -> float:
        """The CPU time of the main thread so far. The engine has a thread of its own."""
        stat = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/stat").read_text(encoding="utf-8")
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) * SECONDS_PER_TICK

    async def run(self, prompts: Sequence[Prompt], max_tokens: int, salt: str, *, is_streamed: bool) -> None:
        """Complete prompts over CONCURRENCY connections, and assert that each has as many tokens as it should."""
        waiting = iter(prompts)

        async def work() -> None:
            reader, writer = await asyncio.open_connection(*self.address, limit=MOST_BYTES)
            for each in waiting:
                fields = {
                    "prompt": each,
                    "max_tokens": max_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "cache_salt": salt,
                }
                if is_streamed:
                    fields |= {"stream": True, "stream_options": {"include_usage": True}}
                body = json.dumps({"model": self.model, **fields}).encode()
                head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                head += f"Content-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                answer = await _answer(reader)
                found = json.loads(answer[-2] if is_streamed else answer[0])
                assert found["usage"]["completion_tokens"] == max_tokens, found
            writer.close()
            await writer.wait_closed()

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))


async def _answer(reader: asyncio.StreamReader) -> list[bytes]:
    """Read an answer: its body, or the data of its events. A stream is taken apart when it has ended: the client shares
    the cores, and should cost little."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head
    if b"content-length: " in head:
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n", 1)[0])
        return [await reader.readexactly(length)]
    chunks = (await reader.readuntil(b"\r\n0\r\n\r\n")).split(b"\r\n")[1::2]
    return [event.removeprefix(b"data: ") for event in b"".join(chunks).split(b"\n\n") if event]


class Generator:
    """An `LLM` in a process of its own, so that the client's process holds no engine."""

    def __init__(self, model: str, keywords: dict[str, Any]) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"))
        self._engine = model, json.dumps(keywords)

    def run(self, prompts: Sequence[Prompt], max_tokens: int, salt: str) -> None:
        self._pool.submit(_generate, self._engine, [_salted(each, salt) for each in prompts], max_tokens).result()

    def stop(self) -> None:
        self._pool.shutdown()


@cache
def _llm(model: str, keywords: str) -> LLM:
    return LLM(model, **json.loads(keywords))


def _generate(engine: tuple[str, str], prompts: list[dict[str, Any]], max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    _llm(*engine).generate(prompts, params, use_tqdm=False)


def _salted(given: Prompt, salt: str) -> dict[str, Any]:
    return {"prompt" if isinstance(given, str) else "prompt_token_ids": given, "cache_salt": salt}


@contextmanager
def models() -> Iterator[dict[str, tuple[str, list[Prompt], int, dict[str, Any]]]]:
    """A context with each model's folder, prompts, tokens per prompt, and further keywords of its
    engine."""
    texts: list[Prompt] = [*islice(cycle(heldout.texts()), NUM_PROMPTS)]
    ids: list[Prompt] = [prompt(128, request) for request in range(NUM_PROMPTS)]
    with tempfile.TemporaryDirectory() as folder:
        save_qwen3(Path(folder))
        yield {
            "embedded": ("tiny", texts, 128, {}),
            "0.4B": (folder, ids, 32, {"skip_tokenizer_init": True}),
        }


def measure(
    model: str, prompts: list[Prompt], max_tokens: int, keywords: dict[str, Any], method: str | None, rounds: int
) -> dict[str, Any]:
    keywords = {"max_num_seqs": CONCURRENCY, "max_model_len": 1024, **keywords}
    options = [word for key, value in keywords.items() for word in ("--engine", f"{key}={json.dumps(value)}")]
    options += [] if method is None else ["--method", method]
    speculative = None if method is None else {"method": method}
    generator = Generator(model, {"speculative_config": speculative, "kv_manager": "prefix", **keywords})
    server, draws = Server(model, options), random.Random(0)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    cpu_s: dict[str, list[float]] = {mode: [] for mode in MODES}
    try:
        for number in range(rounds + 1):
            for mode in draws.sample(MODES, len(MODES)):
                salt = f"{mode} {number}"  # so that no prompt is in the cache of prefixes
                started, before = perf_counter(), server.event_loop_s
                if mode == "generate":
                    generator.run(prompts, max_tokens, salt)
                else:
                    asyncio.run(server.run(prompts, max_tokens, salt, is_streamed=mode == "streams"))
                if number:  # the first round warms up
                    seconds[mode].append(perf_counter() - started)
                    cpu_s[mode].append(server.event_loop_s - before)
    finally:
        server.stop()
        generator.stop()
    num_tokens = max_tokens * len(prompts)
    found = {"tokens_per_s": round(num_tokens / median(seconds["generate"])), "start_s": round(server.start_s, 2)}
    for mode in MODES[1:]:
        ratios = [plain / served for plain, served in zip(seconds["generate"], seconds[mode], strict=True)]
        found[mode] = {
            "of_generate": round(median(ratios), 3),
            "rounds": [round(each, 3) for each in ratios],
            "event_loop_s_per_1000_tokens": round(1000 * median(cpu_s[mode]) / num_tokens, 4),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a model: embedded or 0.4B")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "serving.json")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": command("serving.py"), "machine": machine(), "concurrency": CONCURRENCY}
    record |= {"num_prompts": NUM_PROMPTS, "rows": []}
    with models() as cases:
        for name, case in cases.items():
            for method in (None, "ngram"):
                if args.only in (None, name):
                    row = measure(*case, method, args.rounds)
                    record["rows"].append({"model": name, "method": method, **row})
                    print(record["rows"][-1], flush=True)
    write(record, args.out)


if __name__ == "__main__":
    main()
