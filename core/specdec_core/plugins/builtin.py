"""Core's own verifiers and KV manager, offered through the same hooks as any plugin's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from specdec_core.config.verifiers import TypicalConfig
from specdec_core.contracts.hooks import hookimpl
from specdec_core.contracts.kv import KVManagerSpec
from specdec_core.contracts.proposer import PLUGIN_API
from specdec_core.contracts.verifier import VerifierSpec


def _make(module: str, name: str, *args: Any, **ops: Any) -> Any:
    """Import module `specdec_core.{module}`, and with it torch, and return a new instance of its class `name`."""
    return getattr(import_module(f"specdec_core.{module}"), name)(*args, **ops)


@hookimpl
def specdec_verifiers() -> Sequence[VerifierSpec]:
    def spec(name: str, class_name: str, **features: Any) -> VerifierSpec:
        return VerifierSpec(name, partial(_make, f"verifiers.{name}", class_name), PLUGIN_API, **features)

    return [
        spec("greedy", "GreedyVerifier", greedy_only=True, ops=("likeliest",)),
        spec("chosen", "ChosenVerifier"),
        spec("rejection", "RejectionVerifier", ops=("residuals",)),
        spec("block", "BlockVerifier", chains_only=True, ops=("residuals",)),
        spec("traversal", "TraversalVerifier", ops=("residuals",)),
        spec("typical", "TypicalVerifier", lossless=False, config=TypicalConfig),
    ]


@hookimpl
def specdec_kv_managers() -> Sequence[KVManagerSpec]:
    return [KVManagerSpec("paged", lambda _, context: _make("kv.paged", "PagedKVManager", context), PLUGIN_API)]
