"""Tools for authors of plugins: run a proposer on lists of token ids, and test that a proposer, verifier or KV
manager keeps the rules of its contract (`specdec_core.contracts`)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_testing.conformance import (
        KVManagerConformance as KVManagerConformance,
        ProposerConformance as ProposerConformance,
        VerifierConformance as VerifierConformance,
    )
    from specdec_testing.drive import SimpleRequest as SimpleRequest, propose as propose
    from specdec_testing.enumerating import (
        EnumeratingRandom as EnumeratingRandom,
        enumerate_outcomes as enumerate_outcomes,
    )
    from specdec_testing.tiny import tiny_target as tiny_target

# Imported when first used, because pytest imports this package at every start, which must be cheap.
_MODULES = {
    "EnumeratingRandom": "enumerating",
    "KVManagerConformance": "conformance",
    "ProposerConformance": "conformance",
    "SimpleRequest": "drive",
    "VerifierConformance": "conformance",
    "enumerate_outcomes": "enumerating",
    "propose": "drive",
    "tiny_target": "tiny",
}

__all__ = [
    "EnumeratingRandom",
    "KVManagerConformance",
    "ProposerConformance",
    "SimpleRequest",
    "VerifierConformance",
    "enumerate_outcomes",
    "propose",
    "tiny_target",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
