"""Drafting with several MTP modules, each for one depth of the drafts (DeepSeek-AI 2024, section 2.2)."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from attrs import evolve

from specdec_core import (
    BuildContext,
    Draft,
    DraftPass,
    DraftSlots,
    Level,
    Observation,
    ProposerBatch,
    RequestTensors,
    TreeGrower,
    grow,
    upload,
)
from specdec_proposer_mtp.config import MTPConfig
from specdec_proposer_mtp.loading import Found
from specdec_proposer_mtp.module import MTPModule
from specdec_proposer_mtp.proposer import MTPProposer


class SeveralModules(MTPProposer):
    """Drafts with a module for each depth of the drafts. Depths are counted from 0.

    The module of depth k has slot i of its KV cache, and position i, for the embedding of token i + 1 + k and the
    output of depth k - 1 at the same slot; depth 0 reads the target's hidden states of token i. Its output there
    predicts token i + 2 + k. So what a module computes with the embedding of token t depends only on tokens up to t: on
    the output of the depth before it with token t - 1, and on its own keys and values of earlier tokens. When tokens
    become final, `observe` runs all depths over them, one after the other, and keeps each depth's output with the last
    token. The draft tokens of level j, from 1, run through the depths from j on; the first of these predicts level
    j + 1.

    Token t has no slot in depth k if t <= k. A draft that begins after n tokens has at most n levels, which need no
    such slot.

    Nothing is recorded as filled (`LayerAttention.fill`): a request that found these keys and values would lack the
    modules' outputs with the last token found. So with prefix caching, these requests compute their whole prompts.
    """

    def __init__(self, config: MTPConfig, context: BuildContext, found: Found) -> None:
        super().__init__(config, context, found)
        self._run_depths = [context.graphed(partial(self._run_module, module)) for module in self._modules]
        # With each request's last token: the LM head's input, and the features for every depth but the first.
        widths = [context.target.hidden_size] * len(self._modules)
        self._last = RequestTensors(context.max_num_seqs, widths, context.target.dtype, context.device)

    def grower(self, batch: ProposerBatch) -> TreeGrower:
        within = [
            min(most, sum(len(path) <= len(request.token_ids) for path in self._shape.paths))
            for most, request in zip(batch.max_draft_tokens, batch.requests, strict=True)
        ]
        return super().grower(evolve(batch, max_draft_tokens=tuple(within)))

    def observe(self, observation: Observation) -> None:
        first_rows = upload(observation.offsets[:-1], observation.positions.device)
        features = torch.cat([observation.features[tap] for tap in self._taps], dim=-1)
        before, kept = self._last.take(observation.requests)[1:], []
        for depth in range(len(self._modules)):
            if depth:  # each row reads what the depth before computed in the row before
                features = features.roll(1, 0).index_copy(0, first_rows, before[depth - 1])
            rows, lengths = _rows_with_slots(observation, depth)
            outputs = following = features.new_zeros(0, features.shape[1])
            if len(rows):
                passed = DraftPass.over_tokens(
                    self._attention,
                    observation.requests,
                    [max(0, start - depth) for start in observation.starts],
                    lengths,
                    observation.following_token_ids.index_select(0, rows),
                    observation.positions.index_select(0, rows) - depth,
                )
                outputs, following = self._run_depth(depth, passed, features.index_select(0, rows))
            if not depth:
                kept.append(outputs.index_select(0, observation.last_rows))
            features = torch.zeros_like(features).index_copy(0, rows, following)
            kept.append(features.index_select(0, observation.last_rows))
        self._last.put(observation.requests, *kept[: len(self._modules)])

    def propose(self, batch: ProposerBatch) -> Draft:
        grower = self.grower(batch)
        outputs, *features = self._last.take(batch.requests)
        slots = {depth: self._slots(depth, batch) for depth in range(1, len(self._modules))}  # levels begin at 1

        def forward(level: Level) -> torch.Tensor:
            nonlocal features
            ran = [
                self._run_depth(depth, DraftPass.over_level(slots[depth], level), each.index_select(0, level.rows))
                for depth, each in enumerate(features, start=level.depth)
            ]
            features = [following for _, following in ran[:-1]]
            return self.logits(ran[0][0], level.requests)

        return grow(grower, self.logits(outputs, np.arange(len(batch.requests))), forward)

    def _slots(self, depth: int, batch: ProposerBatch) -> DraftSlots:
        # In a text with fewer tokens than depths, the deeper ones have no slots: no live token depends on them.
        first_slots = [max(0, len(request.token_ids) - 1 - depth) for request in batch.requests]
        return DraftSlots(self._attention, batch, first_slots)

    def _run_depth(self, depth: int, passed: DraftPass, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the module of one depth on the slots of a forward pass, with `features` [num_tokens, hidden]. Returns
        inputs of the LM head, and features for the next depth, [num_tokens, hidden] each."""
        with self._attention.forwarding(passed.metadata, passed.visibility, window=self._window):
            outputs, following = self._run_depths[depth](passed.token_ids, features, passed.positions)
        return outputs, following

    def _run_module(
        self, module: MTPModule, token_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return module.drafting(self._embed(token_ids), features, positions)


def _rows_with_slots(observation: Observation, depth: int) -> tuple[torch.Tensor, list[int]]:
    """Return the rows of an observation whose following tokens have a slot in a depth, int64 [n], and the number of
    each request's rows among them. Only a text's first `depth` rows have none."""
    offsets, missing = observation.offsets, [max(0, depth - start) for start in observation.starts]
    spans = [
        np.arange(min(first + none, end), end)
        for first, end, none in zip(offsets[:-1], offsets[1:], missing, strict=True)
    ]
    rows = upload(np.concatenate(spans), observation.positions.device)
    return rows, [len(span) for span in spans]
