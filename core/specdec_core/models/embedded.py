"""Models that come inside distributions, such as `tiny`: entry points of group `specdec.models`.

Each names a function that returns a folder. They are found, disabled, refused and listed as plugins are
(`plugins/discovery.py`), and imported when one is asked for.
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
    """The name of an embedded model ("tiny") becomes its folder; anything else, "./tiny" too, stays as it is.

    models: `Plugins.models`; None: those that SPECDEC_DISABLE does not name. Raises PluginError if the model is
    disabled, if two distributions claim it, or if its own one fails.
    """
    name, models = str(model), installed() if models is None else models
    claims = [each for each in models if each.name == name and MODEL_NAME.fullmatch(name)]
    if not claims:
        return name
    found = min(claims, key=lambda each: each.status == "disabled")  # one that is not disabled has the say
    if found.error is not None:
        raise PluginError(found.error)
    with found.blamed("give the folder of the model"):
        folder = EntryPoint(found.name, found.value, MODEL_GROUP).load()()
        if not Path(folder).is_dir():
            raise NotADirectoryError(f"{found.value} returned {shown(folder)}")
        return str(folder)


def installed() -> list[Plugin]:
    """All of them, marked if they are not to be used."""
    models = discovery.find_models()
    discovery.refuse_disabled(models, discovery.names_in(os.environ.get("SPECDEC_DISABLE", "")), discovery.VARIABLE)
    discovery.refuse_duplicates(models)
    return models
