"""EAGLE heads in training: their losses and the checkpoints that they save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import nn
from torch.nn.functional import smooth_l1_loss
from transformers import LlamaConfig

from specdec_core import (
    CompatibilityError,
    ConfigError,
    DraftVocabulary,
    SlotAttention,
    TrainingBatch,
    TrainingTarget,
    accuracy,
    most_frequent,
    save_head,
    soft_cross_entropy,
    step_weight,
    unroll,
)
from specdec_proposer_eagle.config import EagleConfig
from specdec_proposer_eagle.head_config import ALIGNED, HeadConfig
from specdec_proposer_eagle.loading import find, load
from specdec_proposer_eagle.modules import Head
from specdec_proposer_eagle.recipes import Eagle3Options, EagleOptions, HeadOptions

Metrics = Mapping[str, torch.Tensor]


class EagleTrainee(nn.Module):
    """Trains an EAGLE head (Li et al. 2024) to predict the target's next hidden state.

    The loss is a weighted sum of two terms. The first is the smooth L1 distance between the head's output and the
    target's next hidden state. The target's LM head turns both of these into token distributions; the second term is
    the cross entropy between these distributions.
    """

    def __init__(self, options: EagleOptions, target: TrainingTarget) -> None:
        super().__init__()
        shapes = {"fc.bias": (target.info.hidden_size,)} if options.bias else {}
        self._options, self._target = options, target
        self._config = _head_config(options, target, shapes, is_eagle3=False)
        self.head = Head(self._config)

    def forward(self, batch: TrainingBatch) -> tuple[torch.Tensor, Metrics]:
        options, final = self._options, batch.features["final"].float()
        features = final + (torch.rand_like(final) - 0.5) * (options.noise if self.training else 0)
        with torch.no_grad():
            logits = self._target.output_head(batch.features["final"]).float()
            wanted, likeliest = logits.softmax(-1), logits.argmax(-1)
        total, metrics = final.new_zeros(()), {}
        steps = unrolled(self.head, self._target, batch.token_ids, features, options.ttt_steps)
        for step, output in enumerate(steps):
            weight, output = step_weight(batch.counts, step), output[:, : -1 - step]
            drafted = self._target.output_head(output.to(batch.features["final"].dtype))
            of_feature = (_distance(output, final[:, 1 + step :]) * weight).sum()
            of_tokens = (soft_cross_entropy(drafted, wanted[:, 1 + step :]) * weight).sum()
            total = total + options.decay**step * (
                options.feature_weight * of_feature + options.token_weight * of_tokens
            )
            metrics |= {f"feature_loss_{step}": of_feature, f"token_loss_{step}": of_tokens}
            metrics[f"accuracy_{step}"] = accuracy(drafted, likeliest[:, 1 + step :], weight)
        return total, metrics

    def load(self, model: str) -> Mapping[str, Any]:
        self._config, self.head, _ = _read(model, self._target, is_eagle3=False)
        return {**_sizes(self._config), "bias": self._config.has("fc.bias")}

    def save(self, folder: Path) -> None:
        keys = {"architectures": ["LlamaForCausalLM"], "bias": self._options.bias}
        _write(folder, self._config, self._target, self.head.state_dict(), keys)


class Eagle3Trainee(nn.Module):
    """Trains an EAGLE-3 head on its own outputs over several steps, the training-time test of Li et al. 2025.

    The loss of a step is the cross entropy to the target's distribution over the head's vocabulary. Positions where the
    target's most likely token is outside that vocabulary are masked. With feature_weight, a smooth L1 loss also pulls
    the inputs of the head's LM head towards the inputs of the target's LM head; this needs far fewer training texts.
    """

    def __init__(self, options: Eagle3Options, target: TrainingTarget, token_counts: torch.Tensor) -> None:
        super().__init__()
        size = options.vocab_size(target.info)
        self._options, self._target, self._taps = options, target, options.layers(target.info)
        self._config = _head_config(
            options, target, {"lm_head.weight": (size, target.info.hidden_size)}, is_eagle3=True, layers=self._taps
        )
        self.head = Head(self._config)
        ids = most_frequent(token_counts, size)
        self.vocabulary = DraftVocabulary(ids, target.info.vocab_size)
        output = target.model.get_output_embeddings()
        assert self.head.lm_head is not None
        with torch.no_grad():  # initialize with the target's LM head
            self.head.lm_head.weight.copy_(output.weight[ids.to(output.weight.device)])

    def forward(self, batch: TrainingBatch) -> tuple[torch.Tensor, Metrics]:
        taken = [batch.features[tap] for tap in self._config.taps]
        fused = self.head.fuse(torch.cat(taken, dim=-1).float())
        with torch.no_grad():
            logits = self._target.output_head(batch.features["final"]).float()
            counts = batch.counts.clone()
            counts[:, 1:] &= self.vocabulary(logits.argmax(-1))[:, :-1] >= 0
            wanted = logits[..., self.vocabulary.target_ids].softmax(-1)
            likeliest = wanted.argmax(-1)
        options, total, metrics = self._options, fused.new_zeros(()), {}
        steps = unrolled(self.head, self._target, batch.token_ids, fused, options.ttt_steps)
        for step, output in enumerate(steps):
            weight, output = step_weight(counts, step), output[:, : -1 - step]
            drafted = self.head.lm_head(output)
            loss = (soft_cross_entropy(drafted, wanted[:, 1 + step :]) * weight).sum()
            metrics[f"loss_{step}"] = loss
            if options.feature_weight:
                of_feature = _distance(output, batch.features["final"][:, 1 + step :].float())
                of_feature = (of_feature * step_weight(batch.counts, step)).sum()
                loss = loss + options.feature_weight * of_feature
                metrics[f"feature_loss_{step}"] = of_feature
            total = total + options.decay**step * loss
            metrics[f"accuracy_{step}"] = accuracy(drafted, likeliest[:, 1 + step :], weight)
        return total, metrics

    def load(self, model: str) -> Mapping[str, Any]:
        self._config, self.head, ids = _read(model, self._target, is_eagle3=True)
        if self._config.aux_layer_ids != self._taps:
            read, wanted = (",".join(map(str, layers)) for layers in (self._config.aux_layer_ids, self._taps))
            raise ConfigError(
                f"the draft head {model!r} reads the inputs of the target's layers {read}, and this run's aux_layers "
                f"are {wanted}: give aux_layers={read}, or start from another head"
            )
        if self._config.is_aligned and not self._options.feature_weight:
            raise ConfigError(
                f"the draft head {model!r} was trained with a feature_weight, so that it can draft tokens of the "
                f"context, too, and this run has none: give feature_weight, such as 10"
            )
        vocab_size = self._target.info.vocab_size
        self.vocabulary = DraftVocabulary(torch.arange(vocab_size) if ids is None else ids, vocab_size)
        return {**_sizes(self._config), "draft_vocab_size": self._config.draft_vocab_size}

    def save(self, folder: Path) -> None:
        tensors = dict(self.head.state_dict())
        if self._config.num_layers == 1:
            tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
        ids = self.vocabulary.target_ids
        own_ids = torch.arange(len(ids), device=ids.device)
        if len(ids) < self._target.info.vocab_size or not torch.equal(ids, own_ids):
            tensors |= {"d2t": ids - own_ids, "t2d": self.vocabulary.is_drafted}
        keys = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(ids),
            "target_hidden_size": self._target.info.hidden_size,
            "eagle_aux_hidden_state_layer_ids": list(self._taps),  # layers whose inputs the head reads
            "eagle_config": {"use_aux_hidden_state": True},
        }
        if self._options.feature_weight:
            keys[ALIGNED] = True
        if min(self._taps) > 0:  # the other convention: layers whose outputs the head reads
            keys["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in self._taps]
        _write(folder, self._config, self._target, tensors, keys)


def _distance(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the smooth L1 distance between hidden states, [batch, n, hidden], averaged over the last dimension:
    [batch, n]."""
    return smooth_l1_loss(outputs, wanted, reduction="none").mean(-1)


def unrolled(
    head: Head, target: TrainingTarget, token_ids: torch.Tensor, features: torch.Tensor, num_steps: int
) -> Iterator[torch.Tensor]:
    """Run the training-time test of a head, as `specdec_core.unroll` says. features: the result of `Head.fuse`."""
    attention = SlotAttention(*token_ids.shape)

    def run(embedded: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor) -> Any:
        return head(embedded, feature, head.rotation(positions, feature.dtype), attention.attend)

    embed = target.embed if head.embed_tokens is None else head.embed_tokens
    return unroll(run, embed, token_ids, features, num_steps)


def _head_config(
    options: HeadOptions,
    target: TrainingTarget,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    is_eagle3: bool,
    layers: tuple[int, ...] = (),
) -> HeadConfig:
    """Return the architecture of a new head.

    shapes: shapes of the tensors of the head's optional modules, by parameter name.
    layers: indices of the target's layers whose inputs an EAGLE-3 head reads.

    Raises ConfigError if the target's config lacks num_attention_heads.
    """
    its, size = target.config, target.info.hidden_size
    num_heads = getattr(its, "num_attention_heads", None)
    if not isinstance(num_heads, int):
        raise ConfigError(f"the config of the target {target.info.model!r} lacks num_attention_heads: use another")
    num_kv_heads = getattr(its, "num_key_value_heads", None) or num_heads
    layer = LlamaConfig(
        vocab_size=target.info.vocab_size,
        hidden_size=size,
        intermediate_size=options.intermediate_size or getattr(its, "intermediate_size", None) or 4 * size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=getattr(its, "head_dim", None) or size // num_heads,
        rms_norm_eps=getattr(its, "rms_norm_eps", 1e-6),
        max_position_embeddings=target.info.max_model_len,
        rope_parameters=_rope(its),
        tie_word_embeddings=False,
    )
    return HeadConfig(
        is_eagle3=is_eagle3,
        layer=layer,
        shapes=shapes,
        num_layers=options.num_layers,
        target_hidden_size=size,
        vocab_size=target.info.vocab_size,
        draft_vocab_size=shapes.get("lm_head.weight", (target.info.vocab_size,))[0],
        aux_layer_ids=layers,
        norm_before_residual=False,
        norm_output=False,
    )


def _read(model: str, target: TrainingTarget, *, is_eagle3: bool) -> tuple[HeadConfig, Head, torch.Tensor | None]:
    """Load a head to train further, in float32. Its own embedding, if it has one, stays as it is. The other results
    are those of `loading.load`.

    Raises CompatibilityError for a head whose LM head or hidden size is not what the loss is for.
    """
    found = find(EagleConfig(model=model), target.info, is_eagle3=is_eagle3)
    size = found.head.layer.hidden_size
    if found.head.has("lm_head.weight") != is_eagle3 or size != target.info.hidden_size:
        own = "an LM head of its own" if found.head.has("lm_head.weight") else "no LM head of its own"
        needed = "one of its own" if is_eagle3 else "the target's"
        raise CompatibilityError(
            f"the draft head {model!r} has {own} and hidden_size={size}, and training needs {needed} and the target's "
            f"hidden_size={target.info.hidden_size}: start from another head"
        )
    head, ids = load(found, evolve(target.info, dtype=torch.float32))
    head.requires_grad_(True)
    if head.embed_tokens is not None:
        head.embed_tokens.requires_grad_(False)
    return found.head, head, ids


def _sizes(head: HeadConfig) -> dict[str, Any]:
    return {"num_layers": head.num_layers, "intermediate_size": head.layer.intermediate_size}


def _rope(config: Any) -> dict[str, Any]:
    """Return the RoPE parameters of a new head. The target's parameters are used if their type is default, linear or
    llama3 with full rotation. Otherwise the head's RoPE is unscaled, with the target's rope_theta."""
    found = getattr(config, "rope_parameters", None) or {}
    found = found.get("full_attention") or found  # of families that have one for each type of layer
    if found.get("rope_type", "default") in ("default", "linear", "llama3") and "partial_rotary_factor" not in found:
        return {"rope_type": "default", "rope_theta": 10000.0, **found}
    return {"rope_type": "default", "rope_theta": found.get("rope_theta", 10000.0)}


def _write(
    folder: Path, head: HeadConfig, target: TrainingTarget, tensors: Mapping[str, torch.Tensor], keys: dict[str, Any]
) -> None:
    config = head.layer.to_dict() | {"vocab_size": head.vocab_size, "num_hidden_layers": head.num_layers} | keys
    config |= {name: True for name in ("norm_before_residual", "norm_output") if getattr(head, name)}
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # for older versions of transformers
    if config["rope_parameters"]["rope_type"] != "default":
        config["rope_scaling"] = config["rope_parameters"]
    save_head(folder, target, config, tensors)
