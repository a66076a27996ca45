"""What a run is: where its data comes from, how it learns, what it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import Attribute, field, fields, frozen

from specdec_core import ConfigError, flag, number, one_of, text, whole_number

LOCK = ".lock"
"""A file in a folder that is written to."""
UNCHECKED = {"unchecked": True}
"""Metadata of settings that a resumed run may change: they leave what is learned as it is, or are meant to go on."""


def _described(help_text: str, *, unchecked: bool = False, **kwargs: Any) -> Any:
    return field(metadata={"help": help_text, **(UNCHECKED if unchecked else {})}, **kwargs)


def _optional_number(low: float, high: float) -> Any:
    return number(low, high, low_open=True, optional=True)


@frozen(kw_only=True)
class Settings:
    """Raises ConfigError for a value out of range."""

    target: str = _described(
        "The model to draft for: a folder, a name on the hub, or an embedded one.", validator=text()
    )
    data: tuple[Path, ...] = _described(
        "Texts to learn from: files or folders of text, .jsonl (text, or prompt and completion), .npy of token ids."
    )
    out: Path = field(metadata={"help": "Folder for the checkpoint, the log and the state of the run.", **UNCHECKED})
    held_out: tuple[Path, ...] = _described("Texts to measure with. Default: the last ones of the data.", default=())
    steps: int = _described("Updates of the weights.", default=1000, unchecked=True, validator=whole_number(1))
    batch: int = _described("Texts in an update.", default=8, validator=whole_number(1))
    length: int = _described(
        "Tokens of a text, at most: longer ones are cut into several.", default=256, validator=whole_number(8)
    )
    lr: float | None = _described(
        "Learning rate. Default: the recipe's.", default=None, validator=_optional_number(0, 10)
    )
    warmup: float = _described("Part of the steps in which it rises.", default=0.05, validator=number(0, 1))
    final_lr: float = _described("What it falls to, as a part of itself.", default=0.1, validator=number(0, 1))
    clip: float = _described("Norm of the gradient, at most.", default=0.5, validator=number(0, 1e6, low_open=True))
    optimizer: str = _described(
        "muon: of the layers' matrices, at ten times the learning rate, and AdamW of the rest; adamw: of all.",
        default="muon",
        validator=one_of("muon", "adamw"),
    )
    weight_decay: float = _described("Of matrices.", default=0.0, validator=number(0, 10))
    seed: int = _described(
        "Of the first weights, the data's order and all noise.", default=0, validator=whole_number(0)
    )
    generate: int = _described(
        "Let the target itself continue the data by this many tokens, and learn from what it says; 0: learn the data.",
        default=0,
        validator=whole_number(0),
    )
    prompt_len: int = _described(
        "Tokens of a text that begin what is generated.", default=32, validator=whole_number(1)
    )
    temperature: float = _described("Of what is generated.", default=1.0, validator=number(0, 10))
    features: Path | None = field(
        default=None,
        metadata={
            "help": "Compute the target's features once, and keep them in this folder. Default: anew in each step.",
            **UNCHECKED,
        },
    )
    device: str | None = _described(
        "Default: a GPU if there is one.", default=None, unchecked=True, validator=text(optional=True)
    )
    dtype: str = _described(
        "Type that the target computes in.", default="auto", validator=one_of("auto", "float32", "float16", "bfloat16")
    )
    autocast: bool = _described("Compute the draft in bfloat16 where that is safe.", default=False, validator=flag)
    threads: int | None = _described(
        "Of the CPU.", default=None, unchecked=True, validator=whole_number(1, optional=True)
    )
    log_every: int = _described(
        "Steps between lines of the log.", default=10, unchecked=True, validator=whole_number(1)
    )
    save_every: int = _described("Steps between saves.", default=200, unchecked=True, validator=whole_number(1))
    evaluate_every: int = _described(
        "Steps between measurements on the held-out texts; 0: at the end alone.",
        default=200,
        unchecked=True,
        validator=whole_number(0),
    )
    eval_prompts: int = _described(
        "Held-out texts that are continued; 0: none.", default=8, unchecked=True, validator=whole_number(0)
    )
    eval_tokens: int = _described("Tokens of each continuation.", default=64, unchecked=True, validator=whole_number(1))
    resume: bool = _described("Go on from the state in --out.", default=False, unchecked=True, validator=flag)

    def checked(self) -> dict[str, Any]:
        """What must be the same when a run is resumed, as JSON has it."""
        return {a.name: plain(getattr(self, a.name)) for a in fields(Settings) if not a.metadata.get("unchecked")}


def plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def prepare_folder(settings: Settings) -> None:
    """Make `out`. Raises ConfigError if there is something in it, and the run is not to be resumed."""
    out = settings.out
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {str(out)!r} is a file: name a folder")
    if not settings.resume and out.exists() and any(file.name != LOCK for file in out.iterdir()):
        raise ConfigError(
            f"--out {str(out)!r} is not empty: pass --resume to go on with its run, or name another folder"
        )
    out.mkdir(parents=True, exist_ok=True)


def described(attribute: Attribute[Any]) -> str:
    return str(attribute.metadata.get("help", ""))
