"""Parts of models: what ranks read, exchange and add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch import nn

from specdec_core import CompatibilityError, ConfigError
from specdec_core.models.split import Cut
from specdec_core.models.split_modules import Part, SplitHead, SplitLinear
from specdec_core.models.split_plan import _Splitting
from specdec_core.models.split_styles import STYLES
from specdec_core.ranks.driver import device_of
from specdec_core.ranks.messages import Sum, receive, send


def on_ranks(size: int, work: Callable[[Part], Any]) -> list[Any]:
    """Call `work` with the `Part` of each rank, in a thread of its own. Returns the results."""
    barrier, slots, results = Barrier(size, timeout=60), [torch.empty(0)] * size, [None] * size

    def run(rank: int) -> None:
        def gather(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
            slots[rank] = tensor
            barrier.wait()
            found = list(slots)
            barrier.wait()
            return found

        results[rank] = work(Part(rank, size, gather))

    threads = [Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_cut_of_packed_weights_has_a_part_of_each():
    cut = Cut((8, 2), 0, ((2, 4), (6, 8)))
    assert cut.part_shape == (4, 2)
    assert cut.read(torch.arange(16).view(8, 2))[:, 0].tolist() == [4, 6, 12, 14]


def test_sums_are_in_the_order_of_the_ranks_on_all_of_them():
    numbers = [torch.tensor([[1e8, 1.0]]), torch.tensor([[1.0, 2.0]]), torch.tensor([[-1e8, 3.0]])]
    found = on_ranks(3, lambda part: part.sum(numbers[part.rank]).tolist())
    assert found == [[[float(torch.tensor(1e8) + 1 - 1e8), 6.0]]] * 3


def test_bfloat16_is_rounded_once():
    numbers = [torch.tensor([256.0]), torch.tensor([1.0]), torch.tensor([1.0])]
    found = on_ranks(3, lambda part: part.sum(numbers[part.rank].bfloat16()).item())
    assert found == [258.0] * 3


@pytest.mark.parametrize("name", ["rowwise", "rowwise_split_input", "colwise_gather_output"])
@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_a_split_layer_computes_the_whole_one(name, has_bias):
    whole, style = nn.Linear(8, 4, bias=has_bias), STYLES[name]
    rows = torch.randn(3, 8)

    def compute(part: Part) -> torch.Tensor:
        own = nn.Linear(8 // (1 + style.dim), 4 // (2 - style.dim), bias=has_bias)
        own.weight.copy_(whole.weight.chunk(2, style.dim)[part.rank])
        if has_bias:
            own.bias.copy_(whole.bias.chunk(2)[part.rank] if style.dim == 0 else whole.bias)
        given = part.own(rows) if style.dim == 1 and not style.narrows else rows
        return SplitLinear(own, style, part)(given)

    # inference mode is of a thread
    for found in on_ranks(2, torch.inference_mode()(compute)):
        assert torch.allclose(found, whole(rows), atol=1e-6)


@torch.no_grad()
def test_a_split_head_has_whole_logits_and_rows():
    whole = nn.Linear(4, 6, bias=False)
    hidden, token_ids = torch.randn(2, 4), torch.tensor([[5, 0], [2, 3]])

    def compute(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        own = nn.Linear(4, 3, bias=False)
        own.weight.copy_(whole.weight.chunk(2)[part.rank])
        head = SplitHead(own, part)
        return head(hidden), head.rows()(token_ids)

    for logits, rows in on_ranks(2, torch.no_grad()(compute)):
        assert torch.allclose(logits, whole(hidden), atol=1e-6)
        assert torch.equal(rows, whole.weight[token_ids])


def test_too_few_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert device_of(1, torch.device("cuda:1"), 2) == torch.device("cuda:2")
    assert device_of(3, torch.device("cpu"), 4) == torch.device("cpu")
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 needs as many GPUs, from cuda on, and there are 3"):
        device_of(3, torch.device("cuda"), 4)


class Pipe:
    """Both ends of a pipe."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def send_bytes(self, message: bytes) -> None:
        self.messages.append(message)

    def recv_bytes(self) -> bytes:
        return self.messages.pop(0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(2, 3).T,
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.ones(1, dtype=torch.int64).expand(3),
        torch.empty(0, 4),
        torch.tensor([True, False]),
    ],
    ids=str,
)
def test_tensors_in_messages_stay_as_they_are(tensor):
    pipe, sent, received = Pipe(), Sum(), Sum()
    send([pipe], [("name", (tensor, "text"))], sent)
    ((name, (found, text)),) = receive(pipe, received)
    assert (name, text, found.dtype, found.shape) == ("name", "text", tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)
    assert (sent.num_messages, sent.checksum) == (received.num_messages, received.checksum) == (1, sent.checksum)


class Attention(nn.Module):
    """One key head of 8 numbers, and a gate that is as wide."""

    def __init__(self, has_gate: bool) -> None:
        super().__init__()
        self.k_proj, self.v_proj = nn.Linear(16, 8), nn.Linear(16, 8)
        if has_gate:
            self.gate_proj = nn.Linear(16, 8)

    @property
    def base_model(self) -> nn.Module:
        return self


@pytest.mark.parametrize("has_gate", [False, True])
def test_layers_as_wide_as_keys_are_not_repeated_unnoticed(has_gate):
    model = Attention(has_gate)
    names = {module: name for name, module in model.named_modules()}
    plan = dict.fromkeys(["k_proj", "v_proj", "gate_proj"], "colwise")
    splitting = _Splitting(model, names, None, Part.pretended(2), plan, "gated")
    if has_gate:
        with pytest.raises(CompatibilityError, match="k_proj, v_proj, gate_proj have as many outputs as the keys"):
            dict(splitting._repeated(model, (1, 8, 8)))
    else:
        assert dict(splitting._repeated(model, (1, 8, 8))) == {"k_proj": (0, 8), "v_proj": (0, 8)}
