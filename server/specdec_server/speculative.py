"""Speculation of one request: how it asks for drafts, and what the answer reports of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from attrs import fields_dict, frozen

from specdec_core import ConfigError, DraftCounts, Piece, flag, option, shown, whole_number
from specdec_core.config.fields import refuse_unknown, strings


@frozen(kw_only=True)
class Speculative:
    """The field `speculative` of a request."""

    enabled: bool = option(flag, "Whether anything is drafted for the request.", default=True)
    num_tokens: int | None = option(
        whole_number(1, optional=True), "Most draft tokens in a step. None: as many as the server was started with."
    )
    method: Sequence[str] | None = option(
        None,
        "The server's methods that draft, all by default.",
        allowed="a name, or several",
        converter=lambda value: None if value is None else strings("method", value),
    )
    details: bool = option(
        flag, "Whether the chunks of a stream have the new tokens with the methods that drafted them.", default=False
    )

    @classmethod
    def parse(cls, value: Any) -> Speculative | None:
        """Read the field's value. Raises ConfigError, whose message begins with the field's name."""
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ConfigError(f"speculative={shown(value)} must be an object of {', '.join(fields_dict(cls))}")
        try:
            refuse_unknown(value, fields_dict(cls).keys(), "it")
            found = cls(**{key: each for key, each in value.items() if each is not None})
        except ConfigError as error:
            raise ConfigError(f"speculative is wrong: {error}") from error
        if not found.enabled and (found.num_tokens is not None or found.method is not None):
            raise ConfigError(
                "speculative has enabled=False beside num_tokens or method: leave out the one or the other"
            )
        return found

    def check(self, methods: Sequence[str], num_tokens: int) -> None:
        """Raise ConfigError, whose message begins with the field's name, if the server cannot draft like this.

        methods, num_tokens: those that it was started with.
        """
        if self.enabled and not methods:
            raise ConfigError("speculative asks for drafts, and the server was started without a method: leave it out")
        if self.num_tokens is not None and self.num_tokens > num_tokens:
            raise ConfigError(
                f"speculative has num_tokens={self.num_tokens}, and the server drafts {num_tokens} at most"
            )
        unknown = [name for name in self.method or () if name not in methods]
        if unknown:
            known = ", ".join(map(repr, methods))
            raise ConfigError(f"speculative has method={unknown[0]!r}, and the server was started with {known}")

    @property
    def sampling(self) -> dict[str, Any]:
        """The parameters of `SamplingParams` that mean the same."""
        if not self.enabled:
            return {"num_speculative_tokens": 0}
        return {"num_speculative_tokens": self.num_tokens, "speculative_methods": self.method}


def details(num_drafts: int, pieces: Sequence[Piece]) -> dict[str, Any]:
    """What a chunk of a stream has of speculation, if the request asks for details.

    num_drafts: drafts that were verified for the completion so far.
    pieces: its new tokens.
    """
    return {
        "num_drafts": num_drafts,
        "tokens": [
            {"token_id": each.token_id, "text": each.text, "is_draft": each.is_draft, "methods": [*each.methods]}
            for each in pieces
        ],
    }


def acceptance(counts: DraftCounts, num_speculative_tokens: int) -> dict[str, Any]:
    """What vLLM's server calls metrics.speculative_decoding.

    acceptance_histogram: entry i is the number of drafts of which exactly i tokens were accepted.
    num_speculative_tokens: the engine's number, its largest draft.
    """
    at_least = [counts.num_drafts, *counts.accepted_per_pos, *[0] * (num_speculative_tokens + 1)]
    return {
        "mean_acceptance_length": counts.acceptance_length,
        "draft_acceptance_rate": counts.acceptance_rate,
        "acceptance_histogram": [more - fewer for more, fewer in pairwise(at_least[: num_speculative_tokens + 2])],
        "num_spec_steps": counts.num_drafts,
        "num_accepted_draft_tokens": counts.num_accepted,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_spec_tokens": num_speculative_tokens,
    }
