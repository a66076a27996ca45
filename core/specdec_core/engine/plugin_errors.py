"""Turns exceptions of plugins into a PluginError that names the plugin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from specdec_core.errors import PluginError, SpecdecError


@contextmanager
def blaming(
    plugin: str, failure: str, consequence: str = "", passing: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """A context in which an exception of a plugin becomes a PluginError that names the plugin.

    plugin: the plugin's name in the error message, such as "proposer 'eagle'".
    failure: what happened, such as "failed to close".
    consequence: a sentence about what follows, or what the plugin should have done.
    passing: exceptions that stay as they are.
    """
    try:
        yield
    except passing:
        raise
    except (Exception, SystemExit) as error:
        report = f"{consequence}; report" if consequence else "Report"
        raise PluginError(
            f"{plugin} {failure}: {type(error).__name__}: {error}. {report} this to the plugin's author"
        ) from error


def building(plugin: str, what: str) -> AbstractContextManager[None]:
    """`blaming` while an engine is built. specdec's own errors pass. what: what the plugin could not do, such as "be
    built"."""
    return blaming(plugin, f"could not {what}", passing=(SpecdecError,))


def in_step(plugin: str) -> AbstractContextManager[None]:
    """`blaming` in a step."""
    return blaming(plugin, "failed in a step", "The running requests were aborted, and the engine can go on")
