"""CounterRandom: the keys that its draws depend on, and the distribution that they follow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from chi_square import fit_p_value
from drawing import DRAWN_STREAMS, SMALLEST_P, categorical, ids, source, target_tokens, uniform, zeros

from specdec_core.contracts.verifier import RandomSource, Stream

# What draws depend on


def test_draws_are_deterministic() -> None:
    weights = torch.rand(64, 50, generator=torch.Generator().manual_seed(0))
    prob = weights[:, 0]
    for _ in range(2):
        first, second = (source(range(64), range(64)) for _ in range(2))
        assert torch.equal(
            first.target_token(weights, ids(64), zeros(64)), second.target_token(weights, ids(64), zeros(64))
        )
        for stream in DRAWN_STREAMS:
            for draw, argument in (("categorical", weights), ("bernoulli", prob)):
                once = getattr(first, draw)(argument, stream, ids(64), ids(64))
                again = getattr(first, draw)(argument, stream, ids(64), ids(64))
                elsewhere = getattr(second, draw)(argument, stream, ids(64), ids(64))
                assert torch.equal(once, again)
                assert torch.equal(once, elsewhere)


def draw_all(
    random: RandomSource, weights: torch.Tensor, requests: torch.Tensor, nodes: torch.Tensor
) -> list[torch.Tensor]:
    draws = [random.target_token(weights, requests, nodes)]
    for stream in DRAWN_STREAMS:
        draws.append(random.categorical(weights, stream, requests, nodes))
        draws.append(random.bernoulli(weights[:, 0], stream, requests, nodes))
    return draws


def test_draws_ignore_the_order_of_rows_and_what_else_is_drawn() -> None:
    weights = torch.rand(40, 30, generator=torch.Generator().manual_seed(1))
    requests, nodes = ids(40) // 5, ids(40) % 5
    random = source(range(100, 108), range(8))
    whole = draw_all(random, weights, requests, nodes)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    for rows in (order, order[:7], torch.tensor([39]), torch.tensor([], dtype=torch.int64)):
        part = draw_all(random, weights[rows], requests[rows], nodes[rows])
        for expected, actual in zip(whole, part, strict=True):
            assert torch.equal(expected[rows], actual)


def test_draws_ignore_the_batch() -> None:
    weights = torch.rand(8, 30, generator=torch.Generator().manual_seed(1))
    seeds, positions = [9, 8, 7, 6, 5, 4, 3, 2], [1, 20, 300, 4, 5, 6, 7, 8]
    whole = draw_all(source(seeds, positions), weights, ids(8), ids(8))
    for order in ([7, 0, 3], [2], [7, 6, 5, 4, 3, 2, 1, 0]):
        smaller = source([seeds[i] for i in order], [positions[i] for i in order])
        part = draw_all(smaller, weights[order], ids(len(order)), torch.tensor(order))
        for expected, actual in zip(whole, part, strict=True):
            assert torch.equal(expected[order], actual)


def test_draws_ignore_the_scale_and_layout_of_weights() -> None:
    weights = torch.rand(32, 64, generator=torch.Generator().manual_seed(3))
    random = source(range(32), [5] * 32)
    expected = random.target_token(weights, ids(32), zeros(32))
    assert torch.equal(random.target_token(weights * 1024, ids(32), zeros(32)), expected)
    assert torch.equal(random.target_token(weights / 1024, ids(32), zeros(32)), expected)
    assert torch.equal(random.target_token(weights.t().contiguous().t(), ids(32), zeros(32)), expected)


@pytest.mark.parametrize(("root", "depth"), [(12, 0), (11, 1), (10, 2), (9, 3)])
def test_target_token_is_keyed_by_the_absolute_index_alone(root: int, depth: int) -> None:
    weights = uniform(50)
    drawn = source(range(50), [root] * 50).target_token(weights, ids(50), torch.full((50,), depth))
    assert torch.equal(drawn, target_tokens(weights, range(50), position=12))
    assert not torch.equal(drawn, target_tokens(weights, range(50), position=13))


def agreement(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first == second).double().mean())


def test_each_key_changes_the_draw() -> None:
    """Draws with different seeds, positions, streams or nodes are unrelated: two draws from 1,000 equally likely tokens
    agree about once in 1,000 times."""
    n = 2000
    weights = uniform(n)
    draws = {
        "target": target_tokens(weights, range(n), position=17),
        "next position": target_tokens(weights, range(n), position=18),
        "far position": target_tokens(weights, range(n), position=2**20),
        "other seeds": target_tokens(weights, range(n, 2 * n), position=17),
        "high seed bits": target_tokens(weights, [s + (1 << 40) for s in range(n)], position=17),
    }
    for stream in DRAWN_STREAMS:
        for root in (17, 18):
            for node in (0, 1):
                random = source(range(n), [root] * n)
                nodes = torch.full((n,), node)
                draws[f"{stream.name} {root} {node}"] = random.categorical(weights, stream, ids(n), nodes)
    names = list(draws)
    for i, name in enumerate(names):
        for other in names[:i]:
            assert agreement(draws[name], draws[other]) < 0.006, f"{name} repeats {other}"


def test_seed_position_and_node_do_not_add_up() -> None:
    """Parts of a key are not simply added: (seed s, position i + 1) draws differently from (seed s + 1, position i),
    and so do keys with two parts swapped."""
    n = 2000
    weights = uniform(n)
    assert agreement(target_tokens(weights, range(n), 6), target_tokens(weights, range(1, n + 1), 5)) < 0.006
    root_by_node = source([1] * n, [3] * n).categorical(weights, Stream.DRAFT, ids(n), ids(n))
    node_by_root = source([1] * n, ids(n)).categorical(weights, Stream.DRAFT, ids(n), torch.full((n,), 3))
    assert agreement(root_by_node, node_by_root) < 0.006
    seed_by_root = source([1] * n, ids(n)).categorical(weights, Stream.DRAFT, ids(n), zeros(n))
    root_by_seed = source(range(n), [1] * n).categorical(weights, Stream.DRAFT, ids(n), zeros(n))
    assert agreement(seed_by_root, root_by_seed) < 0.006


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1])
def test_any_seed_below_2_to_the_63_works(seed: int) -> None:
    random = source([seed], [3])
    drawn = random.target_token(uniform(400, 8), zeros(400), ids(400))
    assert fit_p_value(drawn, torch.ones(8)) > SMALLEST_P
    other = source([seed ^ 1], [3]).target_token(uniform(400, 8), zeros(400), ids(400))
    assert agreement(drawn, other) < 0.3


# What distribution draws have


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("draw", [target_tokens, categorical])
@pytest.mark.parametrize("weights", [[1, 1], [1, 9], [1, 2, 3, 4], [0, 5, 0, 1, 0], [1e-3, 1, 1e-3], [1e20, 3e20]])
def test_draws_follow_the_weights(draw: Callable[..., torch.Tensor], weights: list[float], dtype: torch.dtype) -> None:
    row = torch.tensor(weights, dtype=dtype)
    drawn = draw(row, range(20_000))
    assert drawn.dtype == torch.int64
    assert fit_p_value(drawn, row) > SMALLEST_P


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("vocab", "chunk", "num_chunks"), [(2, 4096, 4), (100, 4096, 4), (8193, 512, 8), (151936, 64, 12)]
)
def test_draws_follow_the_weights_of_any_vocabulary(
    vocab: int, chunk: int, num_chunks: int, dtype: torch.dtype
) -> None:
    """Draws follow the weights. The tokens of large vocabularies are counted in 32 bins."""
    weights = torch.rand(vocab, generator=torch.Generator().manual_seed(vocab), dtype=dtype)
    drawn = torch.cat([target_tokens(weights, range(i * chunk, (i + 1) * chunk)) for i in range(num_chunks)])
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < vocab
    num_bins = min(vocab, 32)
    for bins in (ids(vocab) % num_bins, ids(vocab) * num_bins // vocab):
        expected = torch.zeros(num_bins, dtype=torch.float64).index_add(0, bins, weights.double())
        assert fit_p_value(bins[drawn], expected) > SMALLEST_P


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [2, 100, 8193, 151936])
def test_weight_zero_is_never_drawn(vocab: int, dtype: torch.dtype) -> None:
    n = min(4000, 8_000_000 // vocab)
    for allowed in ([0], [vocab - 1], [vocab // 2], [0, vocab - 1], [vocab // 2, vocab - 1]):
        weights = torch.zeros(vocab, dtype=dtype)
        weights[allowed] = torch.tensor([1.0, 1e-3], dtype=dtype)[: len(allowed)]
        assert set(target_tokens(weights, range(n)).tolist()) <= set(allowed)
        assert set(categorical(weights, range(n)).tolist()) <= set(allowed)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e30])
def test_a_single_token_is_drawn_whatever_its_weight(scale: float) -> None:
    weights = torch.eye(500) * scale
    assert torch.equal(target_tokens(weights, range(500)), ids(500))


def test_rows_with_different_support_do_not_touch_each_other() -> None:
    generator = torch.Generator().manual_seed(4)
    weights = torch.rand(4000, 12, generator=generator) * (torch.rand(4000, 12, generator=generator) < 0.3)
    weights[:, 5] += weights.sum(-1) == 0
    drawn = target_tokens(weights, range(4000))
    assert bool((weights.gather(1, drawn[:, None]) > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stream", DRAWN_STREAMS)
@pytest.mark.parametrize("prob", [0.0, 0.01, 0.3, 0.5, 0.99, 1.0])
def test_bernoulli_follows_its_probability(prob: float, stream: Stream, dtype: torch.dtype) -> None:
    n = 20_000
    drawn = source(range(n), [17] * n).bernoulli(torch.full((n,), prob, dtype=dtype), stream, ids(n), zeros(n))
    assert drawn.dtype == torch.bool
    assert fit_p_value(drawn.long(), torch.tensor([1 - prob, prob])) > SMALLEST_P
