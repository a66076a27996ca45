"""A simple reference implementation of the method `suffix`, which counts every string of tokens in a dict.

The method does not specify which of several equally frequent tokens is drafted. So the reference returns every draft
that some way of breaking these ties can produce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Literal

import numpy as np
from attrs import Factory, define, field, frozen

String = tuple[int, ...]


@frozen
class Node:
    token_id: int
    score: float  # how often the token follows, given that its string occurs: float32, as prob and every sum of them
    prob: float  # product of the scores up to here


Chain = tuple[Node, ...]


def total(chain: Chain) -> np.float32:
    """Return a chain's expected number of accepted tokens, summed in float32 in the order of its nodes."""
    score = np.float32(0)
    for node in chain:
        score += np.float32(node.prob)
    return score


@frozen
class Options:
    depth: int = 24  # longest string that is counted
    max_cached_requests: int = 10_000  # 0: no global tree
    factor: float = 1.0
    offset: float = 0.0
    min_prob: float = 0.1
    evicts: Literal["first finished", "first started"] = "first finished"  # arctic the latter, also while it is active
    matches_whole_context: bool = True  # arctic does not: it leaves at least one token of the context unmatched

    def max_nodes(self, match_len: int, budget: int) -> int:
        """Return the largest number of draft tokens after a match of `match_len` tokens, at most `budget`."""
        allowed = np.float32(match_len) * np.float32(self.factor) + np.float32(self.offset)
        return max(min(budget, int(float(allowed) + 1e-6)), 0)


@define
class Tree:
    """Counts how often each string of 1 to `depth` tokens occurs in a set of sequences, each of which may still
    grow."""

    depth: int
    following: dict[String, Counter[int]] = field(factory=dict)  # string -> how often each token follows

    def append(self, sequence: list[int], token_id: int) -> None:
        """Append a token to a sequence in place, and count the strings that end with it. The sequence's earlier tokens
        must have been appended by this method too."""
        sequence.append(token_id)
        for string in self._strings_that_end(sequence, len(sequence)):
            self.following.setdefault(string[:-1], Counter())[string[-1]] += 1

    def remove(self, sequence: list[int]) -> None:
        for end in range(1, len(sequence) + 1):
            for string in self._strings_that_end(sequence, end):
                counts = self.following[string[:-1]]
                counts[string[-1]] -= 1
                if not counts[string[-1]]:
                    del counts[string[-1]]
                if not counts:
                    del self.following[string[:-1]]

    def count(self, string: String) -> int:
        return self.counts_after(string[:-1])[string[-1]]

    def counts_after(self, string: String) -> Counter[int]:
        """Return how often each token follows a string, which must have fewer than `depth` tokens."""
        return self.following.get(string, Counter())

    def score(self, string: String, token_id: int) -> np.float32:
        """Return the share of a string's occurrences that are followed by `token_id`. Occurrences at the end of a
        sequence, which no token follows, are included."""
        return np.float32(self.count((*string, token_id))) / np.float32(self.count(string))

    def chains(self, string: String, max_nodes: int, min_prob: float, prob: float = 1.0) -> list[Chain]:
        """Return the most frequent continuations of a string: one for each way of breaking ties.

        max_nodes: largest number of tokens of a continuation.
        prob: cumulative probability of the draft tokens with which `string` ends, 1 if there are none.
        """
        counts = self.counts_after(string) if len(string) < self.depth else None
        if max_nodes == 0 or not counts:
            return [()]
        most = max(counts.values())
        found: list[Chain] = []
        for token_id in (t for t, n in counts.items() if n == most):
            score = self.score(string, token_id)
            node = Node(token_id, float(score), float(np.float32(prob) * score))
            if node.prob < np.float32(min_prob):
                return [()]
            rest = self.chains((*string, token_id), max_nodes - 1, min_prob, node.prob)
            found.extend((node, *chain) for chain in rest)
        return found

    def matches(self, context: Sequence[int], longest: int) -> Iterator[String]:
        """Yield the suffixes of a request's tokens, `context`, that occur in the counted sequences, shortest first.

        longest: largest number of tokens of a suffix.
        """
        for length in range(1, min(longest, self.depth - 1, len(context)) + 1):
            string = tuple(context[-length:])
            if not self.count(string):
                return
            yield string

    def _strings_that_end(self, sequence: list[int], end: int) -> Iterable[String]:
        return (tuple(sequence[end - length : end]) for length in range(1, min(self.depth, end) + 1))


@define
class Request:
    number: int
    num_prompt_tokens: int
    tree: Tree
    tokens: list[int] = field(factory=list)  # prompt and output


@define
class Reference:
    """The reference proposer. Its methods name a request by a key, which may be used again once the request has
    finished."""

    options: Options
    new_tree: Callable[[int], Tree] = Tree
    requests: dict[str, Request] = field(factory=dict)  # active
    outputs: dict[int, list[int]] = field(factory=dict)  # in the global tree, by the request's number
    tree: Tree = field(default=Factory(lambda self: self.new_tree(self.options.depth), takes_self=True))
    num_evicted: int = 0
    _numbers: Iterator[int] = field(factory=count)

    def start(self, key: str, num_prompt_tokens: int) -> None:
        request = Request(next(self._numbers), num_prompt_tokens, self.new_tree(self.options.depth))
        self.requests[key] = request
        if self.options.max_cached_requests > 0:
            self.outputs[request.number] = []
            self._evict(newest=request.number)

    def extend(self, key: str, token_ids: Sequence[int]) -> None:
        """Append tokens to a request. The tokens of its prompt come first, then those of its output."""
        request = self.requests[key]
        for token_id in token_ids:
            request.tree.append(request.tokens, token_id)
            if len(request.tokens) > request.num_prompt_tokens and request.number in self.outputs:
                self.tree.append(self.outputs[request.number], token_id)

    def finish(self, key: str) -> None:
        number = self.requests.pop(key).number
        if number in self.outputs and self.options.evicts == "first finished":
            output = self.outputs.pop(number)
            if output:  # there is nothing to keep otherwise
                self.outputs[number] = output  # now the last in the queue
        self._evict()

    def _evict(self, newest: int = -1) -> None:
        active = {request.number for request in self.requests.values()}
        kept = active if self.options.evicts == "first finished" else {newest}
        for number in [number for number in self.outputs if number not in kept]:
            if len(self.outputs) <= self.options.max_cached_requests:
                return
            self.tree.remove(self.outputs.pop(number))
            self.num_evicted += 1

    def trees(self, key: str) -> list[Tree]:
        """Return two string counts: first of the request's own tokens, then of the outputs of all requests. If drafts
        from both have equal scores, the first wins."""
        return [self.requests[key].tree, self.tree]

    def matches(self, key: str, tree: Tree) -> list[String]:
        tokens = self.requests[key].tokens
        recent = tokens[-self.options.depth :]
        return list(tree.matches(recent, len(recent) - (not self.options.matches_whole_context)))

    def drafts(self, key: str, budget: int) -> set[Chain]:
        """Return every chain that may be drafted for a request. The draft is the chain with the highest score after any
        match, in the request's own tokens or in the outputs of all requests.

        Ties between equally frequent tokens are broken independently at each match. So a chain may win if it beats the
        worst chain of every other match. If scores are equal, a match in the request's own tokens wins, then the longer
        match.
        """
        rivals: list[tuple[tuple[int, int], list[Chain]]] = [((0, 0), [()])]
        for own, tree in zip((1, 0), self.trees(key), strict=True):
            for string in self.matches(key, tree):
                max_nodes = self.options.max_nodes(len(string), budget)
                rank = own, len(string)
                rivals.append((rank, tree.chains(string, max_nodes, self.options.min_prob)))
        to_beat = {rank: (min(map(total, chains)), rank) for rank, chains in rivals}
        return {
            chain
            for rank, chains in rivals
            for chain in chains
            if all((total(chain), rank) >= least for other, least in to_beat.items() if other != rank)
        }
