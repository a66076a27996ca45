"""What `LLM` returns."""

from __future__ import annotations

from attrs import frozen

from specdec_core.engine.request import DraftCounts, Piece


@frozen
class CompletionOutput:
    """One completion. finish_reason: "stop" (end of sequence, or a stop string), "length", "abort", or "error" (the
    target's logits were not finite)."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str


@frozen
class RequestOutput:
    """A finished request. `speculation` says what drafting did for it: see `DraftCounts`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    speculation: DraftCounts


@frozen
class StreamOutput:
    """What one step added to one request of `LLM.stream`. finish_reason is set in the request's last one."""

    prompt_index: int
    pieces: tuple[Piece, ...]
    finish_reason: str | None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)
