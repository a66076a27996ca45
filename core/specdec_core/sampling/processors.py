"""Custom logits processors: a user's functions of one position's logits and history."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec_core.sampling.rules import RuledRows
from specdec_core.sampling_params import LogitsProcessor


def run_processors(logits: torch.Tensor, rows: RuledRows) -> None:
    """In place, a row at a time. A row whose processor fails becomes NaN, which fails its request if it is reached.
    Dead nodes, and rows that are not finite already, are left alone."""
    asking = rows.where(lambda rules: len(rules.processors) > 0)
    if asking is None:
        return
    is_root = np.diff(asking.owners, prepend=-1) > 0
    depths = asking.depths.tolist()
    paths = asking.path.cpu().numpy()
    is_finite = logits[asking.rows].amax(dim=1).isfinite().tolist()
    for position, (row, owner) in enumerate(zip(asking.host_rows.tolist(), asking.owners.tolist(), strict=True)):
        depth, rules = depths[position], asking.rules[owner]
        if not is_finite[position] or (depth == 0 and not is_root[position]):
            continue
        history = _read_only(asking.requests[owner].token_ids, paths[position, :depth][::-1])
        processed = _processed(rules.processors, logits[row].clone(), history)
        if is_root[position]:
            rules.fault = processed if isinstance(processed, str) else None
        logits[row] = torch.nan if isinstance(processed, str) else processed


def _read_only(known: np.ndarray, path: np.ndarray) -> np.ndarray:
    history = np.concatenate([known, path])
    history.flags.writeable = False
    return history


def _processed(processors: Sequence[LogitsProcessor], logits: torch.Tensor, history: np.ndarray) -> torch.Tensor | str:
    """What the last one returns, or what one of them did wrong."""
    shape, dtype = logits.shape, logits.dtype
    for processor in processors:
        name = getattr(processor, "__qualname__", type(processor).__qualname__)
        try:
            logits = processor(logits, history)
        except Exception as error:
            return f"logits processor {name} raised {type(error).__name__}: {error}"
        if not isinstance(logits, torch.Tensor):
            return f"logits processor {name} returned a {type(logits).__name__}: it must return the logits, a tensor"
        if logits.shape != shape or logits.dtype != dtype:
            return (
                f"logits processor {name} returned {logits.dtype} {list(logits.shape)}: it must return {dtype} "
                f"{list(shape)}"
            )
    if not logits.amax().isfinite():
        return (
            "the logits processors returned NaN, or +inf, or -inf for every token: at least one token must be possible"
        )
    return logits
