"""The endpoints beside completions."""

from __future__ import annotations

from collections.abc import Callable

from running_server import Running

import specdec_core


def test_models(serve: Callable[..., Running]) -> None:
    started = serve(model_names=("first", "second"))
    assert [model.id for model in started.openai.models.list()] == ["first", "second"]
    assert started.openai.models.retrieve("second").id == "second"
    assert started.http.get("/v1/models/first").json()["max_model_len"] == 512
    found = started.complete("x", max_tokens=1, model="second")
    assert found["model"] == "first"


def test_tokens(server: Running) -> None:
    text = "def mean(values):\n    return 'ä'"
    found = server.post("/tokenize", prompt=text, add_special_tokens=False, return_token_strs=True).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 512
    assert server.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": text}
    usage = server.complete(found["tokens"], max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == found["count"]


def test_health_version_and_load(server: Running) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/version").json() == {"version": specdec_core.__version__}
    assert server.http.get("/load").json() == {"server_load": 0}
