"""Counts each proposer's own draft tokens and how many of them were accepted, where several draft for one request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define, field

from specdec_core.budget.nodes import Nodes
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import Verdict
from specdec_core.engine.metrics import Counter, DraftCounts


@define
class OwnCounts:
    """counts: by method. A token that two proposers have drafted counts for both."""

    counts: dict[str, DraftCounts] = field(factory=dict)

    def add(
        self, names: Sequence[str], drafts: Sequence[Draft | None], verdict: Verdict, emitted: Sequence[int]
    ) -> None:
        """Count a step. names, drafts: of each proposer; a draft is one over all scheduled requests, or None. Drafts
        whose tokens are on a GPU are not counted: reading them would wait for it. verdict: on the host. emitted: of
        each request, how many of its accepted draft tokens were emitted; a stop may leave out the last ones."""
        is_alone = sum(draft is not None and draft.num_nodes > 0 for draft in drafts) == 1
        for name, draft in zip(names, drafts, strict=True):
            counts = self.counts.setdefault(name, DraftCounts())
            if draft is not None and draft.num_nodes and draft.is_on_host(draft.token_ids, draft.parents):
                accepted = emitted if is_alone else _accepted(draft, verdict)
                for number, own, most in zip(draft.num_live_per_request, accepted, emitted, strict=True):
                    if number:
                        counts.add(number, min(own, most))

    def metrics(self) -> list[Counter]:
        """The counts of all methods, as METHOD_num_drafts and so on."""
        return [
            Counter(f"{name}_{what}", value)
            for name, counts in self.counts.items()
            for what, value in (
                ("num_drafts", counts.num_drafts),
                ("num_draft_tokens", counts.num_draft_tokens),
                ("num_accepted_tokens", counts.num_accepted),
            )
        ]


def _accepted(draft: Draft, verdict: Verdict) -> Sequence[int]:
    """The number of accepted draft tokens of each request."""
    nodes, size = Nodes.of(draft), draft.batch_size
    texts = np.full((size, int(nodes.depths.max()) + 1), -1)
    known = verdict.token_ids.numpy()[:, : texts.shape[1]]
    texts[:, : known.shape[1]] = known
    texts[np.arange(texts.shape[1]) >= verdict.num_accepted.numpy()[:, None]] = -1
    accepted = np.zeros(size, dtype=np.int64)
    np.maximum.at(accepted, nodes.requests, np.where(nodes.accepted(texts), nodes.depths, 0))
    found: list[int] = accepted.tolist()
    return found
