"""Operations for CUDA devices, as Triton kernels.

A row's result never depends on what else is in the forward pass: each kernel sums in an order that follows from the
row's own positions and from the layer's sizes, in tiles of fixed shapes (docs/architecture.md, Row-invariance)."""

from __future__ import annotations

import torch

from specdec_core import OpsContext
from specdec_kernels.gpu.argmax import likeliest
from specdec_kernels.gpu.attention import paged_attention, shared_bytes
from specdec_kernels.gpu.compaction import compact
from specdec_kernels.gpu.decoder import fuse_layers
from specdec_kernels.gpu.drawing import draw
from specdec_kernels.gpu.linear import pack_linear
from specdec_kernels.gpu.norm import rms_norm
from specdec_kernels.gpu.penalties import penalize
from specdec_kernels.gpu.residuals import residuals
from specdec_kernels.gpu.rotary import rotary
from specdec_kernels.gpu.store import store_kv
from specdec_kernels.gpu.top_tokens import most_likely
from specdec_kernels.gpu.truncation import truncate

OPS = {
    "paged_attention": paged_attention,
    "store_kv": store_kv,
    "rms_norm": rms_norm,
    "rotary": rotary,
    "pack_linear": pack_linear,
    "fuse_layers": fuse_layers,
    "draw": draw,
    "likeliest": likeliest,
    "truncate": truncate,
    "compact": compact,
    "penalize": penalize,
    "most_likely": most_likely,
    "residuals": residuals,
}
OF_ANY_CACHE = ("pack_linear", "draw", "likeliest", "truncate", "compact", "penalize", "most_likely", "residuals")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_CAPABILITY = (8, 0)
"""Of a GPU: older ones (before Ampere) have no bfloat16."""


def supports(name: str, context: OpsContext) -> bool:
    """Return whether the kernel of this name supports the device and the dtypes in `context`. All but those of
    OF_ANY_CACHE need a KV cache of the model's dtype, and attention needs heads whose tiles fit into the GPU's shared
    memory."""
    if context.dtype not in DTYPES or torch.cuda.get_device_capability(context.device) < LEAST_CAPABILITY:
        return False
    layout = context.kv_layout
    if name == "paged_attention":
        available = torch.cuda.get_device_properties(context.device).shared_memory_per_block_optin
        if shared_bytes(layout.key_dim, layout.value_dim, context.dtype) > available:
            return False
    return name in OF_ANY_CACHE or layout.dtype == context.dtype
