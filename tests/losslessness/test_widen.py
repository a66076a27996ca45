"""benchmarks/widen.py makes a model and its drafts wider without changing the generated text or the acceptance rate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import fsum
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from hypothesis import given, strategies as st

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import widen
from inflate import SHAPES, inflate
from widen import Widths

from specdec_core import Checkpoint, SamplingParams, resolve_model

TINY = Path(resolve_model("tiny"))
WIDTHS, TIMES = Widths(hidden=2, intermediate=3, kv_heads=1, inner=4), 2
METHODS = sorted(folder.name for folder in (TINY / "drafts").iterdir())
TOKENS = torch.randint(8192, (4, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a copy of the embedded model, wider and deeper, with its drafts."""
    folder = tmp_path_factory.mktemp("wide")
    inflate(TINY, folder, TIMES, widths=WIDTHS)
    return folder


def test_logits_are_the_same_up_to_rounding(wide: Path) -> None:
    narrow, model = reference.load(TINY), reference.load(wide)
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    assert [getattr(model.config, key) for key in sizes] == [512, 3072, 8, 2, 16]
    with torch.no_grad():
        expected, found = (each(TOKENS, output_hidden_states=True) for each in (narrow, model))
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=0)
    assert expected.logits.std() > 1  # so that 1e-4 is little
    for layer in range(8):
        twice = expected.hidden_states[layer].repeat(1, 1, 2)
        torch.testing.assert_close(found.hidden_states[TIMES * layer], twice, atol=1e-4, rtol=1e-4)


@pytest.mark.nightly
def test_so_are_those_of_a_large_shape(tmp_path: Path) -> None:
    times, widths = SHAPES["1B"]
    inflate(TINY, tmp_path / "1B", times, widths=widths)
    with torch.no_grad():
        expected, found = (reference.load(folder)(TOKENS[:1]).logits for folder in (TINY, tmp_path / "1B"))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_bfloat16_holds_the_shares(wide: Path) -> None:
    narrow, model = (reference.load(folder).state_dict() for folder in (TINY, wide))
    assert {tensor.dtype for tensor in Checkpoint(str(wide)).load(["lm_head.weight"]).values()} == {torch.bfloat16}
    assert torch.equal(narrow["model.embed_tokens.weight"], 2 * model["lm_head.weight"][:, :256])
    down = narrow["model.layers.1.mlp.down_proj.weight"]
    copies = model["model.layers.2.mlp.down_proj.weight"].view(2, 256, 3, 1024)
    for row in copies:
        assert [float(copy[0, 0] / down[0, 0]) for copy in row.unbind(1)] == [0.25, 0.25, 0.5]
        assert torch.equal(row.sum(1), down)


@given(st.lists(st.integers(0, 5), max_size=200))
def test_shares_are_powers_of_two_that_add_up_to_one(source: list[int]) -> None:
    shares = widen._shares(source)
    for i in set(source):
        own = [share for share, j in zip(shares, source, strict=True) if j == i]
        assert fsum(own) == 1
        assert all(share.hex().startswith("0x1.0000000000000p") for share in own)


def test_a_tensor_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'model\.router\.weight'.*RULES"):
        WIDTHS.tensors({"model.router.weight": torch.zeros(2, 2)}, {"hidden_size": 2})


@pytest.mark.parametrize("method", [*METHODS, "mtp"])
def test_as_much_is_accepted(wide: Path, method: str, make_llm: Callable[..., Any]) -> None:
    prompts = [{"prompt_token_ids": ids} for ids in reference.prompts(8192, [9, 17], seed=2)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options, found = {"num_speculative_tokens": 3, "adaptive_draft_length": False}, []
    for folder in (TINY, wide):
        llm = make_llm(folder, method, options=options, max_model_len=64)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([(output.outputs[0].token_ids, output.speculation) for output in outputs])
    assert found[0] == found[1]
    assert sum(counts.num_accepted for _, counts in found[1]) > 8
