"""Random requests to targets with recurrent layers, with random trees around the right continuation, far too few KV
blocks and cancellations, generate the tokens that they have without drafts. Faults in the states change some.

SPECDEC_NIGHTLY=1 runs ten times as many requests, to all families.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_tree
import traffic
from attrs import evolve
from families import RECURRENT, save_family
from nightly import IS_NIGHTLY
from recurrent_faults import FAULTS
from traffic import Figures, Traffic, Wish

from specdec_core import CompatibilityError, SamplingParams
from specdec_core.models.meta_load import Outline

SCALE = 10 if IS_NIGHTLY else 1
NUM_REQUESTS = 100 * SCALE
NUM_WISHES = 30 * SCALE
BY_DAY = ("granitemoehybrid", "qwen3_next")
FAMILIES = [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in RECURRENT]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def wishes() -> list[Wish]:
    return [evolve(wish, params=evolve(wish.params, n=1)) for wish in traffic.random_wishes(NUM_WISHES, seed=7)]


@pytest.fixture(scope="module")
def engine_of(make_llm: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folders: dict[str, Path] = {}

    def make(name: str, method: str | None, **settings: Any) -> Any:
        if name not in folders:
            folders[name] = save_family(
                name, tmp_path_factory.mktemp(name), vocab_size=traffic.VOCAB_SIZE, eos_token_id=None
            )
        settings = {"max_model_len": traffic.MAX_MODEL_LEN, "block_size": traffic.BLOCK_SIZE, **settings}
        options = {"num_speculative_tokens": traffic.NUM_SPECULATIVE_TOKENS} if method else {}
        return make_llm(folders[name], method, options=options, **settings).engine

    return make


@pytest.fixture(scope="module")
def outputs(wishes: list[Wish], engine_of: Any) -> Callable[[str], dict[Wish, list[int]]]:
    """Return a function that returns what a family's model generates without drafts."""
    known: dict[str, dict[Wish, list[int]]] = {}

    def of(name: str) -> dict[Wish, list[int]]:
        if name not in known:
            engine, known[name] = engine_of(name, None), {}
            for wish in wishes:
                params = evolve(wish.params, num_speculative_tokens=None)
                engine.add_request(
                    wish.prompt, params, lambda r, _, wish=wish: known[name].update({wish: r.output_token_ids})
                )
            while engine.has_unfinished:
                engine.step()
        return known[name]

    return of


@pytest.fixture
def send(wishes: list[Wish], outputs: Any, engine_of: Any) -> Callable[..., tuple[Figures, list[Any]]]:
    """Return a function that sends random requests to a family's model. It returns the run's figures, and the
    completions with other tokens than plain decoding."""

    def run(name: str, method: str, num_requests: int, **settings: Any) -> tuple[Figures, list[Any]]:
        expected = outputs(name)
        random_tree.TRUTH.update((wish.prompt, token_ids) for wish, token_ids in expected.items())
        # One request of the most tokens, with its draft, has room.
        few = {"num_kv_blocks": 20, "max_num_seqs": 6, "max_num_batched_tokens": 40, **settings}
        sent = Traffic(engine_of(name, method, **few), wishes, np.random.default_rng(3))
        figures = sent.run(num_requests)
        wrong = []
        for each in sent.completions:
            whole = expected[each.wish]
            is_whole = each.finish_reason != "abort"
            if each.token_ids != (whole if is_whole else whole[: len(each.token_ids)]):
                wrong.append(each)
        assert sent.engine.kv.num_free_blocks == few["num_kv_blocks"]
        assert sent.engine.kv.states.layers.store._slots == {}
        return figures, wrong

    return run


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_are_those_of_plain_decoding(name: str, send: Any) -> None:
    figures, wrong = send(name, "random_tree", NUM_REQUESTS)
    assert wrong == []
    assert figures.num_accepted > 2 * NUM_REQUESTS
    assert figures.num_draft_tokens - figures.num_accepted > 2 * NUM_REQUESTS
    assert figures.num_preempted > NUM_REQUESTS / 10
    assert figures.num_cancelled > NUM_REQUESTS / 40
    assert figures.num_chunks > NUM_REQUESTS / 10


@pytest.mark.parametrize("name", ["granitemoehybrid", pytest.param("qwen3_next", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_noticed(name: str, fault: Any, send: Any, outputs: Any, monkeypatch: Patch) -> None:
    outputs(name)  # before the fault
    fault(monkeypatch)
    _, wrong = send(name, "random_tree", 40)
    assert wrong != []


def test_nothing_is_found_in_a_prefix_cache(send: Any) -> None:
    """No state was kept at the end of a cached prefix."""
    figures, wrong = send("lfm2", "ngram", 40, kv_manager="prefix")
    assert wrong == []
    assert figures.num_cached == 0


def test_such_a_draft_model_is_refused(make_llm: Any, tmp_path: Path, monkeypatch: Patch) -> None:
    """When its proposer plans, or when it loads the model."""
    folder = save_family("lfm2", tmp_path)
    message = "recurrent layers is not supported, and 2 of this model's layers keep a state"
    with pytest.raises(CompatibilityError, match=message):
        make_llm(folder, "draft_model", options={"model": str(folder)})
    monkeypatch.setattr(Outline, "kv_layout", property(lambda self: self.kv_groups.layouts[0]))
    with pytest.raises(CompatibilityError, match=message):
        make_llm(folder, "draft_model", options={"model": str(folder)})


@pytest.mark.parametrize("name", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.nightly)])
def test_drafts_under_a_budget(name: str, make_llm: Any, generate: Any, tmp_path: Path) -> None:
    """It measures steps while the engine is built, with requests of its own."""
    folder = save_family(name, tmp_path, vocab_size=16, eos_token_id=None)
    prompts = [[1, 2, 3, 1, 2, i] for i in range(6)]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40)
    expected = [each.token_ids for each in generate(make_llm(folder, None), prompts, params)]
    llm = make_llm(folder, "suffix", options={"adaptive_draft_length": True}, max_num_seqs=4)
    assert llm.engine.kv.states.layers.store._slots == {}
    assert [each.token_ids for each in generate(llm, prompts, params)] == expected
