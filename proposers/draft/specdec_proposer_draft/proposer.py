"""Drafting chains or trees of tokens with a smaller language model (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import define

from specdec_core import (
    BuildContext,
    Draft,
    DraftPass,
    DraftSlots,
    Level,
    Observation,
    Proposer,
    ProposerBatch,
    RequestView,
    grow,
    grower_of,
    upload,
)
from specdec_proposer_draft.config import DraftConfig
from specdec_proposer_draft.vocabulary import SharedVocabulary


@define
class Stored:
    """What the draft model's KV cache holds of one request.

    num_tokens: the cache holds this many of the request's tokens, counted from its first token.
    num_levels: the cache also holds this many levels of the last draft, in the slots after these tokens. After
        verification, the engine moves the accepted draft tokens so that they directly follow the request's tokens.
    """

    num_tokens: int = 0
    num_levels: int = 0

    def settle(self, num_accepted: int) -> None:
        """After verification, count accepted draft tokens as tokens of the request. An accepted token of the draft's
        last level is not counted, since the draft model has never forwarded it.

        num_accepted: number of accepted draft tokens.
        """
        self.num_tokens += min(num_accepted, self.num_levels)
        self.num_levels = 0


class DraftModelProposer(Proposer):
    """Drafts with a language model, the draft model, which has a KV cache of its own.

    `propose` first forwards the request's tokens that this KV cache lacks, such as those generated while the request
    did not draft. Then it grows the draft level by level; the last level is not forwarded.

    A draft token has the same slot in the KV caches of the draft model and of the target. The engine moves the keys and
    values of accepted tokens in both caches, so the draft model does not compute them again.
    """

    def __init__(self, config: DraftConfig, context: BuildContext) -> None:
        assert context.attention is not None
        self._model, self._attention, self._device = context.load_model(config), context.attention, context.device
        self._shape = config.shape(context.num_speculative_tokens)
        self._method, self._window = config.draft_sample_method, config.draft_window
        self._num_tokens_per_pass = context.max_num_batched_tokens
        vocabulary: SharedVocabulary = context.state
        self._stand_in = upload(vocabulary.stand_in, context.device)  # int64 [target_vocab]
        self._draft_ids = _on_device(vocabulary.draft_ids, context.device)  # int64 [num_shared]
        self._target_ids = _on_device(vocabulary.target_ids, context.device)  # int64 [num_shared]
        self._stored: dict[str, Stored] = {}

    def start(self, request: RequestView) -> None:
        self._stored[request.id] = Stored()

    def reset(self, request: RequestView) -> None:
        self._stored[request.id] = Stored()

    def finish(self, request: RequestView, reason: str) -> None:
        self._stored.pop(request.id, None)  # absent if an interrupt aborted `start` or an earlier call

    def observe(self, observation: Observation) -> None:
        """Record how many draft tokens of each request were accepted. For a request with a draft, `host_num_valid` is
        one more than the number of accepted draft tokens, since the token before the draft is also counted."""
        for request, num_valid in zip(observation.requests, observation.host_num_valid, strict=True):
            self._stored[request.id].settle(max(0, num_valid - 1))

    def propose(self, batch: ProposerBatch) -> Draft:
        grower = grower_of(batch, self._shape, self._method, self._target_ids)
        logits = self._catch_up(batch.requests)
        slots = DraftSlots(self._attention, batch, [len(request.token_ids) for request in batch.requests])
        return grow(grower, logits, lambda level: self._forward_nodes(level, slots))

    def _catch_up(self, requests: Sequence[RequestView]) -> torch.Tensor:
        """Forward the tokens of these requests that the draft model's KV cache lacks. If the tokens exceed the token
        budget, several forward passes are run. Returns the logits after each request's last token, [len(requests),
        num_shared], where num_shared is the number of tokens that both vocabularies have."""
        found: dict[int, torch.Tensor] = {}
        while len(found) < len(requests):
            part, starts, tokens = [], [], []
            room = self._num_tokens_per_pass
            for b, request in enumerate(requests):
                stored = self._stored[request.id]
                if b in found or not room:
                    continue
                start = stored.num_tokens = max(stored.num_tokens, request.num_cached_tokens)
                part.append(b)
                starts.append(start)
                tokens.append(request.token_ids[start : start + room])
                room -= len(tokens[-1])
                stored.num_tokens += len(tokens[-1])
            logits = self._forward_tokens([requests[b] for b in part], starts, tokens)
            num_stored = [self._stored[requests[b].id].num_tokens for b in part]
            self._attention.fill([requests[b] for b in part], num_stored)
            is_done = [num == len(requests[b].token_ids) for b, num in zip(part, num_stored, strict=True)]
            found |= {b: row for b, row, done in zip(part, logits, is_done, strict=True) if done}
        return torch.stack([found[b] for b in range(len(requests))])

    def _forward_tokens(self, requests: list[RequestView], starts: list[int], tokens: list[np.ndarray]) -> torch.Tensor:
        """Run one forward pass over tokens[i] of each request i, from position starts[i] on. Returns the logits after
        tokens[i][-1] for each i, [len(requests), num_shared]."""
        lengths = [len(each) for each in tokens]
        ranges = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        token_ids, positions = (upload(np.concatenate(each), self._device) for each in (tokens, ranges))
        passed = DraftPass.over_tokens(self._attention, requests, starts, lengths, token_ids, positions)
        return self._forward(passed, upload(np.cumsum(lengths) - 1, self._device))

    def _forward_nodes(self, level: Level, slots: DraftSlots) -> torch.Tensor:
        for b in level.requests.tolist():  # a request without nodes at this depth cannot have any accepted there
            self._stored[slots.requests[b].id].num_levels += 1
        passed = DraftPass.over_level(slots, level)
        return self._forward(passed, torch.arange(len(level.token_ids), device=self._device))

    def _forward(self, passed: DraftPass, rows: torch.Tensor) -> torch.Tensor:
        """Map the target's token ids to the draft model's, then run the draft model on them. Returns logits over the
        tokens that both vocabularies have, [len(rows), num_shared].

        passed: the forward pass, with the target's token ids.
        rows: int64, indices of the tokens for which logits are computed.
        """
        token_ids = self._stand_in[passed.token_ids]
        logits, _ = self._model.forward(
            token_ids, passed.positions, passed.metadata, passed.visibility, rows, window=self._window
        )
        return logits[:, self._draft_ids]


def _on_device(ids: Any, device: torch.device) -> Any:
    """Return an array as a tensor on the device. A slice or None is returned unchanged."""
    return upload(ids, device) if isinstance(ids, np.ndarray) else ids
