"""Plots of the losses and acceptance lengths in a training run's log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specdec_train.files import replace


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def draw(lines: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Plot the losses and the measured acceptance lengths over the training steps.

    lines: the parsed lines of the log file log.jsonl.
    file: the PNG file to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for key, label in (("loss", "training"), ("held_out_loss", "held out")):
        points = [(line["step"], line[key]) for line in lines if key in line]
        if points:
            above.plot(*zip(*points, strict=True), label=label, marker="o" if key == "held_out_loss" else None)
    measured = [line for line in lines if "acceptance_length" in line]
    for name in measured[0]["acceptance_length"] if measured else ():
        points = [(line["step"], line["acceptance_length"][name]) for line in measured]
        below.plot(*zip(*points, strict=True), label=name.replace("_", " "), marker="o")
    above.set_ylabel("loss")
    below.set_ylabel("acceptance length")
    below.set_xlabel("step")
    for axes in (above, below):
        if axes.lines:
            axes.legend()
    with replace(file) as partial:
        figure.savefig(partial, format="png", dpi=120)
