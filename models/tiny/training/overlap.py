"""Search the training corpus for the built-in tasks of specdec's demo: `python -m training.overlap --work ~/tiny-run`.

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
    """Split a text into identifiers, numbers and single punctuation characters."""
    return re.findall(r"\w+|[^\w\s]", text)


def ngrams(text: str) -> set[str]:
    """Return all sequences of 13 words in a row in a text, each joined by spaces."""
    found = words(text)
    return {" ".join(found[i : i + NUM_WORDS]) for i in range(len(found) - NUM_WORDS + 1)}


def overlaps(texts: Sequence[str], documents: Iterable[corpus.Document]) -> list[tuple[int, str, str]]:
    """Find all sequences of 13 words that a text and a document share. Returns, for each, the index of the text, the 13
    words and the document's "source/path"."""
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
    """Print each overlap of the demo's tasks with the training corpus. Exits with status 1 if there is one."""
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
