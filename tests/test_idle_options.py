"""Options that change nothing are accepted with one warning, and options that contradict each other are refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from specdec_core import LLM, ConfigError, SamplingParams
from specdec_core.api.arguments import prepare

NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}
PADDED = {"disable_padded_drafter_batch": True}
TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0)]"


@pytest.mark.parametrize(
    ("keywords", "messages"),
    [
        ({"runner": "generate"}, ["runner='generate' changes nothing here: this engine only generates text"]),
        ({"speculative_config": NGRAM | PADDED}, ["disable_padded_drafter_batch=True changes nothing here"]),
        ({"speculative_config": {"method": "eagle"} | PADDED}, ["disable_padded_drafter_batch=True changes nothing"]),
        (
            {"runner": "generate", "speculative_config": {"method": "eagle", "enforce_eager": True, **PADDED}},
            ["runner='generate' changes nothing", "disable_padded_drafter_batch=True changes nothing"],
        ),
    ],
    ids=str,
)
def test_one_warning_names_what_changes_nothing(keywords: dict[str, Any], messages: list[str]) -> None:
    with pytest.warns(UserWarning, match="changes nothing here") as caught:
        prepare("tiny", skip_tokenizer_init=True, **keywords)
    (warning,) = caught
    found = str(warning.message).split("; ")
    assert all(each.startswith(message) for each, message in zip(found, messages, strict=True))


def test_the_warning_is_of_the_line_that_makes_the_llm() -> None:
    with pytest.warns(UserWarning, match="runner='generate'") as caught:
        LLM("tiny", max_model_len=64, runner="generate")
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    "keywords",
    [
        {"enforce_eager": True, "runner": "auto"},
        {"speculative_config": NGRAM | {"enforce_eager": True, "draft_tensor_parallel_size": 1, "model": None}},
        {"speculative_config": {"method": "eagle", "enforce_eager": False, "draft_tensor_parallel_size": 1}},
    ],
    ids=str,
)
def test_defaults_are_not_worth_a_warning(keywords: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare("tiny", skip_tokenizer_init=True, **keywords)


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
@pytest.mark.parametrize("number", [3, 6])
def test_a_tree_of_another_size_is_refused(method: str, number: int) -> None:
    config = {"method": method, "num_speculative_tokens": number, "speculative_token_tree": TREE}
    message = f"num_speculative_tokens={number}, but speculative_token_tree has 5 nodes: give num_speculative_tokens=5"
    with pytest.raises(ConfigError, match=message):
        LLM("tiny", max_model_len=64, speculative_config=config)


def test_a_threshold_of_one_request_drafts_for_a_request_that_runs_alone() -> None:
    config = NGRAM | {"prompt_lookup_min": 1, "disable_by_batch_size": 1}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM("tiny", max_model_len=128, speculative_config=config) as llm:
        pair = llm.generate(["x = x + x + x +"] * 2, params)
        (alone,) = llm.generate("x = x + x + x +", params)
    assert [output.speculation.num_drafts for output in pair] == [0, 0]
    assert alone.speculation.num_drafts > 0
