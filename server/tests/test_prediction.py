"""OpenAI's Predicted Outputs over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from running_server import ENGINE, Running

from specdec_core import LLM, AsyncLLM

METHODS = [
    {"method": "prediction", "num_speculative_tokens": 8},
    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
]
PROMPT = "def mean(values):\n"


@pytest.fixture(scope="module")
def predicting() -> Iterator[Running]:
    llm = AsyncLLM("tiny", **{**ENGINE, "speculative_config": {"method": METHODS}})
    running = Running(llm)
    yield running
    running.stop()
    asyncio.run(llm.shutdown())


def ask(running: Running, **fields: Any) -> Any:
    return running.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": PROMPT}], max_tokens=40, temperature=0, **fields
    )


def counts(answer: Any) -> tuple[int, int]:
    details = answer.usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


def test_a_right_prediction_is_counted(predicting: Running, reference: LLM) -> None:
    without = ask(predicting)
    text = without.choices[0].message.content
    assert without.usage.completion_tokens_details is None
    answer = ask(predicting, prediction={"type": "content", "content": text})
    assert answer.choices[0].message.content == text
    num_predicted = len(reference.get_tokenizer().encode(text))
    accepted, rejected = counts(answer)
    assert accepted + rejected == num_predicted
    assert accepted > 30
    parts = [{"type": "text", "text": part} for part in (text[:20], text[20:])]
    assert counts(ask(predicting, prediction={"type": "content", "content": parts})) == (accepted, rejected)


def test_a_wrong_prediction_changes_nothing(predicting: Running) -> None:
    expected = ask(predicting).choices[0].message.content
    answer = ask(predicting, prediction={"type": "content", "content": "zzz yyy " * 10})
    assert answer.choices[0].message.content == expected
    accepted, rejected = counts(answer)
    assert accepted == 0 < rejected


def test_streams_count_too(predicting: Running) -> None:
    text = ask(predicting).choices[0].message.content
    chunks = [*ask(predicting, prediction={"type": "content", "content": text}, stream=True,
                   stream_options={"include_usage": True})]  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert counts(chunks[-1])[0] > 30


def test_completions_take_text_or_token_ids(predicting: Running, reference: LLM) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40}
    text = predicting.complete(**body)["choices"][0]["text"]
    for prediction in (text, reference.get_tokenizer().encode(text)):
        answer = predicting.complete(**body, prediction=prediction)
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 30
