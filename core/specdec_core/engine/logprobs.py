"""Logprobs for requests that ask for them: of the prompt's tokens during prefill, of output tokens as they are
emitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen

from specdec_core.contracts.verifier import Verdict
from specdec_core.engine.request import Request
from specdec_core.engine.scheduler import Schedule
from specdec_core.engine.step_batch import StepBatch
from specdec_core.ops.upload import upload
from specdec_core.sampling.logprobs import TokenLogprobs, logprobs_of

Decode = Callable[[int], str | None]


class TokenTexts:
    """Decodes single tokens and caches their texts. If the tokenizer is None, all texts are None."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def decoder_for(self, request: Request) -> Decode:
        return self._decode if self._tokenizer is not None and request.params.detokenize else _nothing

    def _decode(self, token_id: int) -> str:
        if token_id not in self._texts:
            self._texts[token_id] = self._tokenizer.decode([token_id])
        return self._texts[token_id]


def _nothing(token_id: int) -> None:
    return None


@frozen(eq=False)
class PromptPart:
    """A range [start, end) of a request's prompt tokens, whose logprobs one forward pass computes. Each token's
    logprob comes from the logits of the token before it."""

    request: Request
    start: int
    end: int
    first_row: int  # of the flat batch: the token before start

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def prompt_parts(schedule: Schedule, batch: StepBatch) -> list[PromptPart]:
    """For each request that asks for prompt logprobs, the range of its prompt tokens whose logprobs this forward pass
    computes. Tokens whose logprobs are known from before a preemption are left out."""
    parts = []
    for request, num_known, offset in zip(schedule.requests, schedule.num_known, batch.token_offsets, strict=True):
        if request.prompt_logprobs is not None:
            start = len(request.prompt_logprobs)
            end = min(request.num_computed + num_known + 1, request.num_prompt_tokens)
            if start < end:
                parts.append(PromptPart(request, start, end, int(offset) + start - 1 - request.num_computed))
    return parts


def rows_of(parts: Sequence[PromptPart], device: torch.device) -> torch.Tensor:
    """For each token of these prompt ranges, the index of the token before it in the forward pass. The logits at this
    index give the token's logprob. int64 [number of tokens in all ranges]."""
    return upload(np.concatenate([p.first_row + np.arange(p.num_tokens) for p in parts]), device)


def add_prompt_logprobs(parts: Sequence[PromptPart], logits: torch.Tensor, texts: TokenTexts) -> None:
    """Compute prompt logprobs and add them to their requests.

    parts: the ranges of prompt tokens.
    logits: [number of tokens in all ranges, vocab], the logits that predict the tokens of the ranges.
    texts: decodes the tokens.
    """
    end = 0
    for part in parts:
        start, end = end, end + part.num_tokens
        request, number = part.request, part.request.params.prompt_logprobs
        assert request.prompt_logprobs is not None and number is not None
        tokens = upload(request.token_ids[part.start : part.end].copy(), logits.device)
        decode = [texts.decoder_for(request)] * part.num_tokens
        request.prompt_logprobs += logprobs_of(logits[start:end], tokens, [number] * part.num_tokens, decode)


def output_logprobs(
    requests: Sequence[Request],
    verdict: Verdict,
    token_ids: Sequence[Sequence[int]],
    logits: torch.Tensor,
    texts: TokenTexts,
) -> dict[str, list[TokenLogprobs]]:
    """Logprobs of the emitted tokens, by request id, for requests that ask for them.

    verdict: the result of verification, on the host: the emitted tokens, and for each the row of `logits` that decided
        it.
    token_ids: the verdict's token ids, one list per request, padded with -1.
    logits: [num_rows, vocab], the target's logits at each request's last token and at its draft tokens.
    texts: decodes the tokens.
    """
    asking = [(i, request) for i, request in enumerate(requests) if request.params.logprobs is not None]
    places = [(i, j, r) for i, r in asking for j, token_id in enumerate(token_ids[i]) if token_id >= 0]
    if not places:
        return {}
    index = torch.tensor([(i, j) for i, j, _ in places]).unbind(dim=1)  # on the host, as the verdict is
    numbers = [r.params.logprobs for _, _, r in places if r.params.logprobs is not None]
    decode = [texts.decoder_for(r) for _, _, r in places]
    decided = torch.stack([verdict.rows[index].to(torch.int64), verdict.token_ids[index]])
    rows, tokens = upload(decided, logits.device).unbind()  # int64 [num_tokens] each
    found: dict[str, list[TokenLogprobs]] = {request.id: [] for _, request in asking}
    each = logprobs_of(logits[rows], tokens, numbers, decode)
    for (_, _, request), logprobs in zip(places, each, strict=True):
        found[request.id].append(logprobs)
    return found
