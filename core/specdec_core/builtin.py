"""What core itself offers, through the same hooks as any plugin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from specdec_core.hookspecs import hookimpl
from specdec_core.kv_manager import KVManager, KVManagerSpec
from specdec_core.proposer import PLUGIN_API
from specdec_core.verifier import Verifier, VerifierSpec
from specdec_core.verifiers.config import TypicalConfig

if TYPE_CHECKING:
    import torch


def _verifier(path: str, *config: object) -> Verifier:
    """path: "module.Class" of specdec_core.verifiers, which import torch."""
    module, _, name = path.partition(".")
    verifier: Verifier = getattr(import_module(f"specdec_core.verifiers.{module}"), name)(*config)
    return verifier


def _paged(num_blocks: int, block_size: int, device: torch.device) -> KVManager:
    from specdec_core.kv import PagedKVManager

    return PagedKVManager(num_blocks, block_size, device)


@hookimpl
def specdec_verifiers() -> Sequence[VerifierSpec]:
    return [
        VerifierSpec("greedy", partial(_verifier, "greedy.GreedyVerifier"), PLUGIN_API, greedy_only=True),
        VerifierSpec("chosen", partial(_verifier, "chosen.ChosenVerifier"), PLUGIN_API),
        VerifierSpec("rejection", partial(_verifier, "rejection.RejectionVerifier"), PLUGIN_API),
        VerifierSpec("block", partial(_verifier, "block.BlockVerifier"), PLUGIN_API, chains_only=True),
        VerifierSpec("traversal", partial(_verifier, "traversal.TraversalVerifier"), PLUGIN_API),
        VerifierSpec(
            "typical",
            partial(_verifier, "typical.TypicalVerifier"),
            PLUGIN_API,
            lossless=False,
            config=TypicalConfig,
        ),
    ]


@hookimpl
def specdec_kv_managers() -> Sequence[KVManagerSpec]:
    return [KVManagerSpec("paged", _paged, PLUGIN_API)]
