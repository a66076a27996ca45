"""Files of prompts: plain text, our own .jsonl, and the layouts of Spec-Bench and SPEED-Bench."""

from __future__ import annotations

import json

import pytest

from specdec_core import ConfigError
from specdec_tools.files import PLACEHOLDER, read_prompts


def test_prompts_have_titles(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"task_id": "HumanEval/0", "prompt": "x", "test": 1}\n{"prompt": "y", "group": "a"}\n')
    assert read_prompts(path) == [("HumanEval/0", "x", "all", 0), ("line 2", "y", "a", 0)]


def test_prompts_of_a_text_file(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("\ufeffone\n\n  two \n", encoding="utf-8")
    assert read_prompts(path) == [("line 1", "one", "some.txt", 0), ("line 3", "  two ", "some.txt", 0)]


SPEC_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Write it again."], "reference": []}
SPEED_BENCH = {
    "question_id": "0f2c", "category": "coding", "sub_category": None, "turns": ["Sort a list."], "source": "x",
    "src_id": "1", "difficulty": None, "multiturn": False,
}  # fmt: skip
PREPARED = {
    "question_id": "0f2d", "category": "qa",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
}  # fmt: skip


def test_published_layouts(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (SPEC_BENCH, SPEED_BENCH, PREPARED)))
    assert read_prompts(path) == [
        ("question 81", "Write a post.", "writing", 1),
        ("0f2c", "Sort a list.", "coding", 0),
        ("0f2d", "Why?", "qa", 0),
    ]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b" \n", "has no prompts"),
        ("a.txt", b"\xff", "is not UTF-8"),
        ("a.jsonl", b'{"prompt": "x"}\n{', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "x"}', "line 1 is"),
        ("a.jsonl", b'{"prompt": ""}', "line 1 is"),
        ("a.jsonl", b'{"prompt": "x", "group": 1}', "line 1 is"),
        ("a.jsonl", b'{"prompt": "x", "task_id": 1}', "line 1 is"),
        ("a.jsonl", b"[1]", "line 1 is"),
        ("a.jsonl", b'{"turns": []}', "line 1 is"),
        ("a.jsonl", b'{"turns": ["x", 1]}', "line 1 is"),
        ("a.jsonl", b'{"messages": [{"role": "system", "content": "x"}]}', "line 1 is"),
        ("a.jsonl", b'{"messages": ["x"]}', "line 1 is"),
        ("a.jsonl", b'{"prompt": "x", "category": 1}', "line 1 is"),
        ("a.jsonl", b'{"prompt": "x", "question_id": true}', "line 1 is"),
        ("a.jsonl", f'{{"turns": ["FULL BENCHMARK DATA {PLACEHOLDER}"]}}'.encode(), "SPEED-Bench's placeholder"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
    ],
)
def test_prompts_that_cannot_be_read(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read_prompts(tmp_path / name)
