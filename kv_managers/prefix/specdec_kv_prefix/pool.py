"""A pool of KV-cache blocks with reference counts, and an LRU cache of blocks that no request holds."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence

from specdec_core import BlockPool


class SharedBlocks(BlockPool):
    """A pool of KV-cache blocks that several requests can hold at once. Each block is free, held by one or more
    requests, or cached: no request holds a cached block, but a new request can find its contents by key. When free
    blocks run out, the least recently used cached block is evicted first."""

    def __init__(self, num_blocks: int, block_size: int, most_kept: int | None) -> None:
        super().__init__(num_blocks, block_size)
        self._most_kept = num_blocks if most_kept is None else most_kept
        self._holders: Counter[int] = Counter()
        self._kept: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._by_key: dict[Hashable, set[int]] = {}
        self._keys: dict[int, set[Hashable]] = {}  # the keys of a block's contents, one per filled group

    @property
    def num_free(self) -> int:
        return super().num_free + len(self._kept)

    def take(self, number: int) -> list[int]:
        self._give_up(number - len(self._free))
        blocks = super().take(number)
        self._holders.update(blocks)
        return blocks

    def give(self, blocks: Sequence[int]) -> None:
        self._holders.subtract(blocks)
        for block in reversed(blocks):  # so that later blocks are evicted before their prefix
            if block in self._keys and not self._holders[block]:
                self._kept[block] = None
            elif not self._holders[block]:
                super().give([block])
        self._give_up(len(self._kept) - self._most_kept)

    def hold(self, blocks: Sequence[int]) -> None:
        self._holders.update(blocks)
        for block in blocks:
            self._kept.pop(block, None)

    def publish(self, block: int, key: Hashable) -> None:
        self._keys.setdefault(block, set()).add(key)
        self._by_key.setdefault(key, set()).add(block)

    def find(self, keys: set[Hashable]) -> int | None:
        """Return the lowest-numbered block that has all of these keys. None if no block has them all."""
        return min(set.intersection(*(self._by_key.get(key, set()) for key in keys)), default=None)

    def recount(self) -> None:
        super().recount()
        self._holders = Counter(block for table in self._tables.values() for block in table)
        self._kept, self._by_key, self._keys = OrderedDict(), {}, {}

    def _give_up(self, number: int) -> None:
        for _ in range(min(number, len(self._kept))):
            block, _ = self._kept.popitem(last=False)
            for key in self._keys.pop(block):
                self._by_key.get(key, set()).discard(block)
                if not self._by_key.get(key):
                    self._by_key.pop(key, None)
            super().give([block])

    def check_integrity(self) -> None:
        self._settle()
        held = Counter(block for table in self._tables.values() for block in table)
        assert held == self._holders, f"{held} hold blocks, and {self._holders} were counted"
        places = sorted([*self._free, *self._kept, *held])
        assert places == list(range(self.num_blocks)), f"blocks lost or held twice: {places}"
