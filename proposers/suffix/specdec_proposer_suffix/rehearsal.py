"""Warm-up: drafts for two small requests while the engine is built, so that numba compiles all functions before the
first real request."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from attrs import evolve, frozen

from specdec_core import BuildContext, ProposerBatch
from specdec_proposer_suffix.config import SuffixConfig
from specdec_proposer_suffix.proposer import SuffixProposer
from specdec_proposer_suffix.store import enlarge


@frozen(eq=False)
class _Request:
    id: str
    token_ids: np.ndarray
    seed: int = 0
    num_prompt_tokens: int = 1


@frozen
class _Batch:
    """Stands in for a ProposerBatch. It has only the fields that the proposer reads."""

    requests: list[_Request]
    max_draft_tokens: tuple[int, ...] = (1,)


def rehearse(config: SuffixConfig, context: BuildContext) -> None:
    few = evolve(config, suffix_decoding_max_cached_requests=1, suffix_decoding_cache_path=None)
    context = evolve(context, max_num_seqs=1)
    proposer = SuffixProposer(few, context)
    token_ids = np.zeros(2, np.int64)
    token_ids.flags.writeable = False
    with torch.inference_mode():
        for name in ("first", "second"):  # the second one evicts the first
            request = _Request(name, token_ids)
            proposer.start(request)
            proposer.propose(cast("ProposerBatch", _Batch([request])))
            proposer.finish(request, "stop")
    proposer.cache.add(token_ids)
    proposer.cache.store = enlarge(proposer.cache.store)
