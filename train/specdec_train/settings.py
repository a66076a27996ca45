"""Settings of a training run: data, optimization and output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import Attribute, field, fields, frozen

from specdec_core import ConfigError, flag, number, one_of, text, whole_number

LOCK = ".lock"
"""Name of the lock file in a folder that is written to."""
UNCHECKED = {"unchecked": True}
"""Metadata of settings that a resumed run may change, because they do not affect the weights or only extend the run."""


def _setting(help_text: str, *, unchecked: bool = False, **kwargs: Any) -> Any:
    return field(metadata={"help": help_text, **(UNCHECKED if unchecked else {})}, **kwargs)


def _optional_number(low: float, high: float) -> Any:
    return number(low, high, low_open=True, optional=True)


@frozen(kw_only=True)
class Settings:
    """Settings that every training run has, whatever its method. Each is an option of `spec-decode train METHOD`.
    Raises ConfigError for a value out of range."""

    target: str = _setting("The model to draft for: a folder, a name on the hub, or an embedded one.", validator=text())
    data: tuple[Path, ...] = _setting(
        "Training texts: files or folders of text, .jsonl (text, or prompt and completion), .npy of token ids."
    )
    out: Path = field(metadata={"help": "Folder for the checkpoint, the log and the state of the run.", **UNCHECKED})
    start: str | None = _setting(
        "Trained draft to start from (fine-tuning): a folder, or a name on the hub. Options of the recipe that have "
        "defaults must be those of the start. Default: start from new weights.",
        default=None,
        validator=text(optional=True),
    )
    held_out: tuple[Path, ...] = _setting(
        "Held-out texts for evaluation. Default: the last ones of the data.", default=()
    )
    steps: int = _setting("Optimizer steps.", default=1000, unchecked=True, validator=whole_number(1))
    batch: int = _setting("Texts per step.", default=8, validator=whole_number(1))
    length: int = _setting("Longest text in tokens; longer ones are split.", default=256, validator=whole_number(8))
    lr: float | None = _setting(
        "Learning rate. Default: the recipe's.", default=None, validator=_optional_number(0, 10)
    )
    warmup: float = _setting("Learning rate warm-up, as a share of the steps.", default=0.05, validator=number(0, 1))
    final_lr: float = _setting("Final learning rate, as a share of --lr.", default=0.1, validator=number(0, 1))
    clip: float = _setting("Gradient norm to clip to.", default=0.5, validator=number(0, 1e6, low_open=True))
    optimizer: str = _setting(
        "muon: Muon for the layers' matrices, at ten times --lr, and AdamW for the rest. adamw: AdamW for all.",
        default="muon",
        validator=one_of("muon", "adamw"),
    )
    weight_decay: float = _setting("Weight decay of matrices.", default=0.0, validator=number(0, 10))
    seed: int = _setting(
        "Seed of the initial weights, the data's order and all noise.", default=0, validator=whole_number(0)
    )
    generate: int = _setting(
        "Train on self-generated data: the target continues each text by this many tokens. 0: the data itself.",
        default=0,
        validator=whole_number(0),
    )
    prompt_len: int = _setting(
        "Tokens of a text that --generate uses as a prompt, and at most that the evaluation does.",
        default=32,
        validator=whole_number(1),
    )
    temperature: float = _setting("Temperature for --generate.", default=1.0, validator=number(0, 10))
    features: Path | None = field(
        default=None,
        metadata={
            "help": "Folder to store the target's hidden states in. Default: compute them in each step.",
            **UNCHECKED,
        },
    )
    window: int | None = _setting(
        "With --features: split texts further, to this many tokens, with the hidden states of the unsplit texts. "
        "--batch counts these parts. For heads that read one position at a time, such as Medusa's: batches vary more.",
        default=None,
        validator=whole_number(8, optional=True),
    )
    device: str | None = _setting(
        "Device to train on. Default: a GPU if there is one.",
        default=None,
        unchecked=True,
        validator=text(optional=True),
    )
    dtype: str = _setting(
        "The target's dtype.", default="auto", validator=one_of("auto", "float32", "float16", "bfloat16")
    )
    autocast: bool = _setting("Run the draft under bfloat16 autocast.", default=False, validator=flag)
    threads: int | None = _setting(
        "CPU threads. Default: PyTorch's.", default=None, unchecked=True, validator=whole_number(1, optional=True)
    )
    log_every: int = _setting("Steps between log lines.", default=10, unchecked=True, validator=whole_number(1))
    save_every: int = _setting("Steps between checkpoints.", default=200, unchecked=True, validator=whole_number(1))
    evaluate_every: int = _setting(
        "Steps between evaluations on the held-out texts. 0: only at the end.",
        default=200,
        unchecked=True,
        validator=whole_number(0),
    )
    eval_prompts: int = _setting(
        "Held-out texts for measuring the acceptance length. 0: do not measure it.",
        default=8,
        unchecked=True,
        validator=whole_number(0),
    )
    eval_tokens: int = _setting(
        "Tokens generated for each of them.", default=64, unchecked=True, validator=whole_number(1)
    )
    resume: bool = _setting(
        "Continue the run in --out from its last checkpoint.", default=False, unchecked=True, validator=flag
    )

    def __attrs_post_init__(self) -> None:
        if self.window is not None and self.features is None:
            raise ConfigError(f"window={self.window} takes stored hidden states: give --features FOLDER, too")
        if self.features is not None and self.features.resolve() == self.out.resolve():
            raise ConfigError(f"--features and --out are the same folder, {str(self.out)!r}: name another for one")

    @property
    def texts_at_once(self) -> int:
        """Number of whole texts with about as many tokens as a step has."""
        return self.batch if self.window is None else max(1, self.batch * min(self.window, self.length) // self.length)

    def identity(self) -> dict[str, Any]:
        """Return those settings that a resumed run must not change, {name: value in JSON types}."""
        return {a.name: plain(getattr(self, a.name)) for a in fields(Settings) if not a.metadata.get("unchecked")}


def plain(value: Any) -> Any:
    """Return a setting's value in JSON types: a path becomes a string, a tuple becomes a list."""
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def prepare_folder(settings: Settings) -> None:
    """Create the output folder settings.out. Raises ConfigError if it is a file, if it is not empty and settings.resume
    is False, or if it does not exist and settings.resume is True."""
    out = settings.out
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {str(out)!r} is a file: name a folder")
    if not settings.resume and out.exists() and any(file.name != LOCK for file in out.iterdir()):
        raise ConfigError(f"--out {str(out)!r} is not empty: pass --resume to continue its run, or name another folder")
    if settings.resume and not out.exists():
        raise ConfigError(f"--out {str(out)!r} does not exist: name the folder of the run, or leave --resume out")
    make_folder("--out", out)


def make_folder(option: str, folder: Path) -> None:
    """Create a folder and its lock file, if they do not exist. Raises ConfigError if that is not possible.

    option: the one that names the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOCK).touch()
    except OSError as error:
        raise ConfigError(
            f"{option} {str(folder)!r} cannot be written to: {error.strerror}. Name a folder in which you may write"
        ) from error


def help_of(attribute: Attribute[Any]) -> str:
    return str(attribute.metadata.get("help", ""))
