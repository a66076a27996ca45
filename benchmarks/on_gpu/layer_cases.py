"""A whole decoder layer, on which `fuse_layers` is measured. Its reference is `DecoderLayer.forward` with torch's
operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn.functional import linear

from on_gpu.case import DTYPE, SIZE, Bound, Case, Operation, cache_of, heads_of, random
from on_gpu.setup import Sizes
from specdec_core.ops import REFERENCE
from specdec_core.ops.decoder import PRODUCTS, DecoderLayer, Norm


def layer_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """A layer of Llama, with one token of each request."""
    shape, (num_heads, num_kv_heads, dim) = sizes.kernel_shape, heads_of(sizes)
    hidden_size, inner = shape["hidden_size"], shape["intermediate_size"]
    weight_sizes = {
        "query_key_value": ((num_heads + 2 * num_kv_heads) * dim, hidden_size),
        "attention_output": (hidden_size, num_heads * dim),
        "gate_and_up": (2 * inner, hidden_size),
        "down": (hidden_size, inner),
    }
    num_weights = sum(num_out * num_in for num_out, num_in in weight_sizes.values())
    for context, batch in product(sizes.contexts, sizes.batches):

        def bind(context: int = context, batch: int = batch) -> Callable[[Operation], Bound]:
            weights = {name: random(*size, device=device) * size[1] ** -0.5 for name, size in weight_sizes.items()}
            keys, values, plan = cache_of(sizes, batch, context, 1, device)
            hidden = random(batch, hidden_size, device=device)
            norm = Norm(torch.ones_like(hidden[0]), 1e-5, rounds_first=True)
            angles = torch.rand(context, dim, device=device)
            tables = angles.cos().to(DTYPE), angles.sin().to(DTYPE)

            def bound(op: Operation) -> Bound:
                is_reference = op is REFERENCE["fuse_layers"]
                pack = _torch_linear if is_reference else _packed
                layer = DecoderLayer(
                    num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=dim, rope=0, scaling=dim**-0.5,
                    features={}, activation="silu", input_norm=norm, mlp_norm=norm, query_norm=None, key_norm=None,
                    attention_norm=None, down_norm=None, **{name: pack(weights[name]) for name in PRODUCTS},
                )  # fmt: skip
                own = keys.clone(), values.clone()
                slots, positions = plan.metadata.slot_mapping, plan.visibility.positions
                if is_reference:
                    return partial(_as_modules_do, layer, hidden, tables, positions, own, slots, plan)
                return partial(op([layer]), hidden, [tables], positions, [own], slots, plan, None)

            return bound

        num_bytes = SIZE * (num_weights + 2 * batch * context * num_kv_heads * dim)
        num_flops = 2 * batch * (num_weights + 2 * context * num_heads * dim)
        tolerance = 2**-6  # a chain of roundings
        yield Case({"batch": batch, "context": context}, num_bytes, num_flops, bind, tolerance)


def _torch_linear(weight: torch.Tensor) -> Any:
    return partial(linear, weight=weight)


def _packed(weight: torch.Tensor) -> Any:
    from specdec_kernels.gpu import OPS  # in an environment without Triton, no case asks for it

    return OPS["pack_linear"](weight, None)


def _as_modules_do(
    layer: DecoderLayer, hidden: Any, tables: Any, positions: Any, cache: Any, slots: Any, plan: Any
) -> torch.Tensor:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
        REFERENCE["store_kv"](*cache, slots, key, value)
        attended: torch.Tensor = REFERENCE["paged_attention"](query, *cache, plan, layer.scaling)
        return attended.flatten(1).unsqueeze(0)

    return layer.forward(hidden.unsqueeze(0), *(table[positions].unsqueeze(0) for table in tables), attend)[0]
