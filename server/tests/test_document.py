"""docs/serving.md: its examples run against a server, and the names in it exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from running_server import Running

from specdec_server.cli import serve as command

TEXT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_python(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    code = "\n".join(blocks("python"))
    assert ADDRESS in code
    names: dict[str, object] = {}
    exec(code.replace(ADDRESS, server.url), names)
    names["client"].close()  # type: ignore[attr-defined]
    whole, streamed = capsys.readouterr().out.split("\n", 1)[0], names["completion"]
    assert whole
    assert streamed.choices[0].finish_reason == "length"  # type: ignore[attr-defined]
    assert names["answer"].choices[0].text in ("yes", "no")  # type: ignore[attr-defined]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: Running) -> None:
    (code,) = blocks("bash")
    assert ADDRESS in code
    done = subprocess.run(["bash", "-c", code.replace(ADDRESS, server.url)], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_addresses(server: Running) -> None:
    found = re.findall(r"`(GET|POST) (/[\w/]*)`|`POST (/detokenize)`", TEXT)
    paths = {path for groups in found for path in groups[1:] if path}
    assert len(paths) >= 9
    assert paths == {route.path for route in server.app.routes if "{" not in route.path}  # type: ignore[attr-defined]


def test_options() -> None:
    options = {name for option in command.params for name in option.opts}
    named = set(re.findall(r"`(--[\w-]+)", TEXT))
    assert len(named) > 15
    assert named <= options


def test_names_of_metrics(server: Running) -> None:
    server.complete("def mean(", max_tokens=2)
    exposed = set(re.findall(r"^vllm:(\w+)", server.http.get("/metrics").text, re.MULTILINE))
    table = TEXT.partition("| name | kind |")[2].partition("There are more")[0]
    named = set(re.findall(r"`(\w+)(?:\{\w+\})?`", table))
    assert len(named) >= 14
    assert named <= exposed | {name.removesuffix("_bucket") for name in exposed}
    (expressions,) = blocks("promql")
    assert set(re.findall(r"specdec:(\w+)", expressions)) <= exposed
    for part in expressions.split("\n\n"):
        assert part.count("(") == part.count(")"), part
    assert expressions.count("# ") == 6
