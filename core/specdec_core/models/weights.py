"""Loads a model's weights from a checkpoint to its device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForCausalLM, PretrainedConfig

from specdec_core.models.attention import IMPLEMENTATION
from specdec_core.models.empty_model import empty_model
from specdec_core.models.load import ModelSource, checked, parse_dtype
from specdec_core.models.placing import placing_on
from specdec_core.models.quantization import quantized_loading
from specdec_core.models.weight_only import refuse_unquantized


def load_weights(
    source: ModelSource, config: PretrainedConfig, *, attn_implementation: str | None = IMPLEMENTATION
) -> Any:
    """Load a transformers model in evaluation mode to its device, without a copy of all weights in the host's memory.
    Its attention modules call the engine's attention function, which uses the paged KV cache.

    attn_implementation: the name of another attention function to use instead. None: transformers' default.

    Raises ConfigError if the weights cannot be loaded or quantized, CompatibilityError if tensors are missing or of
    another shape.
    """
    dtype = parse_dtype(source.dtype, source.device)
    quantized = quantized_loading(source.quantization, config, source.device)
    model_class: Any = AutoModelForCausalLM
    given = {"config": config, "attn_implementation": attn_implementation, **source.revisions, **quantized}
    if source.device.type != "cpu" and not quantized:  # transformers places quantized weights itself
        empty = empty_model(source, config, dtype, attn_implementation)
        model_class = placing_on(type(empty), source.device)
        given |= {"config": empty.config, "code_revision": None}  # the class is that of this revision of the code

    def load() -> tuple[Any, Mapping[str, Any]]:
        loaded: tuple[Any, Mapping[str, Any]] = model_class.from_pretrained(
            source.path,
            dtype=dtype,
            trust_remote_code=source.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, by name
            **{key: value for key, value in given.items() if value is not None},
        )
        return loaded

    model = checked(source, config, load)
    refuse_unquantized(source.quantization, model, source.path)
    if not quantized:
        model.to(source.device)
    return model.eval().requires_grad_(False)
