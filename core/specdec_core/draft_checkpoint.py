"""What users may leave out of speculative_config: the method of a draft checkpoint, and the checkpoint of a target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import fields

from specdec_core.checkpoint import Checkpoint
from specdec_core.config import speculative_mapping
from specdec_core.errors import ConfigError
from specdec_core.plugins import Plugins
from specdec_core.proposer import ProposerSpec
from specdec_core.target.load import resolve_model

DRAFTS = "drafts"
"""The folder in a target's folder that has a draft checkpoint for each of some methods, by the method's name."""


def completed(given: Any, target: str | Path, plugins: Plugins) -> dict[str, Any]:
    """speculative_config with its method, and with the model of a method that needs one. Raises ConfigError, or
    PluginError if no installed method, or more than one, knows the checkpoint."""
    mapping = speculative_mapping(given)
    if "method" not in mapping:
        checkpoint = Checkpoint(str(mapping["model"]), mapping.get("revision"))
        mapping = {"method": plugins.detect(checkpoint.config, checkpoint.shapes).name, **mapping}
    method = plugins.proposer(mapping["method"])
    if mapping.get("model") is None and "model" in {attribute.name for attribute in fields(method.config)}:
        mapping["model"] = _shipped(method, target, mapping.get("revision"))
    return mapping


def _shipped(method: ProposerSpec, target: str | Path, revision: Any) -> str:
    """The draft that lies beside the target's weights."""
    folder = Path(resolve_model(target), DRAFTS, method.name)
    if folder.is_dir():
        if revision is None:
            return str(folder)
        raise ConfigError(
            f"speculative_config has revision={revision!r}, which is of a repository, and names none: give its name as "
            f"model, or leave revision out for the draft that comes with the target {str(target)!r}"
        )
    known = _published(method.published, str(target))
    raise ConfigError(
        f"speculative_config of method {method.name!r} names no model, and none comes with the target {str(target)!r}: "
        + (f"give model={known!r}, which was published for it" if known else "give the draft's folder or repository")
    )


def _published(drafts: Mapping[str, str], target: str) -> str | None:
    """By the end of the target's name, as it is called in a copy, too."""
    name = target.rstrip("/").rpartition("/")[2].lower()
    return next((draft for of, draft in drafts.items() if of.rpartition("/")[2].lower() == name), None)
