"""Operations compiled for the CPU at hand, on the threads that torch uses."""

from specdec_kernels.cpu.attention import paged_attention, store_kv
from specdec_kernels.cpu.linear import pack_linear
from specdec_kernels.cpu.norm import rms_norm
from specdec_kernels.cpu.rotary import rotary

OPS = {
    "paged_attention": paged_attention,
    "store_kv": store_kv,
    "rms_norm": rms_norm,
    "rotary": rotary,
    "pack_linear": pack_linear,
}
