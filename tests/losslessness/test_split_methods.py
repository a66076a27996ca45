"""Where ranks share the target, every method generates the tokens of plain decoding with as many ranks. By day a few
methods, at night all of them, with chains and trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from random_tree import TRUTH

from specdec_core import SamplingParams
from specdec_core.ranks.driver import Ranks

model_path = pytest.importorskip("specdec_model_tiny").model_path

pytestmark = pytest.mark.usefixtures("lasting")

TEXTS = [
    "import os\nimport sys\n",
    "def mean(values):\n    ",
    "class Stack:\n",
    "for i in range(10):\n    print(i)\nfor",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=20, ignore_eos=True)
PARAMS = [GREEDY, SEEDED] * (len(TEXTS) // 2)
TREE = {"speculative_token_tree": str([(0,), (1,), (0, 0), (0, 1), (1, 0)])}
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": False, "num_kv_blocks": 64}
SPLIT = {"model": str(model_path()), "draft_tensor_parallel_size": "of the target"}  # the shipped draft has three heads
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram": ("ngram", {}),
    "suffix": ("suffix", {}),
    "suffix, tree": ("suffix", {"suffix_decoding_use_tree": True}),
    "draft model": ("draft_model", {}),
    "draft model, tree": ("draft_model", TREE),
    "split draft model": ("draft_model", SPLIT),
    "split draft model, tree": ("draft_model", SPLIT | TREE),
    "eagle": ("eagle", {}),
    "eagle, tree": ("eagle", TREE),
    "eagle3": ("eagle3", {}),
    "eagle3, tree": ("eagle3", TREE),
    "mtp": ("mtp", {}),
    "mtp, tree": ("mtp", TREE),
    "mlp_speculator": ("mlp_speculator", {"num_speculative_tokens": 3}),
    "mlp_speculator, tree": ("mlp_speculator", TREE),
    "medusa": ("medusa", {"num_speculative_tokens": 3}),
    "medusa, tree": ("medusa", TREE),
    "random trees": ("random_tree", {"correct": 1.0}),
}
BY_DAY = {("split draft model, tree", 2), ("eagle3, tree", 2), ("medusa", 2), ("random trees", 2), ("ngram", 4)}
BY_DAY |= {("mlp_speculator", 4), ("split draft model", 4), ("eagle, tree", 4)}


def tokens_of(llm: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(TEXTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain(make_llm: Any) -> Callable[[int], list[list[int]]]:
    """Return a function from the number of ranks to the tokens of plain decoding."""
    known: dict[int, list[list[int]]] = {}

    def tokens(size: int) -> list[list[int]]:
        if size not in known:
            llm = make_llm(model_path(), None, tensor_parallel_size=size, **SETTINGS)
            known[size] = tokens_of(llm)
            llm.close()
        return known[size]

    return tokens


def truth_of(llm: Any, tokens: list[list[int]]) -> None:
    """Tell the proposer of random trees what the outputs will be."""
    ids = [tuple(llm.get_tokenizer().encode(text)) for text in TEXTS]
    TRUTH.update(zip(ids, tokens, strict=True))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=() if (name, size) in BY_DAY else pytest.mark.nightly)
        for name in CASES
        for size in (2, 4)
    ],
)
def test_every_method_generates_the_tokens_of_plain_decoding(name, size, make_llm, plain, counter):
    method, options = CASES[name]
    options = {key: size if value == "of the target" else value for key, value in options.items()}
    expected = plain(size)
    llm = make_llm(model_path(), method, options=options, tensor_parallel_size=size, **SETTINGS)
    truth_of(llm, expected)
    found, num_accepted = tokens_of(llm), counter(llm, "num_accepted_tokens")
    llm.close()
    assert found == expected
    assert num_accepted > 0


def test_ranks_that_move_no_accepted_tokens_are_noticed(make_llm, plain, monkeypatch):
    """Trees whose first branch is wrong need `compact`, on each rank."""
    expected = plain(2)  # before the engine below: both use the same processes
    later = Ranks.later
    monkeypatch.setattr(Ranks, "later", lambda self, name, *args: name != "compact" and later(self, name, *args))
    llm = make_llm(model_path(), "random_tree", options={"correct": 1.0}, tensor_parallel_size=2, **SETTINGS)
    truth_of(llm, expected)
    found = tokens_of(llm)
    llm.close()
    assert found != expected
