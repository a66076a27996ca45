"""What a family computes between its embedding and its first layer, and around its output head.

Some scale the embedding (Gemma 2, Granite), what enters the output head (MiniCPM 3), or the logits (Granite, Cohere),
or cap these (Gemma 2), outside of the modules that other models would share with the target. It is found by comparing
what a pass put in and got out.
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

TOLERANCE = 0.02  # relative to the largest number: the numbers may be bfloat16


Record = dict[str, torch.Tensor]
"""What one pass computed, each [..., width]: "embedded", "first_input", "final" (after the last norm), "head_input",
"head_output" and "logits", as far as the model has them."""


@contextmanager
def recording_ends(model: Any, backbone: nn.Module) -> Iterator[Record]:
    """While the block runs the model, record what enters and leaves its ends in the first pass. backbone: all but the
    output head."""
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
class Ends:
    """embedding_scale: 1 where something else than a scale is added, such as learned positions. head_scale: of what
    enters the output head. logits_scale: of what leaves it. logits_cap: cap * tanh(logits / cap) follows the scale.
    Where head_scale or logits_scale is None, it is not known what happens there."""

    embedding_scale: float
    head_scale: float | None
    logits_scale: float | None
    logits_cap: float | None

    @classmethod
    def of(cls, record: Record, config: Any) -> Ends:
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
        """What enters the first layer, [..., width]; without learned positions, where a model has them."""
        embedded: torch.Tensor = embedding(token_ids)
        return embedded if self.embedding_scale == 1 else embedded * self.embedding_scale

    def rows(self, head: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        """Rows of the output head, by token ids: a row times what it takes is that token's logit. The function raises
        CompatibilityError if the logits are something else than such products."""
        is_known = self.head_scale is not None and self.logits_scale is not None and self.logits_cap is None
        if not is_known or type(head) is not nn.Linear or head.bias is not None:
            return _no_rows
        weight = head.weight.detach()  # stays as it is when the layer is packed
        scale = self.head_scale * self.logits_scale
        return lambda token_ids: weight[token_ids] if scale == 1 else weight[token_ids] * scale

    def logits(self, head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """What the model makes of hidden [..., width], after the last norm, with its output head. Raises
        CompatibilityError if that is not known."""
        if self.head_scale is None or self.logits_scale is None:
            raise CompatibilityError(
                "what this model computes before or after its output head was not recognized, so that a draft cannot "
                "share the head: use a draft with an output head of its own"
            )
        logits: torch.Tensor = head(hidden if self.head_scale == 1 else hidden * self.head_scale)
        logits = logits if self.logits_scale == 1 else logits * self.logits_scale
        return logits if self.logits_cap is None else torch.tanh(logits / self.logits_cap) * self.logits_cap


def table_rows(embedding: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """Rows [..., width] of an embedding's table. Some families scale them within the module (Gemma), others outside. A
    module of another kind is taken at its word."""
    if not isinstance(embedding, nn.Embedding):
        rows: torch.Tensor = embedding(token_ids)
        return rows
    return nn.functional.embedding(token_ids, embedding.weight)


def raw_logits(head: Callable[[torch.Tensor], torch.Tensor] | None, hidden: torch.Tensor) -> torch.Tensor:
    """What the output head's matrix makes of hidden [..., width]."""
    if head is None:
        raise CompatibilityError("this model has no output head to share: use a draft with one of its own")
    return head(hidden)


def _no_rows(token_ids: torch.Tensor) -> torch.Tensor:
    raise CompatibilityError(
        "the target's logits are not products with rows of one matrix alone, and the draft asks for such rows: use a "
        "draft, or options of it, that does not"
    )


def _scale(before: torch.Tensor | None, after: torch.Tensor | None) -> float | None:
    """The number that takes before to after, 1 exactly if they agree; None if there is none."""
    if before is None or after is None or before.shape != after.shape:
        return None
    if torch.equal(before, after):
        return 1.0
    x, y = before.double().flatten(), after.double().flatten()
    scale = float(x @ y / (x @ x))
    return scale if (y - scale * x).abs().max() <= TOLERANCE * y.abs().max() else None
