"""The rules that a verifier's `Verdict` must keep. Each fault says what the contract is, what was seen, and the likely
cause."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import Verdict


def faults_of(verdict: Verdict, logits: torch.Tensor, draft: Draft) -> Iterator[str]:
    """Yield an error message for each rule that a verdict breaks. logits: [num_rows, vocab], finite or -inf."""
    width = draft.max_depth + 1
    shapes = {
        "token_ids": (torch.int64, (draft.batch_size, width)),
        "rows": (torch.int32, (draft.batch_size, width)),
        "num_accepted": (torch.int32, (draft.batch_size,)),
    }
    for name, (dtype, shape) in shapes.items():
        tensor = getattr(verdict, name)
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            yield (
                f"Verdict.{name} is {dtype} {list(shape)}, for {draft.batch_size} requests and max_depth "
                f"{draft.max_depth}; this one is {tensor.dtype} {list(tensor.shape)}: specdec_core.follow and trace "
                f"make verdicts of the right shape"
            )
            return
    for request in range(draft.batch_size):
        yield from (f"request {request}: {fault}" for fault in _of_request(verdict, logits, draft, request))


def _of_request(verdict: Verdict, logits: torch.Tensor, draft: Draft, request: int) -> Iterator[str]:
    layout = draft.layout
    tokens, rows = verdict.token_ids[request].tolist(), verdict.rows[request].tolist()
    num_accepted, root = int(verdict.num_accepted[request]), int(layout.root_rows[request])
    deepest = int(layout.row_depths[layout.row_requests == request].max())
    if not 0 <= num_accepted <= deepest:
        yield (
            f"num_accepted counts accepted draft tokens, never the token after them, so it is from 0 to {deepest}, the "
            f"depth of the tree without dead nodes; it is {num_accepted}: are dead nodes or the last token counted?"
        )
        return
    said, rest = tokens[: num_accepted + 1], tokens[num_accepted + 1 :]
    if not all(0 <= token < logits.shape[1] for token in said) or set(rest) - {-1}:
        yield (
            f"token_ids has the accepted tokens and the one after them, and then -1; with num_accepted {num_accepted} "
            f"it is {tokens}: pad with -1, and give -1 alone only for a request whose logits are not finite"
        )
        return
    if rows[0] != root or set(rows[num_accepted:]) != {rows[num_accepted]}:
        yield (
            f"rows begins with the root's row, {root}, and repeats the last row of the path to the end; it is {rows} "
            f"with num_accepted {num_accepted}: row of request b's root: offsets[b] + b, of its node i: one more + i"
        )
        return
    for depth, (token, row) in enumerate(zip(said, rows, strict=False)):
        if not 0 <= row < len(logits) or int(layout.row_requests[row]) != request:
            yield f"rows[{depth}] is {row}, a row of another request or of none: count rows from the batch's first one"
            return
        if depth:
            node = int((layout.node_rows == row).nonzero())
            is_child = bool(layout.is_alive[node]) and int(layout.up[row]) == rows[depth - 1]
            if not is_child or int(draft.token_ids[node]) != said[depth - 1]:
                yield (
                    f"the accepted tokens are a path of live nodes down the tree; rows are {rows} and tokens {tokens}, "
                    f"but row {row} is token {int(draft.token_ids[node])} below row {int(layout.up[row])}, and "
                    f"{'live' if layout.is_alive[node] else 'dead'}: token_ids[:, j] is the token after row rows[:, j]"
                )
                return
        if logits[row, token] == -torch.inf:
            yield (
                f"a token whose logit is -inf is never emitted, since a mask or a grammar forbids it; token {token} "
                f"was, after row {row}: accept and draw by the probabilities of the row"
            )
