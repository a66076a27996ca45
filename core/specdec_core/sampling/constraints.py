"""A request's sampling parameters that apply before temperature, and the rows of logits that they apply to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from attrs import define, field, frozen

from specdec_core.config.sampling import SamplingParams
from specdec_core.contracts.draft import Draft
from specdec_core.ops.token_counts import TokenCounts
from specdec_core.ops.upload import upload
from specdec_core.sampling.bad_words import BadWords
from specdec_core.sampling.grammar_state import GrammarState
from specdec_core.sampling.history import History


@define(eq=False)
class Constraints:
    """A request's sampling parameters that apply before temperature, prepared once when it is submitted: lists of
    tokens become arrays of token ids.

    fault: the error message if a custom logits processor or the grammar failed in the latest step, on the logits after
        the request's last token; else None.
    leaves_any: bool [], on the device: whether the processors left a token possible there; None: they did not run.
    got_logits: bool [], on the device: whether the processors got the logits there, and not zeros, since these were not
        finite; None: they did not run.
    token_counts: counts for penalties; None: not needed yet.
    history: makes the token ids that custom logits processors get.
    grammar: how far the output has come in the grammar of structured_outputs; None: there is none.
    """

    params: SamplingParams
    allowed_ids: np.ndarray | None  # int64 [n]   None: every token
    bad_words: BadWords | None  # None: there are none
    min_tokens: int
    end_ids: np.ndarray  # int64 [n]   tokens not to draw before min_tokens
    bias_ids: np.ndarray  # int64 [n]   all different
    bias_values: np.ndarray  # float64 [n]
    fault: str | None = None
    leaves_any: torch.Tensor | None = field(default=None, repr=False)
    got_logits: torch.Tensor | None = field(default=None, repr=False)
    token_counts: TokenCounts | None = field(default=None, repr=False)
    history: History = field(factory=History, repr=False)
    grammar: GrammarState | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        bad_words: Sequence[Sequence[int]],
        eos_token_ids: frozenset[int],
        grammar: GrammarState | None = None,
    ) -> Constraints | None:
        """Return the constraints of a request; None if none of its sampling parameters needs them.

        bad_words: params.bad_words as token ids.
        """
        end_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        bias = params.logit_bias or {}
        found = cls(
            params,
            allowed_ids=None if params.allowed_token_ids is None else np.array(params.allowed_token_ids),
            bad_words=BadWords.of(bad_words) if bad_words else None,
            min_tokens=params.min_tokens if end_ids else 0,
            end_ids=np.array(sorted(end_ids), dtype=np.int64),
            bias_ids=np.array(list(bias), dtype=np.int64),
            bias_values=np.array(list(bias.values()), dtype=np.float64),
            grammar=grammar,
        )
        masks = found.allowed_ids is not None or bad_words or found.min_tokens or params.logits_processors
        return found if masks or bias or found.penalizes or grammar is not None else None

    @property
    def penalizes(self) -> bool:
        params = self.params
        return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def why_not_finite(constraints: Constraints | None) -> str:
    """The error message for a request that fails because its logits were not finite."""
    not_finite, advice = "the target's logits were not finite", "check the model's weights, or try dtype='float32'"
    if constraints is None:
        return f"{not_finite}: {advice}"
    either = f"{not_finite}, or the sampling parameters left no token possible: {advice}, or allow more tokens"
    if constraints.fault is not None:
        got_zeros = constraints.got_logits is not None and not constraints.got_logits
        return f"{constraints.fault}. Logits processors got zeros there: {either}" if got_zeros else constraints.fault
    if constraints.leaves_any is not None and not constraints.leaves_any:
        return (
            "the logits processors returned NaN, or +inf, or -inf for every token: at least one token must be possible"
        )
    return either


class ConstrainedRequest(Protocol):
    """The attributes of a request that `ConstrainedRows` needs.

    token_ids: int64, the prompt and the output so far.
    """

    @property
    def constraints(self) -> Constraints | None: ...
    @property
    def token_ids(self) -> np.ndarray: ...
    @property
    def num_prompt_tokens(self) -> int: ...


@frozen(eq=False)
class Paths:
    """The path of each row of target logits: the row's own draft token, its parent and so on, without the root."""

    draft: Draft

    @cached_property
    def host_token_ids(self) -> np.ndarray:
        """int64 [num_rows, max_depth]   the token ids of each row's path, the row's own first, padded with -1. A row
        without a draft token (the root's) and rows of dead (padding) nodes have only -1."""
        layout = self.draft.host_layout
        own, rows = np.full_like(layout.up, -1), np.arange(len(layout.up))
        own[layout.node_rows] = np.where(layout.is_alive, self.draft.host_token_ids, -1)
        path = np.empty((len(own), self.draft.max_depth), dtype=np.int64)
        for depth in range(self.draft.max_depth):
            path[:, depth] = own[rows]
            rows = layout.up[rows]
        return path

    @cached_property
    def token_ids(self) -> torch.Tensor:
        """The same on the device."""
        return upload(self.host_token_ids, self.draft.token_ids.device)


@frozen(eq=False)
class ConstrainedRows:
    """The rows of target logits [num_rows, vocab] that belong to requests with constraints, n in all, request after
    request.

    A request has one row for its root (its last token) and one for each draft token. The history of a row is its
    request's tokens, then the draft tokens on its path; a dead (padding) node has the root's history.
    """

    requests: tuple[ConstrainedRequest, ...]  # [num_requests]   those that have constraints
    batch_indices: tuple[int, ...]  # [num_requests]   their indices in the batch
    paths: Paths

    @classmethod
    def of(cls, requests: Sequence[ConstrainedRequest | None], draft: Draft) -> ConstrainedRows | None:
        """The rows of all requests that have constraints; None if no request has any.

        requests: [batch]; None instead of a request whose rows need no processing.
        """
        asking = [(r, i) for i, r in enumerate(requests) if r is not None and r.constraints is not None]
        if not asking:
            return None
        constrained, batch_indices = zip(*asking, strict=True)
        return cls(constrained, batch_indices, Paths(draft))

    def where(self, is_asked: Callable[[Constraints], bool]) -> ConstrainedRows | None:
        """The rows of requests whose constraints meet the condition `is_asked`; None if there are no such requests."""
        asking = zip(self.requests, self.batch_indices, self.constraints, strict=True)
        chosen = [(request, b) for request, b, constraints in asking if is_asked(constraints)]
        if len(chosen) == len(self.requests):
            return self
        if not chosen:
            return None
        requests, batch_indices = zip(*chosen, strict=True)
        return ConstrainedRows(requests, batch_indices, self.paths)

    @cached_property
    def constraints(self) -> tuple[Constraints, ...]:
        return tuple(request.constraints for request in self.requests if request.constraints is not None)

    @cached_property
    def counts(self) -> np.ndarray:
        """int64 [num_requests]   the number of rows of each request: one for its last token and one for each draft
        token, padding included."""
        num_nodes = self.paths.draft.num_nodes_per_request
        return np.array([num_nodes[b] + 1 for b in self.batch_indices])

    @property
    def first_rows(self) -> list[int]:
        """[num_requests]   the index of each request's first row in the target's logits. Its others follow."""
        return [self.paths.draft.offsets[b] + b for b in self.batch_indices]

    @cached_property
    def owners(self) -> np.ndarray:
        """int64 [n]   index of each row's request, in `requests`."""
        return np.repeat(np.arange(len(self.constraints)), self.counts)

    @cached_property
    def host_rows(self) -> np.ndarray:
        """int64 [n]   the indices of these rows in the target's logits."""
        spans = zip(self.first_rows, self.counts, strict=True)
        return np.concatenate([np.arange(first, first + count) for first, count in spans])

    @cached_property
    def rows(self) -> torch.Tensor:
        """int64 [n]   the indices of these rows in the target's logits (`host_rows`), as a tensor on the device."""
        return self.to_device(self.host_rows)

    @cached_property
    def depths(self) -> torch.Tensor:
        """int64 [n]   depth of each row's draft token in its tree; 0 for the root (the request's last token) and for
        padding."""
        return self.paths.draft.layout.row_depths[self.rows]

    @cached_property
    def path(self) -> torch.Tensor:
        """int64 [n, max_depth]   the token ids of each row's draft token, its parent, grandparent and so on, without
        the root; padded with -1."""
        return self.paths.token_ids[self.rows]

    def pairs(self, values: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Pair each row with each value of its request.

        values: one array for each request.

        Returns two arrays [m], for m pairs: the row's index among these n rows (int64), and the value.
        """
        lengths = np.array([len(each) for each in values])
        positions = np.repeat(np.arange(len(self.owners)), lengths[self.owners])
        return positions, np.concatenate([np.tile(each, n) for each, n in zip(values, self.counts, strict=True)])

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return upload(array, self.paths.draft.token_ids.device)
