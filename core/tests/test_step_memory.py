"""The memory that sampling and verification take for each logit, and tree attention masks for each row, measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from specdec_core import Draft, SamplingParams
from specdec_core.contracts.draft import DraftTree
from specdec_core.contracts.kv import Visibility
from specdec_core.engine.step_memory import COPIES, PATH_BYTES
from specdec_core.models.activations import CountingBytes
from specdec_core.ops.attention_plan import ancestor_bits
from specdec_core.sampling.process import process_logits
from specdec_core.sampling.random import CounterRandom
from specdec_core.verifiers.block import BlockVerifier
from specdec_core.verifiers.chosen import ChosenVerifier
from specdec_core.verifiers.rejection import RejectionVerifier
from specdec_core.verifiers.traversal import TraversalVerifier

VOCAB, BATCH = 6000, 4


def sampled(parents: tuple[int, ...]) -> Draft:
    """A tree of sampled tokens for each request. Siblings are drawn from one row of q."""
    draft = Draft.from_trees([DraftTree([*range(len(parents))], [*parents])] * BATCH)
    each = np.unique(parents, return_inverse=True)[1]
    num_rows = int(each.max()) + 1
    q_rows = (each + num_rows * np.arange(BATCH)[:, None]).ravel()
    q = torch.rand(BATCH * num_rows, VOCAB).softmax(-1)
    return evolve(draft, q=q, q_rows=torch.from_numpy(q_rows.astype(np.int32)))


CHAIN, TREE = (-1, 0, 1, 2), (-1, -1, 0, 0, 1, 2)
CASES = {
    "block": (BlockVerifier, CHAIN),
    "traversal": (TraversalVerifier, TREE),
    "traversal of chains": (TraversalVerifier, CHAIN),
    "rejection": (RejectionVerifier, TREE),
    "chosen": (ChosenVerifier, TREE),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9, "min_p": 0.01}], ids=["plain", "truncated"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_no_more_than_is_planned(name: str, truncation: dict[str, Any], dtype: torch.dtype) -> None:
    verifier, parents = CASES[name]
    draft = sampled(parents)
    layout, params = draft.host_layout, [SamplingParams(temperature=0.8, **truncation)] * BATCH
    logits = torch.randn(len(layout.row_requests), VOCAB).to(dtype)
    counting = CountingBytes()
    with torch.inference_mode(), counting:
        processed = process_logits(logits, layout.row_requests, params)
        random = CounterRandom(np.arange(BATCH).tolist(), torch.full((BATCH,), 9))
        verifier().verify(processed, draft, random)
    copies = counting.most_bytes / 4 / logits.numel()
    assert 1 < copies < COPIES


@pytest.mark.parametrize("num_nodes", [3, 63, 64, 200])
def test_the_mask_of_the_deepest_trees_takes_no_more_than_is_planned(num_nodes: int) -> None:
    """Each tree is a path, on which the last node attends to all others."""
    counting, num_rows = CountingBytes(), BATCH * (1 + num_nodes)
    with torch.inference_mode(), counting:
        depths = torch.arange(1 + num_nodes).repeat(BATCH)
        paths = (9 + depths.unsqueeze(1) - torch.arange(num_nodes)).clamp(min=9)
        visibility = Visibility(9 + depths, torch.full_like(depths, 10), paths, 1 + num_nodes)
        owners = torch.arange(BATCH, dtype=torch.int32).repeat_interleave(1 + num_nodes)
        tree_starts = torch.full_like(owners, 10)
        bits = ancestor_bits(visibility, owners, visibility.prefix_lens, tree_starts)
    assert bits[num_nodes].tolist() == words(num_nodes)
    assert PATH_BYTES / 2 < counting.most_bytes / (num_rows * num_nodes) < PATH_BYTES


def words(num_bits: int) -> list[int]:
    """The lowest bits set, in as many signed words as the mask has for one bit more."""
    every = (1 << num_bits) - 1
    parts = [every >> 64 * word & (1 << 64) - 1 for word in range(-(-(1 + num_bits) // 64))]
    return [part - (part >> 63 << 64) for part in parts]
