"""Verifiers decide the same with the Triton kernels as with the reference in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from specdec_core import Draft, Plugins
from specdec_core.contracts.draft import DEAD, DraftTree
from specdec_core.ops import REFERENCE
from specdec_core.ops.residuals import Proposals
from specdec_core.sampling.random import CounterRandom
from specdec_kernels.gpu import OPS

BATCH, VOCAB = 5, 30
SHAPES = {
    "chain": (-1, 0, 1, 2),
    "a dead tail": (-1, 0, DEAD, DEAD),
    "nothing": (),
    "tree": (-1, -1, -1, 0, 0, 1),
    "a dead branch": (-1, -1, DEAD, 2, 0, 1),
}
CASES = [
    (rule, shape)
    for rule in ("rejection", "block", "traversal")
    for shape in SHAPES
    if rule != "block" or shape in ("chain", "a dead tail", "nothing")
]


def batch(parents: tuple[int, ...], seed: int, kind: str, with_replacement: bool) -> tuple[torch.Tensor, Draft]:
    """Logits, and drafts of these shapes. The last node of each is chosen, the others are sampled from q, which is near
    to the target's distribution."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(BATCH, len(parents) + 1, VOCAB, generator=generator)
    q = (rows + 0.7 * torch.randn(rows.shape, generator=generator)).softmax(-1).flatten(0, 1)
    draft = Draft.from_trees([DraftTree([0] * len(parents), [*parents])] * BATCH)
    ids = torch.stack(
        [torch.randperm(VOCAB, generator=generator)[:20] for _ in range(1 if kind == "mapped" else len(q))]
    )
    if kind != "dense":
        q = q.gather(1, ids.expand(len(q), -1))
    tokens = torch.zeros(BATCH, len(parents), dtype=torch.int64)
    q_rows = torch.zeros(BATCH, len(parents), dtype=torch.int32)
    for b in range(BATCH):
        for parent in {max(parent, -1) for parent in parents}:
            nodes = [i for i, each in enumerate(parents) if max(each, -1) == parent]
            row = b * (len(parents) + 1) + parent + 1
            columns = q[row].multinomial(len(nodes), replacement=with_replacement, generator=generator)
            tokens[b, nodes] = columns if kind == "dense" else ids[row % len(ids)][columns]
            q_rows[b, nodes] = row
    q_rows[:, -1:] = -1
    draft = evolve(
        draft,
        token_ids=tokens.flatten(),
        q=q,
        q_rows=q_rows.flatten(),
        with_replacement=with_replacement,
        is_chain=all(parent in (i - 1, DEAD) for i, parent in enumerate(parents)),
        q_to_target=ids[0] if kind == "mapped" else None,
        q_ids=ids if kind == "own ids" else None,
    )
    return (2 * rows).flatten(0, 1), draft


def verdicts(rule: str, residuals: Any, shape: str, kind: str = "dense", with_replacement: bool = False) -> Any:
    """Of five batches: tokens and rows, as lists."""
    found = []
    for seed in range(5):
        logits, draft = batch(SHAPES[shape], seed, kind, with_replacement)
        random = CounterRandom(range(BATCH), torch.full((BATCH,), 9 + seed))
        verdict = Plugins.load().verifier(rule).build(residuals=residuals).verify(logits, draft, random)
        found.append((verdict.token_ids.tolist(), verdict.rows.tolist(), verdict.num_accepted.tolist()))
    return found


@pytest.mark.parametrize("with_replacement", [True, False])
@pytest.mark.parametrize(("rule", "shape"), CASES)
def test_verdicts_are_those_of_the_reference(rule: str, shape: str, with_replacement: bool) -> None:
    expected = verdicts(rule, REFERENCE["residuals"], shape, with_replacement=with_replacement)
    assert verdicts(rule, OPS["residuals"], shape, with_replacement=with_replacement) == expected
    num_accepted = [number for _, _, numbers in expected for number in numbers]
    assert shape == "nothing" or 0 < sum(num_accepted) < len(num_accepted) * len(SHAPES[shape])


@pytest.mark.parametrize("kind", ["mapped", "own ids"])
@pytest.mark.parametrize(("rule", "shape"), [("rejection", "tree"), ("block", "chain"), ("traversal", "tree")])
def test_of_drafts_over_some_tokens(rule: str, shape: str, kind: str) -> None:
    assert verdicts(rule, OPS["residuals"], shape, kind) == verdicts(rule, REFERENCE["residuals"], shape, kind)


@pytest.mark.parametrize(("rule", "shape"), CASES)
def test_memory_is_written_before_it_is_read(rule: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not written may be anything. Too large a number is a warning in the interpreter, and so an error."""
    expected, empty = verdicts(rule, REFERENCE["residuals"], shape), torch.empty

    def full(*size: Any, **options: Any) -> torch.Tensor:
        memory = empty(*size, **options)
        return memory.fill_(torch.finfo(memory.dtype).max) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty", full)
    assert verdicts(rule, OPS["residuals"], shape) == expected


def another_row(logits: torch.Tensor, proposals: Proposals) -> Any:
    q_rows = torch.where(proposals.q_rows < 0, -1, (proposals.q_rows + 1) % len(proposals.q))
    return OPS["residuals"](logits, evolve(proposals, q_rows=q_rows))


@pytest.mark.parametrize(("rule", "shape"), [("rejection", "tree"), ("block", "chain"), ("traversal", "tree")])
def test_the_comparison_notices(rule: str, shape: str) -> None:
    assert verdicts(rule, another_row, shape) != verdicts(rule, REFERENCE["residuals"], shape)
