"""What core itself offers, through the same hooks as any plugin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec_core.hookspecs import hookimpl
from specdec_core.kv_manager import KVManager, KVManagerSpec
from specdec_core.proposer import PLUGIN_API
from specdec_core.verifier import Verifier, VerifierSpec

if TYPE_CHECKING:
    import torch


def _greedy() -> Verifier:
    from specdec_core.verifiers.greedy import GreedyVerifier

    return GreedyVerifier()


def _chosen() -> Verifier:
    from specdec_core.verifiers.chosen import ChosenVerifier

    return ChosenVerifier()


def _paged(num_blocks: int, block_size: int, device: torch.device) -> KVManager:
    from specdec_core.kv import PagedKVManager

    return PagedKVManager(num_blocks, block_size, device)


@hookimpl
def specdec_verifiers() -> Sequence[VerifierSpec]:
    return [VerifierSpec("greedy", _greedy, PLUGIN_API), VerifierSpec("chosen", _chosen, PLUGIN_API)]


@hookimpl
def specdec_kv_managers() -> Sequence[KVManagerSpec]:
    return [KVManagerSpec("paged", _paged, PLUGIN_API)]
