"""Base of proposers whose heads read one hidden state of the target per request, and have no attention."""

from __future__ import annotations

import torch

from specdec_core.config.draft_options import DraftHeadConfig
from specdec_core.config.token_tree import TokenTree
from specdec_core.contracts.proposer import BuildContext, Observation, Proposer, ProposerBatch, RequestView
from specdec_core.drafting.distributions import draws_some
from specdec_core.drafting.level import TreeGrower
from specdec_core.drafting.rows import RequestTensors
from specdec_core.drafting.static import grower_of


class LastHiddenProposer(Proposer):
    """Keeps the target's hidden state, after the final norm, of the token before each request's root (its last token).

    A subclass implements `propose` with `hidden` and `grower`. Such a head needs no KV cache: everything it knows about
    a request's text is in that hidden state.

    shape: of the drafts, chains or trees.
    q_to_target: int64 [draft_vocab], maps draft token ids to target token ids; None if they are the same.
    """

    def __init__(
        self,
        config: DraftHeadConfig,
        context: BuildContext,
        shape: TokenTree,
        q_to_target: torch.Tensor | None = None,
    ) -> None:
        self._method, self._shape, self._q_to_target = config.draft_sample_method, shape, q_to_target
        self._sampled_shape = shape if config.gives_shape else TokenTree.chain(shape.depth)
        target = context.target
        self._last = RequestTensors(context.max_num_seqs, [target.hidden_size], target.dtype, context.device)

    def start(self, request: RequestView) -> None:
        self._last.start(request)

    def finish(self, request: RequestView, reason: str) -> None:
        self._last.finish(request)

    def observe(self, observation: Observation) -> None:
        self._last.put(observation.requests, observation.features["final"].index_select(0, observation.last_rows))

    def grower(self, batch: ProposerBatch) -> TreeGrower:
        """Begin the drafts of a call of `propose`: trees of the given shape, or chains if tokens are drawn and no shape
        is given."""
        shape = self._sampled_shape if draws_some(batch, self._method) else self._shape
        return grower_of(batch, shape, self._method, self._q_to_target)

    def hidden(self, batch: ProposerBatch) -> torch.Tensor:
        """Return the hidden states of the requests, [batch, hidden_size]."""
        (hidden,) = self._last.take(batch.requests)
        return hidden
