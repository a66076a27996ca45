"""Temperature, top-k and top-p, applied to every row of target logits before verification."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_core.sampling_params import SamplingParams


def process_logits(logits: torch.Tensor, row_requests: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """What a verifier sees: logits [num_rows, vocab] as the parameters of each row's request define them, float32.

    row_requests int64 [num_rows] indexes params. Rows of greedy requests are -inf except at the argmax, unless every
    request is greedy: then nothing is done. Parameters that no request uses cost nothing.
    """
    if all(p.is_greedy for p in params):
        return logits.float()

    def per_row(values: list[float]) -> torch.Tensor:  # float32 [num_rows, 1]
        return torch.tensor(values, device=logits.device)[row_requests].unsqueeze(1)

    logits = logits.float() / per_row([1.0 if p.is_greedy else p.temperature for p in params])
    if any(p.top_k > 0 for p in params):
        logits = _keep_top_k(logits, per_row([max(p.top_k, 0) for p in params]).long(), max(p.top_k for p in params))
    if any(p.top_p < 1 for p in params):
        logits = _keep_top_p(logits, per_row([p.top_p for p in params]))
    if any(p.is_greedy for p in params):
        is_greedy = per_row([float(p.is_greedy) for p in params]).bool()
        is_best = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.argmax(1, keepdim=True), True)
        # A row of NaN stays NaN, so that the verifier fails its request and no other.
        logits = logits.masked_fill(is_greedy & ~is_best & ~logits.isnan(), -torch.inf)
    return logits


def _keep_top_k(logits: torch.Tensor, k: torch.Tensor, largest_k: int) -> torch.Tensor:
    """k int64 [num_rows, 1], 0: every token. Ties with the k-th largest stay."""
    largest = logits.topk(min(largest_k, logits.shape[-1]), dim=-1).values
    least = largest.gather(1, (k - 1).clamp(0, largest.shape[-1] - 1))
    return logits.masked_fill((logits < least) & (k > 0), -torch.inf)


def _keep_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest set of most probable tokens that reaches top_p float32 [num_rows, 1]; always at least one."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    dropped = before >= top_p
    dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter_(1, order, dropped), -torch.inf)
