"""A stand-in for `Plugins`: the installed plugins, some of them replaced by a test."""

from __future__ import annotations

from typing import Any

from specdec_core import KVManagerSpec, Plugins, ProposerSpec, VerifierSpec


class Offered:
    """Stands in for `Plugins`. The plugin specs that a test passes in replace installed ones of the same kind and name,
    or are added."""

    def __init__(self, *specs: ProposerSpec | VerifierSpec | KVManagerSpec) -> None:
        self._installed = Plugins.load()
        self._specs = {(type(spec), spec.name): spec for spec in specs}

    def proposer(self, name: str) -> Any:
        return self._specs.get((ProposerSpec, name)) or self._installed.proposer(name)

    def verifier(self, name: str) -> Any:
        return self._specs.get((VerifierSpec, name)) or self._installed.verifier(name)

    def kv_manager(self, name: str) -> Any:
        return self._specs.get((KVManagerSpec, name)) or self._installed.kv_manager(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._installed, name)
