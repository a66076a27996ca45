"""response_format and structured_outputs: answers match, whole and streamed, and are those of the engine."""

from __future__ import annotations

import json
import re
from threading import current_thread
from typing import Any

import jsonschema
import pytest
from running_server import Running, last_event

from specdec_core import LLM, SamplingParams
from specdec_grammar import compiler

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["mean", "median"]}, "arity": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "arity"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "function", "strict": True, "schema": SCHEMA}}
PROMPT = "def mean(values):\n"


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_schema(server: Running, reference: LLM, temperature: float) -> None:
    asked = {"temperature": temperature, "max_tokens": 100, "seed": 3}
    params = SamplingParams(structured_outputs={"json": SCHEMA}, **asked)  # type: ignore[arg-type]
    (output,) = reference.generate(PROMPT, params, use_tqdm=False)
    (choice,) = server.complete(PROMPT, response_format=FORMAT, **asked)["choices"]
    assert choice["text"] == output.outputs[0].text
    messages: Any = [{"role": "user", "content": PROMPT}]
    chats = [
        server.openai.chat.completions.create(model="tiny", messages=messages, response_format=FORMAT, **asked),  # type: ignore[call-overload]
        server.openai.chat.completions.create(
            model="tiny", messages=messages, extra_body={"structured_outputs": {"json": SCHEMA}}, **asked
        ),
    ]
    stream = server.openai.chat.completions.create(  # type: ignore[call-overload]
        model="tiny", messages=messages, response_format=FORMAT, stream=True, **asked
    )
    texts = ["".join(chunk.choices[0].delta.content or "" for chunk in stream)]
    texts += [chat.choices[0].message.content for chat in chats]
    assert texts == [choice["text"]] * 3
    if temperature:  # greedy, this model writes spaces without an end
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)


def test_any_object(server: Running) -> None:
    (choice,) = server.complete("x = ", response_format={"type": "json_object"}, temperature=1, seed=1, max_tokens=64)[
        "choices"
    ]
    assert choice["text"].lstrip().startswith("{")
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["text"]), dict)


def test_each_completion_matches(server: Running) -> None:
    wanted = {"regex": r"(def|class) [a-z_]{3,12}\(\)"}
    choices = server.complete(PROMPT, structured_outputs=wanted, n=3, temperature=1, seed=1, max_tokens=40)["choices"]
    assert len({choice["text"] for choice in choices}) > 1
    for choice in choices:
        assert re.fullmatch(wanted["regex"], choice["text"])


def test_a_schema_beyond_the_limits_of_its_compiler(server: Running) -> None:
    """It compiles, and fails when the output comes to its many alternatives."""
    names = [f"key_{i}" for i in range(2500)]
    schema = {"anyOf": [{"type": "object", "properties": {name: {}}, "required": [name]} for name in names]}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    for fields, param in (({"structured_outputs": {"json": schema}}, "structured_outputs"),
                          ({"response_format": wanted}, "response_format")):  # fmt: skip
        for is_streamed in (False, True):
            answer = server.post("/v1/completions", prompt="x", max_tokens=8, stream=is_streamed, **fields)
            if not is_streamed:
                assert answer.status_code == 400
            error = (last_event(answer.text) if answer.status_code == 200 else answer.json())["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
            assert "max is 2000" in error["message"]
    server.wait_until_idle()


def test_grammars_are_compiled_before_the_engine_needs_them(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    written = compiler._grammar

    def record(wanted: Any) -> str:
        threads.append(current_thread().name)
        return written(wanted)

    monkeypatch.setattr(compiler, "_grammar", record)
    for is_streamed in (False, True):
        wanted = {"regex": f"compiled_ahead|{is_streamed}"}  # which no other test asks for
        assert server.post("/v1/completions", prompt="x", structured_outputs=wanted, stream=is_streamed).is_success
    assert [name.rpartition("_")[0] for name in threads] == ["specdec-server"] * 2
