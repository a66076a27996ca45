"""Whether speculation changes the output: greedy output with and without it, and frequencies of drawn tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from on_gpu.kernels import kernels
from on_gpu.setup import Rows, Setup
from on_gpu.speculation import config_of, prompts_of
from on_gpu.timing import attempt
from specdec_core import LLM, SamplingParams
from specdec_core.ops import REFERENCE

COLUMNS = ("num_tokens", "num_equal", "num_prompts", "first_differences", "num_accepted", "acceptance_length")
COLUMNS += ("bins", "chi_square", "p_value")
MAX_MODEL_LEN, PROMPT_TOKENS = 1024, 128
METHOD_S = 10.0
AT_ONCE = 100_000  # draws
NUM_BINS = 500


def rows(setup: Setup) -> Rows:
    draw = kernels(setup.device).get("draw", REFERENCE["draw"])
    yield attempt(setup, {"what": "draws", "method": draw.__module__}, lambda: chi_square_of(draw, setup))
    expected: list[list[int]] = []
    for method in ("plain", *setup.sizes.methods):
        row = {"what": "greedy output", "method": method}
        needed_s = METHOD_S if setup.device == "cuda" else 0
        yield attempt(setup, row, lambda method=method: _outputs(setup, method, expected), needed_s)


def _outputs(setup: Setup, method: str, expected: list[list[int]]) -> dict[str, Any]:
    """Complete the prompts with the embedded model. expected: the outputs of plain decoding, which comes first."""
    sizes = setup.sizes
    params = SamplingParams(temperature=0, max_tokens=sizes.equality_tokens, ignore_eos=True)
    with LLM(
        "tiny",
        device=setup.device,
        dtype=setup.dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=sizes.equality_prompts,
        speculative_config=config_of(method),
    ) as llm:
        prompts = prompts_of(llm, sizes.equality_prompts, PROMPT_TOKENS)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    failed = [output.outputs[0] for output in outputs if output.outputs[0].finish_reason != "length"]
    if failed:
        raise RuntimeError(f"{len(failed)} requests did not get all of their tokens: {failed[0].error}")
    found = [list(output.outputs[0].token_ids) for output in outputs]
    if method == "plain":
        expected.extend(found)
    elif not expected:
        raise RuntimeError("plain decoding failed: there is nothing to compare with")
    counts = [output.speculation for output in outputs]
    drafts, accepted = sum(each.num_drafts for each in counts), sum(each.num_accepted for each in counts)
    row = {
        **compared(found, expected),
        "num_accepted": accepted,
        "acceptance_length": round(1 + accepted / drafts, 3) if drafts else 1.0,
    }
    if method != "plain" and not accepted:
        row["error"] = "no draft token was accepted, so that equal output shows nothing: set more equality_tokens"
    return row


def compared(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> dict[str, Any]:
    """first_differences: for each prompt, the number of tokens before the first that differs; None: they are equal."""
    first = [first_difference(*pair) for pair in zip(found, expected, strict=True)]
    return {
        "num_tokens": sum(map(len, found)),
        "num_prompts": len(found),
        "num_equal": first.count(None),
        "first_differences": first,
    }


def first_difference(found: Sequence[int], expected: Sequence[int]) -> int | None:
    if found == expected:
        return None
    pairs = enumerate(zip(found, expected, strict=False))
    return next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(found), len(expected)))


@torch.inference_mode()
def chi_square_of(draw: Any, setup: Setup) -> dict[str, Any]:
    """Draw tokens of a distribution like those of a model, and compare their frequencies with the probabilities."""
    sizes, device = setup.sizes, setup.device
    torch.manual_seed(0)
    probs = (3 * torch.randn(sizes.draw_vocabulary, device=device)).softmax(0)
    counts = torch.zeros(sizes.draw_vocabulary, dtype=torch.int64, device=device)
    for first in range(0, sizes.draws, AT_ONCE):
        uniform = torch.rand(min(AT_ONCE, sizes.draws - first), dtype=torch.float64, device=device)
        for part in uniform.split(_rows_at_once(draw, sizes.draw_vocabulary)):
            counts += draw(probs.expand(len(part), -1), part).bincount(minlength=sizes.draw_vocabulary)
    statistic, num_bins = chi_square(counts.cpu(), probs.cpu())
    halves = torch.tensor([num_bins - 1, statistic], dtype=torch.float64) / 2
    p_value = float(torch.special.gammaincc(*halves))
    return {
        "num_tokens": sizes.draws,
        "chi_square": round(statistic, 3),
        "bins": num_bins,
        "p_value": round(p_value, 5),
    }


def _rows_at_once(draw: Any, vocab_size: int) -> int:
    """The reference sums each row in float64."""
    return AT_ONCE if draw is not REFERENCE["draw"] else max(1, 2**28 // vocab_size)


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> tuple[float, int]:
    """Pearson's statistic, and the number of bins. Neighboring tokens share a bin, so that each bin is expected to have
    a NUM_BINS-th of the draws, or at least 5 of them.

    counts: int64 [vocab]. probs: float [vocab], which need not add up to 1.
    """
    probs, total = probs.double() / probs.double().sum(), int(counts.sum())
    wanted = max(1 / NUM_BINS, 5 / total)
    bins = torch.zeros(len(probs), dtype=torch.int64)
    filled, number = 0.0, 0
    for token, prob in enumerate(probs.tolist()):
        bins[token] = number
        filled += prob
        if filled >= wanted:
            filled, number = 0.0, number + 1
    if filled:
        bins[bins == number] = max(0, number - 1)  # too few are left for a bin
    num_bins = int(bins.max()) + 1
    expected = total * torch.zeros(num_bins, dtype=torch.float64).index_add_(0, bins, probs)
    observed = torch.zeros(num_bins, dtype=torch.float64).index_add_(0, bins, counts.double())
    return float(((observed - expected) ** 2 / expected).sum()), num_bins
