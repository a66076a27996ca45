"""The keyword arguments for speculation in vLLM up to 0.6 still work. A warning shows the speculative_config that
replaces them."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from typing import Any

import pytest

from specdec_core import LLM, ConfigError, SamplingParams, SpeculativeConfig
from specdec_core.api import old_vllm_arguments
from specdec_core.api.arguments import prepare
from specdec_core.api.old_vllm_arguments import OLD_KEYS, without_old_keys
from specdec_core.budget.budget import Budget
from specdec_core.config.verifiers import TypicalConfig
from specdec_core.errors import SpecdecError
from specdec_model_tiny import model_path

PROMPT = "def mean(values):\n    total = 0\n    for value in"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)

OLD_NGRAM = {"speculative_model": "[ngram]", "num_speculative_tokens": 5, "ngram_prompt_lookup_max": 4}
OLD_TYPICAL = {
    "spec_decoding_acceptance_method": "typical_acceptance_sampler",
    "typical_acceptance_sampler_posterior_threshold": 0.2,
    "typical_acceptance_sampler_posterior_alpha": 0.4,
}
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
                "model": "some/draft",
                "num_speculative_tokens": 3,
                "quantization": "fp8",
                "draft_tensor_parallel_size": 1,
                "max_model_len": 512,
            },
        ),
        (
            {**OLD_NGRAM, **OLD_TYPICAL},
            {**NEW_NGRAM, "verifier": "typical", "posterior_threshold": 0.2, "posterior_alpha": 0.4},
        ),
        (
            {**OLD_NGRAM, "spec_decoding_acceptance_method": "typical_acceptance_sampler"},
            {**NEW_NGRAM, "verifier": "typical"},
        ),
        ({**OLD_NGRAM, "disable_logprobs_during_spec_decoding": False}, NEW_NGRAM),
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
        ({**OLD_NGRAM, "spec_decoding_acceptance_method": "strict"}, "'strict' has no counterpart"),
        (
            {**OLD_NGRAM, "typical_acceptance_sampler_posterior_alpha": 0.4},
            "no effect without spec_decoding_acceptance",
        ),
        (OLD_TYPICAL, "no speculative_model"),
        ({**OLD_NGRAM, "speculative_disable_mqa_scorer": True}, "no counterpart"),
        ({"speculative_mode": "[ngram]"}, "did you mean 'speculative_model'"),
    ],
    ids=str,
)
def test_what_cannot_be_translated(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("tiny", **keywords)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_a_draft_checkpoint_tells_its_method(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old keywords with a draft and no number run. So does the dict in the warning: it gives the same options."""
    monkeypatch.setattr(Budget, "_choose", lambda self, rows, limits, so_far: limits)  # whatever drafting costs here
    settings = {"dtype": "float32", "max_model_len": 64, "num_kv_blocks": 8}
    old = {"speculative_model": str(Path(model_path(), "drafts", method)), "speculative_draft_tensor_parallel_size": 1}
    with pytest.warns(DeprecationWarning, match="speculative_model") as caught:
        llm = LLM("tiny", **old, **settings)
    assert (llm.engine.num_speculative_tokens or 0) > 0
    (output,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert output.speculation.num_accepted > 0
    assert len(caught) == 1
    check_same_options(old, method)
    assert llm.engine.num_speculative_tokens == prepared(shown(caught[0])).num_speculative_tokens


def prepared(speculative_config: dict[str, Any] | None = None, **old: Any) -> SpeculativeConfig:
    found = prepare("tiny", speculative_config=speculative_config, dtype="float32", max_model_len=64, **old).speculative
    assert found is not None
    return found


def check_same_options(old: dict[str, Any], method: str) -> None:
    """Check that old keywords and the dict in their warning give the same options, of this method."""
    with pytest.warns(DeprecationWarning, match="instead") as caught:
        found = prepared(**old)
    assert found == prepared(shown(caught[0]))
    assert found.method == method


def test_options_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"speculative_model": str(Path(model_path(), "drafts", "eagle")), "num_speculative_tokens": 3}
    check_same_options(old, "eagle")
    monkeypatch.setattr(old_vllm_arguments, "_new_form", lambda given: {"method": "draft_model", **given})
    with pytest.raises(SpecdecError, match="use method 'eagle', not 'draft_model'"):
        check_same_options(old, "eagle")


def test_the_typical_sampler_is_the_verifier() -> None:
    with pytest.warns(DeprecationWarning, match="speculative_model") as caught:
        llm = LLM("tiny", dtype="float32", max_model_len=64, **OLD_NGRAM, **OLD_TYPICAL)
    sampled = SamplingParams(temperature=1.0, seed=1, max_tokens=8)
    assert not llm.generate(PROMPT, sampled, use_tqdm=False)[0].lossless
    found = prepared(shown(caught[0]))
    assert (found.verifier, found.verifier_options) == (
        "typical",
        TypicalConfig(posterior_threshold=0.2, posterior_alpha=0.4),
    )


@pytest.mark.filterwarnings("ignore:.*instead:DeprecationWarning")
def test_a_draft_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="some/draft"):
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
