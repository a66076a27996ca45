"""Operations compiled for the CPU at hand, which run on as many threads as torch uses."""

from specdec_core import OpsContext
from specdec_kernels.cpu.attention import paged_attention, store_kv
from specdec_kernels.cpu.bits import LIKE
from specdec_kernels.cpu.decoder import fuse_layers
from specdec_kernels.cpu.drawing import draw
from specdec_kernels.cpu.lanes import is_supported
from specdec_kernels.cpu.linear import pack_linear
from specdec_kernels.cpu.norm import rms_norm
from specdec_kernels.cpu.rotary import rotary

OPS = {
    "paged_attention": paged_attention,
    "store_kv": store_kv,
    "rms_norm": rms_norm,
    "rotary": rotary,
    "pack_linear": pack_linear,
    "fuse_layers": fuse_layers,
    "draw": draw,
}


def supports(name: str, context: OpsContext) -> bool:
    """Return whether the compiled operation of this name supports the dtypes in `context`. The model's dtype must be
    float32 or bfloat16. `pack_linear` and `fuse_layers` need a CPU with AVX2 and FMA for float32, and with AVX512-BF16
    for bfloat16. All but `pack_linear` and `draw` need a KV cache of the model's dtype. `draw` works for any model."""
    if name == "draw":
        return True
    if name in ("pack_linear", "fuse_layers") and not is_supported(context.dtype):
        return False
    return name == "pack_linear" or (context.dtype in LIKE and context.kv_layout.dtype == context.dtype)
