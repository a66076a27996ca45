"""Write the evaluation results of the tiny model into its model card (README.md): figures, loss curve, sample
continuations, and a table of the training data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .corpus import load_manifest

ROOT = Path(__file__).parents[1]


def replace_section(card: str, name: str, content: str) -> str:
    """Return the text of the model card with the content of one section replaced. Two comments in the card mark where a
    section begins and ends. Raises ValueError if these comments are missing."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(card):
        raise ValueError(f"the model card has no section {name!r}; add the lines {begin} and {end} to README.md")
    return pattern.sub(lambda _: f"{begin}\n{content.strip()}\n{end}", card)


def plot(history: list[dict[str, Any]], path: Path) -> None:
    """Plot training loss (lightly smoothed) and held-out loss over training tokens as a small PNG.

    history: the points that training has logged, in order.
    """
    figure, axes = plt.subplots(figsize=(6.4, 3.2), dpi=100)
    tokens = [point["tokens"] / 1e6 for point in history]
    smooth, value = [], history[0]["loss"]
    for point in history:
        value = 0.8 * value + 0.2 * point["loss"]
        smooth.append(value)
    axes.plot(tokens, smooth, linewidth=1, label="training")
    held = [(point["tokens"] / 1e6, point["heldout"]) for point in history if "heldout" in point]
    axes.plot(*zip(*held, strict=True), "o-", markersize=3, linewidth=1, label="held-out modules")
    decay = next((point["tokens"] / 1e6 for point in history if point.get("decays")), None)
    if decay is not None:
        axes.axvline(decay, color="grey", linewidth=0.8, linestyle=":", label="decay begins")
    top = min(6, 1.2 * max([*smooth, *(loss for _, loss in held)]))
    axes.set(xlabel="tokens seen (millions)", ylabel="loss (nats per token)", ylim=(0, top))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def table(left: str, right: str, rows: list[tuple[str, str]]) -> list[str]:
    """The lines of a Markdown table of two columns."""
    return [f"| {left} | {right} |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def figures_section(figures: dict[str, Any]) -> str:
    """Return the evaluation results as Markdown tables for the model card.

    figures: the results of `evaluate`, and `tokens`, the number of tokens that the model was trained on.
    """
    rows = [
        ("Parameters (tied embedding included)", f"{figures['parameters'] / 1e6:.2f}M"),
        ("Training tokens seen", f"{figures['tokens'] / 1e6:.1f}M"),
        ("Held-out bits per byte", f"{figures['bits_per_byte']:.3f}"),
        ("Held-out loss, nats per token", f"{figures['loss_per_token']:.3f}"),
        ("Bytes per token", f"{figures['bytes_per_token']:.2f}"),
    ]
    lines = table("Figure", "Value", rows)
    lines += ["", "Loss by position in the document:", ""]
    by_position = figures["loss_by_position"].items()
    lines += table("Tokens before", "Loss", [(name, f"{value:.3f}") for name, value in by_position])
    lines += ["", "Edits of unseen code, share of the result's tokens guessed right:", ""]
    by_task = figures["edit_accuracy"].items()
    lines += table("Task", "Share", [(name, f"{value:.1%}") for name, value in by_task])
    lines += ["", "Renames in unseen code that greedy decoding gets right to the last character:", ""]
    lines += table("Results", "Share", [(name, f"{value:.0%}") for name, value in figures["exact_renames"].items()])
    lines += ["", "Bits per byte by held-out module or package:", ""]
    by_module = figures["bits_per_byte_by_module"].items()
    lines += table("Module", "Bits per byte", [(name, f"{value:.3f}") for name, value in by_module])
    return "\n".join(lines)


def samples_section(samples: list[dict[str, str]]) -> str:
    """Return sample prompts with their greedy continuations as Markdown; a comment marks where each continuation
    begins."""
    blocks = [
        f"````python\n{s['prompt']}# ---- the model goes on:\n{s['continuation'].rstrip()}\n````" for s in samples
    ]
    return "\n\n".join(blocks)


def data_section(totals: dict[str, int]) -> str:
    """Return a Markdown table of all sources of the corpus, with version, license and size in megabytes.

    totals: {source: number of its characters in the training data}.
    """
    manifest = load_manifest()
    library = manifest["stdlib"]
    held = manifest["heldout"]["packages"]
    rows = [("Python standard library", library["version"], library["licence"], "stdlib")]
    rows += [(p["name"], p["version"], p["licence"], p["name"]) for p in manifest["package"]]
    lines = ["| Source | Version | Licence | MB |", "|---|---|---|---|"]
    for name, version, licence, key in rows:
        size = "held out" if key in held else f"{totals.get(key, 0) / 1e6:.1f}"
        lines.append(f"| {name} | {version} | {licence} | {size} |")
    return "\n".join(lines)


def write_card(work: Path, figures: dict[str, Any], root: Path = ROOT) -> None:
    """Update README.md, evaluation.json and loss.png in the folder ``root`` of the tiny model's distribution.

    work: folder of the training run.
    figures: the results of `evaluate`, and `tokens`, the number of tokens that the exported model was trained on.
    """
    history = [json.loads(line) for line in (work / "loss.jsonl").read_text().splitlines()]
    history = [point for point in history if point["tokens"] <= figures["tokens"]]
    plot(history, root / "loss.png")
    (root / "evaluation.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    path = root / "README.md"
    card = path.read_text(encoding="utf-8")
    card = replace_section(card, "figures", figures_section(figures))
    card = replace_section(card, "samples", samples_section(figures["samples"]))
    card = replace_section(card, "data", data_section(json.loads((work / "totals.json").read_text())))
    path.write_text(card, encoding="utf-8")
