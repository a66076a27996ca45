"""The errors that specdec raises. Each names what failed, the value, what is allowed and what to do."""

from __future__ import annotations


def reason(error: BaseException) -> str:
    """Return the message of another library's error, or its type if it has none. A final period is removed, so that
    specdec's message can continue after it."""
    return str(error).rstrip(". \n") or type(error).__name__


class SpecdecError(Exception):
    """Base of all errors below: catch this one to catch them all."""


class ConfigError(SpecdecError, ValueError):
    """A configuration or sampling parameter is unknown, out of range or contradicts another."""


class PluginError(SpecdecError):
    """A plugin is missing, cannot be loaded, conflicts with another, or failed in a step."""


class CapacityError(SpecdecError):
    """A request needs more KV blocks or a longer context than the engine has."""


class DeviceError(SpecdecError):
    """The device failed for good: no later call to it can work in this process, so restart the process."""


class CompatibilityError(SpecdecError):
    """A model or a library version has a feature with which this version of specdec would give wrong results."""
