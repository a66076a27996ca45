"""Checks whether a saved training run can be resumed with the settings at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_core import ConfigError, shown
from specdec_train import files
from specdec_train.settings import Settings

METHOD = "method"
HASHED = frozenset({"the texts", "the target's weights"})
"""What is compared by a hash, which says nothing to users."""


def saved_state(settings: Settings, checked: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state of the run to resume. None if the run is new, or has saved nothing yet.

    checked: what must be as it was, by name: the method, the settings, and hashes.

    Raises ConfigError if the saved run was another one, or has already made more steps than settings.steps.
    """
    state = files.read_state(settings.out) if settings.resume else None
    if state is None:
        return None
    run, was = f"the run in {str(settings.out)!r}", state["checked"]
    if was.get(METHOD) != checked[METHOD]:
        raise ConfigError(
            f"{run} trains {shown(was.get(METHOD))}, and this command {shown(checked[METHOD])}: resume it with "
            f"`spec-decode train {was.get(METHOD)}`, or start in another folder"
        )
    differing = [name for name, value in checked.items() if was.get(name) != value]
    if differing:
        others = ", ".join(
            f"{name} were others" if name in HASHED else f"{name} was {shown(was.get(name), 60)}" for name in differing
        )
        raise ConfigError(f"{run} had other settings: {others}. Give the same ones, or start in another folder")
    if state["step"] > settings.steps:
        raise ConfigError(f"{run} has made {state['step']} steps already, and steps={settings.steps}: raise it")
    return state
