"""The target's hidden states for training texts."""

from __future__ import annotations

import torch

from specdec_core import load_training_target
from specdec_testing import tiny_target
from specdec_train.features import features_of


def test_the_last_layers_output_is_what_its_norm_makes_the_final_features_of(tmp_path):
    target = load_training_target(str(tiny_target(tmp_path, num_hidden_layers=3)), "float32")
    taps = ("input.0", "input.2", "input.3", "final")
    found = features_of(target, torch.arange(10).reshape(2, 5), taps)
    assert tuple(found) == taps
    assert torch.equal(target.model.model.norm(found["input.3"]), found["final"])
    last = target.model.model.layers[2]
    left = last(found["input.2"], position_embeddings=_rotation(target, 5))
    torch.testing.assert_close(left[0] if isinstance(left, tuple) else left, found["input.3"])
    torch.testing.assert_close(found["input.0"], target.embed(torch.arange(10).reshape(2, 5)))


def _rotation(target, length):
    return target.model.model.rotary_emb(torch.empty(0), torch.arange(length)[None])
