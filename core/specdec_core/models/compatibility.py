"""Two trial forward passes when a model is loaded, which detect models whose output would be wrong on the paged KV
cache.

In both forward passes, attention is replaced by a function in which no token attends to another, and recurrent layers
compute each token by itself. Each token's logits must then depend on that token and its position only. The second
forward pass contains the tokens of the first, in another order, and further tokens between them. If a token's logits
differ between the two forward passes, another part of the model mixes tokens.

In the first forward pass, each call of attention is also checked. Its attention mask must be causal, and the attention
function that transformers has for the model's family must give the same result as the engine's. A recurrent layer must
compute the same for several tokens at once and one after the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from typing import Any

import torch
from attrs import define, field, frozen
from torch import nn
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from specdec_core.contracts.kv import KVMetadata, Visibility
from specdec_core.errors import CompatibilityError, SpecdecError
from specdec_core.models.attention import IMPLEMENTATION, attention_sites
from specdec_core.models.families import ATTENTION_KEYWORDS, WINDOW
from specdec_core.models.mixers import CheckedTokenByToken, TokenByToken
from specdec_core.ops.attention import paged_attention
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_core.ops.padding import Padding

TRIAL = "specdec_trial"
NUM_TOKENS = 8
NEAR = 1024
TOLERANCE = 1e-3  # relative to the largest logit
ROUNDED_TOLERANCE = 0.05  # where anything is in less than float32

NUM_NEAR = 8
MOST_POSITIONS = 2**20  # of which masks are compared: no family has longer windows or chunks
ATTENTION_TOLERANCE = 1e-3  # in float32, relative to the largest value

_SEES = "specdec_sees"


@frozen
class Findings:
    """What the two trial forward passes found out about a model.

    keeps_rows: True if the model's `forward` has an argument `logits_to_keep`, a tensor of token indices, and computes
        logits only at these tokens.
    """

    keeps_rows: bool


def trial_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for trial forward passes, in which no token attends to another. In the first of the two
    forward passes, a `StockChecks` object also checks each call.

    A token's result is the sum of its value, the mean of its query's elements and the mean of its key's elements. Wrong
    rotary embeddings change these means. Each key and value head is repeated for the query heads that share it.
    """
    if (checks := _CHECKS.get()) is not None:
        checks.check_mask(module, attention_mask, features.get(WINDOW))
        assert attention_mask is not None
        checks.check_result(module, query, key, value, attention_mask, scaling, features)
    own = value + key.mean(dim=-1, keepdim=True)
    own = own.repeat_interleave(query.shape[1] // value.shape[1], dim=1) + query.mean(dim=-1, keepdim=True)
    return own.transpose(1, 2).contiguous(), None


def telling_mask(*, mask_function: Callable[..., Any], **kwargs: Any) -> torch.Tensor:
    """Make the mask tensor of transformers' eager attention, with mask_function stored as an attribute of the tensor.
    Has the signature that transformers requires of functions that make masks.

    mask_function: maps (batch, head, query position, key position) to whether the query attends to the key.
    """
    mask: torch.Tensor = eager_mask(mask_function=mask_function, **{**kwargs, "allow_is_bidirectional_skip": False})
    setattr(mask, _SEES, mask_function)
    return mask


@define(eq=False)
class StockChecks:
    """Checks each call of attention in a trial forward pass: transformers' attention of the model's family must have
    the same mask and the same result as the engine's attention.

    max_model_len: masks are compared at positions below this.
    """

    max_model_len: int
    _compared: list[tuple[torch.Tensor, int | None]] = field(factory=list)  # masks and windows: layers share them

    def check_mask(self, module: nn.Module, mask: torch.Tensor | None, window: int | None) -> None:
        """Raise CompatibilityError unless a module's attention mask is causal.

        window: length in tokens of the sliding window that the mask must have. None: no sliding window.
        """
        sees = getattr(mask, _SEES, None)
        if mask is None or sees is None:
            kind = "no mask" if mask is None else "a mask of its own making"
            raise CompatibilityError(
                f"{type(module).__name__} calls attention with {kind}, so its attention mask cannot be checked: "
                f"position biases, masks that depend on the text and attention to later tokens are not supported"
            )
        if any(mask is known and window == its_window for known, its_window in self._compared):
            return
        positions = torch.arange(min(self.max_model_len, MOST_POSITIONS))
        near = positions[:NUM_NEAR]
        for queries, keys in ((near, near), (positions, positions[:1]), (positions[-1:], positions)):
            self._compare(module, sees, queries[:, None], keys[None, :], window)
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
        except IndexError as error:  # the mask looks something up for each token
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
            f"as in causal attention with {WINDOW}={window}. Chunked and sparse attention are not supported; if "
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
        """Compare the result of the engine's attention function with that of `eager_attention_forward`, a function in
        the Python file of the model's family. Both compute in float32. Raises CompatibilityError if the results differ.

        Does nothing if that function does not exist, or on the meta device.
        """
        stock = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
        if stock is None or query.is_meta:
            return
        query, key, value = query.float(), key.float(), value.float()
        theirs = stock(module, query, key, value, mask.float(), scaling=scaling, **features)[0][0]
        num_tokens = query.shape[2]
        positions = torch.arange(num_tokens, device=query.device)  # and slots, of one request
        metadata = KVMetadata((0,), (num_tokens,), positions.new_zeros(1, 1), positions, block_size=num_tokens)
        plan = AttentionPlan(metadata, Visibility(positions, positions + 1), Padding(rows=1, keys=1))
        q, k, v = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        given: dict[str, Any] = {argument: features.get(keyword) for keyword, argument in ATTENTION_KEYWORDS.items()}
        ours = paged_attention(q, k, v, plan, scaling, **given)
        worst = (theirs - ours).abs().max()
        if worst > ATTENTION_TOLERANCE * value.abs().max():
            raise CompatibilityError(
                f"{type(module).__name__} computes attention in a way that specdec's does not (the two differ by "
                f"{worst:.2g} in a trial): models of this family are not supported"
            )


_CHECKS: ContextVar[StockChecks | None] = ContextVar("specdec_checks", default=None)

AttentionInterface.register(TRIAL, trial_attention)
AttentionMaskInterface.register(TRIAL, telling_mask)


def try_out(model: Any, vocab_size: int, max_model_len: int) -> Findings:
    """Run the two trial forward passes, and return what they found out. Raises CompatibilityError if the model's output
    would be wrong on the paged KV cache."""
    name = type(model).__name__
    device = next(model.parameters()).device
    num_tokens = min(NUM_TOKENS, max_model_len)
    token_ids = torch.arange(2 * num_tokens, device=device) % vocab_size
    # Far enough from 0 that slow rotary frequencies matter, and far below positions that families treat as long.
    near = min(NEAR, max_model_len // 16) + torch.arange(num_tokens, device=device)
    far = torch.linspace(0, max_model_len - 1, num_tokens, device=device).long()
    # The second forward pass has the tokens of the first in another order, among others at the largest positions.
    order = torch.randperm(2 * num_tokens, generator=torch.Generator().manual_seed(0)).to(device)
    rows = order.argsort()[:num_tokens]
    keep = {"logits_to_keep": rows} if "logits_to_keep" in signature(model.forward).parameters else {}
    with _trial(model, StockChecks(max_model_len)):
        alone = _logits(model, token_ids[:num_tokens], near)
    with _trial(model, None):
        among = _logits(model, token_ids[order], torch.cat([near, far])[order], **keep)
    keeps_rows = among.shape[0] == num_tokens
    if alone.shape[1] != vocab_size:
        raise CompatibilityError(
            f"{name} computes {alone.shape[1]} logits, but its configuration says vocab_size={vocab_size}: make them "
            f"agree in config.json"
        )
    if not alone.isfinite().all(dim=-1).any():
        raise CompatibilityError(
            f"{name} computes no finite logits: its weights are broken, or overflow in this dtype. Check the "
            f"checkpoint, or give another dtype"
        )
    is_rounded = any(parameter.dtype != torch.float32 for parameter in model.parameters())
    if not _agree(alone, among if keeps_rows else among[rows], is_rounded=is_rounded):
        raise CompatibilityError(
            f"the output of {name} for a token depends on other tokens of the batch outside of attention, so "
            f"requests would change each other's output. Such are convolutions and other states across tokens, "
            f"experts that take a limited number of tokens, positions that are counted and not given, and rotary "
            f"frequencies that follow the longest request (there, a lower max_model_len may help)"
        )
    return Findings(keeps_rows)


def check_masks(model: Any, max_model_len: int) -> None:
    """Run the first trial forward pass for its checks of attention masks, which need no weights. The model may be on
    the meta device."""
    near = torch.arange(NUM_TOKENS, device=next(model.parameters()).device)
    with _trial(model, StockChecks(max_model_len)):
        _logits(model, torch.zeros_like(near), near)


@contextmanager
def refusing_failures(model: Any) -> Iterator[None]:
    """A context that turns exceptions raised in a trial forward pass into CompatibilityError. It does not change
    specdec's own errors and torch.OutOfMemoryError."""
    try:
        yield
    except (SpecdecError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CompatibilityError(
            f"{type(model).__name__} fails in a trial forward pass over a flat batch: {type(error).__name__}: "
            f"{error}. Models of this family are not supported"
        ) from error


@contextmanager
def _trial(model: Any, checks: StockChecks | None) -> Iterator[None]:
    """A context in which the model's attention function is `trial_attention`, and recurrent layers keep no state. On
    exit, the engine's attention function is set.

    checks: the object that checks each call of attention. None: the calls are not checked.
    """
    model.set_attn_implementation(TRIAL)
    if model.config.get_text_config()._attn_implementation != TRIAL:
        raise CompatibilityError(
            f"{type(model).__name__} does not choose its attention by transformers' common interface, so it cannot run "
            f"on the paged cache: use a model of another family"
        )
    token = _CHECKS.set(checks)
    try:
        site = TokenByToken() if checks is None else CheckedTokenByToken()
        with attention_sites([module for module in model.modules() if hasattr(module, "layer_idx")], site):
            yield
    finally:
        _CHECKS.reset(token)
        model.set_attn_implementation(IMPLEMENTATION)


def _logits(model: Any, token_ids: torch.Tensor, positions: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    output = model(token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **kwargs)
    logits: torch.Tensor = output.logits[0]
    return logits


def _agree(expected: torch.Tensor, found: torch.Tensor, *, is_rounded: bool) -> bool:
    """Return whether two forward passes computed the same logits [num_tokens, vocab] for the same tokens, within a
    tolerance.

    is_rounded: whether the model's dtype is less precise than float32. If so, the tolerance is larger, and up to half
        of the tokens may differ, since rounding may route a token to other experts.
    """
    tolerance = ROUNDED_TOLERANCE if is_rounded else TOLERANCE
    largest = expected.abs().amax(dim=-1)
    is_alike = (expected - found).abs().amax(dim=-1) <= tolerance * largest
    is_alike |= ~largest.isfinite() & ~found.abs().amax(dim=-1).isfinite()  # one token's weights may be broken
    return int(is_alike.sum()) >= (len(is_alike) // 2 if is_rounded else len(is_alike))
