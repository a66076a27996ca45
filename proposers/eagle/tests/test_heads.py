"""Tests that heads of all published checkpoint layouts give the same logits as the reference implementations in
`reference_heads`, which follow the papers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from reference_heads import reference_eagle, reference_eagle3, target_token_ids
from tiny_heads import SAFETENSORS, TinyHead, llama3_rope, write_eagle, write_eagle3, write_specforge, write_speculators
from tiny_weights import Shape, Target

from specdec_core import TargetInfo
from specdec_proposer_eagle.config import EagleConfig
from specdec_proposer_eagle.loading import find, load

TARGET = Target(hidden_size=32, vocab_size=40, num_hidden_layers=8)
INFO = TargetInfo("any", "llama", 40, 32, 8, 512, torch.float64, torch.device("cpu"))
KNOWN, NODES = 9, 4

HEADS: dict[str, Callable[[Path], TinyHead]] = {
    "eagle": partial(write_eagle, target=TARGET),
    "eagle, no bias, safetensors": partial(write_eagle, target=TARGET, bias=False, file=SAFETENSORS),
    "eagle, embeddings": partial(write_eagle, target=TARGET, shape=Shape(own_embeddings=True, head_dim=16)),
    "eagle, norms": partial(write_eagle, target=TARGET, para_norm=True),
    "eagle3": partial(write_eagle3, target=TARGET),
    "eagle3, small vocabulary": partial(write_eagle3, target=TARGET, shape=Shape(draft_vocab_size=17)),
    "eagle3, biases, llama3": partial(
        write_eagle3,
        target=TARGET,
        file=SAFETENSORS,
        shape=Shape(attention_bias=True, mlp_bias=True, rope_scaling=llama3_rope(), head_dim=12),
    ),
    "eagle3, two layers": partial(write_eagle3, target=TARGET, shape=Shape(num_hidden_layers=2)),
    "eagle3, norms before fc": partial(write_eagle3, target=TARGET, shape=Shape(norm_before_fc=True)),
    "eagle3, another width": partial(write_eagle3, target=TARGET, shape=Shape(hidden_size=24, own_embeddings=True)),
    "SpecForge": partial(write_specforge, target=TARGET, shape=Shape(rope_theta=500.0)),
    "speculators": partial(
        write_speculators, target=TARGET, shape=Shape(norm_before_residual=True, draft_vocab_size=20)
    ),
    "speculators, Qwen3": partial(
        write_speculators, target=TARGET, shape=Shape(qk_norm=True, fc_norm=True, norm_output=True, rms_norm_eps=1e-3)
    ),
}


def dense(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute causal attention over one whole sequence, in place of the engine's attention with a KV cache.

    rows: indices of the queries to compute; None for all.
    """
    per_kv_head = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(per_kv_head, dim=1) for each in (key, value))
    hidden = torch.ones(len(key), len(key)).triu(1).bool()
    if rows is not None:
        query, hidden = query[rows], hidden[rows]
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


class AsData(torch.nn.Module):
    """Stands in for a head's `DecoderStack` whose layers are fused: computes them as they are described."""

    is_fused = True

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._layers = [layer.described() for layer in module.layers]

    def forward(self, hidden: Any, angles: Any, positions: Any, entering: Any, rows: Any) -> torch.Tensor:
        def attend(*heads: torch.Tensor) -> torch.Tensor:
            return dense(0, *(each[0].transpose(0, 1) for each in heads)).flatten(1).unsqueeze(0)

        for layer in self._layers:
            given = (each.unsqueeze(0) for each in (hidden, *angles))
            (hidden,) = layer.forward(*given, attend, None if entering is None else entering.unsqueeze(0))
            entering = None
        return hidden if rows is None else hidden[rows]


@pytest.mark.parametrize("how", ["all rows", "last row", "as data", "last row, as data"])
@pytest.mark.parametrize("name", HEADS)
def test_a_chain_of_logits_equals_the_reference(name: str, how: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    alone = how.startswith("last")
    written = HEADS[name](tmp_path)
    is_eagle3 = not name.startswith("eagle,") and name != "eagle"
    config = EagleConfig(model=tmp_path)
    found = find(config, INFO, is_eagle3=is_eagle3)
    head, (module, to_target) = found.head, load(found, INFO)
    if how.endswith("as data"):
        module.stack = AsData(module)
    embedding, output = torch.randn(40, 32, dtype=torch.float64), torch.randn(40, 32, dtype=torch.float64)
    tokens = torch.randint(40, (KNOWN + 1,))
    nodes = torch.randint(40, (NODES,))
    features = torch.randn(KNOWN, head.feature_size, dtype=torch.float64)
    shared: Any = lambda ids: embedding[ids], lambda hidden: hidden @ output.T

    reference = reference_eagle3 if is_eagle3 else reference_eagle
    tree = [(int(token), i - 1) for i, token in enumerate(nodes)]
    expected = reference(written.tensors, written.config, *shared, tokens.tolist(), features, tree)

    embed = module.embed_tokens or shared[0]
    inputs, entering, logits = tokens[1:], module.fuse(features), []
    for i in range(NODES + 1):
        rotation = module.rotation(torch.arange(len(inputs)), entering.dtype)
        rows = torch.tensor([len(inputs) - 1]) if alone else None
        outputs, leaving = module(embed(inputs), entering, rotation, dense, rows)
        assert len(outputs) == len(leaving) == (1 if alone else len(inputs))
        logits.append((module.lm_head or shared[1])(outputs[-1]))
        inputs, entering = torch.cat([inputs, nodes[i : i + 1]]), torch.cat([entering, leaving[-1:]])
    # float32 in the cosines of transformers' rotary embedding
    torch.testing.assert_close(torch.stack(logits), expected, atol=1e-4, rtol=1e-5)

    ids = target_token_ids(written.tensors, expected.shape[1]).tolist()
    assert ids == (list(range(40)) if to_target is None else to_target.tolist())


def test_positions_are_as_exact_in_half_precision(tmp_path: Path) -> None:
    write_eagle3(tmp_path, TARGET)
    config = EagleConfig(model=tmp_path)
    cosines = []
    for dtype in (torch.float32, torch.bfloat16):
        info = evolve(INFO, dtype=dtype)
        module, _ = load(find(config, info, is_eagle3=True), info)
        assert {parameter.dtype for parameter in module.parameters()} == {dtype}
        cosines.append(module.rotation(torch.tensor([3, 500, 40_001]), dtype)[0])
    assert torch.equal(cosines[0].to(torch.bfloat16), cosines[1])
