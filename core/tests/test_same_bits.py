"""Results are compared bit by bit, in little memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_core.models import same_bits
from specdec_core.models.same_bits import have_same_bits

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, 3.0], False),
        ([0.0, 1.0], [-0.0, 1.0], False),
        ([NAN, 1.0], [NAN, 1.0], True),
        ([NAN, 1.0], [-NAN, 1.0], True),
        ([NAN, 1.0], [1.0, 1.0], False),
        ([], [], True),
    ],
)
def test_bits(dtype: torch.dtype, one: list[float], other: list[float], expected: bool) -> None:
    pair = torch.tensor(one, dtype=dtype), torch.tensor(other, dtype=dtype)
    assert bool(have_same_bits(pair[:1], pair[1:])) is expected
    assert bool(have_same_bits(pair[1:], pair[:1])) is expected


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int32, torch.int64])
def test_whole_numbers(dtype: torch.dtype) -> None:
    one, other = torch.tensor([0, 1], dtype=dtype), torch.tensor([1, 1], dtype=dtype)
    assert have_same_bits([one], [one.clone()])
    assert not have_same_bits([one], [other])


def test_other_dtypes_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"is torch.float32 \[2\], not torch.float64 \[2\]"):
        have_same_bits([torch.ones(2)], [torch.ones(2).double()])
    with pytest.raises(ValueError, match=r"is torch.float32 \[2\], not torch.float32 \[3\]"):
        have_same_bits([torch.ones(2)], [torch.ones(3)])


class Largest(TorchDispatchMode):
    """Finds the largest tensor with memory of its own. num_bytes: its size."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not function.is_view:
            self.num_bytes = max(self.num_bytes, result.numel() * result.element_size())
        return result


def test_comparing_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_bits, "AT_ONCE", 1000)
    one = torch.rand(100, 300)
    other = one.clone()
    with Largest() as largest:
        assert have_same_bits([one], [other])
    assert largest.num_bytes <= 8 * 1000
    other[99, 299] = 2.0
    assert not have_same_bits([one], [other])
