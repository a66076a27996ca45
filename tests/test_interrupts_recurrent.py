"""After Ctrl-C at any point, an engine whose target has recurrent layers works like a new one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from nightly import IS_NIGHTLY

sys.path.extend(str(Path(__file__).parent / folder) for folder in ("", "losslessness"))  # helpers

from families import save_family
from test_interrupts import PARAMS, PROMPTS, Tracer, tokens_of

from specdec_core import LLM

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 2,
    "max_model_len": 64,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "max_num_batched_tokens": 8,
}


@pytest.fixture(autouse=True)
def silent_finalizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide KeyboardInterrupts raised in a finalizer, which Python only prints."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    folder = save_family("lfm2", tmp_path, vocab_size=16)
    return LLM(str(folder), speculative_config=DRAFTS, **SETTINGS)


def interrupted(llm: LLM, k: int) -> Tracer:
    """Generate, with an interrupt at the k-th place after the first request's second output token. None comes if k is
    0."""
    tracer = Tracer(k)

    def begin(logits: Any, token_ids: Any) -> Any:
        if not tracer.num_places and len(token_ids) > 7:
            tracer.begin()
        return logits

    before = sys.gettrace()  # measuring coverage sets one
    try:
        llm.generate(PROMPTS, [attrs.evolve(PARAMS, logits_processors=[begin]), *[PARAMS] * 2], use_tqdm=False)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return tracer


def evenly(places: Sequence[int], number: int) -> Sequence[int]:
    """About so many of the places, evenly spaced."""
    return places[:: max(1, len(places) // number)]


def test_interrupts_wherever_they_come(llm: LLM) -> None:
    """Later outputs are right, no request is left, and all slots and blocks are free. The test interrupts at evenly
    spaced points, and at some in the recurrent layers; nightly runs use more of them."""
    expected, kv = tokens_of(llm), llm.engine.kv
    num_free = kv.num_free_blocks
    names = interrupted(llm, 0).names
    assert len(names) > 1000
    in_layers = [k for k, name in enumerate(names, 1) if "RecurrentLayers" in name]
    places = set()
    for k in [*evenly(range(1, len(names)), 400 if IS_NIGHTLY else 40), *evenly(in_layers, 10)]:
        place = interrupted(llm, k).place
        places.add(place.rpartition(" in ")[2])
        assert tokens_of(llm) == expected, place
        assert not llm.engine.has_unfinished, place
        kv.check_integrity()
        assert kv.num_free_blocks == num_free, place
        assert kv.states.layers.store._slots == {}, place
    assert any("RecurrentLayers" in place for place in places), places
    (accepted,) = (each.value for each in llm.get_metrics() if each.name.endswith("num_accepted_tokens"))
    assert accepted > 10
