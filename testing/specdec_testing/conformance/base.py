"""The base class of the kit's test classes. A subclass that overrides one of their tests raises PluginError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from attrs import frozen

from specdec_core.errors import PluginError


@frozen(eq=False)
class NamedSubject:
    """The verifier or KV manager to check.

    name: as users select it.
    modules: where its plugin is, if that is not installed.
    options: its own keys of the config.
    """

    name: str
    modules: Sequence[str]
    options: Mapping[str, Any]


class Conformance:
    """The tests of one kind of plugin. Each kit class has them as methods, and authors subclass it.

    modules: modules to load the plugin from, if it is not installed.
    skips: {name of a test: why it does not apply to this plugin}.
    kit: the kit class whose tests a subclass inherits.
    """

    modules: ClassVar[Sequence[str]] = ()
    skips: ClassVar[Mapping[str, str]] = {}
    kit: ClassVar[type[Conformance]]

    @classmethod
    def reasons_to_skip(cls, config: pytest.Config) -> Mapping[str, str]:
        """Return the tests to skip, {name of a test: why it does not apply to this plugin}. config: pytest's
        configuration object, from which subclasses can read command-line options."""
        return cls.skips

    @classmethod
    def kit_tests(cls) -> list[str]:
        return [name for name in dir(cls.kit) if name.startswith("test_")]

    @classmethod
    def check_skips(cls, skips: Mapping[str, str], where: str) -> None:
        """Raise PluginError if `skips` names an unknown test or has an empty reason.

        skips: {name of a test: why it does not apply to the plugin}.
        where: the class or command-line option that the error message names as the source of `skips`.
        """
        for name, reason in skips.items():
            if name not in cls.kit_tests():
                tests = ", ".join(cls.kit_tests())
                raise PluginError(f"{where} skips {name!r}, which is no kit test: the kit has {tests}")
            if not isinstance(reason, str) or not reason.strip():
                raise PluginError(f"{where} skips {name!r} without a reason: say why it does not apply to this plugin")

    def __init_subclass__(cls, *, is_kit: bool = False) -> None:
        if is_kit:
            cls.kit = cls
            return
        changed = [name for name in cls.kit_tests() if getattr(cls, name) is not getattr(cls.kit, name)]
        if changed:
            raise PluginError(
                f"{cls.__name__} overrides {', '.join(changed)} of the conformance kit: name it in `skips` with the "
                f"reason why it does not apply, and add tests of your own under other names"
            )
        cls.check_skips(cls.skips, cls.__name__)
