"""Models that come inside distributions, such as `tiny`: entry points of group `specdec.models`.

Each names a function that returns a folder. It is imported when its model is asked for, and under the same rules as a
plugin: whom `SPECDEC_DISABLE` names gives none, and a name that two distributions claim belongs to neither.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

from attrs import frozen

from specdec_core.config.fields import shown
from specdec_core.errors import PluginError
from specdec_core.plugins import discovery
from specdec_core.plugins.discovery import Plugin

GROUP = "specdec.models"

NAME = re.compile(r"[\w-][\w.-]*")
"""What an embedded model may be called: nothing that would be of a folder, or of a repository on the hub."""


def find() -> list[Plugin]:
    """Those of all installed distributions. A name that may be of a folder or on the hub is refused."""
    found = discovery.entries(GROUP, "model")
    for model in found:
        if not NAME.fullmatch(model.name):
            model.refuse(
                "failed",
                f"model {model.label} has a name that may be of a folder, or on the model hub: a name of letters, "
                f"digits, '-', '_' and '.' is allowed. Update or uninstall {model.distribution}",
            )
    return found


@frozen
class EmbeddedModels:
    """What is installed, each marked if it is not to be used."""

    models: Sequence[Plugin]

    @classmethod
    def load(cls) -> EmbeddedModels:
        """But for those that SPECDEC_DISABLE names."""
        models = find()
        discovery.refuse_disabled(models, discovery.names_in(os.environ.get("SPECDEC_DISABLE", "")), discovery.VARIABLE)
        discovery.refuse_duplicates(models)
        return cls(models)

    @property
    def names(self) -> list[str]:
        """Those to be had."""
        return sorted(model.name for model in self.models if model.status == "ok")

    def resolve(self, model: str | Path) -> str:
        """The name of an embedded model becomes its folder; anything else, "./tiny" too, stays as it is. Raises
        PluginError if the model is disabled, if two distributions claim it, or if its own one fails."""
        name = str(model)
        claims = [each for each in self.models if each.name == name and NAME.fullmatch(name)]
        if not claims:
            return name
        found = min(claims, key=lambda each: each.status == "disabled")  # one that is not disabled has the say
        if found.error is not None:
            raise PluginError(found.error)
        with found.blamed("give the folder of the model"):
            folder = EntryPoint(found.name, found.value, GROUP).load()()
            if not Path(folder).is_dir():
                raise NotADirectoryError(f"{found.value} returned {shown(folder)}")
            return str(folder)
