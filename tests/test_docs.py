"""The python, bash and console blocks in the READMEs and in docs/ are run.

The blocks of a file run in order, in an empty directory. The python blocks of a file share one
namespace; a block that begins with `# name.py` is also saved under that name. In a console block, the lines
that begin with "$ " are run, and the rest is output. The line `<!-- not run: reason -->` before a block exempts it.

A `spec-decode` command runs in this process, since importing torch in a new one takes seconds. Others run in bash.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from specdec_core import cli

ROOT = Path(__file__).parents[1]
PLACES = ("README.md", "docs/**/*.md", "*/README.md", "proposers/*/README.md", "models/*/README.md",
          "kv_managers/*/README.md", "integrations/*/README.md")  # fmt: skip
DOCUMENTS = sorted({path for place in PLACES for path in ROOT.glob(place) if not path.parent.name.startswith(".")})

BLOCK = re.compile(
    r"^(?P<mark> *<!-- not run(: [^\n]*)? -->\n)?(?P<indent> *)```(?P<language>python|bash|console)\n"
    r"(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


FILE_NAME = re.compile(r"# (\w+\.py)\n")


class Block(NamedTuple):
    language: str
    line: int  # of the code's first line, from 1
    code: str


def blocks(text: str) -> Iterator[Block]:
    """Yield the code blocks of a document that are to be run."""
    for match in BLOCK.finditer(text):
        if not match["mark"]:
            line = text.count("\n", 0, match.start("code")) + 1
            yield Block(match["language"], line, textwrap.dedent(match["code"]))


def commands(block: Block) -> str:
    """Return the commands of a shell block. In a console block these are the lines after "$ ", with their continuation
    lines after a backslash."""
    if block.language == "bash":
        return block.code
    chosen = []
    for line in block.code.splitlines():
        if line.startswith("$ ") or (chosen and chosen[-1].endswith("\\")):
            chosen.append(line.removeprefix("$ "))
    assert chosen, "a console block shows a command, after '$ '"
    return "\n".join(chosen)


def run_shell(block: Block, where: str) -> None:
    """Run a shell block. Raises AssertionError, which begins with ``where``, if a command fails."""
    lines = commands(block).replace("\\\n", "").splitlines()
    for is_ours, group in groupby(lines, lambda line: line.startswith("spec-decode ")):
        if is_ours:
            for line in group:
                result = CliRunner().invoke(cli.main, shlex.split(line, comments=True)[1:])
                assert result.exit_code == 0, f"{where}: {line}: {result.output}"
        else:
            bin_folder = Path(sys.executable).parent
            env = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
            shell = ["bash", "-euo", "pipefail", "-c", "\n".join(group)]
            done = subprocess.run(shell, env=env, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, f"{where}: {done.stdout}{done.stderr}"


def run(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", module)  # where classes defined in a block are looked up
    for block in blocks(document.read_text()):
        if block.language == "python":
            padding = "\n" * (block.line - 1)  # so that tracebacks point into the document
            exec(compile(padding + block.code, str(document), "exec"), vars(module))
            if name := FILE_NAME.match(block.code):
                Path(name[1]).write_text(block.code)
        else:
            run_shell(block, f"{document}:{block.line}")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(document, monkeypatch)


SAMPLE = """
```python
x = 1
```
Text, and `<!-- not run -->` within a line.

1. An item with a command:

   ```console
   $ echo one \\
     two > said
   one two
   $ test -s said
   ```

<!-- not run: installs packages -->
```bash
exit 1
```

```python
from pathlib import Path

assert (x, Path("said").read_text()) == (1, "one two\\n")
```

```toml
not = run
```
"""


@pytest.fixture
def sample(tmp_path, monkeypatch):
    """Return a function that takes a Markdown text and runs its code blocks as if it were a document."""
    monkeypatch.chdir(tmp_path)

    def run_text(text: str) -> None:
        path = tmp_path / "sample.md"
        path.write_text(text)
        run(path, monkeypatch)

    return run_text


def test_blocks_run_in_order(sample):
    sample(SAMPLE)
    assert [block.language for block in blocks(SAMPLE)] == ["python", "console", "python"]


def test_a_failing_python_block_is_noticed(sample):
    with pytest.raises(ZeroDivisionError) as caught:
        sample(SAMPLE + "\n```python\n1 / 0\n```\n")
    assert (caught.traceback[-1].path.name, caught.traceback[-1].lineno + 1) == ("sample.md", SAMPLE.count("\n") + 3)


def test_a_block_with_a_file_name_is_saved(sample):
    sample("```python\n# saved.py\nx = 5\n```\n\n```console\n$ python -c 'import saved; assert saved.x == 5'\n```\n")


def test_the_example_of_a_plugin_is_the_one_that_is_tested():
    example = (ROOT / "core" / "tests" / "example_proposer.py").read_text()
    assert f"```python\n# recent.py\n{example}```\n" in (ROOT / "docs" / "plugins.md").read_text()


@pytest.mark.parametrize(
    "block",
    ["```bash\nfalse\necho\n```\n", "```console\n$ no-such-command\n```\n", "```console\n$ spec-decode no-such\n```\n"],
)
def test_a_failing_shell_block_is_noticed(sample, block):
    with pytest.raises(AssertionError, match=r"sample.md:3"):
        sample(f"Text\n{block}")
