"""What attention has to hold on every type of device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from passes import Heads, Pass, Request, make_pass

from specdec_core.contracts.draft import DEAD
from specdec_core.ops import REFERENCE

Attention = Callable[..., torch.Tensor]
DTYPES = [torch.float32, torch.bfloat16]
TREE = (-1, -1, 0, 0, DEAD, 1, 2, 2)


@st.composite
def features(draw: Any) -> dict[str, Any]:
    return {
        "window": draw(st.none() | st.integers(1, 120)),
        "softcap": draw(st.none() | st.sampled_from([0.5, 2, 30.0])),
        "sinks": draw(st.none() | st.just("some")),
    }


def computed(attention: Attention, made: Pass, wanted: dict[str, Any]) -> torch.Tensor:
    sinks = torch.linspace(-2, 3, made.query.shape[1]) if wanted.get("sinks") else None
    return attention(made.query, made.keys, made.values, made.fresh_plan(), 0.3, **wanted | {"sinks": sinks})


def assert_right(attention: Attention, made: Pass, wanted: dict[str, Any]) -> None:
    """Compare a forward pass with the reference in float64."""
    found = computed(attention, made, wanted)

    def exact(values: torch.Tensor) -> torch.Tensor:
        wide = Pass(made.requests, made.plan, made.query.double(), made.keys.double(), values)
        return computed(REFERENCE["paged_attention"], wide, wanted)

    expected, mean_size = exact(made.values.double()), exact(made.values.double().abs())
    rounding = 2**-8 if made.query.dtype == torch.bfloat16 else 2e-6  # of each weight, and of the result
    error, most = (found - expected).abs(), rounding * (mean_size + expected.abs()) * 1.01 + 3e-6
    n = sum(made.plan.metadata.lengths)
    assert found.dtype == made.query.dtype
    assert (error[:n] <= most[:n]).all(), (error[:n] / most[:n]).max()
    assert not found[n:].any()


def assert_as_alone(
    attention: Attention, made: Pass, wanted: dict[str, Any], block_size: int, tokens: Callable[[int], list[int]]
) -> None:
    """Compare tokens of a forward pass, to the last bit, with themselves decoded alone. tokens: called with the number
    of tokens of a request, returns which of them."""
    together, dtype = computed(attention, made, wanted), made.query.dtype
    num_kv_heads, key_dim = made.keys.shape[1:]
    heads = Heads(num_kv_heads, made.query.shape[1] // num_kv_heads, key_dim, made.values.shape[2])
    for b, request in enumerate(made.requests):
        rows = range(*made.rows(b).indices(len(made.query)))
        for token in tokens(len(rows)):
            path, row = request.path(token), rows[token]
            alone = make_pass([Request(len(path) - 1, 1)], heads, block_size, dtype, seed=row)
            places = alone.slots(0, list(range(len(path))))
            alone.keys[places], alone.values[places] = (c[made.slots(b, path)] for c in (made.keys, made.values))
            alone.query[:] = made.query[row]
            assert torch.equal(computed(attention, alone, wanted)[0], together[row]), (request, token)
