"""Options of tensor parallelism, what `spec-decode check` says about each rank, and what cannot be split."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from lasting_ranks import lasting_ranks
from tiny_setup import save_checkpoint
from transformers import LlamaConfig

from specdec_core import LLM, AsyncLLM, CompatibilityError, ConfigError, SamplingParams
from specdec_core.api.arguments import dry_run
from specdec_core.cli import main
from specdec_core.models import split, split_plan
from specdec_core.models.split_styles import STYLES
from specdec_core.models.weight_bytes import weight_bytes
from specdec_core.ranks.models import SharedModel

EMBEDDING_BYTES = 8192 * 256 * 4
PROMPTS = ["import os", "def f(x):"]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module", autouse=True)
def ranks():
    with lasting_ranks():
        yield


def checked(*options: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["check", "--model", "tiny", "--json", "--dtype", "float32", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["memory"]


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_holds_what_check_says(size):
    memory, whole = checked("--engine", f"tensor_parallel_size={size}"), checked()
    llm = LLM("tiny", tensor_parallel_size=size, dtype="float32", num_kv_blocks=256, max_model_len=256)
    target = llm.engine.target
    held = [target.weight_bytes, *target._ranks.ask("weight_bytes", "target")]
    layout = target.kv_groups.only
    llm.close()
    assert held == [pytest.approx(memory["target_weight_bytes"], rel=0.05)] * size
    shared = whole["target_weight_bytes"] - EMBEDDING_BYTES  # each rank has the whole embedding
    assert memory["target_weight_bytes"] == pytest.approx(
        EMBEDDING_BYTES + shared / size, rel=0.04
    )  # key heads are repeated
    assert memory["kv_bytes_per_token"] == layout.bytes_per_token
    assert memory["kv_bytes_per_token"] == whole["kv_bytes_per_token"] // 2  # of two key heads, one for each rank
    assert memory["num_ranks"] == size


def test_check_prints_that_the_numbers_are_of_each_rank():
    result = CliRunner().invoke(main, ["check", "--model", "tiny", "--engine", "tensor_parallel_size=4"])
    assert re.search(r"^ranks +4, and what follows is of each", result.stdout, re.MULTILINE)
    result = CliRunner().invoke(main, ["check", "--model", "tiny"])
    assert "\nranks" not in result.stdout


def test_one_rank_has_no_wrapper():
    llm = LLM("tiny", tensor_parallel_size=1, dtype="float32", num_kv_blocks=64, max_model_len=256)
    assert type(llm.engine.target).__name__ == "Model"
    assert type(llm.engine.kv).__module__ == "specdec_core.kv.paged"
    llm.close()


def test_heads_and_embeddings_are_whole_for_proposers():
    settings = {"dtype": "float32", "num_kv_blocks": 64, "max_model_len": 256}
    whole, shared = LLM("tiny", **settings), LLM("tiny", tensor_parallel_size=2, **settings)
    hidden, token_ids = torch.randn(3, 256), torch.tensor([5, 8000, 0])
    for raw in (False, True):
        expected = whole.engine.target.output_head(hidden, raw)
        assert torch.allclose(shared.engine.target.output_head(hidden, raw), expected, atol=1e-4)
        assert torch.equal(shared.engine.target.embed(token_ids, raw), whole.engine.target.embed(token_ids, raw))
    shared.close()
    whole.close()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 is not supported: give 1, 2 or 4"),
        ({"tensor_parallel_size": 8}, "tensor_parallel_size=8 is not supported: give 1, 2 or 4"),
        ({"tensor_parallel_size": 2, "quantization": "int8"}, "only weights that are not quantized can be split"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2.* in each process"),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
            "distributed_executor_backend='ray'.* give 'mp'",
        ),
        ({"tensor_parallel_size": 2.0}, "tensor_parallel_size=2.0 is not supported: give 1, 2 or 4"),
        (
            {"speculative_config": {"method": "draft_model", "draft_tensor_parallel_size": 2}},
            "draft_tensor_parallel_size=2 must be 1, as the target's tensor_parallel_size$",
        ),
        (
            {
                "tensor_parallel_size": 4,
                "speculative_config": {"method": "draft_model", "draft_tensor_parallel_size": 2},
            },
            "draft_tensor_parallel_size=2 must be 1 or 4, as the target's tensor_parallel_size",
        ),
        (
            {"tensor_parallel_size": 2, "speculative_config": {"method": "eagle", "draft_tensor_parallel_size": 2}},
            "a draft head drafts on one rank.*Give 1",
        ),
    ],
    ids=str,
)
def test_other_values_are_refused(keywords, message):
    with pytest.raises(ConfigError, match=message):
        dry_run("tiny", **keywords)


def test_mp_is_the_way_in_which_ranks_run():
    with pytest.warns(UserWarning, match="distributed_executor_backend='mp': leave out"):
        design = dry_run("tiny", tensor_parallel_size=4, distributed_executor_backend="mp")
    assert design.memory.num_ranks == 4


def test_heads_that_cannot_be_shared_are_refused(tmp_path):
    """The model has two heads."""
    folder = save_checkpoint(tmp_path / "two")
    dry_run(str(folder), tensor_parallel_size=2)
    with pytest.raises(CompatibilityError, match="2 query heads and 2 key heads, which 4 ranks cannot share evenly"):
        dry_run(str(folder), tensor_parallel_size=4)


def test_an_embedding_that_a_plan_splits_is_whole(monkeypatch):
    """Plans of transformers 5.17 split that of a model whose LM head is tied to it."""
    monkeypatch.setitem(LlamaConfig.base_model_tp_plan, "embed_tokens", "embedding_rowwise")
    dry_run("tiny", tensor_parallel_size=2)


def test_a_style_that_is_not_known_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(split_plan, "STYLES", {name: style for name, style in STYLES.items() if name != "rowwise"})
    with pytest.raises(CompatibilityError, match=r"'llama' models has 'rowwise' for .*o_proj, which is not supported"):
        dry_run("tiny", tensor_parallel_size=2)


def test_files_that_cannot_be_read_in_part_are_refused(tmp_path):
    folder = save_checkpoint(tmp_path / "pickled")
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    Path(folder, "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"written by torch.save.* convert it to safetensors"):
        LLM(str(folder), tensor_parallel_size=2, skip_tokenizer_init=True, max_model_len=64, num_kv_blocks=16)


def test_only_parts_of_files_are_read(monkeypatch):
    """Each tensor that is cut is read in this rank's interval alone."""
    read, numbers = split.Cut.read, []

    def counted(cut: split.Cut, whole: Any) -> torch.Tensor:
        found = read(cut, whole)
        numbers.append((found.numel(), torch.Size(cut.shape).numel()))
        return found

    monkeypatch.setattr(split.Cut, "read", counted)
    llm = LLM("tiny", tensor_parallel_size=2, dtype="float32", num_kv_blocks=64, max_model_len=256)
    assert isinstance(llm.engine.target, SharedModel)
    assert weight_bytes(llm.engine.target._model) > 0
    llm.close()
    assert len(numbers) == 8 * 7  # layers, and what is cut in each
    assert all(2 * part == whole for part, whole in numbers)


def test_seeds_and_penalties_are_those_of_one_rank():
    """In float32, the texts are the same unless two tokens are almost equally likely."""
    settings = {"dtype": "float32", "num_kv_blocks": 128, "max_model_len": 256}
    params = SamplingParams(temperature=0.7, seed=1, presence_penalty=0.5, max_tokens=16)
    texts = []
    for size in (1, 2):
        llm = LLM("tiny", tensor_parallel_size=size, speculative_config=NGRAM, **settings)
        texts.append([output.outputs[0].text for output in llm.generate(PROMPTS, params)])
        llm.close()
    assert texts[0] == texts[1]


def test_an_async_llm_runs_its_steps_in_another_thread():
    settings = {"dtype": "float32", "num_kv_blocks": 64, "max_model_len": 256, "speculative_config": NGRAM}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    async def texts() -> list[str]:
        llm = AsyncLLM("tiny", tensor_parallel_size=2, **settings)
        try:
            return ["".join([part.text async for part in llm.generate(prompt, params)]) for prompt in PROMPTS]
        finally:
            await llm.shutdown()

    llm = LLM("tiny", tensor_parallel_size=2, **settings)
    expected = [output.outputs[0].text for output in llm.generate(PROMPTS, params)]
    llm.close()
    assert asyncio.run(texts()) == expected
