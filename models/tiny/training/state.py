"""The files from which a training run resumes: checkpoints and the loss history."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from .model import Trainee


@dataclass
class Progress:
    """How far a training run has come; this determines its next batch and learning rate.

    units: number of units (see data.py) used so far.
    decay_from: value of `tokens` at which the decay of the learning rate began; None before that.
    decay_tokens: number of tokens that the decay takes.
    """

    step: int = 0
    tokens: int = 0
    units: int = 0
    seconds: float = 0.0
    decay_from: int | None = None
    decay_tokens: int = 0


def save(path: Path, trainee: Trainee, optimizers: list[torch.optim.Optimizer], progress: Progress) -> None:
    """Write a checkpoint atomically: if the run is killed meanwhile, the previous checkpoint is intact."""
    partial = path.with_suffix(".partial")
    state = {
        "masters": {name: master.detach() for name, master in trainee.masters.items()},
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": asdict(progress),
    }
    torch.save(state, partial)
    partial.replace(path)


def restore(path: Path, trainee: Trainee, optimizers: list[torch.optim.Optimizer] | None = None) -> Progress:
    """Load a checkpoint's weights into ``trainee``, and its optimizer states into ``optimizers`` if given. Returns the
    checkpoint's progress."""
    state = torch.load(path, weights_only=True)
    with torch.no_grad():
        for name, master in trainee.masters.items():
            master.copy_(state["masters"][name])
    for optimizer, saved in zip(optimizers or [], state["optimizers"], strict=False):
        optimizer.load_state_dict(saved)
    return Progress(**state["progress"])


def start_from(folder: Path, trainee: Trainee, tokens: int) -> Progress:
    """Begin a run with the weights of an exported model, and with new optimizer states.

    folder: the model's folder. tokens: number of tokens that it was trained on.
    """
    weights = {name: each for file in folder.glob("model*.safetensors") for name, each in load_file(file).items()}
    with torch.no_grad():
        for name, master in trainee.masters.items():
            master.copy_(weights[name])
    return Progress(tokens=tokens)


def truncate_history(path: Path, tokens: int) -> None:
    """Remove the points of a loss history that were logged after ``tokens`` training tokens.

    path: the file of the loss history.
    """
    if path.exists():
        lines = [line for line in path.read_text().splitlines() if json.loads(line)["tokens"] <= tokens]
        path.write_text("".join(line + "\n" for line in lines))


def reopen(work: Path) -> None:
    """Let a finished run go on after its decay, with another one at its end."""
    state = torch.load(work / "checkpoint.pt", weights_only=True)
    state["progress"] |= {"decay_from": None, "decay_tokens": 0}
    torch.save(state, work / "checkpoint.partial")
    (work / "checkpoint.partial").replace(work / "checkpoint.pt")
    for name in ("decay", "finished"):
        (work / name).unlink(missing_ok=True)


def rewind(work: Path) -> None:
    """Replace the latest checkpoint by the one from before the learning rate decay, so that a longer run can continue
    from it."""
    if not (work / "stable.pt").exists():
        raise FileNotFoundError(f"no stable.pt in {work}: the decay has not begun, so plain training continues")
    (work / "stable.pt").replace(work / "checkpoint.pt")
    for name in ("decay", "finished"):
        (work / name).unlink(missing_ok=True)
