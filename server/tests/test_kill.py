"""A server that is killed in the middle of its work: the next one answers, and its files are whole."""

from __future__ import annotations

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from nightly import IS_NIGHTLY
from running_server import WAIT_S, serving, wait_for

NUM_KILLS = 10 if IS_NIGHTLY else 1
PROMPTS = [f"def function_{i}(value):\n    return value + {i}\n\n\ndef function_{i + 1}(" for i in range(8)]
SAVE_ALWAYS = "from specdec_proposer_suffix import cache_file\ncache_file.SAVE_EVERY_S = 0.0"


def complete(client: httpx.Client, prompt: str, **fields: Any) -> str:
    answer = client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, "max_tokens": 8, **fields})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def num_cached(client: httpx.Client) -> float:
    """The outputs in the suffix cache."""
    (line,) = [
        line
        for line in client.get("/metrics").text.splitlines()
        if line.startswith("specdec:spec_decode_suffix_cache_outputs{")
    ]
    return float(line.split()[-1])


def work_until_the_end(client: httpx.Client, seed: int) -> int:
    """Send short requests, whole and streamed, until the server is gone. Returns how many were answered."""
    rng, number = random.Random(seed), 0
    while True:
        body = {"prompt": rng.choice(PROMPTS), "max_tokens": rng.randint(1, 8), "stream": rng.random() < 0.5}
        try:
            client.post("/v1/completions", json=body)
        except httpx.TransportError:
            return number
        number += 1


def test_kill_and_restart(tmp_path: Path) -> None:
    """The suffix cache is saved after each request, so a kill may come in the middle of saving it."""
    cache = tmp_path / "cache"
    arguments = ["--method", "suffix", "--set", f"suffix_decoding_cache_path={cache}", "--engine", "max_model_len=512"]
    expected: list[str] = []
    num_saved, rng = 0.0, random.Random(0)
    for _ in range(NUM_KILLS + 1):
        with serving(*arguments, before=SAVE_ALWAYS) as (process, client), ThreadPoolExecutor(8) as pool:
            found = num_cached(client)
            assert found >= num_saved, "what was saved is loaded"
            texts = [complete(client, prompt) for prompt in PROMPTS]
            expected = expected or texts
            assert texts == expected
            wait_for(cache.exists)
            pending = [pool.submit(work_until_the_end, client, rng.random()) for _ in range(8)]
            most = num_cached(client) + 20
            wait_for(lambda most=most: num_cached(client) > most)
            num_saved = num_cached(client) - 9  # at most these are not saved yet
            time.sleep(rng.random() / 10)
            process.send_signal(signal.SIGKILL)
            assert process.wait(WAIT_S) == -signal.SIGKILL
            assert sum(each.result() for each in pending) > 0
            assert process.stderr is not None
            assert "Warning" not in process.stderr.read()
