"""The outputs of `LLM` and `AsyncLLM`."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from specdec_core.api.prompts import TokenizedPrompt
from specdec_core.engine.metrics import DraftCounts
from specdec_core.engine.request import Piece, Request
from specdec_core.sampling.logprobs import TokenLogprobs


@frozen
class CompletionOutput:
    """One completion of a prompt.

    index: index of the completion among the prompt's n completions.
    finish_reason: "stop" (end of sequence, a stop token or a stop string), "length", "abort", or "error" (no token
        could be drawn or the device failed; the message is in `error`).
    stop_reason: the stop string or token id that ended the completion; else None.
    logprobs: one entry per output token; None unless the sampling parameters ask for logprobs.
    cumulative_logprob: the sum of the output tokens' logprobs; None unless the sampling parameters ask for logprobs.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


@frozen
class RequestOutput:
    """A finished prompt with its n completions.

    speculation: counts of the drafts, draft tokens and accepted tokens of all n completions.
    prompt_logprobs: one entry per prompt token (None for the first), if the sampling parameters ask for prompt
        logprobs; else None.
    lossless: whether the output has the target's distribution. False only if a lossy verifier was used, at a
        temperature above 0.
    num_cached_tokens: the number of prompt tokens that the first completion found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    speculation: DraftCounts
    lossless: bool = True
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, prompt: TokenizedPrompt, samples: Sequence[Request]) -> RequestOutput:
        """Make the output of a prompt from `samples`, the engine's requests for the prompt, one for each completion."""
        first = samples[0]
        return cls(
            request_id=first.id,
            prompt=prompt.text,
            prompt_token_ids=first.token_ids[: first.num_prompt_tokens].tolist(),
            outputs=[
                CompletionOutput(
                    index=index,
                    text=request.text.text if request.text is not None else "",
                    token_ids=request.output_token_ids,
                    finish_reason=str(request.finish_reason),
                    stop_reason=request.stop_reason,
                    cumulative_logprob=request.cumulative_logprob,
                    logprobs=request.logprobs,
                    error=request.error,
                )
                for index, request in enumerate(samples)
            ],
            speculation=sum((request.counts for request in samples), DraftCounts()),
            lossless=first.is_lossless,
            prompt_logprobs=first.prompt_logprobs,
            num_cached_tokens=min(first.num_cached_tokens, first.num_prompt_tokens),
        )


@frozen
class StreamOutput:
    """The tokens that one step added to one completion.

    prompt_index: index of the prompt in the caller's list of prompts.
    pieces: the new tokens, each with its text.
    index: index of the completion among the prompt's n completions.
    finish_reason: set in the last output of the completion, else None.
    stop_reason: the stop string or token id that ended the completion; else None.
    error: the message for finish_reason "error"; else None.
    lossless: whether the output has the target's distribution.
    prompt_logprobs: set in the first output of the prompt's first completion, if the sampling parameters ask for them;
        else None.
    speculation: counts of the completion's drafts, draft tokens and accepted tokens, in its last output; else None.
    num_drafts: how many of the completion's steps so far have verified a draft.
    num_cached_tokens: the number of prompt tokens that the completion found in the prefix cache, in its last output;
        else 0.
    text: the text that became final in this step. An unfinished character, and characters that may begin a stop string,
        are held back for a later output. The last output adds everything that is still held back, so that all texts
        joined are the completion's text.
    """

    prompt_index: int
    pieces: tuple[Piece, ...]
    finish_reason: str | None
    index: int = 0
    stop_reason: str | int | None = None
    lossless: bool = True
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    rest: str = ""
    speculation: DraftCounts | None = None
    num_cached_tokens: int = 0
    num_drafts: int = 0

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces) + self.rest

    @classmethod
    def of(cls, prompt_index: int, index: int, request: Request, pieces: Sequence[Piece]) -> StreamOutput:
        is_first = request.num_tokens == request.num_prompt_tokens + len(pieces)
        is_last = request.finish_reason is not None
        return cls(
            prompt_index,
            tuple(pieces),
            request.finish_reason,
            index,
            request.stop_reason,
            request.is_lossless,
            prompt_logprobs=request.prompt_logprobs if is_first else None,
            error=request.error,
            rest=request.rest,
            speculation=request.counts if is_last else None,
            num_cached_tokens=min(request.num_cached_tokens, request.num_prompt_tokens) if is_last else 0,
            num_drafts=request.counts.num_drafts,
        )
