"""Wraps the proposer of an engine, and records the calls that it gets and the drafts that it returns."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import attrs
import numpy as np
import torch

from specdec_core.contracts.draft import Draft, HostCopy
from specdec_core.contracts.kv import KVMetadata
from specdec_core.contracts.proposer import (
    BuildContext,
    LayerAttention,
    Observation,
    Proposer,
    ProposerBatch,
    ProposerSpec,
    RequestView,
)
from specdec_core.engine.named_proposer import NamedProposer
from specdec_core.errors import PluginError
from specdec_core.plugins import Plugins
from specdec_testing.conformance.faults import faults_of


@attrs.frozen
class Asked:
    """The state of one request when `propose` was called. Tests compare the drafts that requests in equal states
    got."""

    seed: int
    token_ids: tuple[int, ...]
    max_draft_tokens: int
    temperature: float


@attrs.frozen(eq=False)
class Proposal:
    """One recorded call of `propose`.

    asked: the state of each request of the batch.
    draft: the draft that `propose` returned, with its tensors copied.
    vocab_size: number of the target's token ids.
    device: the engine's device.
    """

    asked: tuple[Asked, ...]
    after_reset: tuple[bool, ...]  # [batch]   the request was preempted before
    draft: Draft
    vocab_size: int
    device: torch.device

    @classmethod
    def of(cls, batch: ProposerBatch, draft: Any, context: BuildContext, reset: set[str]) -> Proposal:
        asked = tuple(
            Asked(request.seed, tuple(request.token_ids.tolist()), budget, temperature)
            for request, budget, temperature in zip(
                batch.requests, batch.max_draft_tokens, batch.temperature.tolist(), strict=True
            )
        )
        after_reset = tuple(request.id in reset for request in batch.requests)
        return cls(asked, after_reset, _copied(draft), context.target.vocab_size, context.device)


def _copied(draft: Any) -> Any:
    """Return a draft with copied tensors, because the proposer may reuse its own tensors. If `propose` returned
    something other than a Draft, return that unchanged."""
    if not isinstance(draft, Draft):
        return draft
    given = {name: value for name, value in _fields(draft) if torch.is_tensor(value)}
    changes: dict[str, Any] = {name: value.clone() for name, value in given.items()}
    changes["host_copies"] = tuple(
        HostCopy(changes[name], copy.values.copy())
        for copy in draft.host_copies
        for name, value in given.items()
        if value is copy.of
    )
    return attrs.evolve(draft, **changes)


def _fields(value: Any) -> list[tuple[str, Any]]:
    return [(attribute.name, getattr(value, attribute.name)) for attribute in attrs.fields(type(value))]


@attrs.frozen(eq=False, weakref_slot=True)
class View:
    """The request object (`RequestView`) that the kit gives to the proposer in place of the engine's. Its id is chosen
    by the kit. Weak references to it show whether the proposer still holds it after `finish`."""

    id: str
    request: RequestView

    @property
    def seed(self) -> int:
        return self.request.seed

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        return self.request.num_cached_tokens

    @property
    def token_ids(self) -> np.ndarray:
        return self.request.token_ids

    @property
    def prediction(self) -> np.ndarray:
        return self.request.prediction


class LentAttention:
    """Forwards the proposer's calls to the engine's `LayerAttention`, with the engine's request objects in place of the
    kit's (`View`)."""

    def __init__(self, inner: LayerAttention, journal: Journal) -> None:
        self._inner, self._journal = inner, journal

    def fill(self, requests: Sequence[View], num_tokens: Sequence[int]) -> None:
        self._journal.num_fills += 1
        self._inner.fill([view.request for view in requests], num_tokens)

    def metadata(self, requests: Sequence[View], starts: Sequence[int], lengths: Sequence[int]) -> KVMetadata:
        return self._inner.metadata([view.request for view in requests], starts, lengths)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def own_name(request: RequestView) -> str:
    return request.id


@attrs.define(eq=False)
class Journal:
    """The recorded calls of a proposer in one or more runs of an engine.

    name: function that takes the engine's request object and returns the request id that the proposer gets.
    """

    name: Callable[[RequestView], str] = own_name
    proposals: list[Proposal] = attrs.field(factory=list)
    changed: list[str] = attrs.field(factory=list)  # arguments that the proposer wrote to
    num_fills: int = 0  # calls of `LayerAttention.fill`
    num_late: int = 0  # observations of several forward passes at once, counted per request
    reset: set[str] = attrs.field(factory=set)  # engine's ids of requests that were preempted
    closed: list[BaseException | None] = attrs.field(factory=list)  # what `close` raised, each time it was called
    seconds: dict[str, list[float]] = attrs.field(factory=lambda: defaultdict(list))  # of each call, by its name
    views: list[weakref.ref[View]] = attrs.field(factory=list)  # of every request that was started
    proposer: Any = None
    context: Any = None
    lent: list[object] = attrs.field(factory=list)  # what the proposer holds of the engine


class RecordingProposer(Proposer):
    """Forwards the engine's calls to the proposer under test and records them in a `Journal`.

    If a draft breaks a rule, it is recorded, but the engine gets an empty draft instead, so that the violation causes
    no further errors.
    """

    def __init__(self, inner: Proposer, context: BuildContext, journal: Journal) -> None:
        self._inner: Any = inner
        self._context = context
        self._journal = journal
        self._views: dict[str, View] = {}
        journal.proposer, journal.context = inner, context

    def start(self, request: RequestView) -> None:
        view = self._views[request.id] = View(self._journal.name(request), request)
        self._journal.views.append(weakref.ref(view))
        self._inner.start(view)

    def propose(self, batch: ProposerBatch) -> Draft:
        reset = {self._views[request.id].id for request in batch.requests if request.id in self._journal.reset}
        batch = attrs.evolve(batch, requests=[self._views[request.id] for request in batch.requests])
        with self._unchanged("propose", batch), self._timed("propose"):
            draft: Draft = self._inner.propose(batch)
        proposal = Proposal.of(batch, draft, self._context, reset)
        self._journal.proposals.append(proposal)
        if any(faults_of(proposal)):
            return Draft.from_chains([[]] * len(batch.requests), self._context.device)
        return draft

    def observe(self, observation: Observation) -> None:
        requests = tuple(self._views[request.id] for request in observation.requests)
        self._journal.num_late += sum(map(_is_late, requests, observation.starts, observation.host_num_valid))
        observation = attrs.evolve(observation, requests=requests)
        with self._unchanged("observe", observation), self._timed("observe"):
            self._inner.observe(observation)

    def reset(self, request: RequestView) -> None:
        self._journal.reset.add(request.id)
        self._inner.reset(self._views[request.id])

    def finish(self, request: RequestView, reason: str) -> None:
        self._inner.finish(self._views.pop(request.id), reason)

    def close(self) -> None:
        inner, self._inner = self._inner, _Closed()
        try:
            NamedProposer(inner, "").close()
        except PluginError as error:  # test_close speaks of it, and no other
            self._journal.closed.append(error.__cause__)
        else:
            self._journal.closed.append(None)

    @contextmanager
    def _timed(self, call: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._journal.seconds[call].append(time.perf_counter() - start)

    @contextmanager
    def _unchanged(self, call: str, argument: ProposerBatch | Observation) -> Iterator[None]:
        given = _tensors(argument)
        before = {name: value.clone() for name, value in given.items()}
        tokens = [request.token_ids.copy() for request in argument.requests]
        yield
        names = [name for name, value in given.items() if not torch.equal(value, before[name])]
        for request, old in zip(argument.requests, tokens, strict=True):
            names += ["token_ids of a request"] if not np.array_equal(request.token_ids, old) else []
        self._journal.changed += [f"{call} wrote to {name}" for name in names]


def _is_late(request: View, start: int, num_valid: int) -> bool:
    """Return whether an observation of a request has hidden states of several forward passes."""
    return start < len(request.token_ids) - 1 and start + num_valid > request.num_prompt_tokens


class _Closed:
    """Replaces a proposer that was closed. Any access raises AssertionError, because the engine must not call a
    proposer after `close`."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"the engine's own fault: it asked for {name} of a proposer that was closed")


def _tensors(argument: ProposerBatch | Observation) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, value in _fields(argument):
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, Mapping):
            found |= {f"{name}[{key!r}]": tensor for key, tensor in value.items()}
    return found


class RecordingPlugins(Plugins):
    """The installed plugins, with one change: the proposer of the method `recorded` is wrapped, and its calls are
    recorded in `journal`."""

    journal: Journal
    recorded: str

    def proposer(self, name: str) -> ProposerSpec:
        spec = super().proposer(name)
        if name != self.recorded:
            return spec
        return attrs.evolve(spec, build=lambda config, context: self._build(spec, config, context))

    def _build(self, spec: ProposerSpec, config: Any, context: BuildContext) -> Proposer:
        lent: Any = context
        if context.attention is not None:
            lent = attrs.evolve(lent, attention=LentAttention(context.attention, self.journal))
        self.journal.lent = [value for each in (context, lent) for _, value in _fields(each)]
        return RecordingProposer(spec.build(config, lent), lent, self.journal)
