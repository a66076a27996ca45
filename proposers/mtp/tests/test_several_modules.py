"""Checkpoints with several MTP modules: one is loaded for each depth of the drafts, and wrong numbers are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_mtp import llama_with_modules

from specdec_core import CompatibilityError, ConfigError, TargetInfo
from specdec_core.api.arguments import dry_run
from specdec_proposer_mtp.config import MTPConfig
from specdec_proposer_mtp.loading import find, load

SETTINGS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64}


def planned(folder: Path, **options: Any) -> Any:
    return dry_run(folder, speculative_config={"method": "mtp", **options}, **SETTINGS).plan


def with_config(folder: Path, **changes: Any) -> Path:
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | changes))
    return folder


def test_each_depth_has_a_module_and_a_layer_of_the_cache(tmp_path: Path) -> None:
    """Deeper drafts than there are modules use them again, with their weights."""
    folder = llama_with_modules(tmp_path, 2)
    stated = json.loads((folder / "config.json").read_text())
    sizes = (stated[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers"))
    target = TargetInfo(str(folder), "llama", *sizes, 64, torch.float32, torch.device("cpu"))
    for number in (1, 2, 4):
        found = find(MTPConfig(), target, number)
        assert found.kv_layout.num_layers == number
        modules = load(found, target, "eager")
        assert len({module.attention for module in modules}) == number
        assert [module.proj.weight.data_ptr() for module in modules] == [
            modules[depth % 2].proj.weight.data_ptr() for depth in range(number)
        ]
        assert len({module.proj.weight.data_ptr() for module in modules}) == min(2, number)


def test_the_depth_is_up_to_the_number_of_modules_or_a_multiple(tmp_path: Path) -> None:
    folder = llama_with_modules(tmp_path, 2)
    for number in (1, 2, 4):
        assert planned(folder, num_speculative_tokens=number).lookahead == number
    assert planned(folder, speculative_token_tree="[(0,), (1,), (0, 0)]").lookahead == 2  # 3 tokens, 2 deep
    message = (
        "with num_speculative_tokens=5, drafts are 5 tokens deep, and '.*' has 2 MTP modules, which draft one token "
        "each in turn: draft up to 2 tokens in a row, or a multiple of 2, as are 4 and 6"
    )
    with pytest.raises(ConfigError, match=message):
        planned(folder, num_speculative_tokens=5)
    with pytest.raises(ConfigError, match="drafts are 3 tokens deep"):
        planned(folder, speculative_token_tree="[(0,), (1,), (0, 0), (0, 0, 0)]")


def test_a_missing_module_is_refused(tmp_path: Path) -> None:
    folder = with_config(llama_with_modules(tmp_path, 2), num_nextn_predict_layers=4)
    assert planned(folder, num_speculative_tokens=2).lookahead == 2  # the others are not needed
    message = (
        r"^num_nextn_predict_layers in config.json of '.*' is 4, but its weights lack MTP module 3: "
        r"model.layers.\d+.eh_proj.weight is not in them. Download it again, or set num_nextn_predict_layers to 2, "
    )
    with pytest.raises(CompatibilityError, match=message) as caught:
        planned(folder, num_speculative_tokens=4)
    assert "train" not in str(caught.value)


def test_more_modules_in_the_config_than_in_the_weights_are_refused(tmp_path: Path) -> None:
    """Also where the drafts' depth is no multiple of the config's number."""
    for number in (2, 10**9):
        folder = with_config(llama_with_modules(tmp_path / str(number)), num_nextn_predict_layers=number)
        with pytest.raises(CompatibilityError, match=f"is {number}, but its weights lack MTP module 2: .* to 1, the"):
            planned(folder, num_speculative_tokens=3)


@pytest.mark.parametrize("number", [-1, 1.5, "two", True])
def test_what_is_no_number_of_modules_is_refused(number: object, tmp_path: Path) -> None:
    folder = with_config(llama_with_modules(tmp_path), num_nextn_predict_layers=number)
    with pytest.raises(CompatibilityError, match=r"num_nextn_predict_layers in config.json is .* must be an integer"):
        planned(folder)
