"""Runs the recurrent layers of a model over a flat batch: each request's tokens change its state, and each draft token
starts from the state of its parent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import nn

from specdec_core.errors import SpecdecError
from specdec_core.kv.states import StateStore
from specdec_core.models.mixers import SITE, Run, StateCache


@frozen(eq=False)
class Level:
    """Single tokens that a layer computes at once, padded by repeating the first one.

    num_tokens: without padding, whose states are dropped.
    """

    rows: torch.Tensor  # int64 [num_padded]   the tokens' rows in the flat batch, or among the nodes
    parents: torch.Tensor  # int64 [num_padded]   where their states come from: slots, or rows of the level above
    num_tokens: int


@frozen
class Chunk:
    """Consecutive tokens of one request's prompt. first: the row of the first one. slot: of the request's state."""

    first: int
    num_tokens: int
    slot: int


@frozen(eq=False)
class StatePlan:
    """What the recurrent layers do in one forward pass.

    chunks, singles: the prompt and output tokens, which change their requests' states: several of one request, and
        single ones of all other requests (None: there are none).
    levels: the live nodes at depth 1, 2 and so on. The parents of the first level are slots.
    """

    chunks: tuple[Chunk, ...]
    singles: Level | None
    levels: tuple[Level, ...] = ()
    node_rows: torch.Tensor | None = None  # int64 [num_nodes]   of all nodes, in the order of the draft


class RecurrentLayers:
    """The recurrent layers of a target, with the states of its requests.

    A forward pass leaves the state of each request after its root (the last known token), and keeps what each layer
    read at the nodes. `replay` then computes the accepted nodes again, which changes the states. So only one state is
    stored for each request, however many nodes there are.

    mixers: the modules that keep states, in the order of the layers.
    store: the states of all requests.
    padded: the function with the number of rows to which a number of tokens is padded, so that a token's result does
        not depend on how many there are.
    """

    def __init__(self, mixers: Sequence[nn.Module], store: StateStore, padded: Callable[[int], int]) -> None:
        self.store, self.padded = store, padded
        self._plan: StatePlan | None = None  # of the current forward pass
        self._layer_idxs: list[Any] = [mixer.layer_idx for mixer in mixers]  # as transformers counts
        self._nodes: dict[int, tuple[Run, torch.Tensor]] = {}  # by layer: what the last forward pass read at the nodes
        for layer, mixer in enumerate(mixers):
            setattr(mixer, SITE, StateSite(self, layer))

    @contextmanager
    def using(self, plan: StatePlan) -> Iterator[None]:
        """A context for one forward pass."""
        self._nodes.clear()
        self._plan = plan
        try:
            yield
        finally:
            if self._plan is plan:  # after an interrupt this may be closed late, in the middle of another pass
                self._plan = None

    def mix(self, layer: int, hidden: torch.Tensor, run: Run) -> torch.Tensor:
        """Compute a layer's output [1, num_tokens, width] for hidden states of the same shape. That of padding and of
        dead nodes is 0."""
        plan = self._plan
        if plan is None:
            raise SpecdecError("a recurrent layer was called outside of `with recurrent.using(...)`")
        given, output, states = hidden[0], torch.zeros_like(hidden[0]), self.store.layers[layer]
        for chunk in plan.chunks:
            rows, slot = slice(chunk.first, chunk.first + chunk.num_tokens), slice(chunk.slot, chunk.slot + 1)
            after = {name: tensor[slot].clone() for name, tensor in states.items()}
            output[rows] = run(given[None, rows], StateCache(after, self._layer_idxs[layer]))[0]
            for name, tensor in states.items():
                tensor[slot] = after[name]
        if plan.singles is not None:
            self._advance(layer, given, plan.singles, output, run)
        before: Mapping[str, torch.Tensor] = states
        for level in plan.levels:
            before = self._step(layer, given, level, before, output, run)
        if plan.node_rows is not None:
            self._nodes[layer] = run, given.index_select(0, plan.node_rows)
        return output.unsqueeze(0)

    def replay(self, steps: Sequence[Level]) -> None:
        """Let accepted nodes of the last forward pass change their requests' states.

        steps: for j = 1, 2 and so on, the j-th accepted node of each request that has so many. Rows are indices of
            nodes, parents slots.
        """
        for layer, (run, given) in self._nodes.items():
            for step in steps:
                self._advance(layer, given, step, None, run)
        self._nodes.clear()

    def _advance(self, layer: int, given: torch.Tensor, level: Level, output: torch.Tensor | None, run: Run) -> None:
        """Compute one token of each of several requests, and store the states after it."""
        states, slots = self.store.layers[layer], level.parents[: level.num_tokens]
        after = self._step(layer, given, level, states, output, run)
        for name, tensor in states.items():
            tensor.index_copy_(0, slots, after[name][: level.num_tokens].to(tensor.dtype))

    def _step(
        self,
        layer: int,
        given: torch.Tensor,
        level: Level,
        states: Mapping[str, torch.Tensor],
        output: torch.Tensor | None,
        run: Run,
    ) -> Mapping[str, torch.Tensor]:
        """Compute single tokens from their parents' states, and write their output to its rows. Returns the states
        after them, [num_padded, ...] each."""
        after = {name: tensor.index_select(0, level.parents) for name, tensor in states.items()}
        cache = StateCache(after, self._layer_idxs[layer])
        found = run(given.index_select(0, level.rows).unsqueeze(1), cache).squeeze(1)
        if output is not None:
            output.index_copy_(0, level.rows[: level.num_tokens], found[: level.num_tokens])
        return after


@frozen(eq=False)
class StateSite:
    """Links a mixer to its layer's states."""

    layers: RecurrentLayers
    layer: int

    def mix(self, module: nn.Module, hidden: torch.Tensor, run: Run) -> torch.Tensor:
        return self.layers.mix(self.layer, hidden, run)
