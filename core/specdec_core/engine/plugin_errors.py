"""Turns exceptions of plugins into a PluginError that names the plugin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specdec_core.errors import PluginError, SpecdecError


@contextmanager
def blaming(plugin: str, what: str) -> Iterator[None]:
    """While an engine is built, turn an exception of a plugin into a PluginError that names it. specdec's own errors
    pass through."""
    try:
        yield
    except SpecdecError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{plugin} could not {what}: {type(error).__name__}: {error}. Report this to the plugin's author"
        ) from error


@contextmanager
def blaming_in_step(plugin: str) -> Iterator[None]:
    """In a step, turn an exception of a plugin into a PluginError that names it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{plugin} failed in a step: {type(error).__name__}: {error}. The running requests were aborted, and the "
            f"engine can go on; report this to the plugin's author"
        ) from error
