"""The target's input embedding and LM head, with the scaling factors that the model's family applies around them. A
draft model or draft head may share both modules.

Some families scale the embedding (Gemma 2, Granite), the input of the LM head (MiniCPM 3) or the logits (Granite,
Cohere), or apply a softcap to the logits (Gemma 2). They do so outside of the embedding module and the LM head module,
so a draft head that only called these modules would compute other values. The factors are found by comparing the
tensors of one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import nn

from specdec_core.errors import CompatibilityError
from specdec_core.models.families import LOGIT_CAP
from specdec_core.models.split_modules import SplitHead

TOLERANCE = 0.02  # relative to the largest number: the numbers may be bfloat16


Record = dict[str, torch.Tensor]
"""Tensors of one forward pass, each [..., width], as far as the model has them: "embedded", "first_input" (of the first
layer), "final" (after the last norm), "head_input", "head_output" (of the LM head) and "logits"."""


@contextmanager
def record_embedding_and_head(model: Any, backbone: nn.Module) -> Iterator[Record]:
    """A context that records the inputs and outputs of the embedding and the LM head in the first forward pass that is
    run inside the context. Yields the `Record`, which that forward pass fills.

    backbone: the part of the model without its LM head.
    """
    record: Record = {}
    first_layer = next((m[0] for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)), None)

    def keep(name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            record.setdefault(name, tensor)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep("first_input", args[0] if args else kwargs.get("hidden_states"))

    def leave(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        keep("final", getattr(out, "last_hidden_state", None))

    def pass_head(module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> None:
        keep("head_input", args[0] if args else None)
        keep("head_output", out)

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    with ExitStack() as hooks:
        hooks.enter_context(embedding.register_forward_hook(lambda module, args, out: keep("embedded", out)))
        hooks.enter_context(backbone.register_forward_hook(leave))
        hooks.enter_context(model.register_forward_hook(lambda module, args, out: keep("logits", out.logits)))
        if head is not None:
            hooks.enter_context(head.register_forward_hook(pass_head))
        if first_layer is not None:
            hooks.enter_context(first_layer.register_forward_pre_hook(enter, with_kwargs=True))
        yield record


@frozen
class EmbeddingAndHead:
    """The factors and the softcap that a model's family applies around its input embedding and its LM head.

    embedding_scale: factor of the embedding's output. 1 if the family applies no factor. Learned positions, which some
        families add to the output, are not included.
    head_scale: factor of the LM head's input. None: unknown.
    logits_scale: factor of the LM head's output. None: unknown.
    logits_cap: logits become cap * tanh(logits / cap), after logits_scale. None: no softcap.
    """

    embedding_scale: float
    head_scale: float | None
    logits_scale: float | None
    logits_cap: float | None

    @classmethod
    def of(cls, record: Record, config: Any) -> EmbeddingAndHead:
        embedding_scale = _scale(record.get("embedded"), record.get("first_input")) or 1.0
        head_scale = _scale(record.get("final"), record.get("head_input"))
        head_output, logits = record.get("head_output"), record.get("logits")
        logits_scale, cap = _scale(head_output, logits), getattr(config, LOGIT_CAP, None)
        if logits_scale is not None:
            return cls(embedding_scale, head_scale, logits_scale, None)
        capped = None if cap is None or head_output is None else torch.tanh(head_output.float() / cap) * cap
        is_capped = _scale(capped, logits) is not None
        return cls(embedding_scale, head_scale, *((1.0, cap) if is_capped else (None, None)))

    def embed(self, embedding: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
        """Embed token ids [...] and multiply by embedding_scale. Returns the input of the model's first layer [...,
        width], without learned positions."""
        embedded = table_rows(embedding, token_ids) if type(embedding) is nn.Embedding else embedding(token_ids)
        return embedded if self.embedding_scale == 1 else embedded * self.embedding_scale

    def rows(self, head: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that maps token ids [...] to their rows [..., width] of the LM head's weight. The rows are
        scaled such that the dot product of a row and a hidden state is the logit of the row's token. If logits are not
        such dot products (bias, softcap, unknown factors), the function raises CompatibilityError."""
        if self.head_scale is None or self.logits_scale is None or self.logits_cap is not None:
            return _no_rows
        rows = _weight_rows(head)
        if rows is None:
            return _no_rows
        scale = self.head_scale * self.logits_scale
        return rows if scale == 1 else lambda token_ids: rows(token_ids) * scale

    def logits(self, head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits from hidden states [..., width] after the final norm. Applies the LM head, the factors and the
        softcap. Raises CompatibilityError if the factors are unknown."""
        if self.head_scale is None or self.logits_scale is None:
            raise CompatibilityError(
                "what this model computes around its LM head was not recognized, so that a draft cannot "
                "share the head: use a draft with an LM head of its own"
            )
        logits: torch.Tensor = head(hidden if self.head_scale == 1 else hidden * self.head_scale)
        logits = logits if self.logits_scale == 1 else logits * self.logits_scale
        return logits if self.logits_cap is None else torch.tanh(logits / self.logits_cap) * self.logits_cap


def table_rows(embedding: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """Look up the rows [..., width] of an embedding's weight for token ids, without the factor that some families
    (Gemma) apply within the embedding module. A module that is not an nn.Embedding is called instead, and its output
    returned."""
    if not isinstance(embedding, nn.Embedding):
        rows: torch.Tensor = embedding(token_ids)
        return rows
    if token_ids.ndim == 1:  # takes half as long
        return embedding.weight.index_select(0, token_ids)
    return nn.functional.embedding(token_ids, embedding.weight)


def raw_logits(head: Callable[[torch.Tensor], torch.Tensor] | None, hidden: torch.Tensor) -> torch.Tensor:
    """Call the LM head on hidden states [..., width] and return its output, without the factors and the softcap that
    the family applies around the LM head. Raises CompatibilityError if `head` is None."""
    if head is None:
        raise CompatibilityError("this model has no LM head to share: use a draft with one of its own")
    return head(hidden)


def _weight_rows(head: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    if isinstance(head, SplitHead):
        return head.rows()
    if type(head) is not nn.Linear or head.bias is not None:
        return None
    weight = head.weight.detach()  # stays as it is when the layer is packed
    return lambda token_ids: weight[token_ids]


def _no_rows(token_ids: torch.Tensor) -> torch.Tensor:
    raise CompatibilityError(
        "the target's logits are not products with rows of one matrix alone, and the draft asks for such rows: use a "
        "draft, or options of it, that does not"
    )


def _scale(before: torch.Tensor | None, after: torch.Tensor | None) -> float | None:
    """Return the number by which `before` was multiplied to get `after`, exactly 1 if the two tensors are equal. None
    if there is no such number, or if one of the tensors is None."""
    if before is None or after is None or before.shape != after.shape:
        return None
    if torch.equal(before, after):
        return 1.0
    x, y = before.double().flatten(), after.double().flatten()
    scale = float(x @ y / (x @ x))
    return scale if (y - scale * x).abs().max() <= TOLERANCE * y.abs().max() else None
