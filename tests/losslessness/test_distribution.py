"""Sampled outputs under speculation follow the target's distribution, as transformers computes it.

SPECDEC_NIGHTLY=1 adds outputs, draft methods, verifiers and sampling parameters.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import table_draft
import torch
from attrs import evolve, field, frozen
from nightly import IS_NIGHTLY
from noisy_drafts import save_in_other_words, save_words
from tiny_models import save_tiny_model

from specdec_core import TokenTree
from specdec_proposer_draft.proposer import DraftModelProposer
from specdec_proposer_draft.vocabulary import SharedVocabulary

VOCAB = 8
NUM_SEEN = 3  # the first token comes from the prefill; the others are decided under speculation
MAX_TOKENS = 4  # so that there is a budget for drafts while they are
NUM_DRAWS, NOISE = (100_000, 0.02) if IS_NIGHTLY else (10_000, 0.08)  # a share of noise that has to be noticed
TEMPERATURE = 1.4
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


@frozen
class Case:
    """One test case: a draft method, its verifier, and sampling parameters.

    options: keys of speculative_config.
    sampling: keyword arguments of SamplingParams, besides the temperature.
    """

    method: Any
    options: dict[str, Any]
    sampling: dict[str, Any] = field(factory=dict)


CHAIN, TREE = {"widths": (1, 1)}, {"widths": (3, 2)}
DEAD_TAILS = {"dead_tails": True}
DRAWN = {"draft_sample_method": "probabilistic"}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.4}
IN_CI = {
    "chosen tree": Case("random_tree", {"observe": False, "full": True}),
    "good chain": Case("table", {**CHAIN, **DRAWN, **DEAD_TAILS}, {"top_p": 0.9, "frequency_penalty": 0.6}),
    "chain within a budget": Case("table", {**CHAIN, **DRAWN, "adaptive_draft_length": True}),
    "sampled chain beside a chosen tree": Case(
        [{"method": "table", **CHAIN, **DRAWN}, {"method": "random_tree", "observe": False, "full": True}],
        {"adaptive_draft_length": True},
    ),
    "adversarial tree": Case(
        "table", {**TREE, **DRAWN, "quality": "adversarial", "sparse": True}, {"top_k": 6, "repetition_penalty": 1.4}
    ),
}
NIGHTLY = {
    f"{quality} {shape}, {verifier}, {', '.join(sampling) or 'plain'}": Case(
        "table", {**widths, **DRAWN, **DEAD_TAILS, "quality": quality, "verifier": verifier}, sampling
    )
    for quality in ("good", "bad", "adversarial")
    for shape, widths, verifiers in (
        ("chain", CHAIN, ("rejection", "block")),
        ("tree", TREE, ("rejection", "traversal")),
    )
    for verifier in verifiers
    for sampling in ({}, {"top_k": 6, "top_p": 0.9}, {"min_p": 0.05, **PENALTIES})
}
CASES = [pytest.param(case, id=name) for name, case in IN_CI.items()]
CASES += [pytest.param(case, id=name, marks=pytest.mark.nightly) for name, case in NIGHTLY.items()]


def raw_logits(model_dir: Path) -> dict[int, torch.Tensor]:
    """Return the target's logits after every continuation of the prompt, by the continuation's length.

    The value for length n is float64 [VOCAB ** n, VOCAB], with the continuations of n tokens in lexicographic order.
    """
    model = reference.load(model_dir)
    return {
        n: torch.stack(
            [reference.logits(model, [*PROMPT, *tokens])[-1].double() for tokens in product(range(VOCAB), repeat=n)]
        )
        for n in range(NUM_SEEN)
    }


def processed(logits: torch.Tensor, sampling: dict[str, Any], output: Sequence[int]) -> torch.Tensor:
    """Apply sampling parameters to logits [VOCAB], by their definitions. Returns the probabilities [VOCAB] of the token
    after PROMPT and `output`."""
    logits = logits.clone()
    for token in range(VOCAB):
        if token in PROMPT or token in output:
            factor = sampling.get("repetition_penalty", 1.0)
            logits[token] *= 1 / factor if logits[token] > 0 else factor
        logits[token] -= sampling.get("frequency_penalty", 0.0) * list(output).count(token)
        logits[token] -= sampling.get("presence_penalty", 0.0) * (token in output)
    probs = (logits / TEMPERATURE).softmax(-1)
    probs[probs < sampling.get("min_p", 0.0) * probs.max()] = 0
    order = probs.argsort(descending=True).tolist()
    probs[order[sampling.get("top_k", VOCAB) :]] = 0
    probs /= probs.sum()
    total = 0.0
    for token in order:
        if total >= sampling.get("top_p", 1.0):
            probs[token] = 0
        total += float(probs[token])
    return probs / probs.sum()


def exact_probabilities(raw: dict[int, torch.Tensor], sampling: dict[str, Any]) -> torch.Tensor:
    """Return the probability of every continuation of NUM_SEEN tokens: float64 [VOCAB ** NUM_SEEN], in lexicographic
    order.

    raw: the logits from `raw_logits`.
    """
    probabilities = torch.ones(1, dtype=torch.float64)
    for n in range(NUM_SEEN):
        outputs = product(range(VOCAB), repeat=n)
        each = [processed(row, sampling, output) for row, output in zip(raw[n], outputs, strict=True)]
        probabilities = (probabilities.unsqueeze(1) * torch.stack(each)).flatten()
    return probabilities


def drawn(make_llm: Any, generate: Any, model_dir: Path, case: Case, num_draws: int) -> tuple[Any, torch.Tensor]:
    """Sample num_draws outputs with different seeds.

    Returns the LLM and, for each output, the index int64 [num_draws] of its first NUM_SEEN tokens among all
    continuations of this length in lexicographic order.
    """
    from specdec_core import SamplingParams

    llm = make_llm(
        model_dir,
        case.method,
        options=case.options,
        max_model_len=16,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        num_kv_blocks=2048,
    )
    for drafter in llm.engine._speculation.drafters:
        if drafter.budget is not None:
            make_drafting_free(drafter.budget)
    each = [
        SamplingParams(temperature=TEMPERATURE, max_tokens=MAX_TOKENS, seed=seed, ignore_eos=True, **case.sampling)
        for seed in range(num_draws)
    ]
    outputs = generate(llm, [PROMPT] * num_draws, each)
    tokens = torch.tensor([output.token_ids[:NUM_SEEN] for output in outputs])
    return llm, (tokens * VOCAB ** torch.arange(NUM_SEEN - 1, -1, -1)).sum(-1)


def make_drafting_free(budget: Any) -> None:
    """So that what a budget decides does not depend on the machine."""
    curve = budget._curve
    seconds = np.linspace(1.0, 1.001, len(curve.seconds(1)))
    curve.seconds = lambda num_requests: seconds
    curve.add = curve.add_empty = lambda *of: None
    for clock in (budget._first, budget._level, budget._observe):
        clock.add = lambda batch_size, seconds, step: None


def p_value(outcomes: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return the p-value of a chi-square test.

    outcomes: indices into probabilities, one for each draw. All outcomes that are expected fewer than 10 times are
        counted as one.
    """
    expected = probabilities * outcomes.numel()
    observed = torch.bincount(outcomes, minlength=probabilities.numel()).double()
    rare = expected < 10
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    observed = torch.cat([observed[~rare], observed[rare].sum().view(1)])
    statistic = ((observed - expected).square() / expected.clamp_min(1e-9)).sum()
    return float(torch.special.gammaincc(torch.tensor((expected.numel() - 1) / 2).double(), statistic / 2))


@pytest.mark.parametrize("case", CASES)
def test_continuations_have_the_exact_distribution(
    case: Case, small_model: Path, make_llm: Any, generate: Any, counter: Any
) -> None:
    raw = raw_logits(small_model)
    table_draft.TABLE.update({n: table.float() for n, table in raw.items()})
    exact = exact_probabilities(raw, case.sampling)
    assert abs(float(exact.sum()) - 1) < 1e-9
    assert int((exact * NUM_DRAWS > 10).sum()) > 40, "too peaked to tell a wrong distribution from the right one"
    llm, outcomes = drawn(make_llm, generate, small_model, case, NUM_DRAWS)
    assert counter(llm, "num_accepted_tokens") > NUM_DRAWS / 20
    assert p_value(outcomes, exact) > 1e-4
    possible = (exact > 0).double()
    noisy = (1 - NOISE) * exact + NOISE * possible / possible.sum()
    assert p_value(outcomes, noisy) < 1e-4, f"{NOISE:.0%} of noise would go unnoticed"


TARGET_WORDS, DRAFT_WORDS = [*"abcdefgh"], [*"xhcaydb"]
FEWER_DRAWS = 10_000 if IS_NIGHTLY else 5_000
Fault = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def in_other_words(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a target and of a draft model whose tokenizers have five tokens in common."""
    target, draft = tmp_path_factory.mktemp("words"), tmp_path_factory.mktemp("other_words")
    shutil.copytree(small_model, target, dirs_exist_ok=True)
    save_words(target, TARGET_WORDS)
    return target, save_in_other_words(target, draft, TARGET_WORDS, DRAFT_WORDS)


def tells_another_pairing(patch: pytest.MonkeyPatch) -> None:
    propose = DraftModelProposer.propose

    def told(self: Any, batch: Any) -> Any:
        draft = propose(self, batch)
        return draft if draft.q is None else evolve(draft, q_to_target=draft.q_to_target.roll(1))

    patch.setattr(DraftModelProposer, "propose", told)


def draws_from_all_its_tokens(patch: pytest.MonkeyPatch) -> None:
    """A deliberate fault: the draft model also samples tokens that the target lacks, and proposes token 0 in their
    place. Its draft probabilities `q` do not include them."""
    by_text, propose = SharedVocabulary.by_text, DraftModelProposer.propose
    found: list[SharedVocabulary] = []

    def all_of_them(*args: Any) -> SharedVocabulary:
        found.append(by_text(*args))
        target_ids = np.zeros(len(DRAFT_WORDS), dtype=np.int64)
        target_ids[found[-1].draft_ids] = found[-1].target_ids
        return evolve(found[-1], draft_ids=slice(len(DRAFT_WORDS)), target_ids=target_ids)

    def told(self: Any, batch: Any) -> Any:
        draft, shared = propose(self, batch), found[-1]
        if draft.q is None:
            return draft
        q = draft.q[:, shared.draft_ids]
        return evolve(draft, q=q / q.sum(dim=-1, keepdim=True), q_to_target=torch.from_numpy(shared.target_ids))

    patch.setattr(SharedVocabulary, "by_text", all_of_them)
    patch.setattr(DraftModelProposer, "propose", told)


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        ("[(0,), (0, 0)]", None),
        ("[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]", None),
        ("[(0,), (0, 0)]", tells_another_pairing),
        ("[(0,), (0, 0)]", draws_from_all_its_tokens),
    ],
    ids=["chain", "tree", "tells_another_pairing", "draws_from_all_its_tokens"],
)
def test_drafts_in_other_words(
    shape: str,
    fault: Fault | None,
    in_other_words: tuple[Path, Path],
    make_llm: Any,
    generate: Any,
    counter: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a draft model that has another tokenizer, outputs follow the target's distribution. With a deliberate fault
    they do not."""
    target, draft = in_other_words
    if fault is not None:
        fault(monkeypatch)
    options = {"model": str(draft), "use_heterogeneous_vocab": True, "speculative_token_tree": shape, **DRAWN}
    options["num_speculative_tokens"] = len(TokenTree.parse(shape).paths)
    llm, outcomes = drawn(make_llm, generate, target, Case("draft_model", options), FEWER_DRAWS)
    assert counter(llm, "num_accepted_tokens") > FEWER_DRAWS / 20
    exact = exact_probabilities(raw_logits(target), {})
    assert (p_value(outcomes, exact) > 1e-4) == (fault is None)
