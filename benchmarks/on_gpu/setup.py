"""What the parts measure: sizes, in full and in small, and how much of the time each part gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import time
from typing import Any

from attrs import field, frozen
from inflate import SHAPES
from widen import Widths

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
SMALL_LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 8192,
}
MODEL_FREE = {
    "ngram": {"num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    # A prompt is completed several times: the cache would find its output.
    "suffix": {"num_speculative_tokens": 8, "suffix_decoding_max_cached_requests": 0},
}
"""Methods without weights, and their options."""
WITH_DRAFTS = ("eagle3", "draft_model", "mtp", "eagle", "medusa", "mlp_speculator")
"""Methods whose drafts come with the embedded model."""


@frozen(kw_only=True)
class Sizes:
    """What is measured. The defaults are those of a GPU; SMALL is to see whether the benchmark runs.

    kernel_shape: of the Llama whose layers' sizes the kernels get.
    batches, contexts: of attention and of plain decoding, in requests and tokens.
    linear_rows, rows: of linear layers, and of the other kernels.
    limit_numbers, limit_size: the numbers that are copied, and the rows of the square matrices that are multiplied, to
        find the limits of the device.
    cell_s: seconds for which one function is called.
    plain_steps: of plain decoding that are timed, after `warm_steps` others.
    shapes: the inflated models: {name: (times as deep, times as wide)}.
    methods: of drafting, of those models.
    prompts, prompt_tokens: their number, if a batch is not larger, and the most tokens of each.
    equality_prompts, equality_tokens: the number of prompts, and of tokens of each output, that are compared.
    draws, draw_vocabulary: of the chi-square test.
    timed_steps: of speculation, after `warm_steps` others.
    step_batches, step_rounds, counted_steps: of the part that counts CUDA calls.
    """

    kernel_shape: dict[str, int] = field(factory=lambda: LLAMA_8B)
    llama: dict[str, int] = field(factory=lambda: LLAMA_8B)
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (2048, 16384)
    linear_rows: tuple[int, ...] = (1, 8, 64, 256)
    rows: tuple[int, ...] = (1, 32, 160)
    limit_numbers: int = 2**29
    limit_size: int = 8192
    cell_s: float = 0.1
    warm_steps: int = 4
    plain_steps: int = 24
    shapes: dict[str, tuple[int, Widths]] = field(factory=lambda: {name: SHAPES[name] for name in ("8B", "1B")})
    methods: tuple[str, ...] = (*WITH_DRAFTS, *MODEL_FREE)
    prompts: int = 4
    prompt_tokens: int = 256
    timed_steps: int = 16
    equality_prompts: int = 16
    equality_tokens: int = 640
    draws: int = 1_000_000
    draw_vocabulary: int = 128256
    step_batches: tuple[int, ...] = (1, 16)
    step_rounds: int = 2
    counted_steps: int = 8


SMALL = Sizes(
    kernel_shape={**SMALL_LLAMA, "hidden_size": 64, "intermediate_size": 96, "head_dim": 8, "vocab_size": 300},
    llama=SMALL_LLAMA,
    batches=(1, 2),
    contexts=(70,),
    linear_rows=(5,),
    rows=(2,),
    limit_numbers=2**12,
    limit_size=32,
    cell_s=0.0,
    warm_steps=1,
    plain_steps=2,
    shapes={"small": (1, Widths(hidden=2, intermediate=2, kv_heads=1, inner=4))},
    prompts=2,
    prompt_tokens=32,
    timed_steps=3,
    equality_prompts=2,
    equality_tokens=64,  # ngram finds nothing in the first 12
    draws=200,
    draw_vocabulary=300,
    step_batches=(1, 2),
    step_rounds=1,
    counted_steps=2,
)


@frozen(kw_only=True)
class Setup:
    """What a part is given.

    device: "cuda" or "cpu".
    until: when the part's time is over, in seconds of time().
    done: rows of results that an earlier process has written before the device failed.
    """

    sizes: Sizes
    device: str
    until: float
    done: Sequence[dict[str, Any]] = ()

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device == "cuda" else "auto"

    def has(self, seconds: float) -> bool:
        """Whether the part has so much time left."""
        return time() + seconds <= self.until

    def is_done(self, row: dict[str, Any]) -> bool:
        return any(row.items() <= each.items() for each in self.done)


Rows = Iterator[dict[str, Any]]
Part = Callable[[Setup], Rows]
