"""Checks for the fields of attrs classes. Their errors name the wrong value, what is allowed and what to do.

Plugins use these checks for their own keys of speculative_config, and describe each key beside its check:

    num_heads: int = option(whole_number(1, 64), "Attention heads.", default=4)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from contextlib import suppress
from math import inf
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from attrs import Attribute, evolve, field, frozen

from specdec_core.config.hashing import UNHASHED, content_digest
from specdec_core.errors import ConfigError, nearest

Validator = Callable[[Any, "Attribute[Any]", Any], None]

LARGEST = 2**31 - 1

LONGEST_NAME = 4096
"""Most characters of a path, as in operating systems."""

MOST_SHOWN = 200
"""Most characters of a value in an error."""


@frozen
class Check:
    """An attrs validator with a description of the values that it allows, for documents and `--help`.

    hashed_as: a function of a valid value that returns what `config_hash` includes instead of it; None: the value.
    """

    validate: Validator
    allowed: str
    hashed_as: Callable[[Any], Any] | None = None

    def __call__(self, instance: Any, attribute: Attribute[Any], value: Any) -> None:
        self.validate(instance, attribute, value)


def option(
    check: Check | None, description: str, default: Any = None, *, allowed: str = "", hashed: bool = True, **others: Any
) -> Any:
    """Make a field of an attrs class with a default value, a check and a help text.

    check: the field's validator. None: any value is allowed.
    description: the help text.
    allowed: a description of the allowed values, if the check has none.
    hashed: whether the field changes the computation, so that `config_hash` includes it.
    others: further arguments of attrs' `field`.
    """
    metadata = {"help": description, "allowed": allowed, **({} if hashed else UNHASHED)}
    return field(default=default, validator=check, metadata=metadata, **others)


def _check(fault: Callable[[Any], str], allowed: str, *, optional: bool = False) -> Check:
    """Make a check that raises ConfigError for a wrong value.

    fault: a function of the value that returns "" if the value is valid, else an error message that says what is wrong
        and what to pass instead.
    allowed: a description of the allowed values, for documents and error messages.
    optional: None is allowed, too.
    """
    or_none = ", or None" if optional else ""

    def check(instance: Any, attribute: Attribute[Any], value: Any) -> None:
        if value is None and optional:
            return
        try:
            found = fault(value)
        except Exception as error:  # a class of the caller's own: how it compares, what it is as text
            raise ConfigError(
                f"{attribute.name}={shown(value)} cannot be checked, it raises {type(error).__name__}: give {allowed}"
                f"{or_none}"
            ) from error
        if found:
            raise ConfigError(f"{attribute.name}={shown(value)} {found}{or_none}")

    return Check(check, allowed + or_none)


def must(hold: Callable[[Any], object], fault: str, allowed: str, *, optional: bool = False) -> Check:
    """Make a check that raises ConfigError unless `hold(value)` is true.

    fault: the error message, which also says what to pass instead.
    allowed: a description of the allowed values, for documents and error messages.
    optional: None is allowed, too.
    """
    return _check(lambda value: "" if hold(value) else fault, allowed, optional=optional)


def whole_number(low: int, high: int = LARGEST, *, optional: bool = False) -> Check:
    """Make a check for an integer in [low, high]. Rejects booleans, strings and fractions.

    optional: None is allowed, too.
    """

    def fault(value: Any) -> str:
        found = _no_number(value)
        if not found and not isinstance(value, Integral):
            found = "is not an integer"
        elif not found and not low <= int(value) <= high:
            found = "is too small" if int(value) < low else "is too large"
        return found and f"{found}: give an integer from {low} to {high}"

    bounds = (f" from {low}" if low > -LARGEST else "") + (f" to {high}" if high < LARGEST else "")
    return _check(fault, f"an integer{bounds}", optional=optional)


def number(low: float, high: float, *, low_open: bool = False, optional: bool = False) -> Check:
    """Make a check for a number in [low, high], or in (low, high] if low_open. Rejects NaN, booleans and strings.

    optional: None is allowed, too.
    """
    bracket = "(" if low_open else "["

    def fault(value: Any) -> str:
        found = _no_number(value)
        if not found and (not low <= value <= high or (low_open and value == low)):
            found = "is out of range"
        return found and f"{found}: give a number in {bracket}{low}, {high}]"

    return _check(fault, f"a number in {bracket}{low:g}, {high:g}]", optional=optional)


flag = must(lambda value: isinstance(value, bool), "must be True or False", "True or False")
"""True or False; numbers and text are refused."""
optional_flag = must(lambda value: isinstance(value, bool), "must be True or False", "True or False", optional=True)


def one_of(*allowed: Any) -> Check:
    """Make a check that a value equals one of the allowed values and has the same type."""
    names = " or ".join(map(repr, allowed))
    return must(
        lambda value: any(isinstance(value, type(each)) and value == each for each in allowed),
        f"is not known: give {names}",
        names,
    )


def text(*, optional: bool = False) -> Check:
    """Make a check for a string that is not empty.

    optional: None is allowed, too.
    """
    fault = "must be text that is not empty"
    return must(lambda value: isinstance(value, str) and value, fault, "text", optional=optional)


def names_checkpoint(value: Any) -> bool:
    """Whether a value can be the path of a folder or a name on the model hub: text or a Path of limited length. Does
    not check that the folder or name exists."""
    with suppress(Exception):  # a class of the caller's own, which is nothing as text
        return isinstance(value, str | Path) and 0 < len(str(value)) <= LONGEST_NAME
    return False


def _checkpoint(*, optional: bool) -> Check:
    fault = f"must be a folder or a name, of at most {LONGEST_NAME} characters"
    return evolve(must(names_checkpoint, fault, "a folder or a name", optional=optional), hashed_as=content_digest)


checkpoint, optional_checkpoint = _checkpoint(optional=False), _checkpoint(optional=True)
"""A folder with a checkpoint, or a name on the model hub. Does not check that it exists. `config_hash` includes the
contents of a folder, not its path."""


def not_yet(default: Any) -> Check:
    """Make a check that allows only an option's default value. For options of other engines that this one does not
    support yet."""
    return must(
        lambda value: value is default or (is_number(value) and value == default),
        f"is not supported yet: leave it out, or give {default}",
        repr(default),
    )


num_ranks = must(
    lambda value: type(value) is int and value in (1, 2, 4), "is not supported: give 1, 2 or 4", "1, 2 or 4"
)
"""A check for a number of processes that share each layer of a model."""


options = must(
    lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
    "must be a dict from names of options to their values",
    "a dict from names of options to their values",
)
"""Options whose own config class checks the values."""


def shown(value: Any, most: int = MOST_SHOWN) -> str:
    """A value as text for an error message: its repr, cut after `most` characters, or its type if it has no repr.

    The repr is built only as far as it is shown, because that of nested lists can be extremely long.
    """
    found = ""
    try:
        for piece in _pieces(value, most):
            found += piece
            if len(found) > most:
                return f"{found[:most]}..."
    except Exception:  # Python refuses to write integers of thousands of digits, too
        return f"<{type(value).__name__}>"
    return found


def _pieces(value: Any, most: int) -> Iterator[str]:
    """Yield the repr of a value piece by piece, so that the caller can stop early. Uses at most the first `most` + 1
    characters of a string."""
    kind = type(value)
    if kind is dict:
        yield "{"
        for index, (key, item) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _pieces(key, most)
            yield ": "
            yield from _pieces(item, most)
        yield "}"
    elif kind is list or kind is tuple:
        yield "[" if kind is list else "("
        for index, item in enumerate(value):
            yield ", " if index else ""
            yield from _pieces(item, most)
        yield "]" if kind is list else ",)" if len(value) == 1 else ")"
    else:
        yield repr(value[: most + 1] if kind is str or kind is bytes else value)


def is_number(value: Any) -> bool:
    """Whether a value is a number of any kind, including numpy's, but not a boolean."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _no_number(value: Any) -> str:
    """The reason why a value is not a number; "" if it is one."""
    if isinstance(value, bool):
        return "is a truth value, not a number"
    if isinstance(value, str):
        return "is text, not a number"
    return "" if is_number(value) else "is not a number"


def unknown_key(key: object, known: AbstractSet[str], where: str) -> ConfigError:
    near = nearest(key if type(key) is str else shown(key), known)
    hint = "remove it." if near is None else f"did you mean {near!r}?"
    keys = f"The keys are {', '.join(sorted(known))}" if known else "There are none"
    return ConfigError(f"{where} has no key {shown(key)}: {hint} {keys}")


def refuse_unknown(keys: Iterable[object], known: AbstractSet[str], where: str) -> None:
    """Raise ConfigError for the first key that is not in `known`.

    where: the object that has the keys, for the message, such as "a prompt".
    """
    for key in keys:
        if key not in known:
            raise unknown_key(key, known, where)


def as_float(value: Any) -> Any:
    """Convert a number of any type, including numpy's, to float. Returns other values unchanged, so that the field's
    check rejects them."""
    with suppress(OverflowError):
        return float(value) if is_number(value) else value
    return value


def as_whole(value: Any) -> Any:
    return int(value) if is_number(value) and value not in (inf, -inf) and value == value // 1 else value


def strings(name: str, value: Any) -> tuple[str, ...]:
    """Convert a string, a sequence of strings or None to a tuple of strings. Raises ConfigError.

    name: the option's name, for error messages.
    """
    if value is None:
        return ()
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else (value,)
    if any(not isinstance(each, str) or not each for each in found):
        raise ConfigError(f"{name}={shown(value)} must be a non-empty string or a list of them")
    for each in found:
        check_text(each, f"{name} has {shown(each)}, which")
    return found


def check_text(text: str, what: str) -> None:
    """Raise ConfigError, which begins with `what`, if text cannot be written in UTF-8: half of a surrogate pair is in
    it, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is not text: character {error.start} is half of a pair") from error


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Like `token_list`, but without duplicates."""
    return tuple(dict.fromkeys(token_list(name, value)))


def token_list(name: str, value: Any, or_else: str = "") -> tuple[int, ...]:
    """Convert token ids to a tuple. Raises ConfigError if a value is not an integer >= 0. Whether the vocabulary has
    these tokens is checked later, by the engine.

    name: the option's name, for error messages.
    or_else: what the option takes, too, such as "a text or ".
    """
    try:
        found = None if isinstance(value, str | bytes | Mapping) else tuple(map(as_whole, value))
    except TypeError:  # not iterable, or a scalar array
        found = None
    if found is None or any(type(token_id) is not int or token_id < 0 for token_id in found):
        raise ConfigError(f"{name}={shown(value)} must be {or_else}a list of token ids: integers from 0 on")
    return found


def biases(name: str, value: Any) -> dict[int, float] | None:
    """Convert a mapping to {token id: a number from -100 to 100}; None stays None. Raises ConfigError.

    name: the option's name, for error messages.
    """
    if value is None:
        return None
    found = {as_whole(key): as_float(bias) for key, bias in value.items()} if isinstance(value, Mapping) else {-1: 0}
    if any(type(token_id) is not int or token_id < 0 for token_id in found):
        raise ConfigError(f"{name}={shown(value)} must be a dict from token ids, integers from 0 on, to numbers")
    for token_id, bias in found.items():
        if type(bias) is not float or not -100 <= bias <= 100:
            raise ConfigError(f"{name}={shown({token_id: bias})} is out of range: give numbers in [-100, 100]")
    return found


def callables(name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    """Convert a sequence of callables to a tuple; None becomes an empty tuple. Raises ConfigError.

    name: the option's name, for error messages.
    """
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(map(callable, value)):
        raise ConfigError(f"{name}={shown(value)} must be a list of callables (logits, token_ids) -> logits")
    return tuple(value)


def checked_vocab_size(option: str, size: int, vocab_size: int) -> int:
    """Return the size of a draft vocabulary that the user gave. Raises ConfigError if it exceeds vocab_size, the
    target's. option: its name."""
    if size > vocab_size:
        raise ConfigError(f"{option}={size}, but the target has {vocab_size} tokens: give at most as many")
    return size
