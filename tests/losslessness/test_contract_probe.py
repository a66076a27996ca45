"""The engine keeps its contract with a proposer that has its own layers and KV cache.

The proposer in probe_draft.py runs with chunked prefill, preemption, cancellation, and trees that are rejected or
accepted in part or in full. Each of its drafts must equal the one that dense_draft.py computes from scratch.

SPECDEC_NIGHTLY=1 runs ten times as many requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dense_draft import DenseDraft
from nightly import IS_NIGHTLY
from probe_mutations import CACHE_FAULTS, FAULTS, preemption_is_ignored, zero_the_cache
from recorded_runs import (
    Asked,
    check_outputs,
    mismatches,
    off_now_and_then,
    plain_outputs,
    random_requests,
    run,
    save_talkative_model,
    what_happened,
    with_common_beginnings,
)

Patch = pytest.MonkeyPatch
PROBED = {"method": "probe", "num_speculative_tokens": 12}
NUM_REQUESTS = 1100 if IS_NIGHTLY else 80
NUM_COMPARED = 2750 if IS_NIGHTLY else 100


@pytest.fixture(scope="module")
def probed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talkative_model(tmp_path_factory.mktemp("probed"))


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return random_requests(NUM_REQUESTS)


@pytest.fixture(scope="module")
def plain(probed_model: Path, asked: list[Asked]) -> list[list[int]]:
    return plain_outputs(probed_model, asked)


@pytest.mark.parametrize(
    ("layer", "style"),
    [
        ("own", "chosen"),
        ("llama", "sampled"),
        pytest.param("own", "sampled", marks=pytest.mark.nightly),
        pytest.param("llama", "chosen", marks=pytest.mark.nightly),
    ],
)
def test_drafts_are_those_computed_from_scratch(
    layer: str, style: str, probed_model: Path, asked: list[Asked], plain: list[list[int]], kv_manager: str
) -> None:
    sums = kv_manager == "paged"  # what a cache found has no features to be summed up
    outcome = run(probed_model, asked, **PROBED, layer=layer, style=style, sums=sums)
    journal = outcome.journal
    differing = list(mismatches(outcome, DenseDraft(probed_model, layer, style, sums=sums), NUM_COMPARED))
    assert not differing, differing[:3]
    check_outputs(outcome, asked, plain)
    happened = what_happened(outcome)
    assert min(happened.values()) >= 3, happened
    assert set(journal.num_in_batch) == set(range(1, 9))
    assert any(probs is not None for drafted in journal.drafts for probs in drafted.q) == (style == "sampled")


@pytest.mark.parametrize("fault", [None, *CACHE_FAULTS], ids=lambda fault: getattr(fault, "__name__", None))
def test_drafts_share_cached_prefixes(fault: Any, probed_model: Path, asked: list[Asked], monkeypatch: Patch) -> None:
    """With prefix caching, drafts computed from cached blocks still equal those computed from scratch. With a
    deliberate fault in the caching they do not."""
    if fault is not None:
        zero_the_cache(monkeypatch)
        fault(monkeypatch)
    some = with_common_beginnings(asked[:60])
    outcome = run(probed_model, some, **PROBED, kv_manager="prefix", sums=False)
    dense = DenseDraft(probed_model, "own", "chosen", sums=False)
    first = next(mismatches(outcome, dense, len(outcome.journal.drafts)), None)
    assert (first is not None) == (fault is not None), first
    assert outcome.num_cached > 300
    if fault is None:
        check_outputs(outcome, some, plain_outputs(probed_model, some))


@pytest.mark.parametrize("kv_manager", [pytest.param("paged", marks=pytest.mark.nightly), "prefix"])
def test_late_observations_make_no_difference(kv_manager: str, probed_model: Path, asked: list[Asked]) -> None:
    outcome = run(probed_model, asked, **PROBED, kv_manager=kv_manager, is_off=off_now_and_then, sums=False)
    dense = DenseDraft(probed_model, "own", "chosen", sums=False)
    differing = list(mismatches(outcome, dense, NUM_COMPARED))
    assert not differing, differing[:3]
    assert not any(off_now_and_then(Seen(drafted)) for drafted in outcome.journal.drafts)


class Seen:
    """Stands in for a request at the time when a draft was recorded. It has only the attributes that `is_off` reads."""

    def __init__(self, drafted: Any) -> None:
        self.num_tokens, self.seed = len(drafted.history), drafted.seed


@pytest.mark.parametrize("fault", [None, *FAULTS], ids=lambda fault: getattr(fault, "__name__", None))
def test_faults_are_noticed(
    fault: Any, probed_model: Path, asked: list[Asked], monkeypatch: Patch, kv_manager: str
) -> None:
    if fault is preemption_is_ignored and kv_manager == "prefix":
        pytest.skip("it finds the blocks that it had: what was observed may be kept")
    if fault is not None:
        zero_the_cache(monkeypatch)
        fault(monkeypatch)
    sums = kv_manager == "paged"
    outcome = run(probed_model, asked[15:45], **PROBED, layer="own", style="sampled", sums=sums)
    dense = DenseDraft(probed_model, "own", "sampled", sums=sums)
    first = next(mismatches(outcome, dense, len(outcome.journal.drafts)), None)
    assert (first is not None) == (fault is not None), first
