"""The decoder layers of dense families are found as data (`DecoderLayer`), which a plugin runs in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_forward import NUM_SLOTS, TOLERANCE, loaded, tiny
from tiny_mtp import BY_NAME

from specdec_core import DecoderLayer
from specdec_proposer_mtp.module import MTPModule

DENSE = ("llama", "mimo")
ROWS = torch.tensor([1, NUM_SLOTS - 1])


def module_and_inputs(name: str) -> tuple[MTPModule, tuple[torch.Tensor, ...]]:
    sizes = {"intermediate_size": 64} if name in DENSE else {}  # a vector's last elements may round otherwise
    config, weights, embedded, features = tiny(name, **sizes)
    module = loaded(BY_NAME[name], config, weights).float()
    for parameter in module.parameters():  # so that every norm matters
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(parameter)))
    return module, (embedded.float(), features.float(), torch.arange(NUM_SLOTS))


def described(module: MTPModule) -> list[DecoderLayer]:
    module.block.self_attn.config._attn_implementation = "specdec"
    return module._described()


class AsData(torch.nn.Module):
    """Stands in for a `DecoderStack` whose layer is fused: computes it as it is described."""

    is_fused = True

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self._layer = layer

    def forward(self, hidden: Any, angles: Any, rows: Any) -> torch.Tensor:
        def attend(query: Any, key: Any, value: Any) -> torch.Tensor:
            repeat = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(repeat, dim=1) for each in (key, value))
            attended = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self._layer.scaling
            )
            return attended.transpose(1, 2).flatten(2)

        (hidden,) = self._layer.forward(*(each.unsqueeze(0) for each in (hidden, *angles)), attend)
        return hidden[rows]


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_layer_computes_the_same_as_data(name: str) -> None:
    module, inputs = module_and_inputs(name)
    expected = module(*inputs, rows=ROWS)
    (layer,) = described(module)
    module.stack = AsData(layer)
    torch.testing.assert_close(module(*inputs, rows=ROWS), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in DENSE])
def test_other_layers_are_not_data(name: str) -> None:
    module, _ = module_and_inputs(name)
    assert described(module) == []


@pytest.mark.parametrize("name", DENSE)
def test_a_layer_that_does_something_else_is_not_data(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = module_and_inputs(name)
    forward = module.block.forward
    monkeypatch.setattr(module.block, "forward", lambda *args, **kwargs: 1.01 * forward(*args, **kwargs))
    assert described(module) == []
