"""The draft that a proposer returns: for each request of the batch, a tree of draft tokens to verify.

A tree grows from its root, the request's last token, which is not a draft token. Shapes use these sizes: `batch`, the
requests of the step; `num_nodes`, the tree nodes (draft tokens) of all requests; `num_rows = batch + num_nodes`, the
rows of target logits. Request b's root has row `offsets[b] + b`, its i-th node has row `offsets[b] + b + 1 + i`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from attrs import evolve, field, fields, frozen

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = TypeVar("Array", np.ndarray, torch.Tensor)
else:
    Array = TypeVar("Array")

DEAD = -2
"""The parent index of a dead (padding) node. Such a node is computed only to keep tensor shapes fixed; neither it nor
its descendants are ever accepted."""

PER_NODE = ("token_ids", "parents", "q_rows", "scores")
"""The fields of `Draft` with one entry per node. They are small enough for host copies."""


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device. It goes to a GPU through pinned memory, so that the host need not wait."""
    is_upload = device.type == "cuda" and tensor.device.type == "cpu"
    return tensor.pin_memory().to(device, non_blocking=True) if is_upload else tensor.to(device)


class DraftTree(NamedTuple):
    """One request's draft tokens, each with its parent's index in the tree. Parent -1 is the request's last token."""

    token_ids: list[int]
    parents: list[int]


@frozen(eq=False)
class HostCopy:
    """A copy of the tensor `of` on the host, as a numpy array. `Draft` uses it for this tensor object only."""

    of: torch.Tensor
    values: np.ndarray


@frozen(eq=False)
class Draft:
    """Draft tokens for a batch: for each request a tree of tokens, which may be empty.

    A node is a draft token; the root of a tree is the request's last token. A node is *sampled* if its token was drawn
    from a draft distribution, which is a row of `q`. Every other node is *chosen*: its token was picked
    deterministically (top-k, n-gram), and it has -1 in `q_rows`. Siblings are in the order in which they were drawn or
    picked, sampled before chosen. Whether a sampled node exists may depend on earlier draws, but not on its own token.

    A node is *dead* (padding) if its parent index is DEAD or its parent is dead; the others are *live*. A dead node has
    a token of the vocabulary and takes part in the forward pass, but the engine ignores its score and its row of `q`.
    On a GPU, the host knows each request's number of nodes without waiting for the device, so that shapes depend on no
    computed value; nodes that drafting did not reach are dead. On a CPU, a draft may have fewer.

    The columns of `q` are the target's vocabulary by default. With `q_to_target` they are the tokens listed there. With
    `q_ids`, each row of `q` has k tokens of its own, all different. All other tokens have probability 0.

    The engine checks these rules before it computes with a draft.
    """

    token_ids: torch.Tensor  # int64 [num_nodes]   always of the target's vocabulary, also with q_to_target
    parents: torch.Tensor  # int32 [num_nodes]   index within the request's own tree; -1: the root; -2: dead
    offsets: tuple[int, ...]  # [batch + 1]   request b owns the nodes offsets[b]:offsets[b + 1]
    max_depth: int  # of the deepest live node, or a bound on it; a root's child has depth 1
    q: torch.Tensor | None = None  # float32 [num_q_rows, draft_vocab or k]   one row per set of sampled siblings
    q_rows: torch.Tensor | None = None  # int32 [num_nodes]   row of q, -1: chosen. None: every node is chosen
    q_to_target: torch.Tensor | None = None  # int64 [draft_vocab]   draft token id -> target token id
    with_replacement: bool = True  # how sampled siblings were drawn from their row of q
    scores: torch.Tensor | None = None  # float32 [num_nodes]   estimated P(accepted | parent accepted)
    is_chain: bool = False  # a request's live nodes come first, each the child of the one before it; the root's first
    q_ids: torch.Tensor | None = None  # int64 [num_q_rows, k]   target token id of each entry of q
    host_copies: tuple[HostCopy, ...] = field(default=(), repr=False)  # see `to`: they spare the engine a download

    @property
    def batch_size(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_nodes(self) -> int:
        return self.offsets[-1]

    @cached_property
    def num_nodes_per_request(self) -> list[int]:
        return [end - start for start, end in pairwise(self.offsets)]

    @cached_property
    def num_live_per_request(self) -> list[int]:
        """The number of draft tokens of each request, without dead (padding) nodes."""
        import numpy as np

        layout = self.host_layout
        owners = layout.row_requests[layout.node_rows[layout.is_alive]]
        return np.bincount(owners, minlength=self.batch_size).tolist()  # type: ignore[no-any-return]

    @cached_property
    def host_token_ids(self) -> np.ndarray:
        """int64 [num_nodes]   `token_ids` as a numpy array on the host, copied from the device at most once."""
        return self.on_host(self.token_ids)

    @cached_property
    def host_parents(self) -> np.ndarray:
        """int32 [num_nodes]   `parents` as a numpy array on the host, copied from the device at most once."""
        return self.on_host(self.parents)

    @cached_property
    def host_layout(self) -> TreeLayout[np.ndarray]:
        """The draft's `TreeLayout` (rows, parents, depths of the trees) as numpy arrays. Computed once and cached."""
        return TreeLayout.of(self)

    @cached_property
    def layout(self) -> TreeLayout[torch.Tensor]:
        """The same `TreeLayout` as `host_layout`, but with tensors on the draft's device."""
        return self.host_layout.to(self.token_ids.device)

    @classmethod
    def from_chains(cls, chains: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Draft:
        """Make a draft from a chain (list of token ids) per request, possibly empty. No token counts as sampled."""
        lengths = [len(chain) for chain in chains]
        nodes = DraftTree([t for chain in chains for t in chain], [i - 1 for n in lengths for i in range(n)])
        return cls._of_nodes(nodes, lengths, max(lengths, default=0), device, is_chain=True)

    @classmethod
    def from_trees(cls, trees: Sequence[DraftTree], device: torch.device | str = "cpu") -> Draft:
        """Make a draft from one `DraftTree` per request, possibly empty. No token counts as sampled."""
        depth = 0
        for tree in trees:
            depths: list[int] = []
            for parent in tree.parents:
                depths.append(1 if parent < 0 else depths[parent] + 1)
            depth = max([depth, *depths])
        nodes = DraftTree([t for tree in trees for t in tree.token_ids], [p for tree in trees for p in tree.parents])
        return cls._of_nodes(nodes, [len(tree.token_ids) for tree in trees], depth, device)

    @classmethod
    def from_arrays(
        cls,
        token_ids: np.ndarray,
        parents: np.ndarray,
        counts: Sequence[int],
        max_depth: int,
        *,
        scores: np.ndarray | None = None,
        is_chain: bool = False,
        device: torch.device | str = "cpu",
    ) -> Draft:
        """Make a draft from numpy arrays of all nodes, those of request 0 first. No token counts as sampled.

        token_ids: int64 [num_nodes]. counts: [batch], the number of nodes of each request.
        parents: int32 [num_nodes], indices within the request's own tree; -1: the root; -2: a dead (padding) node.
        max_depth: the depth of the deepest live node, or an upper bound on it; a child of the root has depth 1.
        is_chain: whether each request's live nodes come first and form a chain.
        scores: float32 [num_nodes], estimated P(accepted | parent accepted).
        On a CPU the draft shares the arrays' memory: allocate new arrays for the next step.
        """
        import torch

        draft = cls(
            token_ids=torch.from_numpy(token_ids),
            parents=torch.from_numpy(parents),
            offsets=tuple(accumulate(counts, initial=0)),
            max_depth=max_depth,
            scores=None if scores is None else torch.from_numpy(scores),
            is_chain=is_chain,
        )
        return draft if torch.device(device).type == "cpu" else draft.to(device)

    @classmethod
    def _of_nodes(
        cls, nodes: DraftTree, counts: list[int], max_depth: int, device: torch.device | str, is_chain: bool = False
    ) -> Draft:
        """Make a draft without sampled nodes. nodes: the nodes of all requests, in order; counts: nodes per request."""
        import numpy as np

        token_ids = np.array(nodes.token_ids) if nodes.token_ids else np.empty(0, dtype=np.int64)
        if token_ids.dtype != np.int64:
            raise TypeError(f"token ids must be whole numbers, not {token_ids.dtype}: {nodes.token_ids[:5]}")
        parents = np.array(nodes.parents, dtype=np.int32)
        return cls.from_arrays(token_ids, parents, counts, max_depth, is_chain=is_chain, device=device)

    def to(self, device: torch.device | str) -> Draft:
        """Return a copy of the draft with all tensors on `device`. If that is a GPU, the copy's `host_copies` hold the
        per-node tensors that are on the host now: do not write to these tensors afterwards."""
        import torch

        device = torch.device(device)
        names = ("token_ids", "parents", "q", "q_rows", "q_to_target", "q_ids", "scores")
        tensors: dict[str, Any] = {name: each for name in names if (each := getattr(self, name)) is not None}
        moved: dict[str, Any] = {name: on_device(tensor, device) for name, tensor in tensors.items()}
        known = [] if device.type == "cpu" else [name for name in PER_NODE if self.is_on_host(tensors.get(name))]
        copies = (HostCopy(moved[name], self.on_host(tensors[name])) for name in known if name in tensors)
        return evolve(self, **moved, host_copies=tuple(copies))

    def is_on_host(self, *tensors: torch.Tensor | None) -> bool:
        """Whether each of these tensors of the draft is on a CPU or has a host copy. None counts as on the host."""
        copied = [copy.of for copy in self.host_copies]
        return all(t is None or t.device.type == "cpu" or any(t is of for of in copied) for t in tensors)

    def on_host(self, tensor: torch.Tensor) -> np.ndarray:
        """Return a tensor of the draft as a numpy array. Copies it from the device only if there is no host copy."""
        for copy in self.host_copies:
            if copy.of is tensor:
                return copy.values
        array: np.ndarray = tensor.cpu().numpy()
        return array

    def tree(self, request: int) -> DraftTree:
        """Return one request's tree as lists, for tests and reports: slow. request: index into the batch."""
        nodes = slice(self.offsets[request], self.offsets[request + 1])
        return DraftTree(self.host_token_ids[nodes].tolist(), self.host_parents[nodes].tolist())


@frozen(eq=False)
class TreeLayout(Generic[Array]):
    """Where a draft's trees are in the rows of target logits (a row per root and per node), as arrays or tensors.

    A root is a request's last token, from which its tree grows. `up` maps each row to its parent's row, and rows of
    roots and dead (padding) nodes to themselves. A dead node has depth 0, as a root has, and attends only to itself.
    """

    row_requests: Array  # int64 [num_rows]
    row_depths: Array  # int64 [num_rows]   0 at roots and dead nodes
    up: Array  # int64 [num_rows]   row of the parent
    root_rows: Array  # int64 [batch]
    node_rows: Array  # int64 [num_nodes]
    parent_rows: Array  # int64 [num_nodes]   the root's row for a dead node
    is_alive: Array  # bool [num_nodes]

    @staticmethod
    def of(draft: Draft) -> TreeLayout[np.ndarray]:
        """Compute the layout of a draft on the host."""
        import numpy as np

        requests, offsets = np.arange(draft.batch_size), np.array(draft.offsets)
        row_requests = requests.repeat(np.diff(offsets) + 1)
        root_rows = offsets[:-1] + requests
        rows, row_roots = np.arange(len(row_requests)), root_rows[row_requests]
        node_rows = (rows != row_roots).nonzero()[0]
        node_roots = row_roots[node_rows]
        parents, is_alive = draft.host_parents, draft.host_parents != DEAD
        parent_rows = np.where(parents < 0, node_roots, node_roots + 1 + parents)
        up = rows.copy()
        up[node_rows] = parent_rows
        if draft.is_chain and is_alive.all():
            return TreeLayout(row_requests, rows - row_roots, up, root_rows, node_rows, parent_rows, is_alive)
        depths = np.zeros(len(rows), dtype=np.int64)
        for _ in range(draft.max_depth):  # each iteration finds the depths of one more level
            depths[node_rows] = depths[parent_rows] + 1
        if not is_alive.all():
            alive = np.ones(len(rows), dtype=bool)
            alive[node_rows] = is_alive
            while (hangs := is_alive & ~alive[parent_rows]).any():  # from a dead node
                is_alive &= ~hangs
                alive[node_rows] = is_alive
            depths[~alive], up[~alive] = 0, rows[~alive]
        return TreeLayout(row_requests, depths, up, root_rows, node_rows, parent_rows, is_alive)

    def to(self: TreeLayout[np.ndarray], device: torch.device) -> TreeLayout[torch.Tensor]:
        import torch

        return TreeLayout(
            *(on_device(torch.from_numpy(getattr(self, each.name)), device) for each in fields(TreeLayout))
        )
