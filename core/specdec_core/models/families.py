"""All facts about particular families of models (such as Gemma or Llama) that the code depends on, for example names of
their options. Each fact is a line here, and a model in tests/losslessness/families.py tests it.

These modules read the facts: `model` and `load` (refusals), `rope` (positions), `attention`, `mixers`, `compatibility`,
`decoder_trial` and `fused_ops` (calls of the family's functions), `embedding_and_head` (softcap of logits), `split`,
`split_plan` and `split_load` (what ranks share). No other code depends on a family's name. All other differences, such
as a scale of embeddings, are found by running the model (`attention.probe`, `compatibility.try_out`,
`embedding_and_head.record_embedding_and_head`, `decoder_trial.record_decoder`).

A keyword of attention that is new to all families also becomes an argument in: `ops/__init__.py` (`FEATURES`),
`ops/attention.py`, `ops/attention_plan.py` (if it changes the mask), `models/attention.py`, `contracts/ops.py`,
`contracts/proposer.py` (`LayerAttention.attend`), the kernels that support it, tests/losslessness/test_families.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from specdec_core.errors import CompatibilityError

SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Chunked attention equals full attention up to the chunk size, and `check_length` refuses longer requests."""

WINDOW = "sliding_window"
"""Sliding window, including the token itself: a field of configurations and a keyword of attention functions."""

ATTENTION_KEYWORDS: Mapping[str, str] = {WINDOW: "window", "softcap": "softcap", "s_aux": "sinks"}
"""{keyword that families pass to their attention function: argument of `paged_attention`}."""

HARMLESS_TENSORS = frozenset({"s_aux", "position_ids", "cache_position"})
"""Keyword arguments with tensors that the attention function uses or may ignore."""

LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on how long a request is: `rope.pin_positions` pins them."""

TEMPERATURE_TUNING = "attn_temperature_tuning"
"""The option of families whose attention temperatures change with the position; `check_length` refuses lengths at which
they are not 1."""

APPLY_ROTARY = "apply_rotary_pos_emb"
"""The function of a family's file that its attention rotates queries and keys with."""

LOGIT_CAP = "final_logit_softcapping"
"""The option with the cap of the logits, cap * tanh(logits / cap), of families that have one (Gemma 2)."""

HEAD_COUNTS: Mapping[str, bool] = {"num_heads": True, "num_attention_heads": True, "num_key_value_heads": False}
"""Attributes of attention modules with the number of query heads (True) or of key heads (False)."""

GROUPS = "num_key_value_groups"
"""The attribute of attention modules with the number of query heads that share a key head; without it, none do."""


@frozen
class Recurrent:
    """The recurrent layers of a family, which keep a state for each request instead of keys and values.

    layer_type: their type, in the configuration's `layer_types`.
    mixer: the attribute of a decoder layer with the module that keeps the state.
    cache: the argument of that module's `forward` that takes transformers' cache.
    """

    layer_type: str
    mixer: str
    cache: str


_GATED_DELTA_NET = Recurrent("linear_attention", "linear_attn", "cache_params")
_SHORT_CONVOLUTION = Recurrent("conv", "conv", "past_key_values")

RECURRENT: Mapping[str, Recurrent] = {
    "qwen3_next": _GATED_DELTA_NET,
    "qwen3_5_text": _GATED_DELTA_NET,
    "qwen3_5_moe_text": _GATED_DELTA_NET,
    "lfm2": _SHORT_CONVOLUTION,
    "lfm2_moe": _SHORT_CONVOLUTION,
    "granitemoehybrid": Recurrent("linear_attention", "mamba", "cache_params"),
}
"""{model_type of the text model: its recurrent layers}. The modules read and write states through the methods of
transformers' cache that `mixers.StateCache` has, and compute a single token from its state alone."""


def check_layer_types(text_config: Any) -> None:
    """Raise CompatibilityError if a layer is of an unsupported type: one with sparse attention, or one that keeps a
    state other than keys and values (such as linear attention), in a family without a row in `RECURRENT`."""
    recurrent = RECURRENT.get(text_config.model_type)
    supported = SUPPORTED_LAYER_TYPES | ({recurrent.layer_type} if recurrent else set())
    unsupported = sorted(set(getattr(text_config, "layer_types", None) or ()) - supported)
    if unsupported:
        raise CompatibilityError(
            f"layer_types {unsupported} of {text_config.model_type!r} models are not supported: allowed are "
            f"{', '.join(sorted(supported))}. Use a model whose layers all attend to a key-value cache, or one of a "
            f"family with recurrent layers that is supported ({', '.join(RECURRENT)})"
        )


def check_length(text_config: Any, max_model_len: int) -> None:
    """Raise CompatibilityError if the model would need chunked attention, or attention temperatures that change with
    the position, for requests of max_model_len tokens. Neither of these is supported."""
    limits: list[tuple[int, str]] = []
    if "chunked_attention" in (getattr(text_config, "layer_types", None) or ()):
        limits.append((text_config.attention_chunk_size, "attention in chunks of attention_chunk_size tokens"))
    if getattr(text_config, TEMPERATURE_TUNING, None):
        limits.append((text_config.floor_scale - 1, "attention temperatures that change at floor_scale tokens"))
    for limit, feature in limits:
        if max_model_len > limit:
            raise CompatibilityError(
                f"max_model_len={max_model_len} is too long for {text_config.model_type!r} models: they have "
                f"{feature}, which is not supported. Up to {limit} it makes no difference: give "
                f"max_model_len={min(limit for limit, _ in limits)} or less"
            )
