"""A process that runs one engine for a benchmark, and answers in lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


class Worker:
    """Starts a script in this folder, which prints one line about itself and then one for each line that it is given.

    python: path of a Python interpreter that has the engine installed.
    script: the script's file name.
    arguments: its command-line arguments.
    """

    def __init__(self, python: str, script: str, *arguments: str) -> None:
        command = [python, str(Path(__file__).with_name(script)), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._answer()

    def ask(self, asked: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"an engine ended: {self._process.args}")
        return json.loads(line)
