"""Tests of `spec-decode suffix build`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specdec_core.cli import main
from specdec_proposer_suffix.cache_file import load_sequences

CODE = "def add(left, right):\n    return left + right\n"


def build(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["suffix", "build", *map(str, arguments)])


def test_a_corpus_becomes_a_cache_that_drafts(tmp_path: Path):
    text, lines, out = tmp_path / "code.py", tmp_path / "more.jsonl", tmp_path / "cache"
    text.write_text(CODE)
    lines.write_text("".join(json.dumps({"text": CODE.replace("add", name)}) + "\n\n" for name in ("plus", "sum")))
    result = build(text, lines, "--out", out)
    assert result.exit_code == 0, result.output
    assert "3 outputs of" in result.output
    assert len(load_sequences(out, 8192)) == 3
    assert "1 outputs of" in build(text, "--out", out).output
    assert len(load_sequences(out, 8192)) == 4

    from specdec_core import LLM, SamplingParams

    config = {"method": "suffix", "suffix_decoding_cache_path": str(out), "adaptive_draft_length": False}
    with LLM("tiny", dtype="float32", speculative_config=config) as llm:
        (output,) = llm.generate("def add(left, right):\n", SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
        assert output.speculation.num_drafts > 0
    assert len(load_sequences(out, 8192)) == 5  # including the engine's own output


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"text": 3}', r"line 1 has 3 as 'text'"),
        ("a.jsonl", b'{"other": "x"}', r"line 1 is '\{\"other.*give a JSON object with a text as 'text'"),
        ("a.jsonl", b"[]\n", "give a JSON object"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1 has '\\ud800' as 'text', which is not text"),
        ("a.jsonl", b"{", "give a JSON object"),
        ("a.txt", b"\xff\xfe\xff", "not UTF-8"),
    ],
)
def test_a_bad_corpus_is_named(tmp_path: Path, name: str, content: bytes, says: str):
    (tmp_path / name).write_bytes(content)
    result = build(tmp_path / name, "--out", tmp_path / "cache")
    assert result.exit_code == 1
    assert says.replace("\\", "")[:12] in result.output
    assert not (tmp_path / "cache").exists()


def test_another_file_is_not_written_to(tmp_path: Path):
    corpus, out = tmp_path / "a.txt", tmp_path / "precious"
    corpus.write_text(CODE)
    out.write_text("mine")
    result = build(corpus, "--out", out)
    assert (result.exit_code, out.read_text()) == (1, "mine")
    assert "name another file, or delete it" in result.output


def test_help_needs_no_torch():
    code = (
        "import sys; from specdec_core.cli import main\n"
        "try: main(['suffix', 'build', '--help'])\n"
        "except SystemExit: print(sorted({'torch', 'numba', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip().endswith("[]")
