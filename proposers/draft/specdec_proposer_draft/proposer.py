"""Drafts of a smaller language model (Leviathan et al. 2023; Chen et al. 2023), in chains or in trees."""

from __future__ import annotations

import numpy as np
import torch
from attrs import define

from specdec_core import (
    BuildContext,
    Draft,
    DraftPass,
    DraftStop,
    Level,
    Observation,
    Proposer,
    ProposerBatch,
    RequestView,
    StaticTree,
    grow,
)
from specdec_proposer_draft.config import DraftConfig
from specdec_proposer_draft.vocabulary import shared_vocabulary


@define
class Stored:
    """What the draft's cache has of a request: the first num_tokens tokens, and behind them num_levels levels of nodes,
    as far as they were accepted: the engine has moved those to where the tokens' places are."""

    num_tokens: int = 0
    num_levels: int = 0

    def settle(self, request: RequestView) -> None:
        """Count accepted nodes as tokens: all tokens that came after a draft were nodes, but for the last one."""
        num_accepted = len(request.token_ids) - self.num_tokens - 1
        self.num_tokens += min(num_accepted, self.num_levels)
        self.num_levels = 0


class DraftModelProposer(Proposer):
    """Forwards what it has not seen of a text, and then level after level of nodes but for the last.

    The keys and values of a node stand in the slot that the target's stand in, so what is accepted is in place for the
    next draft. A request that has not drafted for a while is caught up with in one go.
    """

    def __init__(self, config: DraftConfig, context: BuildContext) -> None:
        assert context.attention is not None
        self._model, self._attention, self._device = context.load_model(config), context.attention, context.device
        self._shape = config.shape(context.num_speculative_tokens)
        self._method = config.draft_sample_method
        self._num_tokens_per_pass = context.max_num_batched_tokens
        self._vocabulary = shared_vocabulary(config, self._model.info, context.target)
        self._stop = DraftStop(config, context.max_num_seqs, forwards_roots=True)
        self._stored: dict[str, Stored] = {}
        self._has_drafted: set[str] = set()  # in this step

    def start(self, request: RequestView) -> None:
        self._stored[request.id] = Stored()
        self._stop.start(request)

    def reset(self, request: RequestView) -> None:
        self._stored[request.id] = Stored()

    def finish(self, request: RequestView, reason: str) -> None:
        del self._stored[request.id]
        self._stop.finish(request)

    def observe(self, observation: Observation) -> None:
        """A token that comes without a draft has no node that could stand for it."""
        for request in observation.requests:
            if request.id not in self._has_drafted:
                self._stored[request.id].settle(request)
        self._has_drafted.clear()

    def propose(self, batch: ProposerBatch) -> Draft:
        grower = StaticTree(batch, self._shape, self._method, self._vocabulary.target_ids, self._stop.begin(batch))
        requests = [batch.requests[b] for b in grower.roots]
        logits = self._catch_up(requests)
        self._has_drafted.update(request.id for request in requests)
        return grow(grower, logits, lambda level: self._forward_nodes(level, batch))

    def _catch_up(self, requests: list[RequestView]) -> torch.Tensor:
        """Forward all tokens that are not stored yet, the roots last: logits [len(requests), num_shared] at these."""
        if not requests:
            return torch.empty(0, 1, device=self._device)
        found: dict[int, torch.Tensor] = {}
        while len(found) < len(requests):
            part, starts, tokens = [], [], []
            room = self._num_tokens_per_pass
            for b, request in enumerate(requests):
                stored = self._stored[request.id]
                if b in found or not room:
                    continue
                stored.settle(request)
                start = stored.num_tokens
                part.append(b)
                starts.append(start)
                tokens.append(request.token_ids[start : start + room])
                room -= len(tokens[-1])
                stored.num_tokens += len(tokens[-1])
            logits = self._forward_tokens([requests[b] for b in part], starts, tokens)
            is_done = [self._stored[requests[b].id].num_tokens == len(requests[b].token_ids) for b in part]
            found |= {b: row for b, row, done in zip(part, logits, is_done, strict=True) if done}
        return torch.stack([found[b] for b in range(len(requests))])

    def _forward_tokens(self, requests: list[RequestView], starts: list[int], tokens: list[np.ndarray]) -> torch.Tensor:
        """Store known tokens of some requests: logits [len(requests), num_shared] at the last of each."""
        lengths = [len(each) for each in tokens]
        ranges = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        token_ids, positions = (torch.from_numpy(np.concatenate(each)).to(self._device) for each in (tokens, ranges))
        passed = DraftPass.over_tokens(self._attention, requests, starts, lengths, token_ids, positions)
        return self._forward(passed, torch.tensor(np.cumsum(lengths) - 1, device=self._device))

    def _forward_nodes(self, level: Level, batch: ProposerBatch) -> torch.Tensor:
        first_slots = [len(request.token_ids) for request in batch.requests]
        for request, count in zip(batch.requests, level.counts, strict=True):
            self._stored[request.id].num_levels += count > 0
        passed = DraftPass.over_level(self._attention, batch, first_slots, level)
        return self._forward(passed, torch.arange(passed.num_tokens, device=self._device))

    def _forward(self, passed: DraftPass, rows: torch.Tensor) -> torch.Tensor:
        """Logits [len(rows), num_shared]."""
        token_ids = self._vocabulary.stand_in[passed.token_ids]
        logits, _ = self._model.forward(token_ids, passed.positions, passed.metadata, passed.visibility, rows)
        return logits[:, self._vocabulary.draft_ids]
