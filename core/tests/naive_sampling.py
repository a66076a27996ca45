"""All sampling parameters, implemented from their definitions in plain Python, one row of logits at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from specdec_core import DraftTree, SamplingParams


def histories(known: Sequence[int], tree: DraftTree) -> list[list[int] | None]:
    """Return the token history of each row of logits. The first row is the root's; each tree node has one more row.

    A history consists of the known tokens (prompt and output) and the draft tokens on the path down to the node, the
    node included. It is None for dead (padding) nodes and their descendants.
    """
    found: list[list[int] | None] = [list(known)]
    for token, parent in zip(*tree, strict=True):
        above = None if parent == -2 else found[parent + 1]
        found.append(None if above is None else [*above, token])
    return found


def naive_logits(
    logits: Sequence[float],
    history: Sequence[int],
    num_prompt_tokens: int,
    params: SamplingParams,
    bad_words: Sequence[Sequence[int]],
    eos_token_ids: frozenset[int],
) -> list[float]:
    """Return one row of logits after penalties, bias, masks and logits processors.

    Temperature, min_p, top_k and top_p are not applied yet. history: prompt and output tokens before the predicted one.
    bad_words: as token ids.
    """
    values, output = list(logits), list(history[num_prompt_tokens:])
    if params.allowed_token_ids is not None:
        values = [x if token in params.allowed_token_ids else -math.inf for token, x in enumerate(values)]
    for *before, last in bad_words:
        if not before or output[-len(before) :] == before:
            values[last] = -math.inf
    if len(output) < params.min_tokens:
        for token in {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}:
            values[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    for processor in params.logits_processors:
        values = processor(torch.tensor(values, dtype=torch.float64), np.array(history)).tolist()
    for token in set(history):
        x, penalty = values[token], params.repetition_penalty
        values[token] = x / penalty if x > 0 else x * penalty
    for token in set(output):
        values[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return values


def naive_probs(values: Sequence[float], params: SamplingParams) -> list[float]:
    """Return the sampling probabilities of one row. values: the row from naive_logits, not all infinite."""
    if params.is_greedy:
        best = values.index(max(values))
        return [float(token == best) for token in range(len(values))]
    probs = _softmax([x / params.temperature for x in values])
    probs = _softmax([_log(p) if p >= params.min_p * max(probs) else -math.inf for p in probs])
    if params.top_k > 0:
        least = sorted(probs, reverse=True)[: params.top_k][-1]
        probs = _softmax([_log(p) if p >= least else -math.inf for p in probs])
    kept, reached = set(), 0.0
    for token in sorted(range(len(probs)), key=lambda token: -probs[token]):
        if reached < params.top_p:
            kept.add(token)
        reached += probs[token]
    return _softmax([_log(p) if token in kept else -math.inf for token, p in enumerate(probs)])


def _softmax(values: Sequence[float]) -> list[float]:
    weights = [math.exp(x - max(values)) for x in values]
    return [weight / sum(weights) for weight in weights]


def _log(prob: float) -> float:
    return math.log(prob) if prob > 0 else -math.inf
