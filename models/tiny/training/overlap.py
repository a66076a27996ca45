"""Look for the demo's tasks in the training corpus: `python -m training.overlap --work ~/tiny-run`.

Two texts overlap if they share 13 words in a row, the measure of "Language Models are Few-Shot Learners"
(arXiv:2005.14165, appendix C). Words are identifiers, numbers and single punctuation characters; white space is
ignored.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from . import corpus

NUM_WORDS = 13


def words(text: str) -> list[str]:
    """The identifiers, numbers and single punctuation characters of a text."""
    return re.findall(r"\w+|[^\w\s]", text)


def ngrams(text: str) -> set[str]:
    """Every 13 words in a row, joined by spaces."""
    found = words(text)
    return {" ".join(found[i : i + NUM_WORDS]) for i in range(len(found) - NUM_WORDS + 1)}


def overlaps(texts: Sequence[str], documents: Iterable[corpus.Document]) -> list[tuple[int, str, str]]:
    """(index of a text, 13 words, "source/path" of the document), for each 13 words of a text that a document has."""
    wanted = {ngram: index for index, text in enumerate(texts) for ngram in ngrams(text)}
    found = []
    for document in documents:
        has = " " + " ".join(words(document.text)) + " "
        found += [
            (index, ngram, f"{document.source}/{document.path}")
            for ngram, index in wanted.items()
            if f" {ngram} " in has
        ]
    return found


def main() -> None:
    """Print each overlap of the demo's tasks, and fail if there is one."""
    from specdec_tools.tasks import TASKS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    work = parser.parse_args().work
    corpus.build(work)
    documents = corpus.read_jsonl(work / "train.jsonl")
    found = overlaps([f"{task.code}\n{task.edited}" for task in TASKS], tqdm(documents, unit="file"))
    for index, ngram, place in found:
        print(f"{TASKS[index].title}: {ngram!r} is in {place}")
    if found:
        raise SystemExit(1)
    print(f"{len(TASKS)} tasks, {len(documents)} files: no {NUM_WORDS} words in a row are in both")


if __name__ == "__main__":
    main()
