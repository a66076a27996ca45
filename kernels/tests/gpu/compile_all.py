"""Compiles all kernels for a CUDA device that need not be there, as they are called for layers of Llama 3 8B. Prints
each kernel's name, with how many bytes of shared memory it takes. Run by test_compiling.py, without the interpreter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parent.parent))

from passes import Heads, Pass, Request, make_pass

from specdec_core.ops.decoder import PRODUCTS, DecoderLayer, Norm
from specdec_core.ops.token_counts import TokenCounts

TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
TREE = (-1, -1, 0, 0, 1)
launches: list[tuple[JITFunction, dict[str, Any], dict[str, Any]]] = []


def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
    options = {name: keywords.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion") if name in keywords}
    launches.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | keywords, options))


def type_of(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return TYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i64" if argument >= 2**31 else "i32"


def is_even(kernel: JITFunction, name: str, given: dict[str, Any]) -> bool:
    """Whether a launch compiles in that an address or a number is a multiple of 16."""
    param = next(param for param in kernel.params if param.name == name)
    if param.is_constexpr or param.do_not_specialize or isinstance(given[name], float):
        return False
    return isinstance(given[name], torch.Tensor) or given[name] % 16 == 0


def compiled(kernel: JITFunction, given: dict[str, Any], options: dict[str, Any], capability: int) -> Any:
    constants = {param.name: given[param.name] for param in kernel.params if param.is_constexpr}
    types = {name: "constexpr" if name in constants else type_of(each) for name, each in given.items()}
    even = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if is_even(kernel, name, given)}
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants, even)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def launch_all(head_dim: int) -> None:
    from specdec_kernels.gpu import OPS, attention, linear

    dtype = torch.bfloat16
    heads = Heads(8, 4, head_dim, head_dim)
    made = make_pass([Request(300, 1, TREE), Request(9, 3)], heads, dtype=dtype)
    features = {"window": 100, "softcap": 30.0, "sinks": torch.ones(32, dtype=dtype)}
    for few, each in ((0, {}), (10**9, {}), (0, features), (10**9, features)):
        attention.FEW_PROGRAMS = few
        OPS["paged_attention"](made.query, made.keys, made.values, made.fresh_plan(), 0.1, **each)
    slots = torch.zeros(2, dtype=torch.int64)
    OPS["store_kv"](made.keys, made.values, slots, made.keys[:2], made.values[:2])
    OPS["compact"](made.keys[None], made.values[None], slots, slots)
    rows, weight = torch.ones(3, 4096, dtype=dtype), torch.ones(1024, 4096, dtype=dtype)
    for most, bias in ((0, None), (256, None), (256, weight[:, 0].contiguous())):
        linear.MOST_ROWS_APART = most
        OPS["pack_linear"](weight, bias)(rows)
    OPS["rms_norm"](rows, weight[0], 1e-5)
    OPS["likeliest"](rows)
    OPS["most_likely"](rows, 8)
    parameters = np.ones(3), np.zeros(3), np.zeros(3, dtype=np.int64), np.ones(3)
    OPS["truncate"](torch.ones(3, 128_256), *parameters)
    OPS["draw"](torch.ones(3, 128_256), torch.zeros(3, dtype=torch.float64))
    counts = TokenCounts(0, 128_256, torch.device("cpu"))
    path = torch.ones(3, 2, dtype=torch.int64)
    OPS["penalize"](torch.ones(3, 128_256), path, [0], [3], np.ones((1, 3)), [counts], [np.arange(3)])
    for has_few_tokens in (False, True):
        verify(has_few_tokens)
    run_layers(made, heads)
    angles = torch.ones(1, 3, 128, dtype=dtype)
    OPS["rotary"](
        rows.view(1, 3, 32, 128).transpose(1, 2), weight[:3, :1024].view(1, 3, 8, 128).transpose(1, 2), angles, angles
    )


def run_layers(made: Pass, heads: Heads) -> None:
    """One with the norms of Llama, and one with those of Gemma 2, and norms of heads."""
    from specdec_kernels.gpu import OPS

    num_kv_heads, head_dim, width, inner = heads.num_kv_heads, heads.key_dim, 512, 1536
    num_heads, dtype = num_kv_heads * heads.groups, made.query.dtype
    sizes = [((num_heads + 2 * num_kv_heads) * head_dim, width), (width, num_heads * head_dim)]
    sizes += [(2 * inner, width), (width, inner)]
    products = [OPS["pack_linear"](torch.ones(size, dtype=dtype), None) for size in sizes]
    for has_more_norms, activation in ((False, "silu"), (True, "gelu_tanh")):

        def norm(size: int, is_there: bool = True, rounds_first: bool = not has_more_norms) -> Norm | None:
            weight = torch.ones(size, dtype=dtype if rounds_first else torch.float32)
            return Norm(weight, 1e-5, rounds_first) if is_there else None

        layer = DecoderLayer(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rope=0, scaling=0.1, features={},
            activation=activation, input_norm=norm(width), mlp_norm=norm(width),
            query_norm=norm(head_dim, has_more_norms), key_norm=norm(head_dim, has_more_norms),
            attention_norm=norm(width, has_more_norms), down_norm=norm(width, has_more_norms),
            **dict(zip(PRODUCTS, products, strict=True)),
        )  # fmt: skip
        positions = made.plan.visibility.positions
        table = torch.ones(len(positions), head_dim, dtype=dtype)
        hidden, cache = torch.ones(len(positions), width, dtype=dtype), (made.keys, made.values)
        slots = torch.full_like(positions, -1)
        run = OPS["fuse_layers"]([layer])
        for rows in (positions, None):
            run(hidden, [(table, table)], rows, [cache], slots, made.fresh_plan(), None)


def verify(has_few_tokens: bool) -> None:
    """A root, and two draft tokens below it that were drawn without replacement."""
    from specdec_core.ops.residuals import Proposals
    from specdec_kernels.gpu import OPS

    rows, nodes, vocab_size = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2]), 128_256
    q_to_target = torch.arange(32_000) if has_few_tokens else None
    q = torch.ones(1, len(q_to_target) if q_to_target is not None else vocab_size)
    proposals = Proposals(3, vocab_size, rows, rows * 0, rows * 0, rows.unsqueeze(1), q, q_to_target, None)
    target = OPS["residuals"](torch.ones(3, vocab_size), proposals)
    target.ratios(nodes)
    target.missed(nodes, torch.ones(2))
    target.refuse(nodes, torch.ones(2))
    target.weights(nodes)


if __name__ == "__main__":
    JITFunction.run = record
    launch_all(head_dim := int(sys.argv[2]))
    from specdec_kernels.gpu.attention import shared_bytes

    print("expected", shared_bytes(head_dim, head_dim, torch.bfloat16))
    for each in launches:
        found = compiled(*each, capability=int(sys.argv[1]))
        print(each[0].__name__, found.metadata.shared)
