"""Paged attention in plain torch, and two variants with deliberate bugs. Like kernels, these functions read only the
device tensors of an AttentionPlan."""

from __future__ import annotations

from typing import Any

import torch

from specdec_core.ops.attention_plan import AttentionPlan


def attention_by_bits(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    scaling: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute paged attention in float64 from the plan's block tables and ancestor bits (the tree attention mask).

    KV-cache slots that a query row does not attend to cannot change its output, even if they hold NaN.
    """
    num_tokens, num_heads, _ = query.shape
    num_kv_heads = keys.shape[1]
    slots, is_seen = seen_slots(plan, window)  # [num_tokens, num_slots]
    masked = ~is_seen.view(*is_seen.shape, 1, 1)
    k = keys[slots].double().masked_fill(masked, 0)  # [num_tokens, num_slots, num_kv_heads, key_dim]
    v = values[slots].double().masked_fill(masked, 0)
    q = query.double().view(num_tokens, num_kv_heads, num_heads // num_kv_heads, -1)
    scores = torch.einsum("thgd,tshd->thgs", q, k) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~is_seen[:, None, None], -torch.inf)
    if sinks is not None:
        sink = sinks.double().view(1, num_kv_heads, -1, 1).expand(num_tokens, -1, -1, 1)
        scores = torch.cat([scores, sink], dim=-1)
    probs = scores.softmax(dim=-1)[..., : slots.shape[1]].nan_to_num(0)  # of padding, which sees nothing
    return torch.einsum("thgs,tshd->thgd", probs, v).reshape(num_tokens, num_heads, -1).to(query.dtype)


def seen_slots(plan: AttentionPlan, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the KV-cache slots that each query row attends to, as two tensors [num_tokens, num_slots].

    The first has the slot indices, the second whether the row attends to that slot. Where it does not, the index is 0.
    num_slots is that of the longest block table.
    """
    owners, size = plan.token_requests.clamp(min=0), plan.metadata.block_size
    num_slots = plan.block_tables.shape[1] * size
    local = torch.arange(num_slots, device=owners.device).expand(len(owners), -1)
    is_seen = local < plan.prefix_lens.unsqueeze(1)
    if num_words := plan.ancestors.shape[1]:
        bits = local - plan.tree_start[owners].unsqueeze(1)
        is_node = (bits >= 0) & (bits < 64 * num_words)
        words = plan.ancestors.gather(1, torch.where(is_node, bits // 64, 0))
        is_seen = is_seen | (is_node & (words >> bits % 64 & 1 == 1))
    if window is not None:
        is_seen = is_seen & (is_seen.cumsum(1) > is_seen.sum(1, keepdim=True) - window)
    blocks = plan.block_tables[owners].gather(1, local // size)
    return torch.where(is_seen, blocks * size + local % size, 0), is_seen


def attention_without_bits(query: Any, keys: Any, values: Any, plan: AttentionPlan, *args: Any, **features: Any) -> Any:
    """Attention with a deliberate bug: tree nodes attend to the tokens before the draft tree, but to no tree node."""
    return attention_by_bits(query, keys, values, Changed(plan, ancestors=plan.ancestors[:, :0]), *args, **features)


def attention_to_all_nodes(query: Any, keys: Any, values: Any, plan: AttentionPlan, *args: Any, **features: Any) -> Any:
    """Attention with a deliberate bug: a tree node attends to all earlier nodes, as if the draft tree were a chain."""
    own = torch.cat([torch.arange(end - n, end) for end, n in zip(plan.context_lens, lengths(plan), strict=True)])
    prefixes = plan.prefix_lens.clone()
    prefixes[: len(own)] = own + 1
    changed = Changed(plan, ancestors=plan.ancestors[:, :0], prefix_lens=prefixes)
    return attention_by_bits(query, keys, values, changed, *args, **features)


def lengths(plan: AttentionPlan) -> list[int]:
    return torch.bincount(plan.token_requests[plan.token_requests >= 0], minlength=len(plan.context_lens)).tolist()


class Changed:
    def __init__(self, plan: AttentionPlan, **changed: torch.Tensor) -> None:
        self._plan = plan
        vars(self).update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)
