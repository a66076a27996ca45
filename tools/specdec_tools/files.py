"""Files that the commands are given: prompts to read, and names of files to write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from specdec_core.config.fields import shown
from specdec_core.errors import ConfigError


class TitledPrompt(NamedTuple):
    title: str
    text: str
    group: str  # prompts of one kind, reported together


def read_prompts(path: Path) -> list[TitledPrompt]:
    """Read prompts from a file: one per non-blank line or, in a .jsonl file, one JSON object per line.

    An object's keys are `prompt`, `group` (optional) and `task_id` (optional, the prompt's title); others are ignored.

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
    prompt, group, title = values.get("prompt"), values.get("group", "all"), values.get("task_id", f"line {number}")
    if not all(isinstance(text, str) for text in (prompt, group, title)) or not prompt:
        raise ConfigError(
            f"{where} is {shown(line, 60)}: give an object with a text as prompt, and as group and task_id if it has "
            f"them"
        )
    return TitledPrompt(title, prompt, group)


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
