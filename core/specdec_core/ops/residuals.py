"""What rejection sampling computes over the whole vocabulary, the reference in torch: ratios of probabilities, and the
residuals of the target's distributions after draft tokens are rejected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from attrs import frozen

AT_ONCE = 2**17
"""Probabilities that are computed together on a CPU, so that they stay in its cache."""


@frozen(eq=False)
class Proposals:
    """The draft tokens of a batch, and the distributions that they were drawn from.

    A draft token is named by its row of target logits (a row per root and per draft token, as in `contracts.draft`).
    `end`, one past the last row, stands for no draft token. Entries of `end` and of roots are arbitrary, except that
    their tokens are of the vocabulary and that none is sampled. So are those of dead (padding) nodes.

    The rows of `q` need not sum to 1. All tokens of a row that are not in `q_ids` or `q_to_target` have probability 0,
    and so have those of the draft token's earlier siblings in `earlier`.
    """

    end: int
    vocab_size: int  # of the target
    token_ids: torch.Tensor  # int64 [end + 1]
    parent_rows: torch.Tensor  # int64 [end + 1]   the row of logits that decides about the token; `end`: none
    q_rows: torch.Tensor  # int64 [end + 1]   row of q; -1: not sampled, a distribution with all of it at the token
    earlier: torch.Tensor  # int64 [end + 1, k]   earlier siblings, drawn without replacement; `end`: none
    q: torch.Tensor | None  # float [num_q_rows, draft_vocab or k]
    q_to_target: torch.Tensor | None  # int64 [draft_vocab]   the target's token of each column of q
    q_ids: torch.Tensor | None  # int64 [num_q_rows, k]   the target's token of each entry of q

    def is_sampled(self, nodes: torch.Tensor) -> torch.Tensor:
        """bool [n]   whether these draft tokens were sampled."""
        return self.q_rows[nodes] >= 0

    @cached_property
    def column_of(self) -> torch.Tensor | None:
        """int64 [vocab_size]   the column of `q` of each token; -1: none. None without `q_to_target`."""
        if self.q_to_target is None:
            return None
        columns = torch.arange(len(self.q_to_target), device=self.q_to_target.device)
        return columns.new_full((self.vocab_size,), -1).index_copy_(0, self.q_to_target, columns)


class Residuals:
    """The target's distribution after each row of logits, and what is left of it while draft tokens are rejected.

    logits: float [num_rows, vocab].
    nodes: int64 [n], draft tokens as in `Proposals`, all different except for `Proposals.end`. What is returned for
        `end` is arbitrary where not said otherwise.
    scale: [n] in the dtype of the logits, non-negative.

    Numbers that are returned have the dtype of the logits. An implementation may compute probabilities when they are
    needed. A row's results depend on that row and on its draft tokens only, to the last bit where the implementation
    can do that. They are NaN if the row has NaN or +inf, or nothing but -inf.

    Attributes: is_nan bool [num_rows], whether a row is such a one.
    """

    def __init__(self, logits: torch.Tensor, proposals: Proposals) -> None:
        num_rows, vocab_size = logits.shape
        self._proposals = proposals
        self._left = logits.new_empty(num_rows + 1, vocab_size)  # the last row is for what has no row
        torch.softmax(logits, dim=-1, out=self._left[:num_rows])
        self.is_nan = self._left[:num_rows, 0].isnan()
        self._q = None if proposals.q is None or not len(proposals.q) else proposals.q.to(logits.dtype)
        self._q_rows = proposals.q_rows.clamp(min=0)  # [end + 1]   arbitrary where there is none
        self._is_chosen = (proposals.q_rows < 0).to(logits.dtype)  # [end + 1]   not sampled

    def ratios(self, nodes: torch.Tensor) -> torch.Tensor:
        """[n]   what is left of the target's probability of each draft token, divided by its draft probability."""
        given = self._proposals
        return self._left[given.parent_rows[nodes], given.token_ids[nodes]] / self._own_probs[nodes]

    def missed(self, nodes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """[n]   the sum of max(0, scale * probs - drawn) over the vocabulary, of what is left of the target's
        probabilities and of the distribution that the draft token was drawn from; 0 for `end`."""
        found, is_node = torch.zeros_like(scale), nodes != self._proposals.end
        for at in self._parts(is_node):
            found[at] = self._rest(nodes[at], scale[at]).sum(dim=1)
        return found.masked_fill(~is_node, 0)

    def refuse(self, nodes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return `missed`, and leave of the target's distributions after the draft tokens' parents, all different, only
        these residuals, normalized. A distribution of which nothing is left, which happens with probability 0, stays as
        it is."""
        found, is_node = torch.zeros_like(scale), nodes != self._proposals.end
        for at in self._parts(is_node):
            rest = self._rest(nodes[at], scale[at])
            found[at] = total = rest.sum(dim=1)
            rows = torch.where(total > 0, self._proposals.parent_rows[nodes[at]], self._proposals.end)
            self._left.index_copy_(0, rows, rest.div_(total.unsqueeze(1)))
        return found.masked_fill(~is_node, 0)

    def weights(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, vocab]   what is left of the target's distributions after these rows of logits, int64 [n], up to a
        factor; arbitrary for `end`."""
        return self._left[rows]

    def _parts(self, is_asked: torch.Tensor) -> Sequence[torch.Tensor]:
        """Indices of what is asked, bool [n], that are computed together. On a GPU, whose answer the host would have to
        wait for, they are all."""
        if is_asked.device.type != "cpu":
            return [torch.arange(len(is_asked), device=is_asked.device)]
        asked = is_asked.nonzero().squeeze(1)
        return torch.split(asked, max(1, AT_ONCE // self._left.shape[1])) if len(asked) else ()

    def _rest(self, nodes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """[n, vocab]   the residuals, not normalized."""
        probs = self._left[self._proposals.parent_rows[nodes]]
        return probs.mul_(scale.unsqueeze(1)).sub_(self._drawn(nodes)).clamp_(min=0)

    def _drawn(self, nodes: torch.Tensor) -> torch.Tensor:
        """[n, vocab]   the distributions that the draft tokens were drawn from."""
        given, shape = self._proposals, (len(nodes), self._left.shape[1])
        tokens, is_chosen = given.token_ids[nodes].unsqueeze(1), self._is_chosen[nodes].unsqueeze(1)
        if self._q is None:
            return self._left.new_zeros(shape).scatter_(1, tokens, is_chosen)
        drawn = self._rows_of_q(nodes).mul_(self._factors[nodes].unsqueeze(1))
        if given.q_ids is not None:
            drawn = drawn.new_zeros(shape).scatter_(1, given.q_ids[self._q_rows[nodes]], drawn)
        elif given.q_to_target is not None:
            drawn = drawn.new_zeros(shape).index_copy_(1, given.q_to_target, drawn)
        return drawn.scatter_add_(1, tokens, is_chosen)

    @cached_property
    def _own_probs(self) -> torch.Tensor:
        """[end + 1]   the draft probability of each draft token."""
        if self._q is None:
            return self._is_chosen
        columns = self._columns(self._q_rows, self._proposals.token_ids)
        drawn = self._q[self._q_rows, columns.clamp(min=0)].masked_fill(columns < 0, 0)
        return drawn * self._factors + self._is_chosen

    @cached_property
    def _factors(self) -> torch.Tensor:
        """[end + 1]   what makes the draft tokens' rows of q, without their earlier siblings, sum to 1; 0 for those
        that were not sampled."""
        assert self._q is not None
        if self._proposals.earlier.shape[1]:
            sums = self._q.new_ones(len(self._q_rows))
            for nodes in self._parts(self._proposals.q_rows >= 0):
                sums[nodes] = self._rows_of_q(nodes).sum(dim=1)
        else:
            sums = self._q.sum(dim=1)[self._q_rows]
        return (1 / sums).masked_fill(self._proposals.q_rows < 0, 0)

    def _rows_of_q(self, nodes: torch.Tensor) -> torch.Tensor:
        """[n, draft_vocab or k]   the draft tokens' rows of q without their earlier siblings, not normalized."""
        assert self._q is not None
        q_rows = self._q_rows[nodes]
        drawn = self._q[q_rows]
        for siblings in self._proposals.earlier[nodes].unbind(1):
            columns = self._columns(q_rows, self._proposals.token_ids[siblings]).clamp(min=0).unsqueeze(1)
            is_one = (siblings != self._proposals.end).unsqueeze(1)
            drawn.scatter_(1, columns, torch.where(is_one, 0, drawn.gather(1, columns)))
        return drawn

    def _columns(self, q_rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [n]   the columns of tokens, int64 [n], in rows of q, int64 [n]; -1: there is none."""
        if self._proposals.q_ids is not None:
            matches = self._proposals.q_ids[q_rows] == tokens.unsqueeze(1)
            return matches.to(torch.int8).argmax(dim=1).masked_fill(~matches.any(dim=1), -1)
        columns = self._proposals.column_of
        return tokens if columns is None else columns[tokens]


MakeResiduals = Callable[[torch.Tensor, Proposals], Residuals]
