"""Completes a few tiny requests on a GPU before the first one of a user: its kernels are compiled when they are first
launched, which takes up to seconds for each.

The requests go through an engine of their own, with its own scheduler, counts and seeds, and without budgets. Only the
target, the KV cache, the verifiers and the proposers are those of users' requests. So nothing is left of them but
compiled kernels and what steps keep for later ones, such as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import evolve

from specdec_core.config.sampling import SamplingParams
from specdec_core.contracts.draft import Draft, DraftTree
from specdec_core.contracts.proposer import Proposer, ProposerBatch
from specdec_core.engine.named_proposer import NamedProposer
from specdec_core.errors import CapacityError, ConfigError, PluginError
from specdec_core.models.memory_errors import is_lack_of_memory

if TYPE_CHECKING:
    from specdec_core.engine.engine import Engine
    from specdec_core.engine.request import Piece, Request

SHORT, LONG, NUM_TOKENS = 5, 300, 6
"""Prompt tokens of requests, and output tokens. Kernels may compute more than 256 tokens, or attend to more, in another
way than a few."""
SALT = "rehearsal"
"""Of the prefix cache: no user's request finds what it keeps of these."""
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = evolve(GREEDY, temperature=1.0)
SHAPED = evolve(SAMPLED, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1)
BATCHES = ((GREEDY, SHORT),), ((SAMPLED, SHORT), (SHAPED, LONG))
"""Sampling parameters and prompt tokens of requests that run together: a step of greedy requests only is verified in
another way."""


class Branches(Proposer):
    """Drafts small trees with a wrong token before the right one. Verification accepts the second branch, so that keys
    and values are moved.

    name: as a drafting method.
    known: int64 [num_tokens] of each request that was completed without drafts: prompt and output.
    """

    name = "branches"

    def __init__(self, device: torch.device) -> None:
        self.known: Sequence[np.ndarray] = ()
        self._device = device

    def propose(self, batch: ProposerBatch) -> Draft:
        pairs = zip(batch.requests, batch.max_draft_tokens, strict=True)
        return Draft.from_trees([self._tree(request.token_ids, most) for request, most in pairs], self._device)

    def _tree(self, token_ids: np.ndarray, most: int) -> DraftTree:
        size = len(token_ids)
        for known in self.known:
            if len(known) > size + 1 and np.array_equal(known[:size], token_ids):
                right, after = known[size : size + 2].tolist()
                return DraftTree([abs(right - 1), right, after][:most], [-1, -1, 1][:most])
        return DraftTree([], [])


class LentProposer(NamedProposer):
    """A proposer that another engine closes."""

    def close(self) -> None:
        return


def rehearse(engine: Engine, branches: Branches | None, methods: tuple[str, ...]) -> None:
    """Complete requests before those of users: without drafts, with trees, and with drafts of the methods.

    A request that is refused is left out, as is one that does not fit or for which a plugin fails: users hear of it
    when they send such a request. Raises DeviceError if the device fails, and whatever is raised when its memory runs
    out.

    engine: its proposers are `branches` and those of `methods`. No budget decides about drafts.
    branches: None: nothing is drafted.
    methods: names of the drafting methods that compute on the GPU. Others might learn from the requests.
    """
    for batch in BATCHES:
        known = _complete(engine, batch, ())
        if branches is not None:
            branches.known = known
            _complete(engine, batch, (branches.name,))
        if methods:  # without a seed, which lets them sample
            _complete(engine, [(evolve(params, seed=None), size) for params, size in batch], methods)


def _complete(
    engine: Engine, batch: Sequence[tuple[SamplingParams, int]], methods: tuple[str, ...]
) -> Sequence[np.ndarray]:
    """Complete a request with each of these parameters and prompt lengths, all in the same steps, and return their
    tokens. Where max_model_len is smaller, a long prompt is cut."""
    target, ids = engine.target.info, []
    longest = max(SHORT, target.max_model_len - NUM_TOKENS)
    known: dict[str, np.ndarray] = {}

    def keep(request: Request, pieces: Sequence[Piece]) -> None:
        known[request.id] = request.token_ids

    try:
        for index, (params, size) in enumerate(batch):
            with suppress(ConfigError, CapacityError):
                prompt = [(index + i) % target.vocab_size for i in range(min(size, longest))]
                given = evolve(params, speculative_methods=methods)
                ids.append(engine.add_request(prompt, given, keep, cache_salt=SALT))
        while engine.has_unfinished:
            engine.step()
    except (CapacityError, PluginError) as error:
        if is_lack_of_memory(error):
            raise
    finally:
        with suppress(PluginError):
            engine.cancel(*ids)
    return [*known.values()]
