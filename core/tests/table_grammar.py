"""A grammar that is a table of states, random ones among them, and its matcher."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Table = list[dict[int, int]]
"""For each state, {token that may come next: state after it}."""


def random_table(vocab: int, num_states: int, seed: int) -> Table:
    """Return a table in which each state allows some of the tokens and forbids others."""
    rng = np.random.default_rng(seed)
    table: Table = []
    for _ in range(num_states):
        tokens = rng.permutation(vocab)[: rng.integers(1, vocab)]
        table.append({token: int(rng.integers(num_states)) for token in tokens.tolist()})
    return table


def allowed_after(table: Table, token_ids: Sequence[int]) -> set[int] | None:
    """The tokens that may follow these, from state 0 on; None if the table does not allow these."""
    state = 0
    for token_id in token_ids:
        if token_id not in table[state]:
            return None
        state = table[state][token_id]
    return set(table[state])


class TableMatcher:
    """A `GrammarMatcher` over a table. It begins in state 0."""

    def __init__(self, table: Table) -> None:
        self.table, self.states = table, [0]

    def accept(self, token_ids: Sequence[int]) -> int:
        for count, token_id in enumerate(token_ids):
            if token_id not in self.table[self.states[-1]]:
                return count
            self.states.append(self.table[self.states[-1]][token_id])
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        assert 0 < num_tokens < len(self.states)
        del self.states[-num_tokens:]

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = 0
        for token_id in self.table[self.states[-1]]:
            mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
