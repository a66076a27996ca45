"""Tests of the reference implementations of EAGLE heads (`reference_heads`): against transformers' layers, against
trees that the authors' code drafted, and by general properties."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, strategies as st
from reference_heads import (
    flat_config,
    next_log_probs,
    reference_eagle,
    reference_eagle3,
    target_token_ids,
)
from reference_layer import Head, inverse_frequencies, rotate
from reference_tree import DynamicTree, dynamic_tree
from tiny_heads import TinyHead, llama3_rope, write_eagle, write_eagle3, write_speculators
from tiny_weights import Shape, Target
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

TARGET = Target(hidden_size=32, vocab_size=97, num_hidden_layers=6)
TREE = [(5, -1), (6, -1), (7, 0), (8, 0), (9, 1), (10, 2)]
PATHS = [[], [0], [1], [0, 2], [0, 3], [1, 4], [0, 2, 5]]  # of the root and of TREE's nodes

Logits = Callable[..., Tensor]  # (tokens, features, tree) -> logits


def weights(seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Draw a target's embedding and LM head at random. Returns two matrices, [vocab_size, hidden_size] each, and the
    random generator that drew them, for further draws."""
    generator = torch.Generator().manual_seed(1000 + seed)
    embeddings = torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=generator).double()
    output = torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=generator).double()
    return embeddings, output / TARGET.hidden_size**0.5, generator


def eagle(head: TinyHead, seed: int = 0) -> Logits:
    embeddings, output, _ = weights(seed)
    return partial(reference_eagle, head.tensors, head.config, lambda ids: embeddings[ids], lambda x: x @ output.T)


def eagle3(head: TinyHead, seed: int = 0) -> Logits:
    embeddings, output, _ = weights(seed)
    return partial(reference_eagle3, head.tensors, head.config, lambda ids: embeddings[ids], lambda x: x @ output.T)


def context(seed: int, num_features: int, width: int) -> tuple[list[int], Tensor]:
    _, _, generator = weights(seed)
    tokens = torch.randint(0, TARGET.vocab_size, (num_features + 1,), generator=generator).tolist()
    return tokens, torch.randn(num_features, width, generator=generator).double()


DRAFTED_BY_THE_AUTHORS = {  # top_k 4, depth 3, total_token 13, by a head with seed 0 for 13 features
    "eagle": DynamicTree(
        [64, 16, 14, 8, 90, 8, 90, 84, 73, 84, 18, 19],
        [-1, -1, -1, 0, 1, 1, 2, 4, 3, 5, 7, 9],
        [1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 4],
        [],
    ),
    "eagle3": DynamicTree(
        [88, 58, 44, 85, 44, 85, 85, 85, 50, 50, 50, 50],
        [-1, -1, -1, -1, 0, 0, 1, 2, 3, 4, 7, 8],
        [1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3],
        [],
    ),
}


def test_eagle_drafts_what_the_authors_code_drafts(tmp_path: Path) -> None:
    logits = partial(eagle(write_eagle(tmp_path, TARGET)), *context(0, 13, 32))
    tree = dynamic_tree(next_log_probs(logits), top_k=4, depth=3, num_nodes=12)
    assert tree[:3] == DRAFTED_BY_THE_AUTHORS["eagle"][:3]


def test_eagle3_drafts_what_the_authors_code_drafts(tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, TARGET, shape=Shape(draft_vocab_size=40))
    logits = partial(eagle3(head), *context(0, 13, 96))
    tree = dynamic_tree(next_log_probs(logits, target_token_ids(head.tensors, 40)), top_k=4, depth=3, num_nodes=12)
    assert tree[:3] == DRAFTED_BY_THE_AUTHORS["eagle3"][:3]


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(rope_theta=500.0, num_key_value_heads=1),
        Shape(rope_scaling=llama3_rope()),
        Shape(rope_scaling={"rope_type": "linear", "factor": 4.0}, head_dim=12),
        Shape(attention_bias=True, mlp_bias=True, rms_norm_eps=0.1),
        Shape(qk_norm=True, head_dim=8),
    ],
)
def test_a_layer_is_that_of_transformers(tmp_path: Path, shape: Shape) -> None:
    written = write_speculators(tmp_path, TARGET, shape=shape)
    layer = AutoConfig.for_model(**written.config["transformer_layer_config"])
    layer._attn_implementation = "eager"
    tensors = write_eagle(tmp_path / "plain", TARGET, shape=shape).tensors
    theirs = (Qwen3DecoderLayer if shape.qk_norm else LlamaDecoderLayer)(layer, 0).double()
    theirs.input_layernorm = torch.nn.Identity()
    theirs.load_state_dict({n.removeprefix("layers.0."): t for n, t in tensors.items() if n.startswith("layers.0.")})
    x = context(1, 24, 32)[1]
    positions = torch.arange(24)[None]
    mask = torch.full((24, 24), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    angles = LlamaRotaryEmbedding(layer)(x[None], positions)
    expected = theirs(x[None], attention_mask=mask, position_ids=positions, position_embeddings=angles)
    ours = Head(tensors, flat_config(written.config), torch.nn.Identity()).layer("layers.0", x, residual=x)
    torch.testing.assert_close(ours, expected[0], rtol=1e-4, atol=1e-4)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 1000), st.sampled_from([None, llama3_rope()]))
def test_rotation_knows_distances_only(query_at: int, key_at: int, shift: int, scaling: dict[str, Any] | None) -> None:
    config = {"hidden_size": 32, "num_attention_heads": 4, "rope_scaling": scaling}
    query, key = context(2, 2, 8)[1].unbind()

    def score(query_at: int, key_at: int) -> Tensor:
        return rotate(query, query_at * inverse_frequencies(config)) @ rotate(key, key_at * inverse_frequencies(config))

    torch.testing.assert_close(score(query_at + shift, key_at + shift), score(query_at, key_at))


def both(tmp_path: Path) -> list[tuple[Logits, int]]:
    """Write an EAGLE and an EAGLE-3 head with many variants combined. Returns each head's logits function and the width
    of its features."""
    shape = Shape(num_hidden_layers=2, head_dim=6, rope_scaling=llama3_rope())
    shape3 = Shape(hidden_size=24, draft_vocab_size=40, norm_before_residual=True, norm_output=True, fc_norm=True)
    return [
        (eagle(write_eagle(tmp_path / "eagle", TARGET, 3, shape=shape)), 32),
        (eagle3(write_eagle3(tmp_path / "eagle3", TARGET, 4, shape=shape3)), 96),
    ]


def test_a_node_knows_its_path_and_no_other_node(tmp_path: Path) -> None:
    for logits, width in both(tmp_path):
        tokens, features = context(3, 7, width)
        rows = logits(tokens, features, TREE)
        for row, path in zip(rows, PATHS, strict=True):
            chain = [(TREE[node][0], depth - 1) for depth, node in enumerate(path)]
            torch.testing.assert_close(row, logits(tokens, features, chain)[-1])


def test_each_input_counts(tmp_path: Path) -> None:
    for logits, width in both(tmp_path):
        tokens, features = context(4, 6, width)
        rows = logits(tokens, features, TREE)
        for i in range(6):
            other_feature = features.index_fill(0, torch.tensor(i), 0.5)
            other_token = [*tokens[: i + 1], 96 - tokens[i + 1], *tokens[i + 2 :]]
            swapped = features[[*range(i), *range(i + 1, 6), i]]
            for changed in (
                logits(tokens, other_feature, TREE),
                logits(other_token, features, TREE),
                *([logits(tokens, swapped, TREE)] if i < 5 else []),
            ):
                assert (changed - rows).abs().amax(dim=1).min() > 1e-3
        assert logits([0, *tokens[1:]], features, TREE).equal(rows), "x_0 is in no slot"


def test_drafted_slots_are_slots_with_the_features_that_the_head_fed_back(tmp_path: Path) -> None:
    """A head gives the same outputs for a chain of draft tokens as for the same tokens in the text, if the head's own
    outputs take the place of the target's hidden states."""
    embeddings, _, _ = weights(0)
    head = write_eagle(tmp_path / "eagle", TARGET, 5)
    # An EAGLE-3 head without fc and lm_head reads hidden states of its own width and returns its feedback.
    head3 = write_eagle3(tmp_path / "eagle3", TARGET, 6, shape=Shape(norm_output=True))
    bare = {name: tensor for name, tensor in head3.tensors.items() if name not in {"fc.weight", "lm_head.weight"}}
    for reference, tensors, config in [
        (reference_eagle, head.tensors, head.config),
        (reference_eagle3, bare, head3.config),
    ]:
        outputs: Logits = partial(reference, tensors, config, lambda ids: embeddings[ids], lambda x: x)
        tokens, features = context(5, 6, 32)
        drafted = outputs(tokens, features, [(11, -1), (12, 0), (13, 1)])
        for num_nodes, token in [(1, 11), (2, 12), (3, 13)]:
            tokens = [*tokens, token]
            known = torch.cat([features, drafted[:num_nodes]])
            torch.testing.assert_close(outputs(tokens, known)[0], drafted[num_nodes])


def test_a_pre_norm_recurrence_and_a_post_norm_one_differ_from_the_first_node_on(tmp_path: Path) -> None:
    plain = write_eagle3(tmp_path, TARGET, 7)
    tokens, features = context(6, 5, 96)
    rows = eagle3(plain)(tokens, features, TREE)
    fed_normed = TinyHead(plain.folder, {**plain.config, "norm_output": True}, plain.tensors)
    others = eagle3(fed_normed)(tokens, features, TREE)
    assert others[0].equal(rows[0])
    assert (others - rows)[1:].abs().amax(dim=1).min() > 1e-3


@pytest.mark.parametrize(
    ("shape", "of_all", "of_each"),
    [
        (Shape(), False, False),
        (Shape(norm_before_residual=True), True, False),
        (Shape(norm_before_fc=True), True, False),
        (Shape(fc_norm=True), True, True),
    ],
)
def test_norms_forget_the_scale_of_what_they_norm(tmp_path: Path, shape: Shape, of_all: bool, of_each: bool) -> None:
    """If a head first norms the target's hidden states, scaling them does not change the logits.

    of_all: whether the logits stay the same if the hidden states of all layers are scaled by the same factor.
    of_each: whether the logits stay the same if the hidden states of each layer are scaled by a different factor.
    """
    logits = eagle3(write_eagle3(tmp_path, TARGET, 8, shape=evolve(shape, rms_norm_eps=1e-12)))
    tokens, features = context(7, 5, 96)
    rows = logits(tokens, features, TREE)
    each = torch.tensor([1.0, 2.0, 4.0]).repeat_interleave(32)
    assert logits(tokens, 3 * features, TREE).allclose(rows) == of_all
    assert logits(tokens, each * features, TREE).allclose(rows) == of_each


def test_norms_before_fc_are_a_plain_head_on_normed_features(tmp_path: Path) -> None:
    tokens, features = context(8, 5, 96)
    for shape, num_norms in [(Shape(fc_norm=True), 3), (Shape(norm_before_fc=True), 1)]:
        head = write_eagle3(tmp_path, TARGET, 9, shape=shape)
        norms = [name for name in head.tensors if name.startswith(("fc_norm", "input_norm"))]
        plain = {name: tensor for name, tensor in head.tensors.items() if name not in norms}
        normed = torch.cat(
            [
                rms_norm(part, part.shape[1:], head.tensors[name].double(), shape.rms_norm_eps)
                for part, name in zip(features.chunk(num_norms, dim=-1), sorted(norms), strict=True)
            ],
            dim=-1,
        )
        config = {**head.config, "fc_norm": False, "norm_before_fc": False}
        expected = eagle3(TinyHead(head.folder, config, plain))(tokens, normed, TREE)
        torch.testing.assert_close(eagle3(head)(tokens, features, TREE), expected)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, TARGET, shape=Shape(fc_norm=True))
    tokens, features = context(0, 3, 96)
    with pytest.raises(ValueError, match="without use"):
        eagle3(TinyHead(head.folder, {**head.config, "fc_norm": False}, head.tensors))(tokens, features)
    with pytest.raises(NotImplementedError, match="yarn"):
        eagle3(TinyHead(head.folder, {**head.config, "rope_scaling": {"type": "yarn"}}, head.tensors))(tokens, features)
    with pytest.raises(ValueError, match="one feature less"):
        eagle3(head)(tokens[1:], features)
    with pytest.raises(ValueError, match="parent 1"):
        eagle3(head)(tokens, features, [(5, -1), (6, 1)])
