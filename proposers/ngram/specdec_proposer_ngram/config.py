"""The options of the method `ngram`."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from specdec_core import ConfigError, option
from specdec_core.config.fields import one_of, whole_number

DEFAULT_LENGTHS = 2, 5
DEFAULT_NUM_TOKENS = 8
"""Draft tokens in a step where users give no number."""


@frozen
class NgramConfig:
    """Options of the method `ngram`: how many of a request's last tokens are searched for among its earlier tokens, and
    which of several matches is continued.

    Raises ConfigError if a value is out of range or prompt_lookup_min exceeds prompt_lookup_max.
    """

    prompt_lookup_min: int | None = option(
        whole_number(1, optional=True),
        "Shortest suffix of the context to look for, in tokens. Smaller: more drafts, lower acceptance "
        "rate. None: as prompt_lookup_max, or 2 if both are None.",
    )
    prompt_lookup_max: int | None = option(
        whole_number(1, optional=True),
        "Longest suffix of the context to look for, in tokens. None: as prompt_lookup_min, or 5 if both are None.",
    )
    prompt_lookup_match: Literal["first", "last"] = option(
        one_of("first", "last"),
        "Of equally long matches, continue the most recent ('last') or the leftmost ('first').",
        default="last",
    )

    def __attrs_post_init__(self) -> None:
        shortest, longest = self.lengths
        if shortest > longest:
            raise ConfigError(
                f"prompt_lookup_min={shortest} must be <= prompt_lookup_max={longest}: lower the one or raise the other"
            )

    @property
    def lengths(self) -> tuple[int, int]:
        """Smallest and largest number of last tokens to search for. If one option is None, it equals the other one. By
        default they are 2 and 5."""
        given = [n for n in (self.prompt_lookup_min, self.prompt_lookup_max) if n is not None] or DEFAULT_LENGTHS
        return given[0], given[-1]
