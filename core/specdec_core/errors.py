"""The errors that specdec raises. Each names what failed, the value, what is allowed and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def reason(error: BaseException) -> str:
    """Return the message of another library's error in one line, or its type if it has none. A final period is removed,
    so that specdec's message can continue after it."""
    return " ".join(str(error).split()).rstrip(". ") or type(error).__name__


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant: one that begins with `name`, else one that is spelled alike."""
    names = sorted(known)
    longer = [each for each in names if name and each.startswith(name)]
    return next(iter(longer or get_close_matches(name, names, n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" with the `nearest` name, to follow a sentence; "" if there is none."""
    found = nearest(name, known)
    return "" if found is None else f" Did you mean {found!r}?"


class SpecdecError(Exception):
    """Base of all errors below: catch this one to catch them all."""


class ConfigError(SpecdecError, ValueError):
    """A configuration or sampling parameter is unknown, out of range or contradicts another."""


class NoDraftError(ConfigError):
    """A method needs a draft checkpoint, and none is named or comes with the target."""


class PluginError(SpecdecError):
    """A plugin is missing, cannot be loaded, conflicts with another, or failed in a step."""


class CapacityError(SpecdecError):
    """A request needs more KV blocks or a longer context than the engine has."""


class DeviceError(SpecdecError):
    """The device failed for good: no later call to it can work in this process, so restart the process. Or one of the
    processes that share a model has ended, so that this engine can run no more."""


class CompatibilityError(SpecdecError):
    """A model or a library version has a feature with which this version of specdec would give wrong results."""
