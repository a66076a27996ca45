"""Files that the commands are given: prompts to read, and names of files to write."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specdec_core.config.fields import shown
from specdec_core.errors import ConfigError

PLACEHOLDER = "SHOULD BE FETCHED FROM THE SOURCE"
"""Part of the text that SPEED-Bench's published file has where it may not publish the prompt itself."""


class TitledPrompt(NamedTuple):
    """A prompt to measure with.

    group: the kind of prompt, such as SPEED-Bench's category. Prompts of one kind are reported together.
    num_left_out: how many later turns of its conversation are not run.
    """

    title: str
    text: str
    group: str
    num_left_out: int = 0


def read_prompts(path: Path) -> list[TitledPrompt]:
    """Read prompts from a file: one per non-blank line or, in a .jsonl file, one JSON object per line.

    The text of an object is one of

    - `prompt`, as in HumanEval's file, with an optional `group`;
    - `turns`, a list of texts of which the first is the prompt, as in the published files of Spec-Bench and MT-bench
      (https://github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl) and in the rows of SPEED-Bench
      (https://huggingface.co/datasets/nvidia/SPEED-Bench);
    - `messages`, a list of {"role": ..., "content": ...} of which the first user's is the prompt, as the preparation
      script of SPEED-Bench writes them.

    `category` stands for `group`, and the title is `task_id` or `question_id`. Other keys are ignored.

    Raises ConfigError if the file or one of its lines cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines() would cut JSON at U+2028
    except OSError as error:
        raise ConfigError(f"prompts file {str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompts file {str(path)!r} is not UTF-8 text: byte {error.start}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"prompts file {str(path)!r} has no prompts: write one in each line")
    if path.suffix.lower() != ".jsonl":
        return [TitledPrompt(f"line {number}", line, path.name) for number, line in numbered]
    return [_from_json(line, f"prompts file {str(path)!r}, line {number}", number) for number, line in numbered]


def _from_json(line: str, where: str, number: int) -> TitledPrompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    values = record if isinstance(record, dict) else {}
    turns = _turns(values)
    group: Any = values.get("group", values.get("category", "all"))
    title: Any = values.get("task_id", values.get("question_id", f"line {number}"))
    if "task_id" not in values and isinstance(title, int) and not isinstance(title, bool):
        title = f"question {title}"  # Spec-Bench counts them
    if not turns or not all(isinstance(text, str) for text in (*turns, group, title)) or not turns[0]:
        raise ConfigError(
            f"{where} is {shown(line, 60)}: give an object with a text as prompt (or a list of texts as turns, or "
            f"messages with role and content), and texts as group or category, and as task_id or question_id, if it "
            f"has them"
        )
    if PLACEHOLDER in turns[0]:
        raise ConfigError(
            f"{where} has SPEED-Bench's placeholder instead of a prompt: make the file with its preparation script, "
            f"which fetches the prompts"
        )
    return TitledPrompt(title, turns[0], group, num_left_out=len(turns) - 1)


def _turns(values: Mapping[str, Any]) -> list[Any]:
    """The texts that a user gives in turn, of which `_from_json` checks the types; empty if there is no such text."""
    if "prompt" in values:
        return [values["prompt"]]
    turns, messages = values.get("turns"), values.get("messages")
    if isinstance(turns, list):
        return turns
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return []
    return [message.get("content") for message in messages if message.get("role") == "user"]


def check_writable(option: str, file: Path | None) -> None:
    """Raise ConfigError if the file that was given for an option cannot be written. The file itself is not opened.

    option: the option's name, such as --output, for the error.
    file: the path to check, or None if the option was not given.
    """
    if file is None:
        return
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"{option} {str(file)!r} cannot be written: give a file in a folder that exists")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{option} {str(file)!r} cannot be written: permission denied")


def write_text(option: str, file: Path, text: str) -> None:
    """Write a file, whole or not at all. Raises ConfigError if that fails, as on a full disk.

    option: the option's name, such as --output, for the error.
    """
    partial = file.with_name(f"{file.name}.partial") if file.is_file() or not file.exists() else file  # not of a pipe
    try:
        partial.write_text(text, encoding="utf-8")
        if partial is not file:
            partial.replace(file)
    except OSError as error:
        if partial is not file:
            partial.unlink(missing_ok=True)
        raise ConfigError(f"{option} {str(file)!r} cannot be written: {error.strerror}") from error
