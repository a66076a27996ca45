"""The options of the method `ngram`."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

from specdec_core import ConfigError
from specdec_core.validators import one_of, whole_number

DEFAULT_LENGTH = 5


@frozen
class NgramConfig:
    """How long a suffix of the context is looked for, and which of its earlier occurrences is continued: the "first"
    (leftmost) of equally long matches, or the "last" (most recent). A length that is None: see `lengths`.

    Raises ConfigError if a bound is not an integer >= 1, if the lower exceeds the upper, or if the match is unknown.
    """

    prompt_lookup_min: int | None = field(default=None, validator=whole_number(1, optional=True))  # tokens
    prompt_lookup_max: int | None = field(default=None, validator=whole_number(1, optional=True))
    prompt_lookup_match: Literal["first", "last"] = field(default="last", validator=one_of("first", "last"))

    def __attrs_post_init__(self) -> None:
        shortest, longest = self.lengths
        if shortest > longest:
            raise ConfigError(
                f"prompt_lookup_min={shortest} must be <= prompt_lookup_max={longest}: lower the one or raise the other"
            )

    @property
    def lengths(self) -> tuple[int, int]:
        """Shortest and longest suffix to look for, in tokens. A bound left out equals the other; both left out, 5."""
        given = [n for n in (self.prompt_lookup_min, self.prompt_lookup_max) if n is not None] or [DEFAULT_LENGTH]
        return given[0], given[-1]
