"""Settings of the compared proposers: one set for all suffix proposers, one for all n-gram proposers."""

from __future__ import annotations

from collections.abc import Callable

from other_proposers import Arctic, TransformersLookup, VllmNgram
from proposer_peers import Ours, OursSuffix, Peer

DEPTH, CACHED, FACTOR, OFFSET, MIN_PROB = 24, 10_000, 1.0, 0.0, 0.1
SUFFIX_NODES = 24
SHORTEST, LONGEST, NGRAM_NODES = 2, 5, 5
MAX_NUM_SEQS = 64

SUFFIX_OPTIONS = {
    "suffix_decoding_max_tree_depth": DEPTH,
    "suffix_decoding_max_cached_requests": CACHED,
    "suffix_decoding_max_spec_factor": FACTOR,
    "suffix_decoding_max_spec_offset": OFFSET,
    "suffix_decoding_min_token_prob": MIN_PROB,
}
NGRAM_OPTIONS = {"prompt_lookup_min": SHORTEST, "prompt_lookup_max": LONGEST}


def arctic() -> Peer:
    return Arctic(DEPTH, CACHED, SUFFIX_NODES, max_spec_factor=FACTOR, max_spec_offset=OFFSET, min_token_prob=MIN_PROB)


SUFFIX: dict[str, Callable[[], Peer]] = {
    "specdec": lambda: OursSuffix("suffix", SUFFIX_OPTIONS, SUFFIX_NODES, MAX_NUM_SEQS),
    "arctic": arctic,
}


def ngram(max_model_len: int) -> list[Callable[[], Peer]]:
    return [
        lambda: Ours("ngram", NGRAM_OPTIONS, NGRAM_NODES, MAX_NUM_SEQS),
        lambda: VllmNgram(SHORTEST, LONGEST, NGRAM_NODES, MAX_NUM_SEQS, max_model_len),
        lambda: TransformersLookup(LONGEST, NGRAM_NODES),
    ]
