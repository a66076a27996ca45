"""The command `spec-decode serve`, as far as it can be tried without serving, and the access log."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from running_server import Running, wait_for

from specdec_core import ConfigError, cli
from specdec_core.cli.options import ModelOptions
from specdec_server import cli as server_cli
from specdec_server.cli import serve as command
from specdec_server.tool_parsers import PARSERS


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.main, ["serve", *arguments])
    return result.exit_code, result.output


def test_help() -> None:
    status, text = run("--help")
    assert status == 0
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.opts[0] in text
    assert {*server_cli.FORMATS} == PARSERS.keys()


def test_wrong_usage(tmp_path: Path) -> None:
    assert run("tiny", "--model", "tiny")[0] == 2
    assert "the model is given twice" in run("tiny", "--model", "tiny")[1]
    assert run("tiny", "--tool-call-parser", "other")[0] == 2
    status, text = run("tiny", "--chat-template", str(tmp_path / "missing"))
    assert (status, "missing" in text) == (1, True)
    (tmp_path / "binary").write_bytes(b"\xff")
    assert "is not UTF-8 text: byte 0" in run("tiny", "--chat-template", str(tmp_path / "binary"))[1]


def test_a_port_in_use_is_noticed_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, text = run("no-such-model", "--port", str(taken.getsockname()[1]))
    assert (status, "already in use" in text) == (1, True)


def test_errors_of_the_engine_are_reported() -> None:
    status, text = run("no-such-model", "--port", "0")
    assert status == 1
    assert "error: " in text
    assert "no-such-model" in text


@pytest.mark.parametrize(
    ("arguments", "kv_manager"),
    [([], "prefix"), (["--engine", "kv_manager=paged"], "paged")],
)
def test_prefixes_are_cached_by_default(monkeypatch: pytest.MonkeyPatch, arguments: list[str], kv_manager: str) -> None:
    def load(self: ModelOptions) -> None:
        raise ConfigError(f"kv_manager is {self.keywords.get('kv_manager')!r}")

    monkeypatch.setattr(ModelOptions, "load_async", load)
    assert f"kv_manager is {kv_manager!r}" in run("tiny", "--port", "0", *arguments)[1]


def test_the_access_log(serve: Callable[..., Running], caplog: pytest.LogCaptureFixture) -> None:
    started = serve(access_log=True, api_keys=("secret",))
    with caplog.at_level(logging.INFO, "specdec_server.access"):
        started.http.get("/health")
        started.post("/v1/completions", prompt="a secret text")
        started.http.post("/v1/completions", headers={"authorization": "Bearer secret"},
                          json={"prompt": "x", "max_tokens": 2, "stream": True})  # fmt: skip
        wait_for(lambda: len(caplog.records) >= 3)  # each line comes after its answer
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "specdec_server.access"]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("GET", "/health", 200),
        ("POST", "/v1/completions", 401),
        ("POST", "/v1/completions", 200),
    ]
    assert all(line["client"] == "127.0.0.1" and line["seconds"] >= 0 and line["bytes"] > 0 for line in lines)
    assert "secret" not in caplog.text
