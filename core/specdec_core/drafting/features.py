"""Base of proposers whose heads read the target's hidden states of every token, and have a KV cache of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import BuildContext, Observation, Proposer, ProposerBatch, RequestView
from specdec_core.drafting.draft_pass import DraftPass, DraftSlots
from specdec_core.drafting.level import Level, TreeGrower, grow
from specdec_core.drafting.rows import RequestTensors


class FeatureProposer(Proposer):
    """Drafts with a head whose input at KV-cache slot i is the embedding of token i + 1 and the target's hidden states
    (features) of token i. The head's output there predicts token i + 2.

    When tokens become final (prompt tokens and accepted draft tokens), `observe` computes their slots from the target's
    hidden states. This overwrites slots that the head computed from its own hidden states while drafting.

    The last slot has the embedding of the request's last token as input. The head's output there is kept for each
    request and gives the logits of the next draft's first level.

    A subclass implements `grower`, `run` and `logits`, and may override `fuse`.

    run_is_pure: whether what `run` computes depends only on its arguments, weights and attention, and leaves nothing
        behind but keys and values. Then it runs as a CUDA graph on a GPU, in the levels of drafts.

    taps: the target's hidden states that the head reads, concatenated.
    hidden_size: the head's.
    window: a token attends to this many positions of the head's KV cache; None: all.
    embedding: the head's own; None: the target's.
    """

    run_is_pure = False

    def __init__(
        self,
        context: BuildContext,
        taps: Sequence[str],
        hidden_size: int,
        window: int | None,
        embedding: torch.nn.Module | None,
    ) -> None:
        assert context.attention is not None
        self._context, self._attention, self._taps, self._window = context, context.attention, taps, window
        self._embed: Callable[[torch.Tensor], torch.Tensor] = context.embed if embedding is None else embedding
        self._run_level = context.graphed(self._run_all) if self.run_is_pure else self._run_all
        # Of each request's last slot: the input of the LM head, and the feature for the next level.
        widths = hidden_size, hidden_size
        self._last = RequestTensors(context.max_num_seqs, widths, context.target.dtype, context.device)

    def grower(self, batch: ProposerBatch) -> TreeGrower:
        """Begin the drafts of a call of `propose`."""
        raise NotImplementedError

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Turn the target's hidden states, concatenated, [n, sum of widths], into the head's features [n, hidden]."""
        return features

    def run(
        self, embedded: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head on a flat batch of slots, inside of `LayerAttention.forwarding`.

        embedded, features: [n, hidden]. positions: int64 [n].
        rows: int64 [m], the slots whose outputs are wanted; None: all.

        Returns two tensors, [m, hidden] each: inputs of the LM head, and features for the next level of a draft.
        """
        raise NotImplementedError

    def logits(self, outputs: torch.Tensor, requests: np.ndarray) -> torch.Tensor:
        """Return the logits of the next draft tokens, [n, draft_vocab].

        outputs: [n, hidden], inputs of the LM head. Each request has equally many rows.
        requests: int64 [num_requests], the requests' indices in the batch.
        """
        raise NotImplementedError

    def start(self, request: RequestView) -> None:
        self._last.start(request)

    def finish(self, request: RequestView, reason: str) -> None:
        self._last.finish(request)

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
        last = observation.last_rows, observation.host_last_rows
        outputs, next_features = self._forward(passed, self.fuse(features), *last)
        self._last.put(observation.requests, outputs, next_features)
        filled = zip(observation.starts, observation.host_num_valid, strict=True)
        self._attention.fill(observation.requests, [start + num_valid for start, num_valid in filled])

    def propose(self, batch: ProposerBatch) -> Draft:
        grower = self.grower(batch)
        outputs, features = self._last.take(batch.requests)
        slots = DraftSlots(self._attention, batch, [len(request.token_ids) - 1 for request in batch.requests])

        def forward(level: Level) -> torch.Tensor:
            nonlocal features
            passed = DraftPass.over_level(slots, level)
            outputs, features = self._forward(passed, features.index_select(0, level.rows))
            return self.logits(outputs, level.requests)

        return grow(grower, self.logits(outputs, np.arange(len(batch.requests))), forward)

    def _forward(
        self,
        passed: DraftPass,
        features: torch.Tensor,
        rows: torch.Tensor | None = None,
        host_rows: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head on the slots of one forward pass, with `features` [num_tokens, hidden]. host_rows: `rows` on the
        host. Returns what `run` does."""
        where = passed.metadata, passed.visibility
        with self._attention.forwarding(*where, window=self._window, rows=host_rows):
            if rows is None:
                outputs, features = self._run_level(passed.token_ids, features, passed.positions)
                return outputs, features
            return self.run(self._embed(passed.token_ids), features, passed.positions, rows)

    def _run_all(
        self, token_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return self.run(self._embed(token_ids), features, positions, None)
