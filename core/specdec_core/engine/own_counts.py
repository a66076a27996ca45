"""Counts each proposer's own draft tokens and how many of them were accepted, where several draft for one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
        self, drafts: Mapping[str, Draft | None], accepted: Mapping[str, Sequence[int]], emitted: Sequence[int]
    ) -> None:
        """Count a step. Drafts whose tokens are on a GPU are not counted: reading them would wait for it.

        drafts: by method, each over all scheduled requests, or None.
        accepted: as `accepted_by` returns it.
        emitted: of each request, how many of its accepted draft tokens were emitted; a stop may leave out the last.
        """
        for name, draft in drafts.items():
            counts = self.counts.setdefault(name, DraftCounts())
            if draft is not None and name in accepted and draft.is_on_host(draft.token_ids, draft.parents):
                for number, own, most in zip(draft.num_live_per_request, accepted[name], emitted, strict=True):
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


def accepted_by(drafts: Mapping[str, Draft | None], verdict: Verdict) -> dict[str, Sequence[int]]:
    """{method: of each request, how many of the accepted draft tokens the method has drafted}. These come first: a
    method has drafted the tokens above one that it has drafted, too.

    Drafts of several methods are left out if their tokens are on a GPU: reading them would wait for it.

    drafts: by method, each over all scheduled requests, or None. verdict: on the host.
    """
    asked = {name: draft for name, draft in drafts.items() if draft is not None and draft.num_nodes}
    if len(asked) == 1:
        return dict.fromkeys(asked, verdict.num_accepted.tolist())
    return {
        name: _accepted(draft, verdict)
        for name, draft in asked.items()
        if draft.is_on_host(draft.token_ids, draft.parents)
    }


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
