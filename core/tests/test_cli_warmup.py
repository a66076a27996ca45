"""`spec-decode warmup` builds an engine as the other commands do."""

import re

from click.testing import CliRunner

from specdec_core.cli import main
from specdec_testing import tiny_target


def run(*args: str):
    return CliRunner().invoke(main, ["warmup", *args])


def test_it_builds_the_engine(tmp_path):
    tiny_target(tmp_path)
    done = run("--model", str(tmp_path), "--engine", "skip_tokenizer_init=true")
    assert re.fullmatch(r"Ready in \d+\.\d s\.\n", done.stdout), done.output


def test_it_refuses_what_cannot_be_built(tmp_path):
    done = run("--model", str(tmp_path))
    assert done.exit_code == 1
    assert "config.json" in done.stderr
