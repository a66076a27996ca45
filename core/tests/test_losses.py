"""The losses of training equal those computed by torch, however the logits are divided."""

from __future__ import annotations

import pytest
import torch

from specdec_core import accuracy, soft_cross_entropy, token_loss
from specdec_core.drafting import losses

VOCAB_SIZE = 9


@pytest.fixture(params=[1, 2, 5, 9], ids=lambda rows: f"{rows} rows at once")
def rows_at_once(request, monkeypatch):
    monkeypatch.setitem(losses.NUM_LOGITS, "cpu", request.param * VOCAB_SIZE + 1)


def check(found: torch.Tensor, expected: torch.Tensor, logits: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected)
    weight = torch.rand_like(expected)
    ours, torchs = (torch.autograd.grad((each * weight).sum(), logits)[0] for each in (found, expected))
    torch.testing.assert_close(ours, torchs)


@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_cross_entropy_is_torchs(dtype):
    torch.manual_seed(0)
    wanted = torch.randn(3, 4, VOCAB_SIZE).softmax(-1)
    logits = torch.randn(3, 4, VOCAB_SIZE, dtype=dtype, requires_grad=True)
    check(soft_cross_entropy(logits, wanted), -(wanted * logits.float().log_softmax(-1)).sum(-1), logits)


@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_loss_is_torchs(dtype):
    torch.manual_seed(0)
    wanted, counts = torch.randint(VOCAB_SIZE, (3, 4)), torch.rand(3, 4) < 0.7
    logits = torch.randn(3, 4, VOCAB_SIZE, dtype=dtype, requires_grad=True)
    loss, share = token_loss(logits, wanted, counts)
    expected = torch.nn.functional.cross_entropy(logits.float()[counts], wanted[counts])
    check(loss, expected, logits)
    assert float(share) == pytest.approx(float((logits.argmax(-1) == wanted)[counts].float().mean()))


def test_losses_are_in_float32_under_autocast():
    logits = 3 * torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    wanted = logits.roll(1, 0).softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        found = soft_cross_entropy(logits, wanted)
    torch.testing.assert_close(found, soft_cross_entropy(logits, wanted), atol=1e-6, rtol=0)


def test_a_wrong_part_is_noticed(monkeypatch):
    parts = losses._parts
    monkeypatch.setattr(losses, "_parts", lambda logits: list(parts(logits))[:-1])
    with pytest.raises(AssertionError):
        test_token_loss_is_torchs(torch.float32)


def test_accuracy_counts_a_token_that_shares_the_highest_logit():
    logits = torch.tensor([[[1.0, 1.0, 0.0], [0.0, 1.0, 2.0]]])
    assert float(accuracy(logits, torch.tensor([[1, 1]]), torch.tensor([[0.75, 0.25]]))) == 0.75


def test_no_tokens_have_no_loss():
    loss, share = token_loss(
        torch.zeros(2, 0, 5, requires_grad=True), torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0)
    )
    assert (float(loss.detach()), float(share)) == (0, 0)
