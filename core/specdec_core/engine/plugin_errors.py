"""Turns exceptions of plugins into a PluginError that names the plugin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specdec_core.errors import PluginError, SpecdecError


@contextmanager
def blaming(plugin: str, what: str) -> Iterator[None]:
    """A context in which an exception of a plugin becomes a PluginError that names the plugin. Used while an engine
    is built. specdec's own errors pass unchanged.

    plugin: the plugin's name in the error message, such as "proposer 'eagle'".
    what: what the plugin could not do, such as "be built".
    """
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
    """A context in which an exception of a plugin becomes a PluginError that names the plugin. Used in steps.

    plugin: the plugin's name in the error message, such as "proposer 'eagle'".
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{plugin} failed in a step: {type(error).__name__}: {error}. The running requests were aborted, and the "
            f"engine can go on; report this to the plugin's author"
        ) from error
