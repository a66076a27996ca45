"""The states of recurrent layers are where transformers' modules look for them, in each supported version."""

from __future__ import annotations

import pytest
import torch

from specdec_core.errors import CompatibilityError
from specdec_core.models.mixers import StateCache, StateProbe


def test_modules_of_transformers_5_17_find_their_states():
    conv, recurrent = torch.zeros(1, 4, 3), torch.zeros(1, 2, 5)
    cache = StateCache({"conv": conv, "recurrent": recurrent}, 7)
    assert cache.has_previous_state(7)
    assert cache.layers[7].conv_states[0] is conv
    assert cache.layers[7].recurrent_states[0] is recurrent
    assert not cache.layers[7].record_past
    with pytest.raises(KeyError):
        cache.layers[6]


def test_they_find_none_before_the_first_token():
    assert not StateProbe().has_previous_state(7)
    with pytest.raises(CompatibilityError, match="a state number 1"):
        StateProbe().has_previous_state(7, state_idx=1)
