"""The options of the method `ngram`."""

from __future__ import annotations

from typing import Literal

from attrs import Attribute, field, frozen

from specdec_core import ConfigError

DEFAULT_LENGTH = 5
LONGEST = 2**31 - 1
MATCHES = ("first", "last")


def _check_length(config: NgramConfig, attribute: Attribute[int | None], value: object) -> None:
    is_length = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LONGEST
    if value is not None and not is_length:
        raise ConfigError(
            f"{attribute.name}={value!r} is not a number of tokens: give an integer from 1 to {LONGEST}, or leave it "
            f"out (it then equals the other bound, or {DEFAULT_LENGTH})"
        )


def _check_match(config: NgramConfig, attribute: Attribute[str], value: object) -> None:
    if value not in MATCHES:
        raise ConfigError(
            f"{attribute.name}={value!r} is not known: give 'first' (the leftmost of equally long matches) or 'last' "
            "(the most recent)"
        )


@frozen
class NgramConfig:
    """How long a suffix of the context is looked for, and which of its earlier occurrences is continued.

    Raises ConfigError if a bound is not an integer >= 1, if the lower exceeds the upper, or if the match is unknown.
    """

    prompt_lookup_min: int | None = field(default=None, validator=_check_length)  # tokens; None: see `lengths`
    prompt_lookup_max: int | None = field(default=None, validator=_check_length)
    prompt_lookup_match: Literal["first", "last"] = field(default="last", validator=_check_match)

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
