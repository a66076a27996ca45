"""SamplingParams: refused values, comparison and copies, and the parameters of each of a request's n samples."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, strategies as st

from specdec_core import ConfigError, SamplingParams, StructuredOutputs
from specdec_core.config.hashing import config_hash


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
        ({"min_tokens": 17}, "min_tokens=17 is more than max_tokens=16: lower it, or raise max_tokens"),
        ({"allowed_token_ids": []}, r"allowed_token_ids=\[\] allows no token at all: name some, or leave it out"),
        ({"structured_outputs": {}}, "has nothing to match: give exactly one of json, regex, choice, grammar"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "has json and regex: give exactly one of"),
        ({"structured_outputs": {"regx": "a"}}, "has no key 'regx': did you mean 'regex'?"),
        ({"structured_outputs": {"regex": ""}}, "regex='': give text that is not empty"),
        ({"structured_outputs": {"grammar": 3}}, "grammar=3: give text"),
        ({"structured_outputs": {"json": [1]}}, r"json=\[1\]: give text"),
        ({"structured_outputs": {"json": {"a": {1}}}}, "which is no JSON"),
        ({"structured_outputs": {"choice": []}}, r"choice=\[\]: give at least one"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "must be a non-empty string or a list"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "is about json: leave it out"),
        ({"structured_outputs": "[0-9]+"}, "must be StructuredOutputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "leave one of them out"),
        ({"truncate_prompt_tokens": 5}, "give None"),
        ({"spaces_between_special_tokens": False}, "give True"),
    ],
    ids=str,
)
def test_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**params)


def test_neutral_values_of_what_is_not_supported_are_taken() -> None:
    neutral = SamplingParams(structured_outputs=None, spaces_between_special_tokens=True)
    assert neutral == SamplingParams()


def test_structured_outputs_may_be_a_mapping() -> None:
    given = {"type": "object", "properties": {"b": {}, "a": {}}}
    params = SamplingParams(structured_outputs={"json": given})
    assert params == SamplingParams(structured_outputs=StructuredOutputs(json=given))
    assert params.structured_outputs == StructuredOutputs(json='{"type": "object", "properties": {"b": {}, "a": {}}}')
    assert StructuredOutputs(choice=["b", "a"]).choice == ("b", "a")
    assert StructuredOutputs(json_object=True).kind == "json_object"


def test_values_are_kept_as_pythons_own() -> None:
    params = SamplingParams(
        min_p=np.float32(0.5),
        logit_bias={np.int64(3): 1},
        allowed_token_ids=np.array([5, 3, 5]),
        bad_words="word",
        logprobs=np.int64(2),
        presence_penalty=1,
    )
    assert (params.min_p, params.logit_bias, params.allowed_token_ids) == (0.5, {3: 1.0}, (5, 3))
    assert (params.bad_words, params.logprobs, params.presence_penalty) == (("word",), 2, 1.0)
    kept = (params.min_p, params.logprobs, params.presence_penalty, *params.allowed_token_ids, *params.logit_bias)
    assert {type(value) for value in kept} == {float, int}
    assert type(params.logit_bias[3]) is float


class Forbid:
    """A logits processor with state, which can be compared but not hashed."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def __call__(self, logits: Any, token_ids: Any) -> Any:
        return logits

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Forbid) and self.token_id == other.token_id

    __hash__ = None  # type: ignore[assignment]


def leave(logits: Any, token_ids: Any) -> Any:
    return logits


def test_parameters_with_callables_and_dicts_are_compared_hashed_and_copied() -> None:
    params = SamplingParams(n=3, seed=7, logit_bias={3: 1.0}, logits_processors=[Forbid(5), leave])
    same = SamplingParams(n=3, seed=7, logit_bias={3: 1}, logits_processors=(Forbid(5), leave))
    assert params == same
    assert hash(params) == hash(same)
    assert params != evolve(params, logits_processors=[Forbid(6), leave])
    assert params != evolve(params, logit_bias={3: 2.0})
    assert params.of_sample(2).logits_processors == params.logits_processors
    assert pickle.loads(pickle.dumps(params)) == deepcopy(params) == params
    named = SamplingParams(logits_processors=[leave])
    assert config_hash(named) == config_hash(SamplingParams(logits_processors=[leave]))
    assert config_hash(named) != config_hash(SamplingParams())


def test_only_the_first_of_several_samples_scores_the_prompt() -> None:
    params = SamplingParams(n=3, prompt_logprobs=1, logprobs=1)
    assert [params.of_sample(index).prompt_logprobs for index in range(3)] == [1, None, None]
    assert {params.of_sample(index).logprobs for index in range(3)} == {1}


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
    """The seeds of a request's n samples must not change between versions, so that outputs can be reproduced."""
    seeds = [SamplingParams(n=3, seed=7).of_sample(index).seed for index in range(3)]
    assert seeds == [7, 4595731978703777594, 61001066745621607]
