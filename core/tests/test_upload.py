"""`upload` gives values the types that torch would."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from specdec_core.ops.upload import upload


@pytest.mark.parametrize("values", [[3, 5], [0.5, 1], [True, False], (7,), []])
def test_the_types_are_those_of_torch(values: Sequence[float]) -> None:
    uploaded, expected = upload(values, torch.device("cpu")), torch.as_tensor(values)
    assert uploaded.dtype == expected.dtype
    assert uploaded.equal(expected)
