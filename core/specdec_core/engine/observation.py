"""Builds the `Observation` of a forward pass: the target's hidden states, for proposers that use them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from specdec_core.contracts.draft import DEAD, Draft
from specdec_core.contracts.proposer import Observation, TopTokens
from specdec_core.contracts.verifier import Verdict
from specdec_core.engine.runner import Computed
from specdec_core.engine.scheduler import Schedule
from specdec_core.ops.top_tokens import MostLikely, most_likely
from specdec_core.ops.upload import upload


def observation_of(
    schedule: Schedule,
    computed: Computed,
    draft: Draft,
    verdict: Verdict,
    chosen: Sequence[int],
    taps: Sequence[str],
    num_top_tokens: int = 0,
    most_likely: MostLikely = most_likely,
) -> Observation:
    """Build the observation of a forward pass for some of its requests: the tokens that the forward pass made final,
    with their hidden states. For each request, its known tokens (prompt or output) come first, then its accepted draft
    tokens.

    verdict: the result of verification, on the host.
    chosen: the requests, as ascending indices into the schedule.
    taps: the hidden states to include: "input.i" for those that enter layer i of the target, or "final" for those after
        the final norm.
    num_top_tokens: how many of the target's most likely next tokens to add at each root and draft token; 0: none.
    most_likely: the operation of this name.
    """
    batch, device = computed.batch, computed.batch.token_ids.device
    which = np.asarray(chosen, dtype=np.int64)
    scheduled = [schedule.requests[i] for i in chosen]
    num_known = np.asarray(schedule.num_known)[which]
    counts = num_known + np.minimum(np.asarray(draft.num_nodes_per_request)[which], draft.max_depth)
    offsets = counts.cumsum() - counts
    tokens = upload(final_rows(schedule, computed, verdict, which, counts), device)
    num_accepted = verdict.num_accepted.numpy()[which]
    decided = verdict.token_ids.numpy()[which, num_accepted]
    # If the next token is known already, the verdict is not needed.
    following = [
        int(request.token_ids[end]) if (end := request.num_computed + known) < request.num_tokens else max(0, token)
        for request, known, token in zip(scheduled, num_known.tolist(), decided.tolist(), strict=True)
    ]
    num_valid = np.where(decided >= 0, num_accepted + num_known, 0)
    return Observation(
        requests=tuple(scheduled),
        starts=tuple(request.num_computed for request in scheduled),
        offsets=tuple(accumulate(counts.tolist(), initial=0)),
        num_valid=upload(num_valid.astype(np.int32), device),
        last_rows=upload(offsets + np.maximum(num_valid - 1, 0), device),
        host_num_valid=tuple(num_valid.tolist()),
        token_ids=batch.token_ids.index_select(0, tokens),
        positions=batch.positions.index_select(0, tokens),
        features={tap: computed.features[tap].index_select(0, tokens) for tap in taps},
        next_token_ids=upload(following, device),
        top_tokens=_top_tokens(computed, draft, which, num_top_tokens, most_likely) if num_top_tokens else None,
    )


def final_counts(verdict: Verdict) -> np.ndarray:
    """int64 [batch]   the number of each request's tokens that a forward pass without prefill made final: its root and
    accepted draft tokens; 0: its logits were not finite."""
    return np.where(verdict.token_ids.numpy()[:, 0] >= 0, 1 + verdict.num_accepted.numpy(), 0)


def final_rows(
    schedule: Schedule, computed: Computed, verdict: Verdict, which: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """int64 [sum(counts)]   the rows in the flat batch of the first counts[i] tokens of each request that a forward
    pass made final: its known tokens, then accepted draft tokens. Beyond these, rows are those of any token.

    which: int64 [n], the requests, as indices into the schedule.
    """
    num_known = np.asarray(schedule.num_known)[which]
    requests = np.arange(len(counts)).repeat(counts)
    local = np.arange(len(requests)) - (counts.cumsum() - counts)[requests]
    accepted = np.maximum(local - num_known[requests] + 1, 0)  # 0: a known token
    known_or_root = computed.batch.token_offsets[which][requests] + np.minimum(local, num_known[requests] - 1)
    decided_at = verdict.rows.numpy()[which]
    rows: np.ndarray = known_or_root + decided_at[requests, accepted] - decided_at[requests, 0]
    return rows


def _top_tokens(computed: Computed, draft: Draft, which: np.ndarray, number: int, most_likely: MostLikely) -> TopTokens:
    """The target's most likely next tokens at each root (a request's last known token) and each draft token, by the raw
    logits.

    which: int64, the requests, as ascending indices into the schedule.
    number: how many tokens at each root or draft token.
    """
    layout, batch = draft.host_layout, computed.batch
    is_wanted = np.isin(layout.row_requests, which)
    rows, numbers = np.flatnonzero(is_wanted), is_wanted.cumsum() - 1
    parents = np.full(len(layout.up), -1, dtype=np.int64)
    parents[layout.node_rows] = np.where(layout.is_alive, numbers[layout.parent_rows], DEAD)

    def on_device(array: np.ndarray) -> torch.Tensor:
        return upload(array, computed.logits.device)

    index = on_device(rows)
    flat = batch.rows.index_select(0, index)
    logprobs, ids = most_likely(computed.logits.index_select(0, index), number)
    return TopTokens(
        requests=on_device(np.searchsorted(which, layout.row_requests[rows])),
        positions=batch.positions.index_select(0, flat),
        token_ids=batch.token_ids.index_select(0, flat),
        parents=on_device(parents[rows]),
        ids=ids,
        logprobs=logprobs,
    )
