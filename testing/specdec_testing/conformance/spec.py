"""Rules for a plugin's declarations: `specdec_core.contracts.proposer.ProposerSpec`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import entry_points
from types import FrameType
from typing import Any

import attrs
import pytest
import torch
from torch.overrides import TorchFunctionMode

from specdec_core.config.speculative import SpeculativeConfig
from specdec_core.errors import PluginError
from specdec_core.models.meta_load import outline
from specdec_core.plugins import PluginInfo, Plugins
from specdec_core.plugins.discovery import GROUP
from specdec_testing.conformance.situations import Situations

IMPORT_ALONE = """
import json, sys
from specdec_core.plugins import discovery, loading
for value in {values!r}:
    loading.load([discovery.Plugin("any", "any", "", value, builtin=True)], set())
print(json.dumps([name for name in {heavy!r} if name in sys.modules]))
"""


class SpecChecks:
    def test_is_offered(self, specdec_situations: Situations) -> None:
        """The plugin loads, and its hook `specdec_proposers` offers a proposer of this name."""
        if not _listed(specdec_situations):
            plugins, modules = specdec_situations.plugins, specdec_situations.subject.modules
            errors = [str(info.error) for info in plugins.listing() if info.error and info.name in modules]
            with pytest.raises(PluginError) as caught:
                Plugins.proposer(plugins, specdec_situations.subject.method)
            pytest.fail("\n".join([str(caught.value), *errors]))

    def test_api_number(self, specdec_situations: Situations) -> None:
        """ProposerSpec.api is the plugin API that the plugin was written for, and equals this core's."""
        for info in _listed(specdec_situations):
            assert info.status != "incompatible", info.error

    def test_required_modules_are_installed(self, specdec_situations: Situations) -> None:
        """Every module in ProposerSpec.requires is installed with the plugin's dependencies."""
        for info in _listed(specdec_situations):
            if info.status != "incompatible":
                Plugins.proposer(
                    specdec_situations.plugins, specdec_situations.subject.method
                )  # says which ones are missing

    def test_entry_module_is_light(self, specdec_situations: Situations) -> None:
        """The entry module imports neither torch nor modules in `requires`: import them in `build`.

        Plugins are imported whenever they are listed, also for users of other methods.
        """
        values = [*specdec_situations.subject.modules]
        values += [entry.value for entry in entry_points(group=GROUP, name=specdec_situations.spec.name)]
        imported = imported_alone(tuple(values), ("torch", "transformers", *specdec_situations.spec.requires))
        assert not imported, f"importing {', '.join(values)} imported {', '.join(imported)}, too: do that in build"

    def test_defaults_are_allowed(self, specdec_situations: Situations) -> None:
        """The config class accepts its own defaults; only options without a default must be given."""
        config = specdec_situations.spec.config
        needed = {attribute.name for attribute in attrs.fields(config) if attribute.default is attrs.NOTHING}
        config(**{name: value for name, value in specdec_situations.options.items() if name in needed})

    def test_unknown_options_are_refused(self, specdec_situations: Situations) -> None:
        """An unknown option raises an error: leave __init__ to attrs."""
        with pytest.raises((TypeError, ValueError)):
            specdec_situations.spec.config(**specdec_situations.options, no_such_option_of_any_method=1)

    def test_options_are_its_own(self, specdec_situations: Situations) -> None:
        """No option has the name of one of core's keys of speculative_config, which it would hide."""
        own = {attribute.name for attribute in attrs.fields(specdec_situations.spec.config)}
        assert not own & SpeculativeConfig.core_keys(), "the engine has keys of these names: rename the options"

    def test_plan_is_pure(self, specdec_situations: Situations) -> None:
        """`plan` returns the same each time and computes nothing, because it is called before weights are loaded."""
        situations = specdec_situations
        arguments = (situations.config, situations.context.target, situations.subject.num_speculative_tokens)
        with _NoTensors():
            plans = [situations.spec.plan(*arguments) for _ in range(2)]
        assert plans[0] == plans[1], "plan answers differently when it is asked again: it must not keep anything"


@cache
def imported_alone(values: tuple[str, ...], heavy: tuple[str, ...]) -> list[str]:
    """The heavy modules that listing these entry points imports, in a new interpreter."""
    code = IMPORT_ALONE.format(values=values, heavy=heavy)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, f"{', '.join(values)} cannot be imported alone: {result.stderr}"
    found: list[str] = json.loads(result.stdout)
    return found


class _NoTensors(TorchFunctionMode):
    """Forbids tensors with storage. Allows tensors on the meta device, and what core's `outline_draft` makes of a
    model's configuration."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and result.device.type != "meta" and not _is_outlining():
            pytest.fail(f"plan made a tensor with {func}: it is to know sizes only; load weights in build")
        return result


def _is_outlining() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != outline.__module__:
        frame = frame.f_back
    return frame is not None


def _listed(situations: Situations) -> list[PluginInfo]:
    """The plugin that provides the method; None if it could not be imported, or if another plugin has the same name."""
    offer = f"proposer {situations.subject.method}"
    return [info for info in situations.plugins.listing() if offer in info.provides and info.status != "duplicate"]
