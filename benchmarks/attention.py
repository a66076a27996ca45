"""Measures attention of specdec-kernels in bfloat16: with AMX, without it, and beside torch, which gets keys and values
that lie together (specdec-kernels reads them from the paged cache).

    python benchmarks/attention.py     # writes benchmarks/results/attention.json

All ways compute the same in turn. Figures are medians, in microseconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

import torch
from linear_layers import AMX, TORCH, VECTORS, medians_us
from measuring import RESULTS, command, machine, write
from torch.nn.functional import scaled_dot_product_attention

from specdec_core.ops.attention_plan import AttentionPlan, KVMetadata, Padding, Visibility
from specdec_kernels.cpu import OPS, amx

HEADS = (4, 2, 64), (32, 8, 128)
"""Query heads, key and value heads, and their width: the embedded model's, and those of Llama 3 8B."""
CASES = (1, 1, 600), (1, 5, 600), (16, 1, 600), (16, 5, 600), (1, 512, 0), (1, 2048, 0)
"""Requests, tokens of each in the forward pass, and tokens before these, to which all attend."""
BLOCK_SIZE = 16


def ways(heads: tuple[int, int, int], case: tuple[int, int, int]) -> dict[str, Callable[[int], torch.Tensor]]:
    (num_heads, num_kv_heads, width), (batch, num_tokens, before) = heads, case
    length = before + num_tokens
    num_blocks = -(-length // BLOCK_SIZE)
    tables = torch.randperm(batch * num_blocks).view(batch, num_blocks)
    slots = (tables[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1)[:, :length]
    positions = torch.arange(before, length).repeat(batch)
    plan = AttentionPlan(
        KVMetadata((before,) * batch, (num_tokens,) * batch, tables, slots[:, before:].flatten(), BLOCK_SIZE),
        Visibility(positions, positions + 1, None, 0),
        Padding.of(torch.device("cpu")),
    )
    query = torch.randn(batch * num_tokens, num_heads, width).bfloat16()
    keys, values = (torch.randn(tables.numel() * BLOCK_SIZE, num_kv_heads, width).bfloat16() for _ in range(2))

    def paged(uses_amx: bool, number: int) -> torch.Tensor:
        with mock.patch.object(amx, "serves", return_value=uses_amx):
            for _ in range(number):
                found = OPS["paged_attention"](query, keys, values, plan, width**-0.5)
        return found

    rows = query.view(batch, num_tokens, num_heads, width).transpose(1, 2)
    seen = torch.ones(num_tokens, length, dtype=torch.bool).tril(before)
    found = {AMX: partial(paged, True)} if amx.is_allowed() else {}
    given = (keys[slots].transpose(1, 2), values[slots].transpose(1, 2))
    masked = {"is_causal": True} if before == 0 else {"attn_mask": seen if num_tokens > 1 else None}

    def in_torch(number: int) -> torch.Tensor:
        for _ in range(number):
            found = scaled_dot_product_attention(rows, *given, enable_gqa=True, **masked)
        return found

    return found | {VECTORS: partial(paged, False), TORCH: in_torch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "attention.json")
    args = parser.parse_args()
    rows = []
    for heads, case in product(HEADS, CASES):
        found = ways(heads, case)
        batch, num_tokens, _ = case
        results = {name: way(1) for name, way in found.items()}
        results[TORCH] = results[TORCH].transpose(1, 2).reshape(batch * num_tokens, *heads[::2])
        for result in results.values():
            torch.testing.assert_close(result, results[TORCH], rtol=2**-6, atol=2e-2)
        rows.append(
            {"heads": heads, "batch": batch, "num_tokens": num_tokens, "context": case[2], "us": medians_us(found)}
        )
        print(*rows[-1].values(), flush=True)
    write({"command": command("attention.py"), "machine": machine(), "rows": rows}, args.out)


if __name__ == "__main__":
    main()
