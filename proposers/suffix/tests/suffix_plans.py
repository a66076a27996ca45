"""Plans of the random tests in `suffix_fuzz`: combinations of options, with few or many distinct tokens."""

from __future__ import annotations

from attrs import evolve
from nightly import IS_NIGHTLY
from suffix_fuzz import Plan
from suffix_reference import Options

NUM_OPERATIONS = 56_000 if IS_NIGHTLY else 500
"""Operations per plan: a million in all in the nightly run, else some thousands."""

PLANS = {
    "defaults": Plan(Options(max_cached_requests=50), num_symbols=30),
    "many symbols": Plan(Options(max_cached_requests=10), num_symbols=3000, longest_prompt=200),
    "two symbols": Plan(Options(depth=6, max_cached_requests=3), num_symbols=2, budget=8),
    "evicts always": Plan(Options(depth=4, max_cached_requests=1), num_symbols=3, budget=5),
    "no global tree": Plan(Options(depth=8, max_cached_requests=0), num_symbols=3),
    "shallowest": Plan(Options(depth=2, max_cached_requests=4), num_symbols=3, budget=4),
    "nothing to count": Plan(Options(depth=1, max_cached_requests=4), num_symbols=3, budget=4),
    "one at a time": Plan(Options(depth=12, max_cached_requests=2), num_symbols=4, max_active=1),
    "many at a time": Plan(Options(depth=10, max_cached_requests=8), num_symbols=6, max_active=16),
    "factor and offset": Plan(Options(depth=10, max_cached_requests=3, factor=0.5, offset=1.0), num_symbols=4),
    "offset alone": Plan(Options(depth=7, max_cached_requests=3, factor=0.0, offset=3.0), num_symbols=4),
    "long drafts": Plan(Options(depth=24, max_cached_requests=5, factor=4.0, min_prob=0.0), num_symbols=5),
    "certain ones": Plan(Options(depth=8, max_cached_requests=4, min_prob=1.0), num_symbols=4),
    "probable ones": Plan(Options(depth=16, max_cached_requests=4, min_prob=0.4), num_symbols=8),
}
WITH_TREES = ("defaults", "two symbols", "no global tree", "long drafts")
TREES = {f"{name}, trees": evolve(PLANS[name], use_tree=True) for name in WITH_TREES}
