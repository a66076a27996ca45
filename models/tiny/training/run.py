"""Corpus, tokenizer, training, export, evaluation and card with one command; resumes where it stopped."""

from __future__ import annotations

from . import corpus, tokenizer, train
from .finish import finish


def main() -> None:
    """Command line: that of the training."""
    arguments = train.parser().parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    corpus.build(arguments.work)
    tokenizer.build(arguments.work)
    train.run(arguments)
    finish(arguments.work)


if __name__ == "__main__":
    main()
