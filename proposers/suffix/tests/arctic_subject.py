"""arctic-inference's suffix decoding as a `Subject` (the proposer under test) of the random tests in `suffix_fuzz`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from arctic_inference.suffix_decoding import SuffixDecodingCache
from attrs import define, evolve, field
from suffix_fuzz import Drafted, Plan, View

DIFFERENT = {"evicts": "first started", "matches_whole_context": False}
"""Options of the reference that reproduce arctic-inference's differences."""


def like_arctic(plan: Plan) -> Plan:
    return evolve(plan, options=evolve(plan.options, **DIFFERENT))


@define
class ArcticSubject:
    plan: Plan
    cache: SuffixDecodingCache = field(init=False)
    _lives: dict[str, tuple[int, int]] = field(factory=dict)  # id -> key in the cache, tokens seen
    _num_lives: int = 0

    def __attrs_post_init__(self) -> None:
        options = self.plan.options
        self.cache = SuffixDecodingCache(options.depth, options.max_cached_requests)

    def start(self, request: View) -> None:
        self._num_lives += 1  # as the key: ids come again, and would drop earlier outputs
        num_prompt_tokens = request.num_prompt_tokens
        self._lives[request.id] = self._num_lives, num_prompt_tokens
        self.cache.start_request(self._num_lives, request.token_ids[:num_prompt_tokens].astype(np.int32))
        self._catch_up(request)

    def propose(self, requests: Sequence[View], budgets: Sequence[int]) -> list[Drafted]:
        for request in requests:
            self._catch_up(request)
        return [self._draft(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def reset(self, request: View) -> None:
        pass

    def finish(self, request: View) -> None:
        self._catch_up(request)
        self.cache.stop_request(self._lives.pop(request.id)[0])

    def _catch_up(self, request: View) -> None:
        key, num_seen = self._lives[request.id]
        self.cache.add_active_response(key, request.token_ids[num_seen:].astype(np.int32))
        self._lives[request.id] = key, len(request.token_ids)

    def _draft(self, request: View, budget: int) -> Drafted:
        options = self.plan.options
        draft = self.cache.speculate(
            self._lives[request.id][0],
            request.token_ids.astype(np.int32),
            max_spec_tokens=budget,
            max_spec_factor=options.factor,
            max_spec_offset=options.offset,
            min_token_prob=options.min_prob,
            use_tree_spec=self.plan.use_tree,
        )
        probs = np.array([*draft.probs, 1.0], dtype=np.float32)  # the last one: of the root, -1
        scores = (probs[:-1] / probs[draft.parents]).tolist() if draft.token_ids else []
        return Drafted(draft.token_ids, draft.parents, scores, None if self.plan.use_tree else draft.score)
