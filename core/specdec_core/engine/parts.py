"""Cuts a large step into parts of some requests each, which are verified one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve

from specdec_core.contracts.draft import PER_NODE, Draft, HostCopy
from specdec_core.contracts.verifier import Verdict


def parts_of(draft: Draft, most_rows: int) -> list[range]:
    """Divide a draft's requests, in order, such that each part has at most `most_rows` rows of target logits, or one
    request."""
    parts, first, num_rows = [], 0, 0
    for request, num_nodes in enumerate(draft.num_nodes_per_request):
        if request > first and num_rows + num_nodes + 1 > most_rows:
            parts.append(range(first, request))
            first, num_rows = request, 0
        num_rows += num_nodes + 1
    return [*parts, range(first, draft.batch_size)]


def part_of(draft: Draft, requests: range) -> Draft:
    """The draft of some of its requests. They share the rows of `q` with the others."""
    first = draft.offsets[requests.start]
    nodes = slice(first, draft.offsets[requests.stop])
    given = {name: each for name in PER_NODE if (each := getattr(draft, name)) is not None}
    cut = {name: each[nodes] for name, each in given.items()}
    known = [name for name, each in given.items() if each.device.type != "cpu" and draft.is_on_host(each)]
    copies = tuple(HostCopy(cut[name], draft.on_host(given[name])[nodes]) for name in known)
    offsets = tuple(offset - first for offset in draft.offsets[requests.start : requests.stop + 1])
    return evolve(draft, offsets=offsets, host_copies=copies, **cut)


def first_row_of(draft: Draft, requests: range) -> int:
    """Of the rows of target logits."""
    return draft.offsets[requests.start] + requests.start


def join(verdicts: Sequence[Verdict], first_rows: Sequence[int]) -> Verdict:
    """Join the parts' verdicts into that of the step. first_rows: the first row of target logits of each part."""
    if len(verdicts) == 1:
        return verdicts[0]
    return Verdict(
        token_ids=torch.cat([verdict.token_ids for verdict in verdicts]),
        rows=torch.cat([verdict.rows + first for verdict, first in zip(verdicts, first_rows, strict=True)]),
        num_accepted=torch.cat([verdict.num_accepted for verdict in verdicts]),
    )
