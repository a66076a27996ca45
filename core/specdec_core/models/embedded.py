"""Embedded models, such as `tiny`: models in installed Python packages, which register them as entry points of the
group `specdec.models`.

Such an entry point names a function that returns the folder of the model's checkpoint. The function is imported only
when the model is requested. Embedded models are found, disabled, refused and listed in the same way as plugins
(`plugins/discovery.py`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

from specdec_core.config.fields import shown
from specdec_core.errors import PluginError
from specdec_core.plugins import discovery
from specdec_core.plugins.discovery import MODEL_GROUP, MODEL_NAME, Plugin


def resolve_model(model: str | Path, models: Sequence[Plugin] | None = None) -> str:
    """Replace the name of an embedded model ("tiny") by the path of its folder. Any other name or path, such as
    "./tiny", is returned unchanged.

    models: the known embedded models, as returned by `installed`. None: `installed` is called.

    Raises PluginError if the model is disabled, if two distributions claim its name, or if the function that returns
    its folder fails.
    """
    name = str(model)
    if not MODEL_NAME.fullmatch(name):  # reading the metadata of all distributions takes a while
        return name
    claims = [each for each in (installed() if models is None else models) if each.name == name]
    if not claims:
        return name
    found = min(claims, key=lambda each: each.status == "disabled")  # prefer one that is not disabled
    if found.error is not None:
        raise PluginError(found.error)
    with found.blamed("give the folder of the model"):
        folder = EntryPoint(found.name, found.value, MODEL_GROUP).load()()
        if not Path(folder).is_dir():
            raise NotADirectoryError(f"{found.value} returned {shown(folder)}")
        return str(folder)


def installed() -> list[Plugin]:
    """List all installed embedded models, each with a status: models that the environment variable SPECDEC_DISABLE
    names are marked as disabled, and models whose name two distributions claim are marked as duplicates."""
    models = discovery.find_models()
    discovery.refuse_disabled(models, discovery.names_in(os.environ.get("SPECDEC_DISABLE", "")), discovery.VARIABLE)
    discovery.refuse_duplicates(models)
    return models
