"""Suffix decoding (Oliaro et al. 2024): drafts the tokens that most often followed the same context earlier, in the
request itself or in the outputs of other requests."""

from __future__ import annotations

from pathlib import Path
from weakref import ref

import numpy as np

from specdec_core import BuildContext, Counter, Draft, Gauge, Proposer, ProposerBatch, RequestView
from specdec_core.drafting.merging import merge_drafts
from specdec_proposer_suffix.automaton import NUM_TOKENS, STATE, extend, free_automaton, new_root
from specdec_proposer_suffix.batch import (
    BUDGETS,
    CACHED,
    COUNTS,
    DONE,
    OWN_IS_FULL,
    OWN_ROOT,
    OWNER,
    REQUEST_WIDTH,
    SOURCES,
    draft_chains,
    draft_trees,
    take_over,
)
from specdec_proposer_suffix.cache import SMALLEST, OutputCache
from specdec_proposer_suffix.cache_file import SavedCache
from specdec_proposer_suffix.config import LRU, SuffixConfig
from specdec_proposer_suffix.store import NONE, ROOT, Store, enlarge, has_room

Nodes = tuple[np.ndarray, np.ndarray, np.ndarray]


class SuffixProposer(Proposer):
    """Drafts from suffix automata: one for each running request, over its prompt and output, and one over the outputs
    of all requests.

    The running requests' automata share one store. Only `propose` and `finish` append new tokens, and a preempted
    request keeps its tokens, so there is nothing to `reset`.
    """

    def __init__(self, config: SuffixConfig, context: BuildContext) -> None:
        self._limits = lengths_after(config)
        self._least_prob = float(config.suffix_decoding_min_token_prob)
        self._draws_trees = config.suffix_decoding_use_tree
        self._device, self._vocab_size = context.device, context.target.vocab_size
        path, most = config.suffix_decoding_cache_path, config.suffix_decoding_max_cached_requests
        self._saved = SavedCache(None if path is None else Path(path).expanduser(), self._vocab_size, most)
        self._config = config
        self.cache = self._loaded_cache()
        self._own = Store.empty(SMALLEST)
        self._requests = np.full((context.max_num_seqs, REQUEST_WIDTH), NONE, np.int64)
        self._all_slots = frozenset(range(context.max_num_seqs))
        self._seen = [0] * context.max_num_seqs  # tokens appended, a copy of the counts in `_requests`
        self._num_removed = self.cache.num_removed
        self._num_queries = self._num_hits = 0
        self._running: dict[str, tuple[int, ref[RequestView]]] = {}  # weak, as a view may keep an engine alive

    def _loaded_cache(self) -> OutputCache:
        config, most = self._config, self._config.suffix_decoding_max_cached_requests
        megabytes = config.suffix_decoding_max_memory_mb
        cache = OutputCache(
            config.suffix_decoding_max_tree_depth,
            self._vocab_size,
            most,
            None if megabytes is None else megabytes << 20,
            config.suffix_decoding_eviction == LRU,
        )
        for sequence in self._saved.load()[-most:] if most else []:
            cache.add(sequence)
        return cache

    def forget(self) -> None:
        """Keep only outputs that were in the cache's file when it was built, or are there now."""
        self.cache = self._loaded_cache()
        self._num_removed = self.cache.num_removed

    def start(self, request: RequestView) -> None:
        slot = min(self._all_slots.difference(slot for slot, _ in self._running.values()))
        self._running[request.id] = slot, ref(request)
        self._seen[slot] = 0
        while not has_room(self._own, 1, 0):
            self._own = enlarge(self._own)
        root = new_root(self._own)
        state, number = (ROOT, self.cache.begin()) if self.cache.max_sequences > 0 else (NONE, NONE)
        self._requests[slot] = root, 0, state, 0, request.num_prompt_tokens, number, root
        self._look_up_after_removal()

    def propose(self, batch: ProposerBatch) -> Draft:
        plan, tails, nodes = self.plan(batch)
        self._num_queries += len(batch.requests)
        if not self._draws_trees:
            self.chains(plan, tails, nodes)
            self._num_hits += int((plan[SOURCES] != NONE).sum())
            return self.draft(plan, nodes, is_chain=True)
        own, cached = self.trees(plan, tails, nodes)
        self._num_hits += int((_scores(*cached) > _scores(*own)).sum())
        drafts = [self.draft(*found, is_chain=False) for found in (own, cached)]
        return merge_drafts(drafts, batch.max_draft_tokens)

    def finish(self, request: RequestView, reason: str) -> None:
        """Keep the request's output in the cache of finished outputs, and free the request's own automaton.

        If an interrupt aborts this method or `start`, the engine calls `finish` again. So each step is marked as done
        before it runs: skipping a step is safer than repeating it.
        """
        if request.id not in self._running:
            return
        slot, _ = self._running[request.id]
        row = self._requests[slot]
        self._look_up_after_removal()
        output = request.token_ids[request.num_prompt_tokens :]
        while row[CACHED][STATE] != NONE and not self._extend_cached(row, output):
            self._make_room_in_cache()
        if row[CACHED][STATE] != NONE:
            row[CACHED] = NONE, 0
            self.cache.finish(int(row[OWNER]), output)
            self._saved.add(output)
        root, row[OWN_ROOT] = int(row[OWN_ROOT]), NONE
        if root != NONE:
            free_automaton(self._own, root)
        del self._running[request.id]
        self._look_up_after_removal()

    @property
    def num_bytes(self) -> int:
        """Memory of all suffix automata and of the finished outputs' tokens, in bytes."""
        return self._own.num_bytes + self.cache.num_bytes

    def close(self) -> None:
        self._saved.save()

    def metrics(self) -> list[Counter | Gauge]:
        """The number of outputs in the cache and its memory; for how many drafts the cache was asked, and how many of
        them have a higher score from the outputs than from the request's own text."""
        return [
            Gauge("cache_outputs", self.cache.num_sequences),
            Gauge("cache_bytes", self.cache.num_bytes),
            Counter("cache_queries", self._num_queries),
            Counter("cache_hits", self._num_hits),
        ]

    def plan(self, batch: ProposerBatch) -> tuple[np.ndarray, np.ndarray, Nodes]:
        """Return the arguments of `draft_chains` and `draft_trees` for a batch: the arrays `plan` and `tails`, which
        the constants in `batch.py` explain, and uninitialized arrays for the draft tokens."""
        slots, totals, ends, tails = [], [], [], []
        end, depth, seen = 0, len(self._limits), self._seen
        for request in batch.requests:
            slot, text = self._running[request.id][0], request.token_ids
            total = len(text)
            start = min(seen[slot], max(0, total - depth))
            seen[slot] = total
            end += total - start
            slots.append(slot)
            totals.append(total)
            ends.append(end)
            tails.append(text[start:])
        plan = np.array((slots, totals, ends, batch.max_draft_tokens))
        return plan, np.concatenate(tails), _room_for_nodes(sum(batch.max_draft_tokens))

    def chains(self, plan: np.ndarray, tails: np.ndarray, nodes: Nodes) -> None:
        """Append the requests' new tokens to the suffix automata, then draft a chain for each request into the arrays
        of `nodes`."""
        while True:
            state = draft_chains(
                *self._own, *self.cache.store, self._vocab_size, self._requests, plan, tails, self._limits,
                self._least_prob, *nodes,
            )  # fmt: skip
            if state == DONE:
                return
            self._make_room(state)

    def trees(self, plan: np.ndarray, tails: np.ndarray, nodes: Nodes) -> list[tuple[np.ndarray, Nodes]]:
        """Append the requests' new tokens to the suffix automata, then draft two trees for each request.

        Returns two pairs (plan, nodes): the first for the trees from the requests' own automata, the second for those
        from the automaton of all outputs.
        """
        limit = len(self._limits)
        while True:
            state = take_over(self._own, self.cache.store, limit, self._vocab_size, self._requests, plan, tails)
            if state == DONE:
                break
            self._make_room(state)
        found = [(plan.copy(), nodes), (plan, _room_for_nodes(len(nodes[0])))]
        for store, is_cache, (its_plan, its_nodes) in zip(
            (self._own, self.cache.store), (False, True), found, strict=True
        ):
            draft_trees(store, is_cache, self._requests, its_plan, tails, self._limits, self._least_prob, *its_nodes)
        return found

    def draft(self, plan: np.ndarray, nodes: Nodes, is_chain: bool) -> Draft:
        counts, depths, sources = plan[:BUDGETS].tolist()
        self.cache.mark_used(sources)
        num_nodes = sum(counts)
        token_ids, parents, scores = (array[:num_nodes] for array in nodes)
        return Draft.from_arrays(
            token_ids, parents, counts, max(depths), scores=scores, is_chain=is_chain, device=self._device
        )

    def _make_room(self, full: int) -> None:
        if full == OWN_IS_FULL:
            self._own = enlarge(self._own)
        else:
            self._make_room_in_cache()

    def _extend_cached(self, row: np.ndarray, output: np.ndarray) -> bool:
        new = output[row[CACHED][NUM_TOKENS] :].astype(np.int64)  # one type to compile for
        return extend(self.cache.store, len(self._limits), self._vocab_size, row[CACHED], new, row[OWNER])

    def _make_room_in_cache(self) -> None:
        """Enlarge the cache's store or evict a finished output. If neither is possible, the cache drops the output of
        the oldest running request, and this request's output is not cached again."""
        if not self.cache.make_room():
            cached = [entry for entry in self._running.values() if self._requests[entry[0]][CACHED][STATE] != NONE]
            slot, request = min(cached, key=lambda entry: self._requests[entry[0], OWNER])
            output = _cached_output(request, self._requests[slot])
            self._requests[slot][CACHED] = NONE, 0
            self.cache.drop(output)
        self._look_up_after_removal()

    def _look_up_after_removal(self) -> None:
        """If the cache has removed an output since the last call, look up the positions of the running requests'
        outputs again."""
        if self.cache.num_removed == self._num_removed:
            return
        for slot, request in self._running.values():
            row = self._requests[slot]
            if row[CACHED][STATE] != NONE:
                self.cache.look_up(row[CACHED], _cached_output(request, row))
        self._num_removed = self.cache.num_removed


def _scores(plan: np.ndarray, nodes: Nodes) -> np.ndarray:
    """Return the sum of each draft's scores, float64 [batch]."""
    counts, (*_, scores) = plan[COUNTS], nodes
    return np.bincount(np.arange(len(counts)).repeat(counts), scores[: counts.sum()], minlength=len(counts))


def _room_for_nodes(num_nodes: int) -> Nodes:
    """Return uninitialized arrays for the token ids, parents and scores of num_nodes draft tokens."""
    return np.empty(num_nodes, np.int64), np.empty(num_nodes, np.int32), np.empty(num_nodes, np.float32)


def _cached_output(request: ref[RequestView], row: np.ndarray) -> np.ndarray:
    view = request()
    assert view is not None, "an engine keeps a request until it has finished"
    start = view.num_prompt_tokens
    return view.token_ids[start : start + row[CACHED][NUM_TOKENS]]


def lengths_after(config: SuffixConfig) -> np.ndarray:
    """Return an array, int64 [tree depth], whose entry n is the largest number of draft tokens after a match of n
    tokens. Entry 0 is unused."""
    limit = config.suffix_decoding_max_tree_depth
    contexts = np.arange(limit)
    factor = np.float32(config.suffix_decoding_max_spec_factor)
    offset = np.float32(config.suffix_decoding_max_spec_offset)
    wanted = (contexts.astype(np.float32) * factor + offset).astype(np.float64) + 1e-6
    return np.minimum(wanted, limit - contexts).astype(np.int64)
