"""What `generate` offers and speculation does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation.configuration_utils import GenerationMode

from specdec_core import ConfigError

MODES = GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE


def refuse_unsupported(
    model: Any,
    input_ids: torch.Tensor,
    generation_config: Any,
    model_kwargs: Mapping[str, Any],
    synced_gpus: bool,
    assistant_model: Any,
) -> None:
    """Raise ConfigError if a call of `generate` asks for anything that speculation would drop or do wrong."""
    config, mode = generation_config, generation_config.get_generation_mode(assistant_model)
    cache = model_kwargs.get("past_key_values")
    returned = [name for name in ("output_attentions", "output_hidden_states") if getattr(config, name)]
    reasons = {
        f"{mode.value} draws or searches in its own way: leave out its options (num_beams, penalty_alpha, dola_layers, "
        f"assistant_model, prompt_lookup_num_tokens, ...)": mode not in MODES,
        f"{len(input_ids)} sequences are generated at once: call generate for one prompt at a time, with "
        f"num_return_sequences=1, or use specdec's own engine (LLM), which drafts for batches": len(input_ids) != 1,
        "inputs_embeds leave no tokens to draft from: give input_ids": model_kwargs.get("inputs_embeds") is not None,
        f"{type(model).__name__} has an encoder and a decoder: only decoders are supported": (
            model.config.is_encoder_decoder
        ),
        f"{type(model).__name__} has recurrent layers, whose states cannot go back to the last accepted token: use "
        f"specdec's own engine (LLM)": model._is_stateful,
        f"{' and '.join(returned)} of rejected tokens would have to be cut out: leave them out": (
            bool(returned) and config.return_dict_in_generate
        ),
        "synced_gpus=True asks each process for equally many forward passes: leave it out": synced_gpus,
        f"the cache is of type {type(cache).__name__}, and rejected tokens can be dropped from a DynamicCache only: "
        f"leave use_cache and cache_implementation at their defaults": not isinstance(cache, DynamicCache),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ConfigError(f"speculative does not support this call of generate: {reason}")
