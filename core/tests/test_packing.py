"""Linear layers packed (reordered) for oneDNN compute what the originals compute; other layers stay unchanged."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tiny_families import EXPERTS, LATENT, logits, tiny_model
from torch import nn
from torch.nn.functional import linear, pad

from specdec_core.contracts.kv import KVContext
from specdec_core.kv import PagedKVManager
from specdec_core.models import Model
from specdec_core.models.attention import PagedAttention
from specdec_core.models.load import ModelSource
from specdec_core.models.packed_linear import PackedLinear, pack_linears, recording_shared_inputs
from specdec_core.ops import REFERENCE
from specdec_core.ops.linear import pack_linear
from specdec_core.ops.padding import Padding

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
HAS_BFLOAT16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
needs_bfloat16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="this CPU computes no bfloat16")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)]
HAS_AMX = torch.cpu._is_amx_tile_supported()
IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
SIZES = [(64, 64), (100, 36), (256, 1024), (768, 512), (2048, 128)]


def random_linear(num_in: int, num_out: int, dtype: torch.dtype = torch.float32, bias: bool = False) -> nn.Linear:
    torch.manual_seed(num_in + num_out)
    return nn.Linear(num_in, num_out, bias=bias).to(dtype).requires_grad_(False)


class Branches(nn.Module):
    """Three linear layers on the same input. If `other` is given, it is the third layer's input."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.left, self.right = random_linear(32, 20, dtype, bias=True), random_linear(32, 12, dtype)
        self.third = random_linear(32, 8, dtype, bias=True)

    def forward(self, rows: torch.Tensor, other: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        return self.left(rows), self.right(rows), self.third(rows if other is None else other)


def groups_of(model: nn.Module, *given: Any) -> list[list[str]]:
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    with recording_shared_inputs(model) as groups:
        model(*given)
    return [[names[each] for each in group] for group in groups]


def alone(linear: nn.Linear) -> Any:
    model = nn.Sequential(linear)
    pack_linears(model, pack_linear)
    return model


def packed(model: nn.Module, *given: Any) -> Any:
    model = copy.deepcopy(model)
    with recording_shared_inputs(model) as groups:
        model(*given)
    pack_linears(model, pack_linear, groups)
    return model


@needs_bfloat16
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_bfloat16_is_the_same_to_the_last_bit(size: tuple[int, int], bias: bool) -> None:
    original = random_linear(*size, torch.bfloat16, bias)
    layer, rows = alone(original), torch.randn(64, size[0]).to(torch.bfloat16)
    for n in range(1, 65):
        assert torch.equal(layer(rows[:n]), original(rows[:n])), n


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_row_is_the_same_among_others(size: tuple[int, int], dtype: torch.dtype) -> None:
    """A row's result is bit for bit the same whatever the batch's other rows are, if the number of rows is a multiple
    of 4.

    The engine pads batches to such a number. In bfloat16 with AMX this holds for up to 32 rows. In float32 with oneDNN
    3.10, which torch 2.11 has, it holds for some sizes up to 12 rows only.
    """
    most = 32 if dtype == torch.bfloat16 and HAS_AMX else 12 if dtype == torch.float32 and IS_OLD else 64
    original = random_linear(*size, dtype)
    layer, rows = alone(original), torch.randn(most, size[0]).to(dtype)
    one_by_one = torch.cat([layer(pad(row, (0, 0, 0, 3)))[:1] for row in rows.split(1)])
    for n in range(4, most + 1, 4):
        assert torch.equal(layer(rows[:n]), one_by_one[:n]), n
    torch.testing.assert_close(one_by_one, original(rows), rtol=1e-5 if dtype == torch.float32 else 0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_with_one_input_become_one_product(dtype: torch.dtype) -> None:
    original, rows = Branches(dtype), torch.randn(8, 32).to(dtype)
    assert groups_of(original, rows) == [["left", "right", "third"]]
    assert groups_of(original, rows, rows.clone()) == [["left", "right"], ["third"]]
    for found, expected in zip(packed(original, rows)(rows), original(rows), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.shape == expected.shape


CALLS = st.lists(st.tuples(st.sampled_from(["left", "right", "third"]), st.integers(0, 2), st.booleans()), max_size=12)


@settings(deadline=None, max_examples=50)
@given(calls=CALLS)
def test_a_group_computes_right_however_it_is_called(calls: list) -> None:
    """Linear layers that are computed as one matrix product give the right results for any sequence of calls. Between
    two calls an input may change in place."""
    original, inputs = Branches(), list(torch.randn(3, 4, 32))
    model = packed(original, inputs[0])
    last: tuple[str, int] | None = None
    for name, i, changes in calls:
        if changes and last == (name, i):
            inputs[i].add_(1)
        torch.testing.assert_close(getattr(model, name)(inputs[i]), getattr(original, name)(inputs[i]))
        last = name, i


@pytest.mark.parametrize(
    ("model_type", "options", "groups"),
    [
        ("llama", {}, [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]),
        ("qwen3", {"attention_bias": True}, [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]),
        ("qwen3_moe", EXPERTS, [["q_proj", "k_proj", "v_proj"]]),
        ("deepseek_v3", LATENT, [["q_a_proj", "kv_a_proj_with_mqa"], ["gate_proj", "up_proj"]]),
        ("gpt_neox", {}, []),
        ("phi3", {}, []),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_families(model_type: str, options: dict, groups: list, dtype: torch.dtype) -> None:
    model = tiny_model(model_type, dtype, **options)
    before = logits(model)
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    with recording_shared_inputs(model) as found:
        logits(model, 2)
    assert [[names[each] for each in group] for group in found if len(group) > 1] == groups * 2  # two layers
    pack_linears(model, pack_linear, found)
    assert not any(type(module) is nn.Linear for module in model.modules())
    if dtype == torch.bfloat16:
        assert torch.equal(logits(model), before)
    else:
        torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)


def test_a_tied_embedding_stays_usable() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    before, embedding = logits(model), model.get_input_embeddings().weight
    assert embedding is model.lm_head.weight
    numbers = embedding.clone()
    pack_linears(model, pack_linear)
    assert type(model.lm_head) is PackedLinear
    assert torch.equal(model.get_input_embeddings().weight, numbers)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)


def test_a_layer_in_two_places_is_packed_once() -> None:
    layer = random_linear(8, 8)
    model = nn.ModuleDict({"a": nn.Sequential(layer), "b": nn.Sequential(layer)})
    pack_linears(model, pack_linear)
    assert type(model["a"][0]) is PackedLinear
    assert model["a"][0] is model["b"][0]


class Reading(nn.Module):
    """A module that calls one of its linear layers three times and only reads the weight of the other, as some MoE
    routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = random_linear(8, 8), random_linear(8, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.called(rows) + self.called(rows) + self.called(2 * rows) + linear(rows, self.read.weight)


def test_a_layer_whose_weight_is_read_stays() -> None:
    original, rows = Reading(), torch.randn(4, 8)
    model = packed(original, rows)
    assert type(model.called) is PackedLinear
    torch.testing.assert_close(model(rows), original(rows))


class Doubled(nn.Linear):
    """A subclass of nn.Linear, as quantized linear layers are. It must not be packed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return linear(input, 2 * self.weight)


class Coded(torch.Tensor):
    """A weight of a Tensor subclass, like a quantized weight. An nn.Linear with this weight must not be packed."""


def with_coded_weight() -> nn.Linear:
    layer = random_linear(8, 8)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Coded), requires_grad=False)
    return layer


@pytest.mark.parametrize(
    "layer",
    [Doubled(8, 8, bias=False), with_coded_weight(), random_linear(8, 8, torch.float64)],
    ids=["class", "weight", "type"],
)
def test_other_layers_are_left_alone(layer: nn.Linear) -> None:
    model = nn.ModuleDict({"other": layer, "plain": random_linear(8, 8)})
    pack_linears(model, pack_linear)
    pack_linears(model, pack_linear, [[model["other"]]])
    assert model["other"] is layer
    assert type(model["plain"]) is PackedLinear


@needs_bfloat16
def test_layers_of_two_types_are_no_group() -> None:
    layers = [random_linear(8, 8, dtype) for dtype in (torch.float32, torch.bfloat16)]
    model = nn.ModuleList(layers)
    pack_linears(model, pack_linear, [layers])
    assert [type(layer) for layer in model] == [PackedLinear] * 2


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_where_onednn_is_switched_off_nothing_is_packed() -> None:
    model = Branches()
    before = dict(model.named_children())
    with torch.backends.mkldnn.flags(enabled=False):
        pack_linears(model, pack_linear, [[model.left, model.right]])
        pack_linears(model, pack_linear)
    assert dict(model.named_children()) == before


def test_a_target_holds_its_weights_once(checkpoint: Path) -> None:
    device = torch.device("cpu")
    target = Model(ModelSource(model=checkpoint, device=device, dtype="float32"))
    originals = [weakref.ref(module) for module in target._model.modules() if type(module) is nn.Linear]
    kv = PagedKVManager(KVContext(1, 16, device))
    kv.add_group(target.kv_groups.only)
    target.attach(PagedAttention(kv, target.kv_groups.places, REFERENCE, Padding.of(device)), REFERENCE)
    gc.collect()
    assert originals
    assert not any(original() for original in originals)
