"""One completion of a prompt, as far as it is generated."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from specdec_core import DraftCounts, Logprob, Piece, StreamOutput, TokenizedPrompt
from specdec_server.logprobs import Entry


@define(eq=False)
class Completion:
    """One completion of a prompt, as far as it is generated.

    number: among all completions of the request.
    prompt_logprobs: None unless the request asks for them; those of a prompt's first completion.
    is_begun: whether a chunk of it was streamed.
    num_shown, num_characters: tokens that `take_new` has given, and characters of tokens whose logprobs were given.
    """

    number: int
    prompt: TokenizedPrompt
    text: str = ""
    pieces: list[Piece] = field(factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    speculation: DraftCounts = field(factory=DraftCounts)
    num_drafts: int = 0
    num_cached_tokens: int = 0
    is_begun: bool = False
    num_shown: int = 0
    num_characters: int = 0

    def add(self, output: StreamOutput) -> None:
        self.text += output.text
        self.pieces += output.pieces
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.num_cached_tokens, self.num_drafts = output.num_cached_tokens, output.num_drafts
        if output.speculation is not None:
            self.speculation = output.speculation

    def take_new(self) -> list[Piece]:
        """The tokens since the last call."""
        start, self.num_shown = self.num_shown, len(self.pieces)
        return self.pieces[start:]


def entries(pieces: Sequence[Piece]) -> list[Entry]:
    return [(piece.token_id, piece.logprobs) for piece in pieces]
