"""Models named by a hub id: a local model hub serves them, or no hub can be reached and the error messages explain
that."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

COMMIT = "a" * 40

ASKS = """
import json
import sys

from click.testing import CliRunner
from specdec_core import EngineConfig, SpecdecError, load_tokenizer
from specdec_core.cli import main
from specdec_core.api.arguments import dry_run

def said(ask):
    try:
        ask()
    except SpecdecError as error:
        return str(error)

for name in sys.argv[1:]:
    model = CliRunner().invoke(main, ["check", "--dtype", "float32", "--model", name]).output
    tokenizer = said(lambda: load_tokenizer(EngineConfig(model=name)))
    draft = said(lambda: dry_run("tiny", dtype="float32", speculative_config={"model": name}))
    print(json.dumps({"model": model, "tokenizer": tokenizer, "draft": draft}))
"""


def ask(folder: Path, port: int, *names: str) -> list[dict[str, str]]:
    """Run `spec-decode check` on each model name, and try to load a tokenizer of that name and to speculate with it.

    folder: holds the download cache. port: the local port of the model hub.

    Returns a dictionary for each name: "model" has the command's output, "tokenizer" and "draft" the error messages, or
    None where loading raised no error.
    """
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "0",
           "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}  # fmt: skip
    dropped = ("TRANSFORMERS_OFFLINE", "HF_TOKEN")
    env = {key: value for key, value in os.environ.items() if key not in dropped} | own
    command = [sys.executable, "-c", ASKS, *names]
    run = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=True)
    assert "Retrying" not in run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.fixture
def free_port() -> int:
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


@contextmanager
def serving(served: Path | None) -> Iterator[tuple[int, list[str]]]:
    """Run a local model hub that serves the files in `served` as "some/model".

    If `served` is None, the hub drops every connection.

    Yields the hub's port and a list, to which each HTTP request for that model is appended.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            if content := self.answer():
                self.wfile.write(content)

        def answer(self) -> bytes:
            is_known = "/some/model/" in self.path
            if is_known:
                asked.append(f"{self.command} {self.path}")
            if served is None:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return b""
            file = served / self.path.rpartition("/")[2]
            content = file.read_bytes() if is_known and file.is_file() else b""
            self.send_response(200 if content else 404)
            if content:
                self.send_header("ETag", f'"{file.name}"')
            else:
                self.send_header("X-Error-Code", "EntryNotFound" if is_known else "RepoNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            return content

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()
            thread.join()


def test_where_there_is_no_connection(tmp_path: Path, free_port: int):
    paths, names = (
        ["./nosuchfolder", "/no/such/folder", "two/levels/down"],
        ["nosuchfolder", "model.gguf", "some/model"],
    )
    whys = [
        *["no repository of the model hub can be called that"] * len(paths),
        *["the model hub cannot be reached: "] * len(names),
    ]
    for name, why, said in zip([*paths, *names], whys, ask(tmp_path, free_port, *paths, *names), strict=True):
        what = f"{name!r} cannot be read: there is no such folder, and {why}"
        assert said["model"].startswith(f"error: model={what}")
        assert ". Give a folder with a transformers checkpoint, a name on the model hub, or" in said["model"]
        assert said["tokenizer"].startswith(f"the tokenizer of {name!r} cannot be loaded: there is no such folder, and")
        file = "config.json of a repository of that name is not available"
        assert said["draft"].startswith(f"the draft model {name!r} is not a folder, and {file}: {why}")
        assert ".. " not in "".join(said.values())


@pytest.mark.nightly
def test_a_connection_that_breaks_is_not_tried_again(tmp_path: Path):
    with serving(None) as (port, asked):
        (said,) = ask(tmp_path, port, "some/model")
    assert "there is no such folder, and the model hub cannot be reached: " in said["model"]
    files = ["config.json", "tokenizer_config.json", "config.json"]
    assert asked == [f"HEAD /some/model/resolve/main/{file}" for file in files]


def test_what_a_hub_says_and_serves_counts(checkpoint: Path, tmp_path: Path):
    with serving(checkpoint) as (port, asked):
        served, missing = ask(tmp_path, port, "some/model", "other/model")
    assert served["model"].splitlines()[-1] == "This would run."
    assert "GET /some/model/resolve/main/config.json" in asked
    assert "other/model is not a local folder and is not a valid model identifier" in missing["model"]
