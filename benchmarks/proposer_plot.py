"""Plots the results of proposers.py: time per request and step over the context length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LOOKS = {
    "specdec ngram": ("tab:blue", "o"),
    "vLLM n-gram": ("tab:orange", "s"),
    "transformers prompt lookup": ("tab:gray", "v"),
    "specdec suffix": ("tab:green", "o"),
    "arctic-inference": ("tab:red", "s"),
}


def plot(contexts: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot each peer's microseconds per request and step over the context length, with a panel for each batch size.

    Both axes are logarithmic.
    contexts: {batch size: {context length: {name of the peer: its results}}}.
    """
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(contexts), figsize=(9, 3.8), sharey=True)
    for axes, (batch, by_length) in zip(panels, contexts.items(), strict=True):
        for name, (color, marker) in LOOKS.items():
            points = [(int(n), found[name]["us_per_request_step"]) for n, found in by_length.items() if name in found]
            if points:
                axes.plot(*zip(*points, strict=True), color=color, marker=marker, label=name)
        axes.set(xscale="log", yscale="log", title=batch, xlabel="tokens of context")
        axes.grid(visible=True, which="both", alpha=0.25)
        lengths = [int(n) for n in by_length]
        axes.set_xticks(lengths, [f"{n // 1024}k" for n in lengths])
        axes.minorticks_off()
    panels[0].set_ylabel("µs per request and step")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
