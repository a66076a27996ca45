"""Random sequences of request operations, in which every draft of a subject (the proposer under test) is compared with
those of the reference implementation in `suffix_reference`.

A subject (`Subject`) reads tokens as a proposer does: from a request's `token_ids` in `start`, `propose` and `finish`.
The reference implementation gets the same tokens at the same moments: before each call of `propose`, it gets the new
tokens of all requests in the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random
from typing import Any, Protocol

import numpy as np
from attrs import Factory, define, field, frozen
from suffix_reference import Chain, Options, Reference, String, Tree, total

VOCABULARY = (0, 1, 2, 7, 100, 30_000, 65_535, 65_536, 199_999)  # token ids that a text's symbols are mapped to


@define(eq=False)
class View:
    """A request with the interface that proposers get (`RequestView`), to which the test appends tokens."""

    id: str
    num_prompt_tokens: int
    seed: int = 0
    _buffer: np.ndarray = field(factory=lambda: np.empty(64, dtype=np.int64))
    _num_tokens: int = 0

    @property
    def token_ids(self) -> np.ndarray:
        view = self._buffer[: self._num_tokens]
        view.setflags(write=False)
        return view

    def append(self, token_ids: Sequence[int]) -> None:
        end = self._num_tokens + len(token_ids)
        if end > len(self._buffer):
            larger = np.empty(2 * end, dtype=np.int64)
            larger[: self._num_tokens] = self._buffer[: self._num_tokens]
            self._buffer = larger
        self._buffer[self._num_tokens : end] = token_ids
        self._num_tokens = end


@frozen
class Drafted:
    token_ids: list[int]
    parents: list[int]
    scores: list[float]  # P(accepted | parent accepted)
    total: float | None = None  # expected number of accepted tokens, if the subject reports it


class Subject(Protocol):
    def start(self, request: View) -> None: ...
    def propose(self, requests: Sequence[View], budgets: Sequence[int]) -> list[Drafted]: ...
    def reset(self, request: View) -> None: ...
    def finish(self, request: View) -> None: ...


@frozen
class Plan:
    """Parameters of one run of random operations on a new subject, the proposer under test."""

    options: Options
    use_tree: bool = False
    num_symbols: int = 4
    max_active: int = 5
    longest_prompt: int = 40
    budget: int = 24  # largest draft budget of a request
    num_operations: int = 500


@define
class Figures:
    """Counts of events in a run, with which a test can check that rare events, such as evictions, occurred."""

    num_operations: int = 0
    num_evicted: int = 0
    longest_draft: int = 0
    events: Counter[str] = field(factory=Counter)


@define
class Text:
    """Generates the tokens of one request, most of which repeat earlier tokens."""

    random: Random
    symbols: list[int]
    earlier: list[list[int]]  # outputs of requests, a few of them
    _source: Iterator[int] = field(factory=lambda: iter(()))

    def take(self, num_tokens: int, context: Sequence[int]) -> list[int]:
        taken: list[int] = []
        while len(taken) < num_tokens:
            token_id = next(self._source, None)
            if token_id is None or self.random.random() < 0.04:
                self._source = self._next_source([*context, *taken])
            if token_id is not None:
                taken.append(token_id)
        return taken

    def _next_source(self, context: list[int]) -> Iterator[int]:
        kind = self.random.random()
        length = self.random.randint(1, 40)
        if kind < 0.25:
            return iter(self.random.choices(self.symbols, k=length))
        if kind < 0.45:  # periodic
            word = self.random.choices(self.symbols, k=self.random.randint(1, 5))
            return iter((word * length)[: 2 * length])
        copied = self.random.choice(self.earlier) if self.earlier and kind < 0.8 else context
        start = self.random.randint(0, len(copied))
        return iter(copied[start : start + length])


@define
class Fuzz:
    """Runs the random operations of a plan and checks every draft.

    plan: the parameters of the run.
    subject: the proposer under test, which must be new.
    random: the generator that makes all random choices.
    """

    plan: Plan
    subject: Subject
    random: Random
    figures: Figures = field(factory=Figures)
    reference: Reference = field(default=Factory(lambda self: Reference(self.plan.options), takes_self=True))
    active: dict[str, tuple[View, Text]] = field(factory=dict)
    _last_drafts: dict[str, list[int]] = field(factory=dict)
    _earlier: list[list[int]] = field(factory=list)
    _used_ids: set[str] = field(factory=set)

    def run(self) -> Figures:
        operations = [self.start, self.extend, self.propose, self.reset, self.finish]
        while self.figures.num_operations < self.plan.num_operations:
            (operation,) = self.random.choices(operations, weights=[4, 10, 12, 1, 2])
            operation()
        for key in list(self.active):
            self.finish(key)
        self.figures.num_evicted = self.reference.num_evicted
        return self.figures

    def start(self) -> None:
        free = [f"request-{i}" for i in range(2 * self.plan.max_active) if f"request-{i}" not in self.active]
        if len(self.active) == self.plan.max_active:
            return
        self.figures.num_operations += 1
        key = self.random.choice(free)  # ids are reused often
        symbols = [VOCABULARY[i % len(VOCABULARY)] + i // len(VOCABULARY) for i in range(self.plan.num_symbols)]
        text = Text(self.random, symbols, self._earlier)
        num_prompt_tokens = self.random.randint(1, self.plan.longest_prompt)
        view = View(key, num_prompt_tokens)
        view.append(text.take(num_prompt_tokens, []))
        self.active[key] = view, text
        self.figures.events["id used again"] += key in self._used_ids
        self._used_ids.add(key)
        self.subject.start(view)
        self.reference.start(key, num_prompt_tokens)
        self._catch_up(view)
        if self.random.random() < 0.8:  # most requests have the first output token already
            view.append(text.take(1, view.token_ids.tolist()))

    def extend(self) -> None:
        """Append tokens to some requests, as an engine step does: accepted tokens of the last draft and a few others.
        The subject is not called."""
        for key in self._some_active():
            self.figures.num_operations += 1
            view, text = self.active[key]
            draft = self._last_drafts.pop(key, [])
            accepted = draft[: self.random.randint(0, len(draft))] if self.random.random() < 0.5 else []
            new = text.take(self.random.choice((1, 1, 1, 2, 8)), view.token_ids.tolist() + accepted)
            view.append([*accepted, *new])

    def propose(self) -> None:
        keys = self._some_active()
        if not keys:
            return
        self.figures.num_operations += len(keys)
        views = [self.active[key][0] for key in keys]
        budgets = [self.random.choice((1, 2, self.plan.budget, self.random.randint(1, self.plan.budget))) for _ in keys]
        drafts = self.subject.propose(views, budgets)
        assert len(drafts) == len(keys)
        for view in views:
            self._catch_up(view)
        check = self._check_tree if self.plan.use_tree else self._check_chain
        for key, drafted, budget in zip(keys, drafts, budgets, strict=True):
            check(key, drafted, budget)
            self._last_drafts[key] = drafted.token_ids if not self.plan.use_tree else []
            self.figures.longest_draft = max(self.figures.longest_draft, len(drafted.token_ids))

    def reset(self) -> None:
        """Call the subject's `reset` for a random request, as after a preemption. The request keeps its tokens."""
        for key in self._some_active()[:1]:
            self.figures.num_operations += 1
            self.figures.events["reset"] += 1
            self.subject.reset(self.active[key][0])

    def finish(self, key: str | None = None) -> None:
        for finished in [key] if key else self._some_active()[:1]:
            self.figures.num_operations += 1
            view, _ = self.active.pop(finished)
            self._last_drafts.pop(finished, None)
            self.subject.finish(view)
            self._catch_up(view)
            self.reference.finish(finished)
            if output := view.token_ids[view.num_prompt_tokens :].tolist():
                self._earlier.append(output)
                del self._earlier[:-8]

    def _some_active(self) -> list[str]:
        keys = sorted(self.active)
        return self.random.sample(keys, self.random.randint(1, len(keys))) if keys else []

    def _catch_up(self, view: View) -> None:
        self.reference.extend(view.id, view.token_ids[len(self.reference.requests[view.id].tokens) :].tolist())

    def _check_chain(self, key: str, drafted: Drafted, budget: int) -> None:
        allowed = self.reference.drafts(key, budget)
        assert drafted.parents == list(range(-1, len(drafted.token_ids) - 1)), self._say(key, drafted, allowed)
        same = [chain for chain in allowed if is_chain(drafted, chain)]
        assert same, self._say(key, drafted, allowed)
        events = self.figures.events
        events["draft"] += 1
        events["no draft"] += not drafted.token_ids
        events["only one draft allowed"] += len({tuple(node.token_id for node in chain) for chain in allowed}) == 1
        own, _ = self.reference.trees(key)
        strings = self.reference.matches(key, own)
        chains = {chain for s in strings for chain in own.chains(s, self._max_nodes(s, budget), self._min_prob)}
        events["only the global tree has it"] += bool(drafted.token_ids) and not chains & set(same)

    def _max_nodes(self, string: String, budget: int) -> int:
        return self.plan.options.max_nodes(len(string), budget)

    @property
    def _min_prob(self) -> float:
        return self.plan.options.min_prob

    def _check_tree(self, key: str, drafted: Drafted, budget: int) -> None:
        def explained() -> bool:
            own, everyones = self.reference.trees(key)
            matches = [[(), *self.reference.matches(key, tree)] for tree in (own, everyones)]
            return any(
                all(is_explained(path, [(own, s), (everyones, t)]) for path in paths) for s, t in product(*matches)
            )

        paths = paths_of(drafted)
        assert len(paths) <= budget, self._say(key, drafted)
        assert len({tuple(token_id for token_id, _ in path) for path in paths}) == len(paths), "two siblings are alike"
        probs = [float(np.prod([score for _, score in path])) for path in paths]
        assert min(probs, default=1.0) >= self._min_prob - 1e-6, self._say(key, drafted)
        assert not paths or explained(), self._say(key, drafted)
        self.figures.events["draft"] += 1
        self.figures.events["no draft"] += not paths
        self.figures.events["branching"] += len(set(drafted.parents)) < len(paths)

    def _say(self, key: str, drafted: Drafted, allowed: Any = ()) -> str:
        chains = [[(node.token_id, round(node.score, 4)) for node in chain] for chain in allowed]
        tail = self.reference.requests[key].tokens[-self.plan.options.depth :]
        return f"after {self.figures.num_operations} operations, {key}, ...{tail}: {drafted}, allowed are {chains}"


def is_chain(drafted: Drafted, chain: Chain) -> bool:
    return (
        drafted.token_ids == [node.token_id for node in chain]
        and np.allclose(drafted.scores, [node.score for node in chain], rtol=1e-6, atol=0)
        and drafted.total in (None, float(total(chain)))
    )


def paths_of(drafted: Drafted) -> list[list[tuple[int, float]]]:
    """Return a list for each drafted node: the (token id, score) pairs on the path from the first level of the tree to
    the node."""
    paths: list[list[tuple[int, float]]] = []
    for node in zip(drafted.token_ids, drafted.scores, drafted.parents, strict=True):
        token_id, score, parent = node
        assert -1 <= parent < len(paths), "a parent comes before its children"
        paths.append([*(paths[parent] if parent >= 0 else []), (token_id, score)])
    return paths


def is_explained(path: list[tuple[int, float]], matches: list[tuple[Tree, String]]) -> bool:
    """Whether the score of a path's last token equals the reference implementation's score for one of the matches.

    path: (token id, score) pairs from the first level of a draft tree to a node.
    matches: pairs (string counts, matched string) to try.
    """
    *before, (token_id, score) = path
    for tree, matched in matches:
        string = (*matched, *(t for t, _ in before))
        if matched and len(string) < tree.depth and tree.count((*string, token_id)):
            expected = tree.score(string, token_id)
            if np.isclose(score, expected, rtol=1e-6, atol=0):
                return True
    return False
