"""The scripts in examples/serving run against real servers."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chain_model import save_chains
from running_server import ENGINE, WAIT_S, Running

from specdec_core import AsyncLLM

EXAMPLES = Path(__file__).parents[2] / "examples" / "serving"


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_openai_client(serve: Callable[..., Running]) -> None:
    started = serve(chat_template=(EXAMPLES / "template.jinja").read_text(), api_keys=("secret",))
    lines = run(sys.executable, str(EXAMPLES / "client.py"), f"{started.url}/v1", "secret")
    assert lines.startswith("tiny drafts with ['ngram']\n")
    whole, _, rest = lines.partition("CompletionUsage(completion_tokens=32")
    text = whole.partition("\n")[2]
    streamed, _, rest = rest.partition('\n{"speculative_decoding": {')
    assert "[" in streamed, "draft tokens were accepted"
    assert rest.partition("\n")[2].startswith(text), "plain decoding gives the same text"


@pytest.fixture
def calling(tmp_path: Path) -> Iterator[AsyncLLM]:
    """An engine that calls a tool after "ask", and answers after "told"."""
    asking = ["ask", '<tool_call>{"name": "look_up", ', '"arguments": {"name": "sorted"}}</tool_call>']
    made = AsyncLLM(save_chains(tmp_path, [asking, ["told", "It sorts."]]), **{**ENGINE, "speculative_config": None})
    yield made
    asyncio.run(made.shutdown())


def test_the_openai_client_calls_tools(serve: Callable[..., Running], calling: AsyncLLM) -> None:
    template = "{{ 'told' if messages[-1].role == 'tool' else 'ask' if tools else 'told' }}"
    started = serve(calling, chat_template=template)
    *_, called, said = run(sys.executable, str(EXAMPLES / "client.py"), f"{started.url}/v1").splitlines()
    assert (called, said) == ('look_up({"name": "sorted"})', "It sorts.")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(serve: Callable[..., Running]) -> None:
    started = serve(api_keys=("secret",))
    lines = run("bash", str(EXAMPLES / "client.sh"), started.url, "secret")
    assert '{"status":"ok"}' in lines
    assert "data: [DONE]" in lines
    assert "spec_decode_num_accepted_tokens_total{" in lines
    assert '"text":"yes"' in lines or '"text":"no"' in lines
