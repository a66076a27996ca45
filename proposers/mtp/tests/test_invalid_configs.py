"""A separate checkpoint whose config.json is not valid is refused with the key or the file named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_mtp import llama_with_modules

from specdec_core import CompatibilityError, ConfigError
from specdec_core.api.arguments import dry_run

SETTINGS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64}
NOT_VALID = r"config.json of '.*' is not valid: "
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "layers in words": ({"num_hidden_layers": "2"}, "num_hidden_layers in config.json is '2', and must be"),
    **{
        f"{key} {value!r}": (
            {key: value},
            f"does not fit: {key} in config.json is {shown}, and must be an integer from 1: download",
        )
        for key in ("hidden_size", "vocab_size")
        for value, shown in ((0, "0"), (-1, "-1"), ("x", "'x'"), (None, "None"))
    },
    "text config": ({"text_config": "x"}, "text_config in config.json of '.*' is 'x', not an object"),
    "no length": (
        {"max_position_embeddings": 0},
        "max_position_embeddings in config.json is 0, and must be an integer from 1",
    ),
    "a list as type": ({"model_type": []}, r"'.*' is of type \[\], and multi-token prediction is known for"),
    "negative width": ({"intermediate_size": -1}, NOT_VALID + "intermediate_size=-1 must be a whole number from 1"),
    "no attention heads": ({"num_attention_heads": 0}, NOT_VALID + "num_attention_heads=0 must be a whole number"),
    "empty heads": ({"head_dim": 0}, NOT_VALID + "head_dim=0 must be a whole number from 1. Download"),
    "several": (
        {"head_dim": "x", "num_key_value_heads": 0},
        NOT_VALID + "(?=.*num_key_value_heads=0)(?=.*head_dim='x').* must be whole numbers from 1",
    ),
    "one key against another": (
        {"num_attention_heads": 3},
        NOT_VALID + "StrictDataclassClassValidationError: .*: ValueError: The hidden size",
    ),
    "huge head": ({"head_dim": 10**18}, NOT_VALID),
    "activation": ({"hidden_act": "foo"}, NOT_VALID + "KeyError: .*foo"),
    "a bias that is not there": (
        {"attention_bias": True},
        r"model.layers.\d.self_attn.k_proj.bias \[\d+\] is missing",
    ),
    "rotary": ({"rope_parameters": {"rope_type": "none"}}, NOT_VALID),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_config_that_is_not_valid_is_refused(fault: str, tmp_path: Path) -> None:
    changes, message = FAULTS[fault]
    target, draft = (llama_with_modules(tmp_path / name) for name in ("target", "draft"))
    file = draft / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CompatibilityError, match=message):
        dry_run(target, speculative_config={"method": "mtp", "model": str(draft)}, **SETTINGS)


def test_drafts_reach_as_far_as_the_draft_goes(tmp_path: Path) -> None:
    target, draft = (llama_with_modules(tmp_path / name) for name in ("target", "draft"))
    file = draft / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 40}))
    speculative = {"method": "mtp", "model": str(draft)}
    assert dry_run(target, speculative_config=speculative, **SETTINGS).plan.max_model_len == 40
    with pytest.raises(ConfigError, match="max_model_len=50, but the draft model takes 40 tokens at most"):
        dry_run(target, speculative_config={**speculative, "max_model_len": 50}, **SETTINGS)
