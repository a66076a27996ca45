"""The plan for memory (weights, KV cache, scratch slots), and the measurement of free memory."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve, fields
from hypothesis import given, strategies as st

from specdec_core import CapacityError, EngineConfig, KVLayout, Plan, TargetInfo
from specdec_core.contracts.kv import KVManagerSpec
from specdec_core.engine import memory as memory_module, step_memory
from specdec_core.engine.memory import free_memory, plan_memory
from specdec_core.models import graph_memory
from specdec_core.models.meta_load import Outline
from specdec_core.models.model import KVGroups

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TARGET = KVLayout(2, 4, 8, 8, torch.float32)  # 512 bytes per token
DRAFT = KVLayout(1, 4, 8, 8, torch.float32)  # 256
WITH_KV = Plan(kv_layout=DRAFT)
MIB = 2**20


@pytest.fixture
def plan(monkeypatch):
    """Return a function that plans memory for a device with free_bytes of free memory and twice as much in total."""

    def make(free_bytes, *, draft=None, device=CPU, target_weight_bytes=0, max_model_len=64, num_drafts=0, **config):
        monkeypatch.setattr(memory_module, "free_memory", lambda device: (free_bytes, 2 * free_bytes))
        config = EngineConfig(model="m", **{"max_num_seqs": 4, **config})
        return planned(config, target(max_model_len, device, target_weight_bytes), draft or Plan(), num_drafts)

    return make


BYTES_PER_BLOCK = fields(KVManagerSpec).bytes_per_block.default


def planned(config, target, draft, num_drafts=0):
    layouts = [*target.kv_groups.layouts, *([draft.kv_layout] if draft.kv_layout else [])]
    draft_bytes = draft.kv_layout.bytes_per_token if draft.kv_layout else 0
    bytes_per_block = BYTES_PER_BLOCK(None, layouts, config.block_size)
    return plan_memory(config, target, draft, bytes_per_block, draft_bytes, num_drafts)


def target(max_model_len, device, weight_bytes=0):
    info = TargetInfo("m", "llama", 100, 32, 2, max_model_len, torch.float32, device)
    return Outline(info, KVGroups((TARGET,), ((0, 0), (0, 1))), weight_bytes)


def test_enough_for_the_largest_batch(plan):
    found = plan(100 * MIB)
    assert (found.num_blocks, found.limited_by) == (4 * 4, "max_num_seqs")
    assert (found.num_tokens, found.num_full_requests, found.kv_bytes) == (256, 4, 256 * 512)


def test_memory_limits(plan):
    """On a CPU, the KV cache gets by default a quarter of the memory left after the weights."""
    found = plan(MIB, target_weight_bytes=MIB // 2, max_num_seqs=1000)
    assert (found.kv_budget_bytes, found.limited_by) == (MIB // 8, "memory")
    assert found.num_blocks == MIB // 8 // (16 * 512)
    assert found.num_full_requests == found.num_blocks // 4
    assert plan(MIB, gpu_memory_utilization=0.5, max_num_seqs=1000).kv_budget_bytes == MIB // 2


def test_on_a_gpu_a_part_of_the_whole_stays_free(plan):
    options = {"gpu_memory_utilization": 0.75, "enforce_eager": True}
    found = plan(100 * MIB, device=GPU, target_weight_bytes=10 * MIB, **options)
    assert found.kv_budget_bytes == (100 - 10 - 50) * MIB


def test_a_gpu_has_room_for_the_largest_step(plan):
    """Of 100 tokens of vocabulary: 4 bytes for each logit and 4 for each number that is made of it. Masks of trees come
    on top."""
    bytes_per_logits, config = 100 * 4 * (1 + step_memory.COPIES), {"max_num_seqs": 64, "max_num_batched_tokens": 256}
    activations, config = 256 * 32 * 4 * graph_memory.ACTIVATIONS, config | {"enforce_eager": True}
    for num_drafts, num_rows in ((0, 64), (2, 192), (9, 256)):
        found = plan(10 * MIB, device=GPU, gpu_memory_utilization=0.99, num_drafts=num_drafts, **config)
        bytes_per_row = bytes_per_logits + num_drafts * step_memory.PATH_BYTES
        assert (found.step.num_rows, found.step.num_bytes) == (num_rows, activations + num_rows * bytes_per_row)
        assert found.kv_budget_bytes == 10 * MIB - found.step.num_bytes
    on_cpu = plan(10 * MIB, gpu_memory_utilization=0.99, num_drafts=9, **config)
    assert on_cpu.kv_budget_bytes == int(9.9 * MIB)


def test_too_little_memory_for_the_largest_step(plan):
    with pytest.raises(CapacityError, match=r"rows of logits.*lower max_num_seqs, max_num_batched_tokens, or use a sm"):
        plan(MIB, device=GPU, max_num_seqs=256, enforce_eager=True)
    with pytest.raises(CapacityError, match=r"512 rows of logits.*num_speculative_tokens, or use a smaller"):
        plan(MIB, device=GPU, max_num_seqs=256, num_drafts=1, enforce_eager=True)
    with pytest.raises(CapacityError, match=r"The largest step takes about \d+ bytes: less with a lower max"):
        plan(6 * MIB, device=GPU, max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=8192, enforce_eager=True)


def test_drafts_cost_weights_cache_and_scratch(plan):
    found = plan(100 * MIB, draft=Plan(kv_layout=DRAFT, weight_bytes=20 * MIB, scratch_slots=10))
    assert (found.kv_bytes_per_token, found.draft_kv_bytes_per_token) == (768, 256)
    assert (found.draft_weight_bytes, found.kv_budget_bytes) == (20 * MIB, 20 * MIB)
    assert found.num_blocks == 4 * 5  # 64 tokens and, from the root's slot on, 9 more
    assert found.scratch_bytes == 10 * 768


def test_as_many_blocks_as_asked(plan):
    found = plan(100 * MIB, num_kv_blocks=7)
    assert (found.num_blocks, found.limited_by, found.num_full_requests) == (7, "num_kv_blocks", 1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_kv_blocks": 3}, "max_model_len=64 tokens, which needs 4: lower max_model_len, or raise num_kv_blocks"),
        ({"free_bytes": 8 * 4096}, "which needs 4: lower max_model_len, or raise gpu_memory_utilization"),
        ({"block_size": 2048}, "which needs 1: lower block_size, or raise gpu_memory_utilization"),
        ({"num_kv_blocks": 200}, "num_kv_blocks=200 blocks of 8192 bytes do not fit into the 1048576 bytes"),
        ({"target_weight_bytes": 2 * MIB}, "2097152 bytes of target weights do not fit into the 1048576 bytes of free"),
        ({"draft": Plan(weight_bytes=2 * MIB)}, "2097152 bytes of draft weights do not fit"),
        ({"draft": Plan(weight_bytes=MIB), "target_weight_bytes": 1}, "1 bytes of target weights and 1048576 bytes"),
        ({"draft": Plan(weight_bytes=2 * MIB)}, "use a smaller draft or none, a smaller model"),
        ({"target_weight_bytes": 2 * MIB}, "of free memory: use a smaller model or another dtype, or free some"),
        ({"draft": WITH_KV, "num_kv_blocks": 3}, "(12288 bytes each, 4096 of them the draft's) do not hold"),
        ({"draft": WITH_KV, "num_kv_blocks": 200}, "blocks of 12288 bytes, 4096 of them the draft's do not fit"),
    ],
)
def test_what_does_not_fit(plan, options, says):
    with pytest.raises(CapacityError) as caught:
        plan(**{"free_bytes": MIB, **options})
    assert says in str(caught.value)


@given(
    free=st.integers(0, 2**22), weights=st.integers(0, 2**22), length=st.integers(1, 300), size=st.integers(1, 40),
    seqs=st.integers(1, 50), scratch=st.integers(0, 40), blocks=st.none() | st.integers(1, 100),
    device=st.sampled_from([CPU, GPU]),
)  # fmt: skip
def test_a_plan_holds_a_request_and_fits(free, weights, length, size, seqs, scratch, blocks, device):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_module, "free_memory", lambda device: (free, 2**22))
        config = EngineConfig(model="m", max_num_seqs=seqs, block_size=size, num_kv_blocks=blocks)
        draft = Plan(kv_layout=DRAFT, weight_bytes=weights, scratch_slots=scratch)
        try:
            found = planned(config, target(length, device), draft)
        except CapacityError:
            return
    assert found.num_tokens >= length
    assert 1 <= found.num_full_requests <= seqs
    assert found.kv_bytes + weights <= free
    if blocks is None:
        assert found.kv_bytes <= found.kv_budget_bytes
        assert found.num_blocks <= seqs * -(-(length + max(0, scratch - 1)) // size)


def test_free_memory_of_this_machine():
    free, total = free_memory(CPU)
    assert 0 < free <= total


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_module, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory_module, "CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal:  8000 kB\nMemFree:  100 kB\nMemAvailable:    3000 kB\n")
    assert free_memory(CPU) == (3000 * 1024, 8000 * 1024)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1500000\n")
    assert free_memory(CPU) == (3000 * 1024, 8000 * 1024)
    (tmp_path / "memory.max").write_text("2000000\n")
    (tmp_path / "memory.stat").write_text("anon 1200000\ninactive_file 300000\n")
    assert free_memory(CPU) == (800_000, 2_000_000)
    (tmp_path / "memory.current").write_text("9000000\n")
    assert free_memory(CPU)[0] == 0


def test_without_meminfo(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_module, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory_module, "CGROUP", tmp_path)
    free, total = free_memory(CPU)
    assert 0 < free <= total


def test_many_rows_are_verified_in_parts(plan, monkeypatch):
    """What is made of logits takes room for some of the rows only; a request's are never split."""
    monkeypatch.setattr(step_memory, "MOST_LOGITS", 100 * 20)
    options = {"device": GPU, "max_num_seqs": 64, "max_num_batched_tokens": 256, "enforce_eager": True}
    activations = 256 * 32 * 4 * graph_memory.ACTIVATIONS
    for num_drafts, num_rows, num_processed in ((0, 64, 20), (2, 192, 20), (99, 256, 100)):
        step = plan(10 * MIB, num_drafts=num_drafts, **options).step
        logits = 100 * 4 * (num_rows + num_processed * step_memory.COPIES)
        assert step.num_bytes == activations + logits + num_rows * num_drafts * step_memory.PATH_BYTES


def test_activations_and_observed_hidden_states_are_those_of_the_model(plan):
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 1024, "enforce_eager": True}
    config = EngineConfig(model="m", **options)
    known = evolve(target(64, GPU), activation_bytes=777)
    with_taps = step_memory.StepMemory.of(known, config, 0, 3).num_bytes
    without = step_memory.StepMemory.of(known, config, 0, 0).num_bytes
    assert without == 1024 * 777 + 100 * 4 * (1 + step_memory.COPIES)
    assert with_taps - without == max(1024 * 3 * 32 * 4, step_memory.STORED_BYTES)


def test_cuda_graphs_have_room_unless_there_are_none(plan):
    eager = plan(1000 * MIB, device=GPU, enforce_eager=True).step
    found = plan(1000 * MIB, device=GPU).step
    assert eager.graph_bytes == 0 < found.graph_bytes == found.num_bytes - eager.num_bytes
    assert plan(100 * MIB).step.graph_bytes == 0
    with pytest.raises(
        CapacityError, match=r"set enforce_eager=True \(\d+ bytes are for CUDA graphs\), or use a smaller"
    ):
        plan(MIB, device=GPU, max_num_seqs=256)


def test_graphs_of_drafts_have_room_on_a_gpu(plan):
    draft = Plan(graph_bytes=3 * MIB)
    without, found = plan(1000 * MIB, device=GPU).step, plan(1000 * MIB, device=GPU, draft=draft).step
    assert found.graph_bytes - without.graph_bytes == found.num_bytes - without.num_bytes == 3 * MIB
    assert plan(100 * MIB, draft=draft).step.graph_bytes == 0


def test_ranks_share_the_memory_of_a_cpu_and_have_a_gpu_each(plan):
    whole, split = plan(8 * MIB), plan(8 * MIB, tensor_parallel_size=4)
    assert (whole.num_ranks, split.num_ranks, split.free_bytes) == (1, 4, 2 * MIB)
    assert split.kv_budget_bytes == whole.kv_budget_bytes // 4
    assert plan(8 * MIB, tensor_parallel_size=4, device=GPU).free_bytes == 8 * MIB
