"""The shape of a draft tree, as users write it: speculative_token_tree."""

from __future__ import annotations

from ast import literal_eval
from collections import Counter
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

from attrs import frozen

from specdec_core.config.fields import shown
from specdec_core.errors import ConfigError


@frozen(cache_hash=True)
class TokenTree:
    """The shape of a draft tree, as one path from the root to each node (draft token).

    paths: a path has one entry per level: the rank of a node among its siblings (0: the likeliest). So (1, 0) is the
        likeliest child of the root's second child. The paths are sorted by length, then by ranks. Nodes are
        drafted in this order.
    order: places in `paths` of all nodes, in the order in which they are kept where a request may have fewer of them.
        (): as in `paths`.
    """

    paths: tuple[tuple[int, ...], ...]
    order: tuple[int, ...] = ()

    @classmethod
    def chain(cls, length: int) -> TokenTree:
        return cls(tuple((0,) * (i + 1) for i in range(length)))

    @classmethod
    def parse(cls, given: Any, key: str = "speculative_token_tree") -> TokenTree:
        """Parse a list of paths such as [(0,), (1,), (0, 0)], or a string with such a list. A TokenTree is returned
        unchanged. Raises ConfigError unless the paths form a tree: every path once, with all its prefixes, and siblings
        numbered from 0.

        key: the option's name, for error messages.
        """
        if isinstance(given, cls):
            return given
        try:
            paths = literal_eval(given) if isinstance(given, str) else given
            found = tuple(sorted((tuple(_ranks(path)) for path in paths), key=lambda path: (len(path), path)))
        except (TypeError, ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise ConfigError(
                f"{key}={shown(given)} is not a list of paths: give one like [(0,), (1,), (0, 0)], where (0, 0) is the "
                f"likeliest child of the likeliest first token"
            ) from error
        known = {(), *found}
        for path in found:
            for needed in (path[:-1], (*path[:-1], path[-1] - 1)):
                if needed not in known and needed[-1:] != (-1,):
                    raise ConfigError(f"{key} has the path {path} without {needed}: add it")
        if not found or len(known) <= len(found):
            raise ConfigError(f"{key}={shown(given)} must have every path once, and at least one")
        return cls(found)

    @classmethod
    def by_worth(cls, paths: Sequence[tuple[int, ...]]) -> TokenTree:
        """The tree of these paths, the most useful first, each after its parent and its elder siblings. It is for heads
        without a KV cache: elsewhere a node's place in the tree is its slot."""
        tree = cls.parse(paths)
        seen: set[tuple[int, ...]] = {()}
        for path in paths:
            if path[:-1] not in seen or (path[-1] and (*path[:-1], path[-1] - 1) not in seen):
                raise ConfigError(f"the path {path} comes before its parent or an elder sibling: sort the paths")
            seen.add(path)
        places = {path: place for place, path in enumerate(tree.paths)}
        return cls(tree.paths, tuple(places[path] for path in paths))

    def check_number(self, num_speculative_tokens: int, key: str = "speculative_token_tree") -> None:
        """Raise ConfigError if num_speculative_tokens is not the number of nodes. key: the option's name."""
        if num_speculative_tokens != len(self.paths):
            raise ConfigError(
                f"num_speculative_tokens={num_speculative_tokens}, but {key} has {len(self.paths)} nodes: give "
                f"num_speculative_tokens={len(self.paths)} or leave it out, or give a tree of that many nodes"
            )

    def first(self, num_nodes: int) -> TokenTree:
        """The tree that consists of the first num_nodes nodes (draft tokens) of this one."""
        return self if num_nodes >= len(self.paths) else TokenTree(self.paths[:num_nodes])

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @property
    def is_chain(self) -> bool:
        return len(self.paths) == self.depth

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The number of nodes (draft tokens) at each depth: entry 0 is for depth 1, the root's children."""
        return tuple(Counter(map(len, self.paths)).values())

    @property
    def num_inner(self) -> int:
        """The number of draft tokens above the deepest level. The draft model runs on these to draft their children."""
        return len(self.paths) - self.widths[-1]

    @cached_property
    def num_children(self) -> tuple[int, ...]:
        """The number of children of the root and then of each node (draft token), [1 + num_nodes]."""
        return self.num_children_kept(len(self.paths))

    def num_children_kept(self, num_nodes: int) -> tuple[int, ...]:
        """The same where only the first num_nodes nodes by `order` are kept, [1 + num_nodes of the whole tree]."""
        return _num_children_kept(self, min(num_nodes, len(self.paths)))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Of each node, how many are kept before it, [num_nodes]."""
        order = self.order or range(len(self.paths))
        return tuple(sorted(range(len(order)), key=order.__getitem__))

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The place of each node's parent in `paths`, [num_nodes]; -1: the root."""
        places = {(): -1} | {path: place for place, path in enumerate(self.paths)}
        return tuple(places[path[:-1]] for path in self.paths)

    @cached_property
    def first_children(self) -> tuple[int, ...]:
        """The index of the first child, for the root and then for each node (draft token), [1 + num_nodes]. The root
        has index 0, and the nodes follow in order. For a node without children, the index that a first child would
        have."""
        return tuple(accumulate(self.num_children[:-1], initial=1))


@lru_cache(maxsize=1024)
def _num_children_kept(tree: TokenTree, num_nodes: int) -> tuple[int, ...]:
    children = Counter(path[:-1] for path, rank in zip(tree.paths, tree.ranks, strict=True) if rank < num_nodes)
    return tuple(children[path] for path in ((), *tree.paths))


def _ranks(path: Sequence[int]) -> Sequence[int]:
    if isinstance(path, str) or not path or any(type(rank) is not int or rank < 0 for rank in path):
        raise ValueError(f"{shown(path)} is not a path")
    return path
