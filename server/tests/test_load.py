"""Many clients at once, a third of which leave: nothing hangs, outputs are those of `LLM`, and all blocks come back."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from nightly import IS_NIGHTLY
from running_server import WAIT_S, Running, events_of, limited, wait_for

from specdec_core import LLM, SamplingParams

NUM_CLIENTS = 64
REQUESTS_PER_CLIENT, NUM_TOKENS, MOST_OF_THOSE_THAT_LEAVE = (20, 48, 400) if IS_NIGHTLY else (2, 16, 150)
PROMPTS = [f"def function_{i}(value):\n    return value + {i}\n\n\ndef function_{i + 1}(" for i in range(8)]
CASES: list[dict[str, Any]] = [
    {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        **params,
        "speculative": {"enabled": enabled},
        "return_token_ids": True,
    }
    for prompt in PROMPTS
    for params in ({"temperature": 0}, {"temperature": 0.9, "seed": 11})
    for enabled in (True, False)
]


Answer = tuple[str, list[int]]
"""The text and the token ids."""


def complete(client: httpx.Client, case: dict[str, Any]) -> Answer:
    response = client.post("/v1/completions", json=case)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["text"], choice["token_ids"]


def stream(client: httpx.Client, case: dict[str, Any]) -> Answer:
    response = client.post("/v1/completions", json={**case, "stream": True})
    assert response.status_code == 200, response.text
    choices = [choice for event in events_of(response.text) for choice in event["choices"]]
    token_ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    return "".join(choice["text"] for choice in choices), token_ids


def leave(client: httpx.Client, case: dict[str, Any], rng: random.Random) -> None:
    """Begin a long request and disconnect: without reading, or in the middle of a stream."""
    body = {**case, "max_tokens": MOST_OF_THOSE_THAT_LEAVE, "ignore_eos": True}
    if rng.random() < 0.5:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body, timeout=httpx.Timeout(WAIT_S, read=0.001 + rng.random() / 50))
        return
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for _, _ in zip(range(rng.randint(1, 8)), response.iter_lines(), strict=False):
            pass


def test_concurrent_clients(server: Running, reference: LLM) -> None:
    expected: list[Answer] = []
    for case in CASES:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=case["temperature"], seed=case.get("seed"))
        (output,) = reference.generate(case["prompt"], params, use_tqdm=False)[0].outputs
        expected.append((output.text, output.token_ids))

    def run(seed: int) -> int:
        rng, num_left = random.Random(seed), 0
        with httpx.Client(base_url=server.url, timeout=WAIT_S, trust_env=False) as client:
            for _ in range(REQUESTS_PER_CLIENT):
                index = rng.randrange(len(CASES))
                if rng.random() < 1 / 3:
                    leave(client, CASES[index], rng)
                    num_left += 1
                else:
                    found = rng.choice([complete, stream])(client, CASES[index])
                    assert found == expected[index], CASES[index]
        return num_left

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        num_left = sum(pool.map(run, range(NUM_CLIENTS)))
    assert num_left > NUM_CLIENTS * REQUESTS_PER_CLIENT / 5
    server.wait_until_idle()
    wait_for(lambda: server.http.get("/load").json() == {"server_load": 0})


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_leaves_frees_its_slots(server: Running, is_streamed: bool) -> None:
    """The engine ends the request, of which hundreds of tokens are missing, without another step."""
    body = {"prompt": PROMPTS[0], "max_tokens": 450, "ignore_eos": True, "stream": is_streamed}
    with limited(server.llm, 3), httpx.Client(base_url=server.url, timeout=WAIT_S, trust_env=False) as client:
        if is_streamed:
            with client.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body, timeout=httpx.Timeout(WAIT_S, read=0.05))
        server.wait_until_idle()


def test_a_full_queue(serve: Callable[..., Running]) -> None:
    """Eight completions run, and one more may wait."""
    started = serve(max_queued=1)
    lifecycle = started.app.state.service.lifecycle
    with ThreadPoolExecutor(2) as pool, limited(started.llm, 2):
        running = [pool.submit(started.post, "/v1/completions", prompt=PROMPTS[:6], max_tokens=9)]
        wait_for(lambda: lifecycle._num_completions == 6)
        refused = started.post("/v1/completions", prompt=PROMPTS[:4], max_tokens=1)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "6 completions run or wait, and the server takes 9 at once" in refused.json()["error"]["message"]
        with pytest.raises(openai.RateLimitError):
            started.openai.completions.create(model="tiny", prompt=PROMPTS[:4], max_tokens=1)
        running.append(pool.submit(started.post, "/v1/completions", prompt=PROMPTS[:3], max_tokens=1))
        wait_for(lambda: lifecycle._num_completions == 9)
        assert started.post("/v1/completions", prompt="x", max_tokens=1, stream=True).status_code == 429
        assert started.http.get("/load").json() == {"server_load": 2}
    assert [each.result().status_code for each in running] == [200, 200]
    started.wait_until_idle()
    assert started.post("/v1/completions", prompt=PROMPTS[:4], max_tokens=1).status_code == 200


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_deadline(serve: Callable[..., Running], is_streamed: bool) -> None:
    started = serve(request_timeout_s=0.3)
    with limited(started.llm, 2 * is_streamed):
        response = started.post("/v1/completions", prompt=PROMPTS, max_tokens=450, ignore_eos=True, stream=is_streamed)
        if response.status_code == 200:  # a stream that had begun
            *_, error, last = (line for line in response.text.split("\n\n") if line)
            assert last == "data: [DONE]"
            found = json.loads(error.removeprefix("data: "))
        else:
            assert response.status_code == 504
            found = response.json()
        assert (found["error"]["code"], found["error"]["type"]) == ("timeout", "server_error")
        assert "longer than 0.3 s" in found["error"]["message"]
        started.wait_until_idle()
