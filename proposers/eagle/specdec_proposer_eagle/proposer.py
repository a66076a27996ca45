"""Drafting with EAGLE heads, from the target's hidden states: chains, fixed trees, and dynamic trees."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch.nn.functional import pad

from specdec_core import (
    BuildContext,
    CompatibilityError,
    Draft,
    DraftPass,
    DraftStop,
    DynamicTree,
    Level,
    Observation,
    Proposer,
    ProposerBatch,
    RequestRows,
    RequestView,
    StaticTree,
    TreeGrower,
    grow,
)
from specdec_proposer_eagle.config import EagleConfig
from specdec_proposer_eagle.context_vocabulary import ContextVocabulary
from specdec_proposer_eagle.head_config import HeadConfig
from specdec_proposer_eagle.modules import Head


class EagleProposer(Proposer):
    """Drafts with an EAGLE head, which has a KV cache of its own beside the target's.

    The head's input at KV-cache slot i is the embedding of token i + 1 and the target's hidden states of token i. The
    head's output there predicts token i + 2.

    When tokens become final (prompt tokens and accepted draft tokens), `observe` computes their slots from the target's
    hidden states. This overwrites slots that the head computed from its own hidden states while drafting.

    The last slot has the embedding of the request's last token as input. The head's output there is kept for each
    request and gives the logits of the next draft's first level.
    """

    def __init__(
        self,
        config: EagleConfig,
        context: BuildContext,
        head: HeadConfig,
        module: Head,
        to_target: torch.Tensor | None,
    ) -> None:
        assert context.attention is not None
        self._config, self._context, self._attention = config, context, context.attention
        self._taps, self._head = head.taps, module
        self._vocabulary = _context_vocabulary(config, context, head, to_target)
        self._to_target = to_target if self._vocabulary is None else None  # target ids of the columns of `_logits`
        self._depth = config.depth(context.num_speculative_tokens)
        self._shape = config.shape(context.num_speculative_tokens)
        self._is_dynamic, self._top_k, self._min_prob = config.is_dynamic, config.top_k, config.min_prob
        self._stop = DraftStop(config, context.max_num_seqs)
        context.speed_up(module)
        size = context.max_num_seqs, head.layer.hidden_size
        kind = {"device": context.device, "dtype": context.target.dtype}
        # A dynamic tree has the same levels for all requests, and may exceed the length limit of some.
        positions = torch.arange(context.target.max_model_len + self._depth, device=context.device)
        self._rotation = module.rotation(positions, context.target.dtype)
        self._outputs, self._features = torch.zeros(size, **kind), torch.zeros(size, **kind)  # each request's last slot
        self._rows = RequestRows(context.max_num_seqs)  # the requests' rows in both

    def start(self, request: RequestView) -> None:
        self._rows.start(request)
        self._stop.start(request)

    def finish(self, request: RequestView, reason: str) -> None:
        self._rows.finish(request)
        self._stop.finish(request)
        if self._vocabulary is not None:
            self._vocabulary.finish(request)

    def observe(self, observation: Observation) -> None:
        features = torch.cat([observation.features[tap] for tap in self._taps], dim=-1)
        passed = DraftPass.over_tokens(
            self._attention,
            observation.requests,
            observation.starts,
            np.diff(observation.offsets).tolist(),
            observation.following_token_ids,
            observation.positions,
        )
        batch = len(observation.requests)
        last_rows = pad(observation.last_rows, (0, self._attention.padded(batch) - batch))
        outputs, next_features = self._forward(passed, self._head.fuse(features), last_rows)
        rows = self._rows_of(observation.requests)
        self._outputs.index_copy_(0, rows, outputs[:batch])
        self._features.index_copy_(0, rows, next_features[:batch])
        filled = zip(observation.starts, observation.host_num_valid, strict=True)
        self._attention.fill(observation.requests, [start + num_valid for start, num_valid in filled])

    def propose(self, batch: ProposerBatch) -> Draft:
        grower = self._grower(batch)
        rows = self._rows_of([batch.requests[b] for b in grower.roots])
        first_slots = [len(request.token_ids) - 1 for request in batch.requests]
        if self._vocabulary is not None:
            self._vocabulary.begin(batch.requests)
        features = self._features.index_select(0, rows)

        def forward(level: Level) -> torch.Tensor:
            nonlocal features
            passed = DraftPass.over_level(self._attention, batch, first_slots, level)
            outputs, next_features = self._forward(passed, features.index_select(0, level.rows))
            features = next_features[: passed.num_tokens]
            return self._logits(outputs[: passed.num_tokens], level.requests)

        roots = np.array(grower.roots, dtype=np.int64)
        return grow(grower, self._logits(self._outputs.index_select(0, rows), roots), forward)

    def _grower(self, batch: ProposerBatch) -> TreeGrower:
        stopping = self._stop.begin(batch)
        if self._is_dynamic:
            return DynamicTree(batch, self._top_k, self._depth, self._to_target, stopping, self._min_prob)
        return StaticTree(batch, self._shape, self._config.draft_sample_method, self._to_target, stopping)

    def _forward(
        self, passed: DraftPass, features: torch.Tensor, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head on the tokens of one forward pass.

        features: [num_tokens, hidden], the argument `feature` of `Head.forward`.
        rows: int64, indices of the tokens whose outputs are returned; None for all tokens.

        Returns the two results of `Head.forward`: inputs of the LM head, and features for the next level. There may be
        padding rows at the end.
        """
        if passed.num_tokens < len(passed.token_ids):
            features = pad(features, (0, 0, 0, len(passed.token_ids) - passed.num_tokens))
        with self._attention.forwarding(passed.metadata, passed.visibility, window=self._config.draft_window):
            embedded = self._embed(passed.token_ids)
            rotation = tuple(table.index_select(1, passed.positions) for table in self._rotation)
            return self._head(embedded, features, rotation, self._attention.attend, rows)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        own = self._head.embed_tokens
        return self._context.embed(token_ids) if own is None else own(token_ids)

    def _logits(self, outputs: torch.Tensor, requests: np.ndarray) -> torch.Tensor:
        """Return the logits of the next draft tokens over the head's vocabulary, [n, draft_vocab]. If tokens outside
        this vocabulary can be drafted too, the logits are over the target's vocabulary, [n, vocab].

        outputs: [n, hidden], inputs of the LM head. Each request has equally many rows.
        requests: int64 [num_requests], the requests' indices in the batch.
        """
        lm_head = self._head.lm_head
        own = self._context.output_head(outputs) if lm_head is None else lm_head(outputs)
        if self._vocabulary is None:
            return own
        return self._vocabulary.logits(own, outputs, requests)

    def _rows_of(self, requests: Iterable[RequestView]) -> torch.Tensor:
        return torch.tensor(self._rows.of(requests), dtype=torch.int64, device=self._context.device)


def _context_vocabulary(
    config: EagleConfig, context: BuildContext, head: HeadConfig, to_target: torch.Tensor | None
) -> ContextVocabulary | None:
    num_tokens = config.context_tokens(has_all=head.has_all_tokens, is_aligned=head.is_aligned)
    if not num_tokens or to_target is None:
        return None
    try:
        context.output_rows(to_target[:1])
    except CompatibilityError as error:
        if config.eagle_context_tokens is None:
            return None
        raise CompatibilityError(f"eagle_context_tokens={num_tokens} is not possible: {error}") from error
    return ContextVocabulary(to_target, context.target.vocab_size, num_tokens, context.output_rows)
