"""Greedy output equals transformers' own, token for token, with every proposer, batch size and chunk size."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import random_tree
from reference import NUM_TOKENS

METHODS = [None, "ngram", pytest.param("suffix", marks=pytest.mark.nightly), "random_tree"]


@pytest.fixture(scope="module", params=METHODS, ids=str)
def method(request: pytest.FixtureRequest) -> str | None:
    return request.param


@pytest.fixture(
    scope="module", params=[7, pytest.param(512, marks=pytest.mark.nightly)], ids=lambda size: f"chunks of {size}"
)
def llm(request: pytest.FixtureRequest, method: str | None, model_dir: Any, make_llm: Callable[..., Any]) -> Any:
    return make_llm(model_dir, method, max_num_batched_tokens=request.param)


@pytest.mark.parametrize("batch", [1, pytest.param(3, marks=pytest.mark.nightly), 16])
def test_output_equals_the_reference(
    llm: Any, method: str | None, batch: int, prompts: list, references: list, generate: Any, counter: Any
) -> None:
    from specdec_core import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    random_tree.TRUTH.update(zip(map(tuple, prompts), references, strict=True))
    waiting = iter(prompts if batch > 1 else prompts[:4])
    done = 0
    while group := list(islice(waiting, batch)):
        for output, expected in zip(generate(llm, group, params), references[done:], strict=False):
            assert output.token_ids == expected
            assert output.finish_reason == "length"
        done += len(group)
    if method == "random_tree":
        drafted, accepted = counter(llm, "num_draft_tokens"), counter(llm, "num_accepted_tokens")
        assert drafted > accepted > 10, "the trees were all refused or all accepted: nothing was tested"


def test_output_equals_the_reference_without_observation(
    model_dir: Any, make_llm: Any, prompts: list, references: list, generate: Any
) -> None:
    """If a proposer's plan has observes=False, the engine never passes hidden states to the proposer, and outputs are
    still right."""
    from specdec_core import SamplingParams

    random_tree.TRUTH.update(zip(map(tuple, prompts), references, strict=True))
    llm = make_llm(model_dir, "random_tree", options={"observe": False})
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    assert [output.token_ids for output in generate(llm, prompts, params)] == references
