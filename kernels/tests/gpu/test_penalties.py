"""Penalties of Triton kernels, against the reference in torch and against histories written out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from hypothesis import given, settings, strategies as st

from specdec_core import DEAD, Draft, DraftTree, SamplingParams
from specdec_core.ops import REFERENCE
from specdec_core.sampling.constraints import ConstrainedRows, Constraints
from specdec_core.sampling.penalties import penalize_history
from specdec_kernels.gpu import OPS, penalties

BLOCK = penalties.BLOCK


@frozen
class Step:
    """A request in a step. params: None: it has no penalties."""

    token_ids: np.ndarray
    num_prompt_tokens: int
    tree: DraftTree
    params: SamplingParams | None
    constraints: Any = None


def asked(repetition: float, frequency: float, presence: float) -> SamplingParams:
    return SamplingParams(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)


PARAMS = [None, asked(1.5, 0, 0), asked(1, 0.7, 0), asked(0.8, 0, 0.9), asked(1, -0.3, 1), asked(1.2, 0.25, -0.4)]


def random_tree(random: np.random.Generator, num_nodes: int, num_tokens: int) -> DraftTree:
    """Half of the time a chain, if it is short, else with dead nodes."""
    parents = list(range(-1, num_nodes - 1))
    if num_nodes > 64 or random.random() < 0.5:
        parents = [DEAD if random.random() < 0.1 else int(random.integers(-1, i)) for i in range(num_nodes)]
    return DraftTree(random.integers(num_tokens, size=num_nodes).tolist(), parents)


def random_steps(seed: int, num_nodes: list[int], num_tokens: int, num_steps: int) -> list[list[Step]]:
    """Requests whose texts grow from step to step, of the first tokens of the vocabulary."""
    random = np.random.default_rng(seed)
    texts = [random.integers(num_tokens, size=random.integers(1, 30)) for _ in num_nodes]
    params = [PARAMS[random.integers(len(PARAMS))] for _ in num_nodes]
    steps, num_prompt = [], [len(text) for text in texts]
    for _ in range(num_steps):
        given_ = zip(texts, num_prompt, num_nodes, params, strict=True)
        steps.append([Step(text, n, random_tree(random, most, num_tokens), p) for text, n, most, p in given_])
        texts = [np.append(text, random.integers(num_tokens, size=random.integers(0, 4))) for text in texts]
    return steps


def penalized(steps: list[list[Step]], logits: list[torch.Tensor], operation: Any) -> list[torch.Tensor]:
    """The logits of each step, with counts that are kept from step to step."""
    kept = [None if each.params is None else Constraints.of(each.params, [], frozenset()) for each in steps[0]]
    found = [each.clone() for each in logits]
    for step, each in zip(steps, found, strict=True):
        requests = [
            Step(r.token_ids, r.num_prompt_tokens, r.tree, r.params, c) for r, c in zip(step, kept, strict=True)
        ]
        rows = ConstrainedRows.of(requests, Draft.from_trees([request.tree for request in step]))
        if rows is not None:
            penalize_history(each, rows, operation)
    return found


def written_out(step: list[Step], logits: torch.Tensor) -> torch.Tensor:
    """The same in float64, row by row and token by token."""
    expected, row = logits.double(), 0
    for request in step:
        prompt, output = np.split(request.token_ids, [request.num_prompt_tokens])
        for own in range(-1, len(request.tree.token_ids)):
            path, node = [], own
            while node >= 0:
                path.append(request.tree.token_ids[node])
                node = request.tree.parents[node]
            path = [] if node == DEAD else path  # of what is below a dead node nothing counts
            if request.params is not None:
                _write_out(expected[row], prompt.tolist(), output.tolist() + path, request.params)
            row += 1
    return expected


def _write_out(logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> None:
    for token in {*prompt, *output}:
        repetition = params.repetition_penalty
        logits[token] *= 1 / repetition if logits[token] > 0 else repetition
    for token, times in Counter(output).items():
        logits[token] -= params.frequency_penalty * times + params.presence_penalty


def logits_of(steps: list[list[Step]], vocab_size: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [sum(len(request.tree.token_ids) + 1 for request in step) for step in steps]
    return [torch.randn(size, vocab_size, generator=generator) for size in sizes]


@settings(max_examples=20, deadline=None)
@given(
    num_nodes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    vocab_size=st.sampled_from([1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 50]),
    num_tokens=st.sampled_from([1, 5, 2000]),
    seed=st.integers(0, 2**32),
)
def test_each_row_by_its_own_history(num_nodes: list[int], vocab_size: int, num_tokens: int, seed: int) -> None:
    check_each_row(random_steps(seed, num_nodes, min(num_tokens, vocab_size), num_steps=3), vocab_size, seed)


def test_large_trees() -> None:
    check_each_row(random_steps(0, [256, 0, 30], 20, num_steps=1), 50, seed=0)


def check_each_row(steps: list[list[Step]], vocab_size: int, seed: int) -> None:
    logits = logits_of(steps, vocab_size, seed)
    found, expected = (penalized(steps, logits, ops["penalize"]) for ops in (OPS, REFERENCE))
    for step, each, of_reference, before in zip(steps, found, expected, logits, strict=True):
        assert torch.equal(each, of_reference)
        torch.testing.assert_close(each.double(), written_out(step, before), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", [7, 64])
def test_rows_do_not_depend_on_each_other(number: int) -> None:
    steps = random_steps(0, [3] * number, 40, num_steps=2)
    logits = logits_of(steps, 50, 0)
    together = penalized(steps, logits, OPS["penalize"])
    for i in range(0, number, 3):
        own = [each[4 * i : 4 * i + 4] for each in logits]
        alone = penalized([[step[i]] for step in steps], own, OPS["penalize"])
        for found, expected in zip(alone, together, strict=True):
            assert torch.equal(found, expected[4 * i : 4 * i + 4])


def test_a_long_prompt_and_tokens_that_are_impossible() -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(300, size=5000)
    step = [Step(tokens, 4000, DraftTree([1, 1, 2], [-1, 0, 1]), asked(1.2, 0.01, 0.5))]
    logits = torch.randn(4, 400, generator=torch.Generator().manual_seed(0))
    logits[:, ::3], logits[2, 5], logits[2, 7] = -torch.inf, torch.nan, torch.inf
    (found,), (expected,) = (penalized([step], [logits], ops["penalize"]) for ops in (OPS, REFERENCE))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert (found[:, ::3] == -torch.inf).all()
    assert torch.equal(found[0, 300:], logits[0, 300:])


def test_float64_is_left_to_the_reference() -> None:
    steps = random_steps(1, [3, 2], 9, num_steps=2)
    logits = [each.double() for each in logits_of(steps, 9, 1)]
    for found, expected in zip(*(penalized(steps, logits, ops["penalize"]) for ops in (OPS, REFERENCE)), strict=True):
        assert found.dtype == torch.float64
        assert torch.equal(found, expected)
