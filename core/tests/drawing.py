"""Shortcuts for drawing from CounterRandom, the engine's source of random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_core.contracts.verifier import RandomSource, Stream

DRAWN_STREAMS = [Stream.DRAFT, Stream.ACCEPT, Stream.RECOVER]
SMALLEST_P = 1e-5


def source(seeds: Sequence[int], root_positions: Sequence[int] | torch.Tensor) -> RandomSource:
    from specdec_core.sampling.random import CounterRandom

    return CounterRandom(list(seeds), torch.as_tensor(root_positions, dtype=torch.int64))


def ids(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.int64)


def zeros(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int64)


def uniform(n: int, vocab: int = 1000) -> torch.Tensor:
    return torch.ones(n, vocab)


def target_tokens(weights: torch.Tensor, seeds: Sequence[int], position: int = 17) -> torch.Tensor:
    """Draw one token per seed. weights: [vocab], or [n, vocab] with a row per seed.

    position: index of each request's last known token.
    """
    n = len(seeds)
    weights = weights.expand(n, -1) if weights.dim() == 1 else weights
    return source(seeds, [position] * n).target_token(weights, ids(n), zeros(n))


def categorical(weights: torch.Tensor, seeds: Sequence[int], stream: Stream = Stream.DRAFT) -> torch.Tensor:
    n = len(seeds)
    return source(seeds, [17] * n).categorical(weights.expand(n, -1), stream, ids(n), zeros(n))
