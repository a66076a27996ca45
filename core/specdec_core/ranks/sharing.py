"""How the parts of an engine are built: in this process alone, or shared with other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from attrs import evolve, frozen

from specdec_core.config.engine import EngineConfig
from specdec_core.contracts.kv import TARGET, KVContext, KVLayout, KVManager, KVManagerSpec
from specdec_core.errors import DeviceError
from specdec_core.models import Model
from specdec_core.models.load import ModelSource
from specdec_core.plugins import Plugins
from specdec_core.ranks.driver import Ranks, device_of
from specdec_core.ranks.models import SharedKV, SharedModel


class Sharing(Protocol):
    """Builds the parts of an engine that ranks may share."""

    def load(self, source: ModelSource, owner: str = TARGET) -> Model:
        """Load the target, or the draft model of the proposer `owner`. Raises the errors of `Model`."""

    def build_kv(self, spec: KVManagerSpec, options: Any, context: KVContext) -> KVManager:
        """Build a KV manager with its parsed options."""

    def add_group(self, kv: KVManager, layout: KVLayout, owner: str, lookahead: int, *, is_split: bool) -> int:
        """Allocate the cache of a draft's layers, and return its group. is_split: whether ranks share the layers."""

    def serve(self) -> None:
        """Note that the engine is built."""

    def failure(self) -> DeviceError | None:
        """The error if a rank has ended by itself, though no request has met it yet. Any thread may ask."""

    def close(self) -> None:
        """End what was started. May be called again."""


class Alone:
    """All parts are whole, and in this process."""

    def load(self, source: ModelSource, owner: str = TARGET) -> Model:
        return Model(source)

    def build_kv(self, spec: KVManagerSpec, options: Any, context: KVContext) -> KVManager:
        return spec.build(options, context)

    def add_group(self, kv: KVManager, layout: KVLayout, owner: str, lookahead: int, *, is_split: bool) -> int:
        return kv.add_group(layout, owner, lookahead)

    def serve(self) -> None:
        return

    def failure(self) -> DeviceError | None:
        return None

    def close(self) -> None:
        return


@frozen(eq=False)
class Shared:
    """Each rank has its part of models that are split, and a KV manager of its own, of the same kind."""

    ranks: Ranks

    def load(self, source: ModelSource, owner: str = TARGET) -> Model:
        return SharedModel(source, self.ranks, owner) if source.tensor_parallel_size > 1 else Model(source)

    def build_kv(self, spec: KVManagerSpec, options: Any, context: KVContext) -> KVManager:
        self.ranks.later("build_kv", spec.name, options, evolve(context, compact=None))
        return SharedKV(spec.build(options, context), self.ranks)

    def add_group(self, kv: KVManager, layout: KVLayout, owner: str, lookahead: int, *, is_split: bool) -> int:
        assert isinstance(kv, SharedKV)
        # What rank 0 alone drafts with has a place in the others' block tables, too, of the least size.
        smallest = evolve(layout, num_layers=1, num_kv_heads=1, key_dim=1, value_dim=1)
        return kv.add_groups(layout, layout if is_split else smallest, owner, lookahead)

    def serve(self) -> None:
        self.ranks.serve()

    def failure(self) -> DeviceError | None:
        return self.ranks.failure

    def close(self) -> None:
        self.ranks.close()


@contextmanager
def sharing(config: EngineConfig, device: torch.device, plugins: Plugins) -> Iterator[Sharing]:
    """A context in which an engine is built. Starts the other ranks, if there are any, and ends them if an exception
    leaves the context. Raises ConfigError if there are too few GPUs."""
    size = config.tensor_parallel_size
    device_of(size - 1, device, size)
    found: Sharing = Alone() if size == 1 else Shared(Ranks(size, device, plugins.usable))
    try:
        yield found
        found.serve()
    except BaseException:
        found.close()
        raise
