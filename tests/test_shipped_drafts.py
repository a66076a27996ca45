"""The drafts shipped with the embedded model are small and lossless, are loaded by default, and have a high acceptance
rate."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from specdec_core import LLM, DraftCounts, SamplingParams
from specdec_model_tiny import model_path

METHODS = ("eagle3", "eagle", "draft_model")
CHAIN = {"num_speculative_tokens": 5, "draft_sample_method": "probabilistic"}
MOST_BYTES = 5_000_000
MOST_DRAFT_VOCAB = 2048
PROMPTS = [
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    'def read_lines(path):\n    """Return the lines of a file."""\n    with open(path) as file:\n',
    "import unittest\n\n\nclass TestStack(unittest.TestCase):\n    def test_push(self):\n        stack = Stack()\n",
    "def mean(values):\n    total = 0\n    for value in values:\n",
]
GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with LLM("tiny", dtype="float32") as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("method", METHODS)
def test_it_is_small(method):
    folder = Path(model_path(), "drafts", method)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= MOST_BYTES


def test_the_draft_vocabulary_is_small():
    tensors = load_file(Path(model_path(), "drafts", "eagle3", "model.safetensors"))
    assert len(tensors["d2t"]) == len(tensors["lm_head.weight"]) <= MOST_DRAFT_VOCAB


@pytest.mark.parametrize(
    ("method", "options", "least"),
    [("eagle3", {}, 4.1), ("eagle3", CHAIN, 3.85), ("eagle", {}, 4.1), ("eagle", CHAIN, 4.1), ("draft_model", {}, 2.7)],
)
def test_it_is_found_and_right_about_many_tokens(method, options, least, plain):
    """Without `model` in speculative_config, the shipped draft of the method is loaded. Outputs equal those of plain
    decoding, and the acceptance length exceeds `least`.

    Measured acceptance lengths of the five cases, in order: 4.39, 4.00, 4.42, 4.42 and 2.95. With a fault in EAGLE-3:
    3.75 if it reads the hidden states of the next layers, 1.00 if tokens are shifted by one.
    """
    with LLM("tiny", dtype="float32", speculative_config={"method": method, **options}) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == plain
    counts = sum((output.speculation for output in outputs), DraftCounts())
    assert counts.acceptance_length > least
