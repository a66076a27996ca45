"""The attention of training against torch's, for lengths that are and are not a multiple of its blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch.compile's own imports
@pytest.mark.parametrize("length", [1, 127, 128, 255, 1100])
def test_blocked_attention_is_causal_attention(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    from training.model import blocked_attention

    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(2, heads, length, 16, generator=generator) for heads in (4, 2, 2))
    outputs, _ = blocked_attention(torch.nn.Module(), query, key, value, None, 0.25)
    expected = scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.25, enable_gqa=True)
    assert torch.allclose(outputs, expected.transpose(1, 2), atol=1e-5)
