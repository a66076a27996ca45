"""What is known about the MTP modules of each model family: one row for each family.

Sources, read in November 2026: transformers 5.23 (modeling_layers.py, conversion_mapping.py), the loaders of vLLM 0.32
(model_executor/models/*_mtp.py) and SGLang 0.5.23 (srt/models), and where named the authors' own code. Where they
differ, the authors' code counts, then what two of the three do.

This module imports no torch: the engine reads it to list the plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from attrs import field, frozen

DEEPSEEK = MappingProxyType(
    {
        "enorm": "model.layers.{layer}.enorm",
        "hnorm": "model.layers.{layer}.hnorm",
        "proj": "model.layers.{layer}.eh_proj",
        "norm": "model.layers.{layer}.shared_head.norm",
        "block": "model.layers.{layer}",
    }
)
COPIES = ("model.layers.{layer}.embed_tokens", "model.layers.{layer}.shared_head.head")


@frozen
class Family:
    """The MTP module of a model family: x = proj(cat[enorm(embedding of the next token), hnorm(feature)]), then one
    decoder layer, a norm (in ERNIE the target's own), and the target's LM head.

    classes: where transformers has the family's layers, and the prefix of their names, as "llama.Llama".
    names: the published names of a module's parts, by their names in `MTPModule`. {module} is the module's index, and
        {layer} is that plus the number of the target's layers.
    copies: published names of copies of the target's embedding and LM head, which are not loaded.
    num_modules: the key of config.json with the number of modules; None: there is one.
    has_layer: whether the decoder layer is that of transformers, else it is put together from its attention and MLP.
    config: values of config.json that the decoder layer needs otherwise than the target's layers.
    hidden_first: whether the feature comes first in the concatenation.
    recurs_normed: whether the final norm's output, not the decoder layer's, is the feature for the next step.
    feature: "final", the target's hidden states after its final norm, or "last", before it.
    zero_first: whether the embedding at position 0 is replaced by zeros.
    """

    name: str  # config.json: model_type
    alias: str  # vLLM's name of the method
    classes: str
    names: Mapping[str, str]
    copies: tuple[str, ...] = ()
    num_modules: str | None = "num_nextn_predict_layers"
    has_layer: bool = True
    config: Mapping[str, Any] = field(factory=dict)
    hidden_first: bool = False
    recurs_normed: bool = True
    feature: str = "final"
    zero_first: bool = False

    def of_transformers(self, kind: str, name: str) -> Any:
        """A class of the family's model in transformers. kind: "modeling" or "configuration"; name: without prefix."""
        module, _, prefix = self.classes.partition(".")
        return getattr(import_module(f"transformers.models.{module}.{kind}_{module}"), prefix + name)

    def tap(self, num_layers: int) -> str:
        """The name of the hidden states that the module reads (`Plan.taps`)."""
        return "final" if self.feature == "final" else f"input.{num_layers}"

    def part(self, name: str, num_layers: int, index: int = 0) -> str:
        """The published name of a part of module `index`, by its name in `MTPModule`."""
        return self.names[name].format(layer=num_layers + index, module=index)


FAMILIES = (
    # transformers, vLLM and SGLang agree but for position 0, which only vLLM treats otherwise.
    Family(
        "deepseek_v3", "deepseek_mtp", "deepseek_v3.DeepseekV3", DEEPSEEK, COPIES, config={"first_k_dense_replace": 0}
    ),
    # transformers and SGLang; vLLM lets the decoder layer's output recur. GLM-4.6 has no copies.
    Family("glm4_moe", "glm4_moe_mtp", "glm4_moe.Glm4Moe", DEEPSEEK, COPIES, config={"first_k_dense_replace": 0}),
    # XiaomiMiMo's model.safetensors.index.json and modeling_mimo.py; vLLM and SGLang for position 0.
    Family(
        "mimo",
        "mimo_mtp",
        "qwen2.Qwen2",
        {
            "enorm": "model.mtp_layers.{module}.token_layernorm",
            "hnorm": "model.mtp_layers.{module}.hidden_layernorm",
            "proj": "model.mtp_layers.{module}.input_proj",
            "norm": "model.mtp_layers.{module}.final_layernorm",
            "block": "model.mtp_layers.{module}",
        },
        hidden_first=True,
        zero_first=True,
    ),
    # PaddlePaddle/ERNIE, ernie/modeling_moe.py; vLLM and SGLang for the names.
    Family(
        "ernie4_5_moe",
        "ernie_mtp",
        "ernie4_5_moe.Ernie4_5_Moe",
        {
            "enorm": "model.mtp_emb_norm.{module}",
            "hnorm": "model.mtp_hidden_norm.{module}",
            "proj": "model.mtp_linear_proj.{module}",
            "norm": "model.norm",
            "block": "model.mtp_block.{module}",
        },
        config={"moe_layer_start_index": 1},
        recurs_normed=False,
        feature="last",
    ),
    # vLLM and SGLang; the published config.json has no number of modules.
    Family(
        "qwen3_next",
        "qwen3_next_mtp",
        "qwen3_next.Qwen3Next",
        {
            "enorm": "mtp.pre_fc_norm_embedding",
            "hnorm": "mtp.pre_fc_norm_hidden",
            "proj": "mtp.fc",
            "norm": "mtp.norm",
            "block": "mtp.layers.0",
        },
        num_modules=None,
        config={"layer_types": ["full_attention"], "mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
    # vLLM and SGLang for the names; the embedding is the module's own in vLLM.
    Family(
        "longcat_flash",
        "longcat_flash_mtp",
        "longcat_flash.LongcatFlash",
        {
            "embed": "model.mtp.embed_tokens",
            "enorm": "model.mtp.layers.0.enorm.m",
            "hnorm": "model.mtp.layers.0.hnorm.m",
            "proj": "model.mtp.layers.0.eh_proj",
            "norm": "model.mtp.norm",
            "block.mlp": "model.mtp.layers.0.transformer_layer.mlp",
            "block": "model.mtp.layers.0",
        },
        num_modules=None,
        has_layer=False,
    ),
    # This project's own, for Llama targets: DeepSeek's names. No published checkpoint has such a module.
    Family("llama", "", "llama.Llama", DEEPSEEK, COPIES),
)

BY_NAME = MappingProxyType({family.name: family for family in FAMILIES})
REFUSED = MappingProxyType(
    {
        "pangu_ultra_moe": "only vLLM implements its MTP module, and it rotates other channel pairs than two other "
        "implementations of the model, so its forward pass cannot be confirmed",
    }
)
"""Families that have MTP modules which are not supported, and why."""

ALIASES = (*(family.alias for family in FAMILIES if family.alias), "pangu_ultra_moe_mtp")
