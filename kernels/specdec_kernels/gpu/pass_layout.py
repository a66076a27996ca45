"""What the attention kernel needs to know of a forward pass: computed once, for all layers."""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen

from specdec_core import upload
from specdec_core.ops.attention_plan import WORD, AttentionPlan


@frozen(eq=False)
class PassLayout:
    """num_keys: int32 [num_tokens], the number of KV-cache slots that each token attends to; 0 for padding.
    paths: int32 [num_tokens, longest], the nodes on each token's path down the draft tree, itself included, as slots
        after `AttentionPlan.tree_start`; what follows the path is 0. None: no request has a tree.
    tiles: int32 [num_tiles, 3], the request, the first token and the number of tokens that one program computes.
    most_keys: at least as many as any of num_keys.
    """

    num_keys: torch.Tensor
    paths: torch.Tensor | None
    tiles: torch.Tensor
    most_keys: int


def layout_of(plan: AttentionPlan, tokens_per_tile: int) -> PassLayout:
    """Return the layout of the plan's forward pass, which is kept in its memo."""
    name = f"specdec_kernels.gpu, {tokens_per_tile}"
    if name not in plan.memo:
        plan.memo[name] = _layout(plan, tokens_per_tile)
    found: PassLayout = plan.memo[name]
    return found


def _layout(plan: AttentionPlan, tokens_per_tile: int) -> PassLayout:
    prefix_lens, most_keys = plan.prefix_lens, plan.most_keys
    if plan.is_fixed:
        tiles = device_tiles_of(plan.token_requests, tokens_per_tile)
    else:
        tiles = upload(tiles_of(plan.metadata.lengths, tokens_per_tile), prefix_lens.device)
    if plan.visibility.more_slots is None or not plan.ancestors.shape[1]:
        return PassLayout(prefix_lens, None, tiles, most_keys)
    ancestors = plan.ancestors
    bits = torch.arange(WORD, device=ancestors.device)
    is_on_path = ((ancestors.unsqueeze(2) >> bits) & 1).flatten(1).bool()
    number = is_on_path.sum(1, dtype=torch.int32)
    places = (is_on_path.cumsum(1) - 1).masked_fill(~is_on_path, is_on_path.shape[1])  # one more, for what is on none
    paths = number.new_zeros(len(number), is_on_path.shape[1] + 1)
    paths.scatter_(
        1, places, torch.arange(is_on_path.shape[1], dtype=torch.int32, device=paths.device).expand_as(places)
    )
    return PassLayout(prefix_lens + number, paths, tiles, most_keys)


def tiles_of(lengths: tuple[int, ...], tokens_per_tile: int) -> np.ndarray:
    """int32 [num_tiles, 3]   `PassLayout.tiles`. lengths: the number of tokens of each request."""
    counts = np.asarray(lengths, dtype=np.int64)
    per_request = -(-counts // tokens_per_tile)
    requests = np.arange(len(counts)).repeat(per_request)
    number = np.arange(len(requests)) - (per_request.cumsum() - per_request)[requests]
    first = number * tokens_per_tile
    begins = (counts.cumsum() - counts)[requests] + first
    sizes = np.minimum(counts[requests] - first, tokens_per_tile)
    return np.stack([requests, begins, sizes], axis=1).astype(np.int32)


def device_tiles_of(token_requests: torch.Tensor, tokens_per_tile: int) -> torch.Tensor:
    """int32 [num_tokens, 3]   the same tiles, made on the device and at the place of their first token; other places
    have tiles of 0 tokens. token_requests: int32 [num_tokens], the request of each token; -1: padding."""
    tokens = torch.arange(len(token_requests), dtype=torch.int32, device=token_requests.device)
    is_first = torch.ones_like(tokens, dtype=torch.bool)
    is_first[1:] = token_requests[1:] != token_requests[:-1]
    begins = torch.where(is_first, tokens, 0).cummax(0).values
    is_last = is_first.roll(-1)
    is_last[-1] = True
    ends = torch.where(is_last, tokens + 1, len(tokens)).flip(0).cummin(0).values.flip(0)
    is_tile = (token_requests >= 0) & ((tokens - begins) % tokens_per_tile == 0)
    sizes = torch.where(is_tile, (ends - tokens).clamp(max=tokens_per_tile), 0)
    return torch.stack([token_requests, tokens, sizes.to(torch.int32)], dim=1)
