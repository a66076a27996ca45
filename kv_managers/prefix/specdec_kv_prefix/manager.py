"""Prefix caching: requests that begin with the same tokens share the KV-cache blocks of these tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from hashlib import sha256

import numpy as np
from attrs import define, field

from specdec_core import TARGET, KVContext, KVLayout, PagedKVManager, RequestView
from specdec_kv_prefix import PrefixConfig
from specdec_kv_prefix.pool import SharedBlocks

FIRST = 0
"""The target's first KV group, which represents all of its groups: every forward pass fills them together."""


@define
class Text:
    """What the KV manager knows about the tokens of one request.

    digests: digests[0] is the hash of the request's cache salt, digests[i] the hash of the salt and the tokens of the
        first i full blocks.
    filled: {KV group (index of a group of layers): number of tokens whose keys and values are stored}.
    published: {KV group: number of blocks that other requests can find}.
    """

    digests: list[bytes]
    filled: dict[int, int] = field(factory=dict)
    published: dict[int, int] = field(factory=dict)

    def hash_blocks(self, token_ids: np.ndarray, block_size: int) -> None:
        """Append to `digests` the hash of each full block of token_ids that has no hash yet."""
        for start in range((len(self.digests) - 1) * block_size, len(token_ids) - block_size + 1, block_size):
            tokens = token_ids[start : start + block_size].tobytes()
            self.digests.append(sha256(self.digests[-1] + tokens).digest())


class PrefixKVManager(PagedKVManager):
    """The KV manager `prefix`. A new request reuses a full KV-cache block of an earlier request if both have the same
    cache salt and the same tokens up to the end of the block. These tokens may be prompt or output."""

    def __init__(self, config: PrefixConfig, context: KVContext) -> None:
        self._shared = SharedBlocks(context.num_blocks, context.block_size, config.max_cached_blocks)
        super().__init__(context, self._shared)
        self._size, self._lookaheads = context.block_size, {FIRST: 0}  # lookaheads of the target's and drafts' groups
        self._texts: dict[str, Text] = {}

    def add_group(self, layout: KVLayout, owner: str = TARGET, lookahead: int = 0) -> int:
        group = super().add_group(layout, owner, lookahead)
        if owner != TARGET:
            self._lookaheads[group] = lookahead
        return group

    def admit(self, request_id: str, token_ids: np.ndarray, salt: str, groups: Sequence[int]) -> int:
        super().admit(request_id, token_ids, salt, groups)
        text = self._texts[request_id] = Text([sha256(salt.encode()).digest()])
        text.hash_blocks(token_ids[:-1], self._size)
        blocks: list[int] = []
        for index in range(len(text.digests) - 1):
            keys = {self._key(text, index, token_ids, group) for group in (FIRST, *groups)}
            found = None if None in keys else self._shared.find(keys)
            if found is None:
                break
            blocks.append(found)
        num_cached = self._num_final[request_id] = len(blocks) * self._size
        self._shared.add(request_id, blocks)
        text.filled = dict.fromkeys((FIRST, *groups), num_cached)
        text.published = dict.fromkeys((FIRST, *groups), len(blocks))
        return num_cached

    def fill(self, group: int, request_ids: Sequence[str], num_tokens: Sequence[int]) -> None:
        for request_id, filled in zip(request_ids, num_tokens, strict=True):
            if group in self._texts[request_id].filled:  # groups that were not looked up are not published either
                self._texts[request_id].filled[group] = filled

    def advance(self, requests: Sequence[RequestView], counts: Sequence[int]) -> None:
        super().advance(requests, counts)
        for request in requests:
            text, num_final = self._texts[request.id], self._num_final[request.id]
            text.filled[FIRST] = num_final
            # Nodes that were accepted after a stop are not part of the request's tokens.
            self._publish(text, self._shared.blocks(request.id), request.token_ids, num_final)

    def release(self, request_id: str) -> None:
        super().release(request_id)
        self._texts.pop(request_id, None)

    def _publish(self, text: Text, blocks: Sequence[int], token_ids: np.ndarray, num_final: int) -> None:
        text.hash_blocks(token_ids[:num_final], self._size)
        for group, filled in text.filled.items():
            for index in range(text.published.get(group, 0), min(filled, num_final, len(token_ids)) // self._size):
                key = self._key(text, index, token_ids, group)
                if key is None:
                    break
                self._shared.publish(blocks[index], key)
                text.published[group] = index + 1

    def _key(self, text: Text, index: int, token_ids: np.ndarray, group: int) -> Hashable:
        """Return the key of block `index` of a request in a KV group. The key contains a hash of all tokens up to the
        block's end. It also contains the next `lookahead` tokens, because the keys and values in the block depend on
        them. Returns None if the request does not have these next tokens yet."""
        end, lookahead = (index + 1) * self._size, self._lookaheads[group]
        ahead = token_ids[end : end + lookahead]
        return (group, text.digests[index + 1], ahead.tobytes()) if len(ahead) == lookahead else None
