"""Acceptance of each trained head of the embedded model falls if it reads hidden states of the wrong token or layer,
attends to the wrong slots, or has wrong norms. Such mistakes show nowhere else, since the output stays the target's."""

from __future__ import annotations

import pytest

from specdec_testing.flips import FLIPS, Flip, effects, other_layers, other_order

PROMPTS = [
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    'def read_lines(path):\n    """Return the lines of a file."""\n    with open(path) as file:\n',
]
MIDDLE = other_layers({"final": "input.4"})  # of eight layers
HEADS = {
    "eagle3": {**FLIPS, "layer": Flip(observed=other_order)},
    "eagle": {**FLIPS, "layer": MIDDLE},
    "mtp": {**FLIPS, "layer": MIDDLE},
    "medusa": {"shift": FLIPS["shift"], "layer": MIDDLE},
    "mlp_speculator": {"shift": FLIPS["shift"], "norm": FLIPS["norm"], "layer": MIDDLE},
}
LEAST = 0.05
"""What a flip costs at least, in acceptance length."""


@pytest.mark.nightly
@pytest.mark.parametrize("method", HEADS)
def test_acceptance_falls(method: str) -> None:
    found = effects("tiny", method, HEADS[method], PROMPTS, max_tokens=32)
    for effect in found:
        print(f"{method}, {effect}")  # noqa: T201  shown with pytest -s
    assert [str(effect) for effect in found if effect.after > effect.before - LEAST] == []


@pytest.mark.nightly
def test_a_flip_that_costs_nothing_is_noticed() -> None:
    """What a head does not read may be flipped: here, nothing is."""
    (effect,) = effects("tiny", "medusa", {"nothing": Flip()}, PROMPTS[:1], max_tokens=8)
    assert effect.after == effect.before
