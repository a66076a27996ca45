"""Converts the speculation keywords of vLLM 0.6 and older, such as speculative_model, to a speculative_config."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

from specdec_core.config.fields import shown
from specdec_core.errors import ConfigError

NEW_KEYS = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "speculative_model_quantization": "quantization",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
}

TYPICAL_KEYS = {
    "typical_acceptance_sampler_posterior_threshold": "posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha": "posterior_alpha",
}
"""Old keywords that have an effect only with the typical acceptance sampler, and the verifier's options."""

ACCEPTANCE_METHOD = "spec_decoding_acceptance_method"
TYPICAL = "typical_acceptance_sampler"

WITHOUT_MEANING = {
    ACCEPTANCE_METHOD: ("rejection_sampler", TYPICAL),
    "speculative_disable_mqa_scorer": (False,),
    "disable_logprobs_during_spec_decoding": (False,),
}
"""Old keywords that are no options of a speculative_config, and their allowed values. None is always allowed."""

OLD_KEYS = frozenset(NEW_KEYS) | frozenset(TYPICAL_KEYS) | frozenset(WITHOUT_MEANING)


def without_old_keys(keywords: Mapping[str, Any], speculative_config: Any) -> tuple[dict[str, Any], Any]:
    """Convert old speculation keywords to a speculative_config. Returns the other keywords, and this
    speculative_config (None if the old keywords have no effect). Without old keywords, returns the arguments unchanged.

    Issues one DeprecationWarning, which shows the new form. Raises ConfigError if a speculative_config is given beside
    old keywords, or if an old keyword has no new form.
    """
    old = {key: value for key, value in keywords.items() if key in OLD_KEYS}
    if not old:
        return dict(keywords), speculative_config
    rest = {key: value for key, value in keywords.items() if key not in OLD_KEYS}
    names = ", ".join(sorted(old))
    if speculative_config is not None:
        raise ConfigError(f"speculative_config and the older {names} are given together: put all of it in the former")
    for key, allowed in WITHOUT_MEANING.items():
        if old.get(key) is not None and old[key] not in allowed:
            raise ConfigError(f"{key}={shown(old[key])} has no counterpart: leave it out")
    given = {NEW_KEYS[key]: value for key, value in old.items() if key in NEW_KEYS and value is not None}
    verifier = _verifier(old)
    if (given or verifier) and "model" not in given:
        raise ConfigError(f"{names} given, but no speculative_model: name one, or leave them out")
    config = {**_new_form(given), **verifier} if given else None
    advice = (
        "leave out what changes nothing"
        if config is None
        else f"write speculative_config={shown(config, 2000)} instead"
    )
    warnings.warn(f"{names}: {advice}", DeprecationWarning, stacklevel=level_of_caller())
    return rest, config


def _new_form(given: dict[str, Any]) -> dict[str, Any]:
    """Name the method if the model's name in brackets is one. Otherwise the checkpoint tells the method."""
    config = {"method": given.pop("model")[1:-1], **given} if bracketed(given["model"]) else given
    if "prompt_lookup_max" in config:  # vLLM 0.6 looked for suffixes of one token on; now the bounds would be equal
        config.setdefault("prompt_lookup_min", 1)
    return config


def _verifier(old: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of speculative_config for the acceptance method. Raises ConfigError if options of the typical acceptance
    sampler are given without it."""
    options = {TYPICAL_KEYS[key]: value for key, value in old.items() if key in TYPICAL_KEYS and value is not None}
    if old.get(ACCEPTANCE_METHOD) == TYPICAL:
        return {"verifier": "typical", **options}
    for key, name in TYPICAL_KEYS.items():
        if name in options:
            raise ConfigError(
                f"{key}={shown(old[key])} has no effect without {ACCEPTANCE_METHOD}={TYPICAL!r}: give both, or neither"
            )
    return {}


def bracketed(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("[") and name.endswith("]")


def unbracketed(name: Any) -> Any:
    return name[1:-1] if bracketed(name) else name


def level_of_caller() -> int:
    """The `stacklevel` with which warnings.warn reports the line of the first caller outside specdec_core as the
    origin of the warning."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("specdec_core."):
        level, frame = level + 1, frame.f_back
    return level
