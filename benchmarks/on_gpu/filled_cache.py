"""A KV manager whose cache is full of random numbers, which requests take for theirs: long contexts need no prefill."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec_core import KVContext, KVLayout, KVManagerSpec, PagedKVManager, hookimpl


class FilledKVManager(PagedKVManager):
    def __init__(self, config: None, context: KVContext) -> None:
        super().__init__(context)
        self._block_size = context.block_size

    def add_group(self, layout: KVLayout, *args: object, **kwargs: object) -> int:
        group = super().add_group(layout, *args, **kwargs)
        for layer in range(layout.num_layers):
            for each in self.cache(group, layer):
                each.normal_()
        return group

    def admit(self, request_id: str, token_ids: np.ndarray, salt: str, groups: Sequence[int]) -> int:
        super().admit(request_id, token_ids, salt, groups)
        num_cached = (len(token_ids) - 1) // self._block_size * self._block_size if len(token_ids) else 0
        self._num_final[request_id] = num_cached
        return num_cached


@hookimpl
def specdec_kv_managers() -> Sequence[KVManagerSpec]:
    return [KVManagerSpec(name="filled", build=FilledKVManager, api=1)]
