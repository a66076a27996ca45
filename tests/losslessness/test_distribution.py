"""The distribution of sampled output under speculation is the target's, as transformers computes it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from tiny_models import save_tiny_model

VOCAB = 8
NUM_SEEN = 3  # the first token comes from the prefill; the others are decided under speculation
MAX_TOKENS = 4  # so that there is a budget for drafts while they are
NUM_DRAWS = 100_000
TEMPERATURE = 0.8
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(
        "llama",
        tmp_path_factory.mktemp("eight_tokens"),
        seed=5,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        head_dim=8,
        num_hidden_layers=1,
    )


def exact_probabilities(model_dir: Path) -> torch.Tensor:
    """float64 [VOCAB ** NUM_SEEN]   of every continuation, in lexicographic order."""
    model = reference.load(model_dir)
    probabilities = []
    for continuation in product(range(VOCAB), repeat=NUM_SEEN - 1):
        logits = reference.logits(model, [*PROMPT, *continuation])[len(PROMPT) - 1 :].double()
        probs = (logits / TEMPERATURE).softmax(-1)
        history = torch.stack([probs[i, token] for i, token in enumerate(continuation)]).prod()
        probabilities.append(history * probs[-1])
    return torch.cat(probabilities)


def p_value(outcomes: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square; outcomes expected fewer than 10 times are counted together."""
    expected = probabilities * outcomes.numel()
    observed = torch.bincount(outcomes, minlength=probabilities.numel()).double()
    rare = expected < 10
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    observed = torch.cat([observed[~rare], observed[rare].sum().view(1)])
    statistic = ((observed - expected).square() / expected.clamp_min(1e-9)).sum()
    return float(torch.special.gammaincc(torch.tensor((expected.numel() - 1) / 2).double(), statistic / 2))


@pytest.mark.slow
def test_continuations_have_the_exact_distribution(
    small_model: Path, make_llm: Any, generate: Any, counter: Any
) -> None:
    from specdec_core import SamplingParams

    exact = exact_probabilities(small_model)
    assert abs(float(exact.sum()) - 1) < 1e-9
    assert int((exact * NUM_DRAWS > 10).sum()) > 40, "too peaked to tell a wrong distribution from the right one"
    llm = make_llm(
        small_model,
        "random_tree",
        options={"observe": False, "full": True},
        max_model_len=16,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        num_kv_blocks=2048,
    )
    each = [
        SamplingParams(temperature=TEMPERATURE, max_tokens=MAX_TOKENS, seed=seed, ignore_eos=True)
        for seed in range(NUM_DRAWS)
    ]
    outputs = generate(llm, [PROMPT] * NUM_DRAWS, each)
    tokens = torch.tensor([output.token_ids[:NUM_SEEN] for output in outputs])
    outcomes = (tokens * VOCAB ** torch.arange(NUM_SEEN - 1, -1, -1)).sum(-1)
    assert counter(llm, "num_accepted_tokens") > NUM_DRAWS / 20
    assert p_value(outcomes, exact) > 1e-4
    uniform = torch.full_like(exact, 1 / exact.numel())
    assert p_value(outcomes, 0.98 * exact + 0.02 * uniform) < 1e-4, "2% of uniform noise would go unnoticed"
