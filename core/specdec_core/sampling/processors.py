"""Custom logits processors: users' functions that change the logits at one position, given the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec_core.config.sampling import LogitsProcessor
from specdec_core.sampling.constraints import ConstrainedRows


def run_processors(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """Run each request's custom logits processors on its rows, in place, row by row. If a processor fails, or leaves no
    token possible, the row becomes NaN, and the request fails if verification accepts the tokens up to that row. Dead
    (padding) nodes are skipped. For a row that is not finite, the processors get zeros, and it stays as it is: to leave
    it out, the host would have to wait for a GPU."""
    is_root = np.diff(rows.owners, prepend=-1) > 0
    depths, ran = rows.paths.draft.host_layout.row_depths, list[int]()
    given = logits.index_select(0, rows.rows)
    is_finite = given.amax(dim=1).isfinite()
    logits.index_copy_(0, rows.rows, given.masked_fill(~is_finite.unsqueeze(1), 0.0))
    for position, (row, owner) in enumerate(zip(rows.host_rows.tolist(), rows.owners.tolist(), strict=True)):
        constraints = rows.constraints[owner]
        if depths[row] == 0 and not is_root[position]:
            continue
        known, path = rows.requests[owner].token_ids, rows.paths.host_token_ids[row, : depths[row]][::-1]
        # No variable holds the history, so that its buffer is free again after the call.
        fault = _process(logits[row], constraints.params.logits_processors, constraints.history.of(known, path))
        if is_root[position]:
            constraints.fault, constraints.leaves_any, constraints.got_logits = fault, None, is_finite[position]
        if fault is None:
            ran.append(position)
        else:
            logits[row] = torch.nan
    processed = logits.index_select(0, rows.rows)
    leaves_any = processed.amax(dim=1).isfinite()
    processed.masked_fill_(~leaves_any.unsqueeze(1), torch.nan)
    logits.index_copy_(0, rows.rows, torch.where(is_finite.unsqueeze(1), processed, given))
    leaves_any |= ~is_finite
    for position in ran:
        if is_root[position]:
            rows.constraints[rows.owners[position]].leaves_any = leaves_any[position]


def _process(logits: torch.Tensor, processors: Sequence[LogitsProcessor], history: np.ndarray) -> str | None:
    """Replace logits [vocab] by the result of the request's processors. Returns an error message if one fails, else
    None. history: the token ids before this position."""
    processed, wanted = logits.clone(), _kind(logits)
    for processor in processors:
        name = getattr(processor, "__qualname__", type(processor).__qualname__)
        try:
            processed = processor(processed, history)
        except (Exception, SystemExit) as error:
            return f"logits processor {name} raised {_described(error)}"
        if not isinstance(processed, torch.Tensor):
            return f"logits processor {name} returned a {type(processed).__name__}: it must return the logits, a tensor"
        if _kind(processed) != wanted:
            return f"logits processor {name} returned {_kind(processed)}: it must return {wanted}"
    try:
        logits.copy_(processed)
    except Exception as error:  # a tensor without data, such as those of the device "meta"
        return f"logits processor {name} returned a tensor that cannot be read: {_described(error)}"
    return None


def _kind(tensor: torch.Tensor) -> str:
    """A tensor's dtype and shape, and its layout if it is not strided, for error messages."""
    layout = "" if tensor.layout == torch.strided else f" {tensor.layout}"
    return f"{tensor.dtype} {list(tensor.shape)}{layout}"


def _described(error: BaseException) -> str:
    """An exception's type and message; the type alone if its message cannot be formatted."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
