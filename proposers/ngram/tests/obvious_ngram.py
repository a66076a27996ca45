"""A simple reference implementation of the method `ngram`, and helpers that make requests and batches to draft for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec_core import DraftTree, ProposerBatch
from specdec_proposer_ngram import NgramConfig
from specdec_proposer_ngram.proposer import NgramProposer


def reference(context: list[int], shortest: int, longest: int, match: str, budget: int) -> list[int]:
    for n in range(min(longest, len(context)), shortest - 1, -1):
        suffix = context[len(context) - n :]
        ends = [end for end in range(n, len(context)) if context[end - n : end] == suffix]
        if ends:
            end = ends[0] if match == "first" else ends[-1]
            text = list(context)
            for i in range(budget):  # draft tokens are context for the next ones
                text.append(text[end + i])
            return text[len(context) :]
    return []


class Request:
    """A request with the interface that proposers get (`RequestView`). As in the engine, `token_ids` is a read-only
    view of a longer array."""

    def __init__(self, name: str, tokens: Sequence[int] = ()) -> None:
        self.id = name
        self.seed = self.num_prompt_tokens = 0
        self.tokens = list(tokens)

    @property
    def token_ids(self) -> np.ndarray:
        array = np.array([*self.tokens, 99, 99], dtype=np.int64)
        array.setflags(write=False)
        return array[:-2]


def proposer(shortest: int = 5, longest: int = 5, match: str = "last", max_num_requests: int = 16) -> NgramProposer:
    return NgramProposer(NgramConfig(shortest, longest, match), max_num_requests, torch.device("cpu"))


def batch_of(requests: Sequence[Request], budgets: Sequence[int]) -> ProposerBatch:
    contexts = [request.tokens for request in requests]
    return ProposerBatch(
        requests=requests,
        root_token_ids=torch.tensor([c[-1] if c else 0 for c in contexts], dtype=torch.int64),
        root_positions=torch.tensor([len(c) - 1 for c in contexts], dtype=torch.int64),
        temperature=torch.zeros(len(contexts)),
        max_draft_tokens=tuple(budgets),
        random=None,  # chosen tokens only
    )


def drafts(of: NgramProposer, requests: Sequence[Request], budgets: Sequence[int]) -> list[list[int]]:
    """Draft for the requests with the proposer `of`. Checks that all drafts are chains, and returns the token ids of
    each."""
    draft = of.propose(batch_of(requests, budgets))
    trees: list[DraftTree] = [draft.tree(i) for i in range(len(requests))]
    for tree in trees:
        assert tree.parents == list(range(-1, len(tree.parents) - 1))
    assert draft.is_chain
    assert draft.max_depth == max((len(tree.token_ids) for tree in trees), default=0)
    return [tree.token_ids for tree in trees]
