"""Targets with recurrent layers generate with every kind of draft what they generate without, while drafts are rejected
or accepted in part or in full, and requests preempted and cancelled.

SPECDEC_NIGHTLY=1 runs three times as many requests for each, of all families with all methods.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hybrid_targets import KINDS, save_eagle3_head, save_hybrid, save_with_mtp_module
from nightly import IS_NIGHTLY
from recorded_runs import check_outputs, plain_outputs, random_requests, run, what_happened

NUM_REQUESTS = 250 if IS_NIGHTLY else 80
TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]"
EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 6}
WAYS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    "suffix": {"method": "suffix", "num_speculative_tokens": 6, "suffix_decoding_use_tree": True},
    "eagle3 chain": EAGLE3 | {"eagle_topk": 1},
    "eagle3 tree": EAGLE3 | {"speculative_token_tree": TREE},
    "eagle3 sampled tree": EAGLE3 | {"speculative_token_tree": TREE, "draft_sample_method": "probabilistic"},
}
BY_DAY = [
    ("granitemoehybrid", "eagle3 tree"),
    ("lfm2", "eagle3 chain"),
    ("lfm2", "ngram"),
    ("qwen3_5_text", "suffix"),
]
CASES = [
    pytest.param(*case, marks=() if case in BY_DAY else pytest.mark.nightly) for case in product(sorted(KINDS), WAYS)
]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    found: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in found:
            found[name] = save_hybrid(name, tmp_path_factory.mktemp(name))
        return found[name]

    return folder_of


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_eagle3_head(tmp_path_factory.mktemp("head"))


@pytest.mark.parametrize(("name", "way"), CASES)
def test_outputs_are_those_of_plain_decoding(name: str, way: str, targets: Any, head: Path) -> None:
    more = {"model": str(head)} if WAYS[way]["method"] == "eagle3" else {}
    check(targets(name), **WAYS[way], **more)


@pytest.mark.parametrize("shape", [{}, pytest.param({"speculative_token_tree": TREE}, marks=pytest.mark.nightly)])
def test_outputs_with_the_targets_own_mtp_module(shape: dict[str, str], tmp_path: Path) -> None:
    """One family has a module, so at night it gets as many requests as the others have together."""
    number = 4 * NUM_REQUESTS if IS_NIGHTLY else NUM_REQUESTS
    check(save_with_mtp_module(tmp_path), number, method="mtp", num_speculative_tokens=6, **shape)


def check(target: Path, number: int = NUM_REQUESTS, **options: Any) -> None:
    """Run so many requests with drafts. There are KV blocks for one of the longest requests, and some more."""
    asked = random_requests(number)
    outcome = run(target, asked, num_kv_blocks=20, **options)
    check_outputs(outcome, asked, plain_outputs(target, asked))
    happened = what_happened(outcome)
    assert outcome.num_cached == 0
    for event in ("refused", "accepted in part", "preempted", "cancelled"):
        assert happened[event] > number / 20, happened
    assert happened["two or more accepted"] > 0, happened
    if options["method"] in ("eagle3", "mtp"):  # which observe, so that the journal tells more
        assert happened["drafted after preemption"] > number / 20, happened
        assert happened["chunks"] > 0, happened
