"""A model's own masks and attention, compared with those of the paged cache, from inside one pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from attrs import define, field
from torch import nn
from transformers.masking_utils import eager_mask

from specdec_core.errors import CompatibilityError
from specdec_core.ops.attention import paged_attention
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_core.ops.padding import Padding
from specdec_core.types import KVMetadata, Visibility

NUM_NEAR = 8
MOST_POSITIONS = 2**20  # of which masks are compared: no family has longer windows or chunks
TOLERANCE = 1e-3  # of attention in float32, relative to the largest value

_SEES = "specdec_sees"


def telling_mask(*, mask_function: Callable[..., Any], **kwargs: Any) -> torch.Tensor:
    """The mask that eager attention gets, and with it the function that it was made from: (batch, head, query position,
    key position) -> bool. It has the signature of transformers' mask functions."""
    mask: torch.Tensor = eager_mask(mask_function=mask_function, **{**kwargs, "allow_is_bidirectional_skip": False})
    setattr(mask, _SEES, mask_function)
    return mask


@define(eq=False)
class StockChecks:
    """What every call of attention goes through; each raises CompatibilityError."""

    max_model_len: int
    _compared: list[tuple[torch.Tensor, int | None]] = field(factory=list)  # masks and windows: layers share them

    def check_mask(self, module: nn.Module, mask: torch.Tensor | None, window: int | None) -> None:
        """The model's own mask must be what `window` says of it, at any distance."""
        sees = getattr(mask, _SEES, None)
        if mask is None or sees is None:
            kind = "no mask" if mask is None else "a mask of its own making"
            raise CompatibilityError(
                f"{type(module).__name__} calls attention with {kind}, so who sees whom cannot be told: position "
                f"biases, masks that depend on the text and attention to later tokens are not supported"
            )
        if any(mask is known and window == its_window for known, its_window in self._compared):
            return
        positions = torch.arange(min(self.max_model_len, MOST_POSITIONS))
        near = positions[:NUM_NEAR]
        self._compare(module, sees, near[:, None], near[None, :], window)
        self._compare(module, sees, positions[:, None], positions[None, :1], window)
        self._compare(module, sees, positions[-1:, None], positions[None, :], window)
        self._compared.append((mask, window))

    def _compare(
        self, module: nn.Module, sees: Callable[..., Any], query: torch.Tensor, key: torch.Tensor, window: int | None
    ) -> None:
        expected = key <= query
        if window is not None:
            expected = expected & (key > query - window)
        zero = torch.zeros((), dtype=torch.int64)
        try:
            found = torch.as_tensor(sees(zero, zero, query, key)).cpu().expand(expected.shape)
        except IndexError as error:  # it looks something up for each token of the pass
            raise CompatibilityError(
                f"{type(module).__name__} has a mask that depends on the text, which is not supported"
            ) from error
        wrong = (found != expected).nonzero()
        if len(wrong) == 0:
            return
        at_query, at_key = (int(each.expand(expected.shape)[tuple(wrong[0])]) for each in (query, key))
        if at_key > at_query:
            raise CompatibilityError(
                f"{type(module).__name__} attends to later tokens, and only causal language models can be decoded. (If "
                f"this model was trained as one, its config.json lacks is_decoder)"
            )
        raise CompatibilityError(
            f"{type(module).__name__} has a mask of its own: whether position {at_query} sees position {at_key} is not "
            f"as in causal attention with sliding_window={window}. Chunked and sparse attention are not supported; if "
            f"the distance is why, max_model_len={at_query} avoids it"
        )

    def check_result(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scaling: float | None,
        features: dict[str, Any],
    ) -> None:
        """The family's own attention must come to the same as the paged cache's, given the same in float32."""
        stock = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
        if stock is None or query.is_meta:
            return
        query, key, value = query.float(), key.float(), value.float()
        theirs = stock(module, query, key, value, mask.float(), scaling=scaling, **features)[0][0]
        ours = _paged(query[0], key[0], value[0], scaling, features)
        worst = (theirs - ours).abs().max()
        if worst > TOLERANCE * value.abs().max():
            raise CompatibilityError(
                f"{type(module).__name__} computes attention in a way that specdec's does not (the two differ by "
                f"{worst:.2g} in a trial): models of this family are not supported"
            )


def _paged(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, features: dict[str, Any]
) -> torch.Tensor:
    """[num_tokens, num_heads, value_dim] of one request whose slots are its positions."""
    num_tokens = query.shape[1]
    positions = torch.arange(num_tokens, device=query.device)
    metadata = KVMetadata((0,), (num_tokens,), positions.new_zeros(1, 1), positions, block_size=num_tokens)
    return paged_attention(
        query.transpose(0, 1),
        key.transpose(0, 1).contiguous(),
        value.transpose(0, 1).contiguous(),
        AttentionPlan(metadata, Visibility(positions, positions + 1), Padding(rows=1, keys=1)),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=features.get("sliding_window"),
        softcap=features.get("softcap"),
        sinks=features.get("s_aux"),
    )
