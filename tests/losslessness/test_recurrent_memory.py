"""The states of recurrent layers: their slots, what memory they take, and how they run on a (pretend) GPU."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from families import save_family

from specdec_core import CapacityError, EngineConfig, SamplingParams, TargetInfo, cli
from specdec_core.api.arguments import dry_run
from specdec_core.contracts.kv import StateLayout, StateTensor
from specdec_core.engine import memory as memory_module
from specdec_core.engine.step_memory import STATE_COPIES, StepMemory
from specdec_core.kv import PagedKVManager
from specdec_core.kv.states import StateStore
from specdec_core.models.meta_load import Outline
from specdec_core.models.model import KVGroups
from specdec_kv_prefix.manager import PrefixKVManager
from specdec_testing.pretend_cuda import PretendCuda

LAYER = (StateTensor("conv", (2, 3), torch.bfloat16), StateTensor("recurrent", (4,), torch.float32))
NAMES = ["granitemoehybrid", "lfm2", "qwen3_next"]


def test_a_slot_belongs_to_one_request() -> None:
    store = StateStore(StateLayout((LAYER, LAYER)), 2, torch.device("cpu"))
    store.add("a")
    store.add("b")
    assert store.slots_of(["b", "a"]) == [1, 0]
    with pytest.raises(CapacityError, match="request 'c' needs a slot for its recurrent states, and all 2 are taken"):
        store.add("c")
    for states in store.layers:
        for tensor in states.values():
            tensor.fill_(1)
    store.remove("a")
    store.remove("a")
    store.add("c")
    store.clear(store.slots_of(["c"]))
    assert [float(tensor.sum()) for tensor in store.layers[1].values()] == [6.0, 4.0]  # those of b are left
    store.check_integrity()
    store._slots["d"] = 0
    with pytest.raises(AssertionError, match="held twice"):
        store.check_integrity()


def test_bytes() -> None:
    layout = StateLayout((LAYER, LAYER[:1]))
    assert (layout.bytes_per_request, layout.most_layer_bytes) == (28 + 12, 28)


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_planned_for_what_is_stored(name: str, make_llm: Any, tmp_path: Path) -> None:
    folder = save_family(name, tmp_path)
    for dtype in ("float32", "bfloat16"):
        plan = dry_run(folder, dtype=dtype, max_num_seqs=3, skip_tokenizer_init=True).memory
        engine = make_llm(folder, None, dtype=dtype, max_num_seqs=3).engine
        store = engine.kv.states.layers.store
        assert plan.state_bytes == sum(tensor.nbytes for states in store.layers for tensor in states.values())
        assert len(store.layers) == 2


def test_states_take_room_from_the_kv_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_family("qwen3_next", tmp_path)
    monkeypatch.setattr(memory_module, "free_memory", lambda device: (2**26, 2**27))
    few, many = (
        dry_run(folder, max_num_seqs=number, skip_tokenizer_init=True, dtype="float32").memory for number in (8, 1024)
    )
    assert many.state_bytes == 128 * few.state_bytes
    difference = few.kv_budget_bytes - many.kv_budget_bytes
    assert difference == pytest.approx((many.state_bytes - few.state_bytes) / 4, abs=1)
    message = r"\d+ bytes of recurrent states for max_num_seqs=65536 requests do not fit .* a lower max_num_seqs, "
    with pytest.raises(CapacityError, match=message):
        dry_run(folder, max_num_seqs=65536, max_num_batched_tokens=65536, skip_tokenizer_init=True, dtype="float32")


def test_the_largest_step_has_room_for_states() -> None:
    """That of 4 requests with 3 draft tokens each: what two layers read at 12 draft tokens, and states of 16 tokens."""
    info = TargetInfo("m", "lfm2", 100, 32, 3, 64, torch.float32, torch.device("cpu"))
    config = EngineConfig(model="m", max_num_seqs=4, max_num_batched_tokens=64)
    plain, recurrent = (
        StepMemory.of(Outline(info, KVGroups((), (), states), 0), config, 3, 0).num_bytes
        for states in (None, StateLayout((LAYER, LAYER)))
    )
    assert recurrent - plain == 12 * 2 * 32 * 4 + 16 * STATE_COPIES * 28


def test_other_targets_have_no_states(make_llm: Any, tmp_path: Path) -> None:
    """What recurrent layers need is not there, so that nothing of it can run."""
    engine = make_llm(save_family("llama", tmp_path), "ngram").engine
    assert isinstance(engine.kv, PagedKVManager | PrefixKVManager)  # as SPECDEC_KV_MANAGER says
    assert engine._runner._states is None
    assert engine.target.recurrent is None
    mixed = [module for module in engine.target._model.modules() if "_mix" in str(vars(module).get("forward"))]
    assert mixed == []


def test_the_command_says_what_states_take(tmp_path: Path) -> None:
    folder = save_family("lfm2", tmp_path)
    options = ["check", "--model", str(folder), "--dtype", "float32", "--engine", "max_num_seqs=4"]
    options += ["--engine", "skip_tokenizer_init=true"]
    table, record = (CliRunner().invoke(cli.main, [*options, *more]) for more in ([], ["--json"]))
    assert json.loads(record.stdout)["memory"]["state_bytes"] == 4 * 2 * 64 * 3 * 4
    assert "states" in table.stdout
    assert "6.00 KiB, of recurrent layers" in table.stdout


@pytest.mark.parametrize("name", ["granitemoehybrid", "lfm2", "qwen3_5_text"])
def test_a_gpu_runs_without_graphs_and_waits_no_more(
    name: str,
    make_llm: Any,
    generate: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECDEC_DISABLE", "kernels")  # they need a real one
    folder = save_family(name, tmp_path, vocab_size=16, num_local_experts=0)  # the pretend one has no experts
    prompts = [[5, 6, 7, 5, 6, i] for i in range(3)]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True)
    options = {"prompt_lookup_min": 1, "adaptive_draft_length": False}
    expected = [each.token_ids for each in generate(make_llm(folder, "ngram", options=options), prompts, params)]
    with PretendCuda() as pretend, caplog.at_level(logging.INFO):
        llm = make_llm(folder, "ngram", options=options, device="cuda")
        assert llm.engine.target.graphs is None
        assert "no CUDA graphs: what recurrent layers compute depends on the shapes of drafts" in caplog.text
        for prompt in prompts:
            llm.engine.add_request(prompt, params)
        num_waits = []
        while llm.engine.has_unfinished:
            before = len(pretend.waits)
            if llm.engine.step().num_accepted:
                num_waits.append(len(pretend.waits) - before)
        assert num_waits
        assert max(num_waits) <= 1  # for the verdict
        assert [each.token_ids for each in generate(llm, prompts, params)] == expected
