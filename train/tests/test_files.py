"""Tests of the files of a training run: repeated saves, interrupted saves and damaged files."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specdec_core import ConfigError
from specdec_train.files import LOG, STATE, UNFINISHED, Log, lock, read_state, write_checkpoint, write_state
from specdec_train.generate import _read


class Several:
    """A draft model in training whose checkpoint has a subfolder."""

    def __init__(self, content: str) -> None:
        self.content = content

    def save(self, folder: Path) -> None:
        (folder / "templates").mkdir()
        for name in ("config.json", "templates/one.jinja"):
            (folder / name).write_text(self.content)


def test_a_checkpoint_with_folders_is_replaced(tmp_path):
    for content in ("first", "second"):
        write_checkpoint(tmp_path, Several(content))
    found = {str(file.relative_to(tmp_path)): file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
    assert found == {"config.json": "second", "templates/one.jinja": "second"}


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let no file of this process grow beyond 20,000 bytes, as if the disk were full."""
    handler, limit = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_an_error_in_words(tmp_path, small_files):
    write_state(tmp_path, {"step": 1})
    for write in (
        lambda: write_state(tmp_path, {"trainee": torch.zeros(100_000)}),
        lambda: write_checkpoint(tmp_path, Several("x" * 100_000)),
    ):
        with pytest.raises(ConfigError, match=r"cannot be written: .*Make room on the disk"):
            write()
    assert [file.name for file in tmp_path.iterdir()] == [STATE]
    assert torch.load(tmp_path / STATE) == {"step": 1}, "what was there before is whole"


def test_others_may_read_a_checkpoint(tmp_path):
    class Secretive(Several):
        def save(self, folder: Path) -> None:
            super().save(folder)
            (folder / "config.json").chmod(0o600)  # as safetensors makes its files

    write_checkpoint(tmp_path, Secretive("first"))
    assert os.stat(tmp_path / "config.json").st_mode & 0o777 == 0o644


def test_what_a_killed_save_left_is_removed(tmp_path):
    (tmp_path / f"{UNFINISHED}1234").mkdir()
    (tmp_path / f"{UNFINISHED}1234" / "half.safetensors").write_text("half")
    (tmp_path / f"{UNFINISHED}5678").touch()  # not a folder
    write_checkpoint(tmp_path, Several("whole"))
    (tmp_path / f"{UNFINISHED}5678").unlink()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "templates"]


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    with lock(tmp_path), pytest.raises(ConfigError, match="another run is writing to"), lock(tmp_path):
        pass
    with lock(tmp_path):
        pass


@pytest.mark.parametrize(
    "line", [b"\xff\xfejunk", b'{"a": 1}', b'{"step": "x"}', b"[1]", b'{"step": 3, "lo', b"[" * 9999]
)
def test_damaged_lines_of_the_log_are_left_out(line, tmp_path):
    (tmp_path / LOG).write_bytes(b'{"step": 0}\n' + line + b'\n{"step": 4}\n{"step": 9}\n')
    assert Log(tmp_path, 5).read() == [{"step": 0}, {"step": 4}]


@pytest.mark.parametrize("content", [b"", b"hello world\n" * 20, b"PK\x03\x04"])
def test_what_is_no_state_is_refused(content, tmp_path):
    (tmp_path / STATE).write_bytes(content)
    with pytest.raises(ConfigError, match="is not the state of a run, or damaged"):
        read_state(tmp_path)


def test_a_reason_ends_with_a_whole_word(tmp_path, monkeypatch):
    def load(*_: object, **__: object) -> None:
        raise RuntimeError("unexpected\n" * 50)

    (tmp_path / STATE).touch()
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(
        ConfigError, match=r"damaged \(RuntimeError: (unexpected )+\.\.\.\): start over in another folder$"
    ):
        read_state(tmp_path)


@pytest.mark.parametrize("value", [[1], {"a": 1}, torch.ones(3)], ids=["list", "dict", "tensor"])
def test_the_state_of_something_else_is_refused(value, tmp_path):
    torch.save(value, tmp_path / STATE)
    with pytest.raises(ConfigError, match="is not the state of a run"):
        read_state(tmp_path)


@pytest.mark.parametrize("lines", ["", "text", "{}\n[[1, 2], [3", '{}\n{"x": 2}', "{}\n[[1, 2]]"])
def test_generated_texts_that_are_damaged(lines, tmp_path):
    (tmp_path / "generated.jsonl").write_text(lines)
    with pytest.raises(ConfigError, match="is damaged"):
        _read(tmp_path / "generated.jsonl")
