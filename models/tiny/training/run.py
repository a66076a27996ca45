"""Build the tiny model with one command: corpus, tokenizer, training, export, evaluation, model card.

If the command was interrupted, run it again to resume.
"""

from __future__ import annotations

from . import corpus, tokenizer, train
from .finish import finish


def main() -> None:
    """The command ``python -m training.run``, with the options of ``training.train``."""
    arguments = train.parser().parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    corpus.build(arguments.work)
    tokenizer.build(arguments.work)
    train.run(arguments)
    finish(arguments.work)


if __name__ == "__main__":
    main()
