"""soft_cross_entropy, a loss for draft models that learn a distribution, equals the same loss computed by torch."""

from __future__ import annotations

import pytest
import torch

from specdec_core import soft_cross_entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_torchs(dtype):
    torch.manual_seed(0)
    wanted, weight = torch.randn(3, 4, 9).softmax(-1), torch.rand(3, 4)
    logits = torch.randn(3, 4, 9, dtype=dtype, requires_grad=True)
    found = soft_cross_entropy(logits, wanted)
    expected = -(wanted * logits.float().log_softmax(-1)).sum(-1)
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad((found * weight).sum(), logits)
    (wanted_gradient,) = torch.autograd.grad((expected * weight).sum(), logits)
    torch.testing.assert_close(gradient, wanted_gradient)
