"""Draws of CounterRandom are independent across seeds, positions, tree nodes and streams."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from chi_square import fit_p_value, independence_p_value
from drawing import DRAWN_STREAMS, SMALLEST_P, ids, source, uniform, zeros

from specdec_core.contracts.verifier import Stream

N = 10_000
K = 8

Series = Callable[[], torch.Tensor]


def over_seeds() -> torch.Tensor:
    return source(range(N), [41] * N).target_token(uniform(N, K), ids(N), zeros(N))


def over_depths() -> torch.Tensor:
    return source([3], [41]).target_token(uniform(N, K), zeros(N), ids(N))


def over_root_positions() -> torch.Tensor:
    return source([3] * N, ids(N)).target_token(uniform(N, K), ids(N), zeros(N))


def over_nodes() -> torch.Tensor:
    return source([3], [41]).categorical(uniform(N, K), Stream.ACCEPT, zeros(N), ids(N))


def over_seeds_categorical() -> torch.Tensor:
    return source(range(N), [41] * N).categorical(uniform(N, K), Stream.RECOVER, ids(N), zeros(N))


def over_positions_categorical() -> torch.Tensor:
    return source([3] * N, ids(N)).categorical(uniform(N, K), Stream.DRAFT, ids(N), zeros(N))


def over_nodes_bernoulli() -> torch.Tensor:
    """Return Bernoulli draws at neighboring tree nodes. Every three draws are combined into one number from 0 to 7."""
    bits = source([3], [41]).bernoulli(torch.full((3 * N,), 0.5), Stream.ACCEPT, zeros(3 * N), ids(3 * N))
    return (bits.view(N, 3).long() * torch.tensor([1, 2, 4])).sum(1)


SERIES = [
    over_seeds,
    over_depths,
    over_root_positions,
    over_nodes,
    over_seeds_categorical,
    over_positions_categorical,
    over_nodes_bernoulli,
]


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.__name__)
def test_series_is_uniform_and_not_serially_correlated(series: Series) -> None:
    drawn = series()
    assert fit_p_value(drawn, torch.ones(K)) > SMALLEST_P
    for lag in (1, 2, 4, 8, 64, 256):
        blocks = drawn[: N // (2 * lag) * 2 * lag].view(-1, 2, lag)  # every draw is in one pair only
        p = independence_p_value(blocks[:, 0].flatten(), blocks[:, 1].flatten(), K)
        assert p > SMALLEST_P, f"draws {lag} apart are correlated: p = {p}"


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.__name__)
def test_triples_are_uniform(series: Series) -> None:
    triples = series()[: N // 3 * 3].view(-1, 3) // 2
    assert fit_p_value((triples * torch.tensor([16, 4, 1])).sum(1), torch.ones(64)) > SMALLEST_P


def test_streams_are_independent_of_each_other() -> None:
    random = source(range(N), [41] * N)
    draws = [random.target_token(uniform(N, K), ids(N), zeros(N))]
    draws += [random.categorical(uniform(N, K), stream, ids(N), zeros(N)) for stream in DRAWN_STREAMS]
    for i, first in enumerate(draws):
        for second in draws[:i]:
            assert independence_p_value(first, second, K) > SMALLEST_P


def test_neighboring_seeds_are_independent_at_every_position() -> None:
    """Requests with similar seeds draw independently of each other, at equal positions and at positions one apart."""
    for first, second in ((0, 1), (1, 2), (5, 2**32 + 5), (7, -8 % 2**63)):
        a = source([first], [0]).target_token(uniform(N, K), zeros(N), ids(N))
        b = source([second], [0]).target_token(uniform(N, K), zeros(N), ids(N))
        assert independence_p_value(a, b, K) > SMALLEST_P
        assert independence_p_value(a[1:], b[:-1], K) > SMALLEST_P
        assert independence_p_value(a[:-1], b[1:], K) > SMALLEST_P


@pytest.mark.parametrize("vocab", [2, 7, 64])
def test_two_different_rows_of_weights_at_neighboring_nodes(vocab: int) -> None:
    """Draws at two neighboring tree nodes, with different weights, are independent."""
    generator = torch.Generator().manual_seed(vocab)
    first, second = torch.rand(2, vocab, generator=generator)
    random = source(range(N), [9] * N)
    a = random.categorical(first.expand(N, -1), Stream.DRAFT, ids(N), zeros(N))
    b = random.categorical(second.expand(N, -1), Stream.DRAFT, ids(N), zeros(N) + 1)
    assert fit_p_value(a * vocab + b, torch.outer(first, second).flatten()) > SMALLEST_P


def test_small_probabilities_are_reached() -> None:
    """A token of probability 1 in 20,000 is drawn about 20 times in 400,000. If the random numbers had too few bits, it
    would never be drawn."""
    n = 400_000
    random = source([11], [0])
    drawn = random.categorical(torch.tensor([1.0, 19_999.0]).expand(n, -1), Stream.DRAFT, zeros(n), ids(n))
    assert 4 <= int((drawn == 0).sum()) <= 45
    accepted = random.bernoulli(torch.full((n,), 1 / 20_000), Stream.ACCEPT, zeros(n), ids(n))
    assert 4 <= int(accepted.sum()) <= 45
