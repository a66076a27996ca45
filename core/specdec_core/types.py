"""The data that passes between engine, proposers, verifiers and KV manager in one step.

Shapes use these sizes: `batch` requests of the step; `num_nodes` draft tokens of all requests; `num_rows = batch +
num_nodes` rows of target logits, for each request its root's and then its nodes'. Request b's root has row
`offsets[b] + b`, its i-th node the row `offsets[b] + b + 1 + i`.

This module imports no torch: plugins are listed without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from attrs import evolve, field, frozen

if TYPE_CHECKING:
    import numpy as np
    import torch

    from specdec_core.tree_layout import TreeLayout

DEAD = -2
"""The parent of a dead node: forwarded so that shapes hold, never accepted, nor anything below it."""


class DraftTree(NamedTuple):
    """One request's draft: token ids, and each node's parent within the tree (-1: the root; parents come first)."""

    token_ids: list[int]
    parents: list[int]


@frozen(eq=False)
class Draft:
    """A ragged batch of token trees.

    A node is *sampled* if its token was drawn from a distribution, a row of `q`; every other node is *chosen*
    (top-k, n-gram) and `q_rows` is -1 there. Siblings stand in the order they were decided, sampled before chosen.
    A node may exist because of what was decided before it, a sampled node never because of its own token.
    """

    token_ids: torch.Tensor  # int64 [num_nodes]   of the target's vocabulary, whatever q_to_target says
    parents: torch.Tensor  # int32 [num_nodes]   index within the request's own tree; -1: the root; -2: dead
    offsets: tuple[int, ...]  # [batch + 1]   request b owns the nodes offsets[b]:offsets[b + 1]
    max_depth: int  # of any node; 0 for an empty draft
    q: torch.Tensor | None = None  # float32 [num_q_rows, draft_vocab]   one row per set of sampled siblings
    q_rows: torch.Tensor | None = None  # int32 [num_nodes]   row of q, -1: chosen. None: every node is chosen
    q_to_target: torch.Tensor | None = None  # int64 [draft_vocab]   draft token id -> target token id
    with_replacement: bool = True  # how sampled siblings were drawn from their row of q
    scores: torch.Tensor | None = None  # float32 [num_nodes]   estimated P(accepted | parent accepted)
    is_chain: bool = False  # every node's parent is the node before it: what the engine may then leave out

    @property
    def batch_size(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_nodes(self) -> int:
        return self.offsets[-1]

    @property
    def num_nodes_per_request(self) -> list[int]:
        return [end - start for start, end in pairwise(self.offsets)]

    @cached_property
    def host_layout(self) -> TreeLayout[np.ndarray]:
        """Rows, depths and ancestors, computed once and shared by the forward pass, the sampler and the verifier."""
        from specdec_core.tree_layout import TreeLayout

        return TreeLayout.of(self)

    @cached_property
    def layout(self) -> TreeLayout[torch.Tensor]:
        """The same on the draft's device."""
        return self.host_layout.to(self.token_ids.device)

    @classmethod
    def from_chains(cls, chains: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Draft:
        """Chains of chosen tokens, one per request, possibly empty: all that a host-side chain proposer needs."""
        import torch

        lengths = [len(chain) for chain in chains]
        return cls(
            token_ids=_token_ids([t for chain in chains for t in chain], device),
            parents=torch.tensor([i - 1 for n in lengths for i in range(n)], dtype=torch.int32, device=device),
            offsets=_offsets(lengths),
            max_depth=max(lengths, default=0),
            is_chain=True,
        )

    @classmethod
    def from_trees(cls, trees: Sequence[DraftTree], device: torch.device | str = "cpu") -> Draft:
        """Trees of chosen tokens, one per request, possibly empty."""
        import torch

        depth = 0
        for tree in trees:
            depths: list[int] = []
            for parent in tree.parents:
                depths.append(1 if parent < 0 else depths[parent] + 1)
            depth = max([depth, *depths])
        return cls(
            token_ids=_token_ids([t for tree in trees for t in tree.token_ids], device),
            parents=torch.tensor([p for tree in trees for p in tree.parents], dtype=torch.int32, device=device),
            offsets=_offsets([len(tree.token_ids) for tree in trees]),
            max_depth=depth,
        )

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
        """Trees of chosen tokens, as code that drafts a whole batch at once has them: token_ids int64 [num_nodes],
        parents int32 [num_nodes], nodes of each request counts [batch], scores float32 [num_nodes]. On a CPU the draft
        shares the arrays' memory: make new ones for the next step."""
        import torch

        draft = cls(
            token_ids=torch.from_numpy(token_ids),
            parents=torch.from_numpy(parents),
            offsets=_offsets(counts),
            max_depth=max_depth,
            scores=None if scores is None else torch.from_numpy(scores),
            is_chain=is_chain,
        )
        return draft if torch.device(device).type == "cpu" else draft.to(device)

    def to(self, device: torch.device | str) -> Draft:
        """The same with all tensors on a device."""
        moved = {
            name: tensor.to(device)
            for name in ("token_ids", "parents", "q", "q_rows", "q_to_target", "scores")
            if (tensor := getattr(self, name)) is not None
        }
        return evolve(self, **moved)

    def tree(self, request: int) -> DraftTree:
        """One request's part, copied to the host (for tests and reports, not for the hot path)."""
        nodes = slice(self.offsets[request], self.offsets[request + 1])
        return DraftTree(self.token_ids[nodes].tolist(), self.parents[nodes].tolist())


def _token_ids(values: list[int], device: torch.device | str) -> torch.Tensor:
    import torch

    if not values:
        return torch.empty(0, dtype=torch.int64, device=device)
    token_ids = torch.tensor(values, device=device)
    if token_ids.dtype != torch.int64:
        raise TypeError(f"token ids must be whole numbers, not {token_ids.dtype}: {values[:5]}")
    return token_ids


def _offsets(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


@frozen(eq=False)
class Verdict:
    """What a verifier decided, on any device: the engine copies it to the host, once in a step."""

    token_ids: torch.Tensor  # int64 [batch, max_depth + 1]   accepted path, then the recovered or bonus token; -1
    #                          pads. All -1: the request's logits were not finite and it fails. The path may run past
    #                          a stop: whoever emits cuts it
    rows: torch.Tensor  # int32 [batch, max_depth + 1]   row of target_logits that decided each token: [:, 0] the
    #                     root's, [:, j] the j-th accepted node's own; past the path, the last decided row again
    num_accepted: torch.Tensor  # int32 [batch]   accepted draft tokens, never counting the recovered or bonus token

    def on_host(self) -> Verdict:
        return Verdict(self.token_ids.cpu(), self.rows.cpu(), self.num_accepted.cpu())


class RequestView(Protocol):
    """What a proposer sees of a request. `token_ids` grows between steps; nothing here may be written to."""

    @property
    def id(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def token_ids(self) -> np.ndarray:
        """int64 [num_tokens]   prompt and output so far, the root included, without a copy."""
        ...


class Stream(IntEnum):
    """Separate streams of noise: a draw of one never repeats a draw of another."""

    TARGET = 0  # rule 1: the token emitted at a position, the same with and without speculation
    DRAFT = 1  # a proposer's draws
    ACCEPT = 2  # a verifier's accept-or-reject
    RECOVER = 3  # a verifier's token after a rejection


class RandomSource(Protocol):
    """All chance in a step, bound to the seeds and root positions of a batch of requests.

    There are no bare uniforms, so that a test can put an enumerating source in its place and add up every outcome.
    Draws depend on nothing but the keys named below: not on the batch, its order or its size.
    """

    def target_token(self, weights: torch.Tensor, requests: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        """The target's own token at each row, keyed by (seed, absolute index of that token): rule 1.

        weights float [n, vocab] (non-negative, unnormalised), requests int64 [n] indices into the batch, depths
        int64 [n] of the rows' nodes (root: 0). Returns int64 [n].
        """
        ...

    def categorical(
        self, weights: torch.Tensor, stream: Stream, requests: torch.Tensor, nodes: torch.Tensor
    ) -> torch.Tensor:
        """One index per row of weights float [n, vocab], keyed by (seed, root position, node, stream).

        nodes int64 [n]: any number that is unique within the request and stream at this step. Returns int64 [n].
        """
        ...

    def bernoulli(
        self, prob: torch.Tensor, stream: Stream, requests: torch.Tensor, nodes: torch.Tensor
    ) -> torch.Tensor:
        """True with probability prob float [n], keyed as in `categorical`. Returns bool [n]."""
        ...


@frozen
class StepCosts:
    """Seconds: a pass of the target over n tokens takes target_s + n * token_s."""

    target_s: float
    token_s: float


@frozen(eq=False)
class ProposerBatch:
    """The requests to draft for: those whose root alone is pending and whose budget is at least one node."""

    requests: Sequence[RequestView]
    root_token_ids: torch.Tensor  # int64 [batch]
    root_positions: torch.Tensor  # int64 [batch]
    temperature: torch.Tensor  # float32 [batch]   0: greedy
    max_draft_tokens: tuple[int, ...]  # [batch]   at least 1; never beyond max_tokens or max_model_len
    random: RandomSource
    costs: StepCosts | None = None  # measured in the engine's first steps; None: not yet, or by nobody


@frozen(eq=False)
class Observation:
    """What a target pass computed: prefill chunks and decode steps alike, after acceptance.

    Request b owns the rows offsets[b]:offsets[b + 1], of which the first num_valid[b] count: the tokens known before
    the pass and then the accepted nodes. They follow, without a gap, what was observed of the request since it started
    or was reset; they may run past a stop, after which the request finishes. num_valid is 0 where the pass was no use:
    logits were not finite, and the request ends or is reset.
    """

    requests: Sequence[RequestView]
    starts: tuple[int, ...]  # [batch]   position of each request's first row
    offsets: tuple[int, ...]  # [batch + 1]
    num_valid: tuple[int, ...]  # [batch]
    token_ids: torch.Tensor  # int64 [num_tokens]   the tokens whose features these are
    positions: torch.Tensor  # int64 [num_tokens]
    features: Mapping[str, torch.Tensor]  # {tap: [num_tokens, width]}
    next_token_ids: torch.Tensor  # int64 [batch]   the token after the last valid one: the next known token (prompt,
    #                               or output being recomputed) if there is one, else the new root

    @cached_property
    def last_rows(self) -> list[int]:
        """[batch]   each request's last row that counts; its first one where none does."""
        return [start + max(0, n - 1) for start, n in zip(self.offsets, self.num_valid, strict=False)]

    @cached_property
    def following_token_ids(self) -> torch.Tensor:
        """int64 [num_tokens]   the token after each row's; arbitrary at rows that do not count."""
        following = self.token_ids.roll(-1)
        following[self.last_rows] = self.next_token_ids
        return following


@frozen
class KVLayout:
    """The cache of one group of layers. `keeps_nodes`: draft nodes are stored in the target's slots and compacted."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    keeps_nodes: bool = False

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@frozen(eq=False)
class KVMetadata:
    """Where one pass over half-open slot intervals [start, start + length) of some requests reads and writes."""

    starts: tuple[int, ...]  # [batch]
    lengths: tuple[int, ...]  # [batch]
    block_tables: torch.Tensor  # int64 [batch, max_blocks]   padded with block 0
    slot_mapping: torch.Tensor  # int64 [sum of lengths]   where each token's key and value go; -1: nowhere
    block_size: int


@frozen(eq=False)
class Visibility:
    """Which slots of its own request each token of a pass sees: a prefix, and single ones beyond it (a tree's nodes see
    their ancestors). Tokens are in the order of the pass's slot intervals; what follows them is padding."""

    positions: torch.Tensor  # int64 [num_tokens]   what windows are measured in
    prefix_lens: torch.Tensor  # int64 [num_tokens]   the slots [0, prefix_len)
    more_slots: torch.Tensor | None = None  # int64 [num_tokens, n]   from the token's own up to its root's, which
    #                                         repeats; what lies within the prefix does not count


@frozen
class TargetInfo:
    """Facts about the loaded (or yet unloaded) target that a plan or a proposer may need.

    trust_remote_code: whether code that comes with checkpoints may run, a draft's too. tokenizer: the one that prompts
    are read with; None: prompts are token ids.
    """

    model: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    trust_remote_code: bool = False
    tokenizer: Any = field(default=None, eq=False, repr=False)


@frozen
class Plan:
    """What a proposer asks of the engine, known before any weights are loaded."""

    taps: tuple[str, ...] = ()  # "input.i": residual stream before layer i, or after the last; "final": normed
    kv_layout: KVLayout | None = None
    scratch_slots: int = 0  # draft KV slots beyond the committed ones, counted from the root's
    weight_bytes: int = 0
    observes: bool = True  # False: `observe` is never called and no features are gathered
    output_rows: bool = False  # whether rows of the target's output layer are asked for (`BuildContext.output_rows`)
    max_model_len: int | None = None  # no drafts beyond so many tokens of a request: as far as the draft reaches


@frozen(eq=False)
class StepReport:
    """One step in figures, for metrics and for whoever implements `specdec_step_finished`."""

    num_prefill_tokens: int = 0  # of prompts; of outputs, too, where a preempted request is computed again
    num_decode_requests: int = 0  # requests whose only known token was the root
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0
    num_preempted: int = 0
    accepted_per_request: Mapping[str, int] = field(factory=dict)  # of requests that had a draft
    output_per_request: Mapping[str, int] = field(factory=dict)  # output tokens, of requests that got some
    verifier: str = ""  # that decided on the drafts; empty if there was none
