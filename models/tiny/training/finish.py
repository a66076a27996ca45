"""Export the latest checkpoint, evaluate it, and write the model card. This can be done at any time during training."""

from __future__ import annotations

import argparse
from pathlib import Path

from .card import write_card
from .evaluate import evaluate
from .export import WEIGHTS, export


def finish(work: Path) -> None:
    """Export ``work/checkpoint.pt`` into the package, evaluate it and update the model card."""
    tokens = export(work)
    figures = {"tokens": tokens} | evaluate(work, WEIGHTS)
    write_card(work, figures)
    print(f"exported at {tokens / 1e6:.2f}M tokens: {figures['bits_per_byte']:.3f} bits per byte held out")


def main() -> None:
    """The command ``python -m training.finish``."""
    parser = argparse.ArgumentParser(description="Export, evaluate and describe the latest checkpoint.")
    parser.add_argument("--work", type=Path, required=True, help="folder of the corpus and the checkpoints")
    parser.add_argument("--export-only", action="store_true", help="only update the weights in the package")
    arguments = parser.parse_args()
    if arguments.export_only:
        print(f"exported at {export(arguments.work) / 1e6:.2f}M tokens")
    else:
        finish(arguments.work)


if __name__ == "__main__":
    main()
