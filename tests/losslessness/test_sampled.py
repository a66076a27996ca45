"""Sampled outputs under speculation equal those of plain decoding with the same seeds, token for token."""

from __future__ import annotations

from itertools import islice
from typing import Any

import attrs
import pytest
import random_tree
from reference import NUM_TOKENS

SETTINGS = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.8, top-k": {"temperature": 0.8, "top_k": 20},
    "temperature 0.8, top-p": {"temperature": 0.8, "top_p": 0.9},
    "temperature 1, top-k, top-p": {"temperature": 1.0, "top_k": 40, "top_p": 0.7},
}


@pytest.fixture(scope="module")
def plain(model_dir: Any, make_llm: Any) -> Any:
    return make_llm(model_dir, None)


@pytest.fixture(scope="module", params=[pytest.param("chain", marks=pytest.mark.nightly), "tree"])
def speculating(request: pytest.FixtureRequest, model_dir: Any, make_llm: Any) -> Any:
    return make_llm(model_dir, "random_tree", options={"shape": request.param})


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_output_equals_that_without_speculation(
    plain: Any, speculating: Any, settings: dict, prompts: list, generate: Any, counter: Any
) -> None:
    from specdec_core import SamplingParams

    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **settings)
    each = [attrs.evolve(params, seed=1000 + i) for i in range(len(prompts))]
    expected = [output.token_ids for output in generate(plain, prompts, each)]
    random_tree.TRUTH.update(zip(map(tuple, prompts), expected, strict=True))
    names = ("num_draft_tokens", "num_accepted_tokens")
    before = [counter(speculating, name) for name in names]
    assert [output.token_ids for output in generate(speculating, prompts, each)] == expected
    drafted, accepted = (counter(speculating, name) - n for name, n in zip(names, before, strict=True))
    assert accepted > 50
    assert drafted - accepted > 50
    for i in range(4):
        assert generate(speculating, [prompts[i]], each[i])[0].token_ids == expected[i]


def test_seeds_matter_and_batches_do_not(plain: Any, prompts: list, generate: Any) -> None:
    from specdec_core import SamplingParams

    prompt = prompts[1]
    each = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed) for seed in range(5)]
    together = [output.token_ids for output in generate(plain, [prompt] * 5, each)]
    alone = [generate(plain, [prompt], params)[0].token_ids for params in each]
    reversed_ = [output.token_ids for output in generate(plain, [prompt] * 5, each[::-1])][::-1]
    assert together == alone == reversed_
    assert len({tuple(tokens) for tokens in together}) == 5


def test_requests_of_different_settings_share_a_batch(
    plain: Any, speculating: Any, prompts: list, generate: Any
) -> None:
    """Greedy and sampled requests in one batch have the same outputs as alone."""
    from specdec_core import SamplingParams

    prompts = prompts[:10]
    cycle = [{"temperature": 0.0}, *SETTINGS.values()] * 2
    each = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=i, **settings)
        for i, settings in enumerate(islice(cycle, len(prompts)))
    ]
    alone = [generate(plain, [prompt], params)[0].token_ids for prompt, params in zip(prompts, each, strict=True)]
    random_tree.TRUTH.update(zip(map(tuple, prompts), alone, strict=True))
    assert [output.token_ids for output in generate(speculating, prompts, each)] == alone
