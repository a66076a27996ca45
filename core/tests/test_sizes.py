"""Sizes in a config.json that no model can have are named in the error, with their values."""

from __future__ import annotations

import json

import pytest
from tiny_setup import save_checkpoint

from specdec_core import ConfigError
from specdec_core.api.arguments import dry_run
from specdec_core.models.sizes import wrong_sizes

FAULTS = {
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads=0 must be a whole number from 1"),
    "empty heads": ({"head_dim": 0}, "head_dim=0 must be a whole number from 1"),
    "text": ({"hidden_size": "x", "vocab_size": -1}, "must be whole numbers from 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_target_without_possible_sizes_is_refused(fault, tmp_path):
    changes, message = FAULTS[fault]
    save_checkpoint(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=message) as caught:
        dry_run(tmp_path)
    assert "\n" not in str(caught.value)


def test_sizes_are_searched_in_nested_objects():
    assert (
        wrong_sizes({"text_config": {"head_dim": -1}, "id2label": {0: "a"}})
        == "head_dim=-1 must be a whole number from 1"
    )
    assert not wrong_sizes({"head_dim": None, "hidden_size": 8, "no_repeat_ngram_size": 0, "num_labels": 0})
