"""Recognizes a draft checkpoint that is given to another method than the one that it was made for, or as the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from os.path import isdir
from pathlib import Path
from typing import Any

from attrs import fields_dict

from specdec_core.config.draft_options import DraftHeadConfig
from specdec_core.config.fields import names_checkpoint, shown
from specdec_core.contracts.proposer import ProposerSpec
from specdec_core.errors import CompatibilityError, ConfigError, PluginError, SpecdecError
from specdec_core.models.checkpoint import Checkpoint
from specdec_core.models.stored_bytes import stored_bytes
from specdec_core.plugins import Plugins


def refuse_other_kind(method: ProposerSpec, model: Any, revision: Any, plugins: Plugins) -> None:
    """Raise CompatibilityError if a head is given as a whole draft model, by the `detect` functions of the installed
    proposers. Otherwise the draft model's loading would fail, after the target is loaded. Methods that load heads are
    not checked: their `plan` reads the checkpoint, and no file should be read twice.

    model, revision: of speculative_config, as users gave them. Only headers of weight files are read, and nothing is
    downloaded.
    """
    is_early = method.detect is None or issubclass(method.config, DraftHeadConfig)
    message = None if is_early else _other_kind(method, model, revision, plugins)
    if message is not None:
        raise CompatibilityError(message)


@contextmanager
def explain_draft_kind(method: ProposerSpec, model: Any, revision: Any, plugins: Plugins) -> Iterator[None]:
    """A context for work that reads the draft checkpoint, and downloads it first if it is on the hub. If that fails
    because the checkpoint is one for another method, the error begins with what the checkpoint is.

    model, revision: of speculative_config.
    """
    try:
        yield
    except (ConfigError, CompatibilityError, PluginError) as error:
        message = _other_kind(method, model, revision, plugins)
        if message is None:
            raise
        if method.detect is None:  # its reason may be another one
            message = f"{message}. {method.name!r} refused it: {error}"
        raise CompatibilityError(message) from error


@contextmanager
def explain_target_kind(model: str | Path, revision: str | None, plugins: Plugins) -> Iterator[None]:
    """A context for work that loads the target. If that fails because the checkpoint has a draft head, the error says
    so."""
    try:
        yield
    except (ConfigError, CompatibilityError) as error:
        heads = _heads(_kinds(model, revision, plugins), plugins)
        if not heads:
            raise
        raise CompatibilityError(
            f"model={str(model)!r} is {' or '.join(heads.values())}, which drafts for a target and cannot be one: give "
            f"it as model in speculative_config, and as the target the model that it was trained for. If it should be "
            f"a target, its files are incomplete: {error}"
        ) from error


def _other_kind(method: ProposerSpec, model: Any, revision: Any, plugins: Plugins) -> str | None:
    """Return what the draft checkpoint is and which method it is for, as text for an error. None if it may be for this
    method, if no installed proposer recognizes it, or if it is not on this machine."""
    kinds = _kinds(model, revision, plugins)
    model_option = fields_dict(method.config).get("model")
    if model_option is not None and model_option.default is None:  # the target's own by default, so any whole model
        kinds = _heads(kinds, plugins)
    if not kinds or method.name in kinds:
        return None
    found = " or ".join(f"{kind}: use method {name!r}" for name, kind in kinds.items())
    return f"this is {found}, not {method.name!r}, for the draft {shown(str(model))}, if no tensors are missing from it"


def _kinds(model: Any, revision: Any, plugins: Plugins) -> dict[str, str]:
    """What a checkpoint is, by the name of each proposer that recognizes it. Empty if it is not on this machine."""
    with suppress(SpecdecError, TypeError, ValueError):  # unreadable, or no name at all: for others to report
        if names_checkpoint(model) and (isdir(model) or stored_bytes(str(model), revision) is not None):
            checkpoint = Checkpoint(str(model), revision)
            return plugins.recognize(checkpoint.config, checkpoint.shapes)
    return {}


def _heads(kinds: Mapping[str, str], plugins: Plugins) -> dict[str, str]:
    return {name: kind for name, kind in kinds.items() if issubclass(plugins.proposer(name).config, DraftHeadConfig)}
