"""The served model: one flat batch in, logits at chosen rows and tapped features out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specdec_core.errors import CompatibilityError, ConfigError
from specdec_core.kv_manager import KVManager
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_core.ops.padding import Padding, round_up
from specdec_core.target.attention import ForwardContext, bind, probe
from specdec_core.target.load import load_config, load_weights, parse_dtype, resolve_model
from specdec_core.types import KVLayout, TargetInfo


class Target:
    """A causal LM from transformers, run without its own cache.

    Public attributes: info (TargetInfo), kv_layout (KVLayout of its group, which must be the first), eos_token_ids
    (frozenset of int), padding (of the shapes that it computes).
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: torch.device,
        dtype: str | torch.dtype = "auto",
        max_model_len: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        path = resolve_model(model)
        config = load_config(path, trust_remote_code=trust_remote_code)
        torch_dtype = parse_dtype(dtype, device)
        self._model = load_weights(path, config, torch_dtype, trust_remote_code=trust_remote_code).to(device)
        text_config = config.get_text_config()
        with torch.inference_mode():
            sites = probe(self._model)
        self._attention_modules = sites.modules
        self.kv_layout = _kv_layout(sites.shapes, text_config.num_hidden_layers, torch_dtype)
        self.info = TargetInfo(
            model=path,
            model_type=config.model_type,
            vocab_size=text_config.vocab_size,
            hidden_size=text_config.hidden_size,
            num_layers=text_config.num_hidden_layers,
            max_model_len=_max_model_len(max_model_len, text_config.max_position_embeddings),
            dtype=torch_dtype,
            device=device,
        )
        self.eos_token_ids = _eos_token_ids(self._model.generation_config, text_config)
        self._features: dict[str, torch.Tensor] = {}
        self.padding = Padding.of(device)

    def attach(self, kv: KVManager, ops: Mapping[str, Callable[..., Any]], taps: Sequence[str]) -> None:
        """Route attention into the first group of `kv`, and record `taps` in every forward from now on."""
        self._context = ForwardContext(kv, ops)
        bind(self._attention_modules, 0, self._context)
        for tap in taps:
            self._add_tap(tap)

    def padded(self, num_tokens: int) -> int:
        """The length to pad a flat batch of num_tokens to."""
        return round_up(num_tokens, self.padding.rows)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        plan: AttentionPlan,
        rows: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """One pass. token_ids, positions, slot_mapping int64 [num_tokens], padded; rows int64 [num_rows] to verify.

        Returns logits [num_rows, vocab] and {tap: [num_tokens, width]}.
        """
        self._context.plan, self._context.slot_mapping = plan, slot_mapping
        self._features.clear()
        num_rows = len(rows)
        rows = nn.functional.pad(rows, (0, self.padded(num_rows) - num_rows))
        output = self._model(
            token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, logits_to_keep=rows
        )
        return output.logits[0, :num_rows], dict(self._features)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [n] -> [n, hidden]."""
        embedded: torch.Tensor = self._model.get_input_embeddings()(token_ids)
        return embedded

    def output_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] after the final norm -> logits [n, vocab]."""
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden)
        return logits

    def _add_tap(self, tap: str) -> None:
        def keep(hidden: torch.Tensor) -> None:
            self._features[tap] = hidden[0]

        if tap == "final":
            self._model.base_model.register_forward_hook(lambda module, args, out: keep(out.last_hidden_state))
            return
        layers = _decoder_layers(self._model, self._attention_modules)
        kind, _, index = tap.partition(".")
        if kind != "input" or not index.isdigit() or int(index) >= len(layers):
            raise ConfigError(f"tap {tap!r} is not known: give 'final' or 'input.i' with i below {len(layers)}")

        def pre_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(args[0] if args else kwargs["hidden_states"])

        layers[int(index)].register_forward_pre_hook(pre_hook, with_kwargs=True)


def _decoder_layers(model: nn.Module, attention_modules: Sequence[nn.Module]) -> nn.ModuleList:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(attention_modules):
            inside = zip(module, attention_modules, strict=True)
            if all(any(child is attention for child in layer.modules()) for layer, attention in inside):
                return module
    raise CompatibilityError(f"no list of decoder layers was found in {type(model).__name__}: features need one")


def _kv_layout(shapes: Sequence[tuple[int, int, int]], num_layers: int, dtype: torch.dtype) -> KVLayout:
    if len(shapes) != num_layers:
        raise CompatibilityError(
            f"{len(shapes)} of {num_layers} layers use the common attention function: the others would run without a "
            f"cache. Linear-attention, hybrid and older families are not supported"
        )
    if len(set(shapes)) > 1:
        raise CompatibilityError(f"layers with different key and value shapes are not supported: {sorted(set(shapes))}")
    heads, key_dim, value_dim = shapes[0]
    return KVLayout(num_layers, heads, key_dim, value_dim, dtype, keeps_nodes=True)


def _max_model_len(asked: int | None, trained: int) -> int:
    if asked is not None and not 1 <= asked <= trained:
        raise ConfigError(f"max_model_len={asked} is out of range: this model was trained for 1 to {trained} tokens")
    return asked or trained


def _eos_token_ids(*configs: Any) -> frozenset[int]:
    for config in configs:
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()
