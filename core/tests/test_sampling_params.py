"""What a request may ask of sampling."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, strategies as st

from specdec_core import ConfigError, SamplingParams


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 0}, "n=0 is too small"),
        ({"n": True}, "n=True is a truth value"),
        ({"n": 2, "temperature": 0}, "n=2 completions at temperature=0.0 would all be the same"),
        ({"stop_token_ids": 5}, "stop_token_ids=5"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output=1"),
        ({"detokenize": None}, "detokenize=None"),
        ({"detokenize": False, "stop": "x"}, r"stop=\['x'\] is looked for in the text"),
        ({"min_p": 0.1}, "min_p=0.1 is not supported yet: leave it out, or give 0.0"),
        ({"repetition_penalty": 1.1}, "give 1.0"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"logprobs": 0}, "logprobs"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"bad_words": ["x"]}, "bad_words"),
    ],
    ids=str,
)
def test_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**params)


def test_neutral_values_of_what_is_not_supported_are_taken() -> None:
    neutral = SamplingParams(min_p=0, presence_penalty=0.0, repetition_penalty=1, logprobs=None, min_tokens=0)
    assert neutral.min_p == 0


@given(seed=st.integers(-(2**63), 2**63 - 1), n=st.integers(2, 50))
def test_samples_have_seeds_of_their_own(seed: int, n: int) -> None:
    params = SamplingParams(n=n, seed=seed, top_p=0.9)
    samples = [params.of_sample(index) for index in range(n)]
    assert samples[0] == evolve(params, n=1)
    assert len({sample.seed for sample in samples}) == n
    assert samples == [params.of_sample(index) for index in range(n)]
    assert {sample.top_p for sample in samples} == {0.9}
    assert SamplingParams(n=n).of_sample(1).seed is None


def test_the_mixed_seed_never_changes() -> None:
    """It is part of what a seed promises: the same output from one version to the next."""
    seeds = [SamplingParams(n=3, seed=7).of_sample(index).seed for index in range(3)]
    assert seeds == [7, 4595731978703777594, 61001066745621607]
