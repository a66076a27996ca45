"""What a run leaves, if it is killed, and if it saves again."""

from __future__ import annotations

from pathlib import Path

from specdec_train.files import UNFINISHED, write_checkpoint


class Several:
    """A checkpoint with a folder in it, as transformers saves a tokenizer that has several chat templates."""

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


def test_what_a_killed_save_left_is_removed(tmp_path):
    (tmp_path / f"{UNFINISHED}1234").mkdir()
    (tmp_path / f"{UNFINISHED}1234" / "half.safetensors").write_text("half")
    write_checkpoint(tmp_path, Several("whole"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "templates"]
