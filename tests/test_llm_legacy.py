"""The keyword arguments for speculation in vLLM up to 0.6 still work. A warning shows the speculative_config that
replaces them."""

from __future__ import annotations

import ast
import warnings
from typing import Any

import pytest

from specdec_core import LLM, ConfigError, PluginError, SamplingParams
from specdec_core.api.old_vllm_arguments import OLD_KEYS, without_old_keys

OLD_NGRAM = {"speculative_model": "[ngram]", "num_speculative_tokens": 5, "ngram_prompt_lookup_max": 4}
NEW_NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 1}


def shown(warning: warnings.WarningMessage) -> Any:
    """Return the speculative_config that a warning shows, evaluated as Python."""
    text = str(warning.message)
    return ast.literal_eval(text[text.index("{") : text.rindex("}") + 1])


def test_the_old_example_runs_and_says_how_to_write_it_now() -> None:
    with pytest.warns(DeprecationWarning, match="speculative_model") as caught:
        llm = LLM(model="tiny", dtype="float32", **OLD_NGRAM)
    (warning,) = caught
    assert warning.filename == __file__
    assert shown(warning) == NEW_NGRAM
    new = LLM("tiny", dtype="float32", speculative_config=shown(warning))
    params = SamplingParams(temperature=0.0, max_tokens=16)
    assert llm.generate("def f(x):\n", params)[0].speculation == new.generate("def f(x):\n", params)[0].speculation


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({**OLD_NGRAM, "ngram_prompt_lookup_min": 2}, {**NEW_NGRAM, "prompt_lookup_min": 2}),
        ({**OLD_NGRAM, "speculative_disable_by_batch_size": 8}, {**NEW_NGRAM, "disable_by_batch_size": 8}),
        ({**OLD_NGRAM, "speculative_max_model_len": None, "speculative_disable_mqa_scorer": False}, NEW_NGRAM),
        ({**OLD_NGRAM, "spec_decoding_acceptance_method": "rejection_sampler"}, NEW_NGRAM),
        (
            {
                "speculative_model": "some/draft",
                "num_speculative_tokens": 3,
                "speculative_model_quantization": "fp8",
                "speculative_draft_tensor_parallel_size": 1,
                "speculative_max_model_len": 512,
            },
            {
                "method": "draft_model",
                "model": "some/draft",
                "num_speculative_tokens": 3,
                "quantization": "fp8",
                "draft_tensor_parallel_size": 1,
                "max_model_len": 512,
            },
        ),
        ({"speculative_model": None, "num_speculative_tokens": None}, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_every_old_key_has_its_place(old: dict[str, Any], new: Any) -> None:
    with pytest.warns(DeprecationWarning, match="instead" if new else "leave out what changes nothing") as caught:
        rest, config = without_old_keys({**old, "dtype": "auto"}, None)
    assert (rest, config) == ({"dtype": "auto"}, new)
    assert len(caught) == 1


def test_without_old_keys_nothing_is_said_or_done() -> None:
    assert without_old_keys({"dtype": "auto"}, {"method": "ngram"}) == ({"dtype": "auto"}, {"method": "ngram"})


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({**OLD_NGRAM, "speculative_config": NEW_NGRAM}, "given together"),
        ({"num_speculative_tokens": 5}, "no speculative_model"),
        ({**OLD_NGRAM, "spec_decoding_acceptance_method": "typical_acceptance_sampler"}, "no counterpart"),
        ({**OLD_NGRAM, "speculative_disable_mqa_scorer": True}, "no counterpart"),
        ({"speculative_mode": "[ngram]"}, "did you mean 'speculative_model'"),
    ],
    ids=str,
)
def test_what_cannot_be_translated(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("tiny", **keywords)


@pytest.mark.filterwarnings("ignore:.*instead:DeprecationWarning")
def test_a_draft_model_names_its_method() -> None:
    with pytest.raises((PluginError, ConfigError), match=r"draft_model|some/draft"):
        LLM("tiny", speculative_model="some/draft", num_speculative_tokens=3)


def test_brackets_in_a_speculative_config() -> None:
    for config in ({"method": "[ngram]"}, {"model": "[ngram]"}):
        llm = LLM("tiny", speculative_config={**config, "num_speculative_tokens": 3})
        assert llm.engine.num_speculative_tokens == 3
    with pytest.raises(ConfigError, match="no key 'model': the method takes no draft model"):
        LLM("tiny", speculative_config={"method": "ngram", "model": "some/draft", "num_speculative_tokens": 3})


def test_no_old_key_is_a_new_one_of_the_engine() -> None:
    from attrs import fields

    from specdec_core import EngineConfig

    assert not OLD_KEYS & {attribute.name for attribute in fields(EngineConfig)}
