"""Targets with recurrent layers compute transformers' logits at each prompt and output token: prompts in one or several
chunks, requests of different lengths in one batch, accepted draft tokens and those after them, and after preemption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import random_tree
import reference
import torch
from families import RECURRENT, save_family
from recurrent_faults import FAULTS
from recurrent_logits import Recorded, record

from specdec_core import SamplingParams

NUM_TOKENS = 16
LENGTHS = [1, 9, 30, 17, 2, 66]
MOST = 1e-4
FEW_BLOCKS = {"num_kv_blocks": 26, "block_size": 4, "max_model_len": 96, "max_num_seqs": 4}
BY_DAY = ("granitemoehybrid", "lfm2", "qwen3_5_text", "qwen3_next")
FAMILIES = [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in RECURRENT]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    found: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in found:
            found[name] = save_family(name, tmp_path_factory.mktemp(name))
        return found[name]

    return folder_of


@pytest.fixture
def run(make_llm: Any, monkeypatch: Patch) -> Callable[..., tuple[Recorded, float, int]]:
    """Return a function that generates from all prompts. It returns what was recorded, the largest difference to
    transformers' logits, and the number of preemptions."""

    def generate(folder: Path, method: str | None, **settings: Any) -> tuple[Recorded, float, int]:
        random_tree.forget_everything()
        prompts, model = reference.prompts(120, LENGTHS, seed=2), reference.load(folder)
        if method is not None:
            outputs = [reference.greedy(model, prompt, NUM_TOKENS).token_ids for prompt in prompts]
            random_tree.TRUTH.update(zip(map(tuple, prompts), outputs, strict=True))
        llm = make_llm(folder, method, **settings)
        texts: dict[str, list[int]] = {}

        def listen(request: Any, pieces: Any) -> None:
            texts[request.id] = request.token_ids.tolist()

        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        with pytest.MonkeyPatch.context() as patch:
            recorded = record(patch)
            num_preempted = 0
            for prompt in prompts:
                llm.engine.add_request(prompt, params, listen)
            while llm.engine.has_unfinished:
                num_preempted += llm.engine.step().num_preempted
        llm.engine.kv.check_integrity()
        return recorded, recorded.largest_difference(model, texts), num_preempted

    return generate


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("most_tokens", [7, 512])
def test_logits_of_plain_decoding(name: str, most_tokens: int, folders: Any, run: Any) -> None:
    recorded, difference, _ = run(folders(name), None, max_num_batched_tokens=most_tokens)
    assert difference < MOST
    assert (recorded.num_later_chunks > 10) == (most_tokens == 7)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_logits_around_drafts(name: str, shape: str, folders: Any, run: Any) -> None:
    """With few KV blocks, so that requests are preempted."""
    recorded, difference, num_preempted = run(folders(name), "random_tree", options={"shape": shape}, **FEW_BLOCKS)
    assert difference < MOST
    assert recorded.num_accepted > 20
    assert recorded.num_rejected > 20
    assert num_preempted > 0


SIZES: dict[str, dict[str, Any]] = {  # without experts, and with whole vectors of numbers for each four tokens
    "granitemoehybrid": {"num_local_experts": 0},
    "lfm2": {},
    "qwen3_5_text": {"linear_num_value_heads": 8},
}


@pytest.mark.parametrize("name", SIZES)
def test_chains_change_no_bit(name: str, run: Any, tmp_path: Path) -> None:
    """Prompts are computed whole in both runs."""
    folder = save_family(name, tmp_path, **SIZES[name])
    plain, _, _ = run(folder, None)
    drafted, _, _ = run(folder, "random_tree", options={"shape": "chain"})
    assert drafted.num_accepted > 20
    for request_id, found in drafted.found.items():
        for position, logits in found.items():
            expected = plain.found[request_id].get(position)
            assert expected is None or torch.equal(logits, expected), (request_id, position)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", pytest.param("granitemoehybrid", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_noticed(name: str, fault: Any, folders: Any, run: Any, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    _, difference, num_preempted = run(folders(name), "random_tree", options={"shape": "tree"}, **FEW_BLOCKS)
    assert num_preempted > 0
    assert difference > 10 * MOST
