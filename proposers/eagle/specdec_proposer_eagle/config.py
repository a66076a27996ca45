"""The options of the methods `eagle` and `eagle3`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from attrs import evolve, frozen

from specdec_core import ConfigError, DraftHeadConfig, DraftWindowConfig, number, option, whole_number

if TYPE_CHECKING:
    import torch

MOST_CHILDREN, MOST_LEVELS = 64, 64
DEFAULT_CONTEXT_TOKENS = 64


class TreeSize(NamedTuple):
    top_k: int
    depth: int
    num_nodes: int
    min_prob: float = 0.0


AUTHORS = TreeSize(10, 7, 59)
"""The tree of EAGLE-2's authors. On a GPU a forward pass over 59 tokens takes little longer than over one."""
ON_CPU = TreeSize(3, 6, 7, 0.3)
"""Best for the embedded model on a CPU: every level and every token takes time there, and eight tokens (the draft's and
the one before them) are the cheapest batch."""


def size_on(device: torch.device) -> TreeSize:
    return AUTHORS if device.type == "cuda" else ON_CPU


@frozen(kw_only=True)
class EagleConfig(DraftHeadConfig, DraftWindowConfig):
    """Options of the methods `eagle` and `eagle3`. By default both draft EAGLE-2's dynamic trees (Li et al. 2024): the
    head generates more nodes than are needed, and the num_speculative_tokens most probable ones become the draft
    tokens.

    Raises ConfigError if a value is out of range or options contradict each other.
    """

    eagle_topk: int | None = option(
        whole_number(1, MOST_CHILDREN, optional=True),
        "Dynamic tree: number of nodes expanded per level, and number of children of each. 1: a chain, as "
        "in vLLM. None: 10 on a GPU, 3 on a CPU.",
    )
    eagle_depth: int | None = option(
        whole_number(0, MOST_LEVELS, optional=True),
        "Dynamic tree: number of levels below the root's children, which is the tree's depth - 1. None: 7 "
        "on a GPU, 6 on a CPU; in a chain, as many as num_speculative_tokens needs.",
    )
    eagle_min_prob: float | None = option(
        number(0, 1, optional=True),
        "Stop growing a request's dynamic tree once all paths have a lower probability than this, by the "
        "head's own probabilities. None: 0; on a CPU 0.3, if eagle_topk and eagle_depth are left out.",
    )
    eagle_context_tokens: int | None = option(
        whole_number(0, optional=True),
        "Number of tokens outside the head's vocabulary that can be drafted: the most recent ones of the "
        "request's text, scored with rows of the target's LM head. None: 64 if the head is trained for it and the "
        "target's LM head is one plain matrix, else 0.",
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.speculative_token_tree and (self.eagle_topk is not None or self.eagle_depth is not None):
            raise ConfigError(
                "speculative_token_tree gives a fixed tree, and eagle_topk and eagle_depth the size of a dynamic one: "
                "leave either out"
            )
        if self.eagle_min_prob and not self.is_dynamic:
            raise ConfigError(
                f"eagle_min_prob={self.eagle_min_prob} stops dynamic trees: leave it out, or else "
                f"speculative_token_tree and draft_sample_method"
            )
        if self.draft_sample_method == "probabilistic" and (self.eagle_topk or 1) > 1:
            raise ConfigError(
                f"draft_sample_method={self.draft_sample_method!r} samples tokens, and eagle_topk={self.eagle_topk} "
                f"grows trees of top-k tokens: leave eagle_topk out for a chain, or give a speculative_token_tree"
            )

    @property
    def is_dynamic(self) -> bool:
        """Whether drafts of chosen tokens are dynamic trees, whose shape depends on the head's probabilities. This
        includes greedy chains, which are trees with eagle_topk=1."""
        return self.speculative_token_tree is None and self.draft_sample_method != "probabilistic"

    @property
    def may_draw(self) -> bool:
        """Whether a step drafts chains of drawn tokens, instead of dynamic trees, if one of its requests has a
        temperature above 0 and no seed."""
        return self.is_dynamic and self.draft_sample_method == "auto"

    def on(self, device: torch.device) -> EagleConfig:
        """Return these options with the device's defaults for dynamic trees filled in. The options of chains and fixed
        trees do not depend on the device."""
        if not self.is_dynamic or self.eagle_topk == 1:
            return self
        if self.eagle_topk is not None:  # trees are wanted
            return evolve(self, draft_sample_method="greedy")._on(device)
        return self._on(device)

    def _on(self, device: torch.device) -> EagleConfig:
        size, min_prob = size_on(device), self.eagle_min_prob
        if (self.eagle_topk, self.eagle_depth, min_prob) == (None, None, None):
            min_prob = size.min_prob  # measured for the default shape only
        return evolve(
            self,
            eagle_topk=self.eagle_topk or size.top_k,
            eagle_depth=size.depth if self.eagle_depth is None else self.eagle_depth,
            eagle_min_prob=min_prob,
        )

    def advice(self, given: Mapping[str, Any]) -> str | None:
        """Return a line for the log if users give the number of draft tokens, which counts nodes, but not the tree's
        shape: in vLLM the number is the length of a chain.

        given: the speculative_config as users wrote it.
        """
        number = given.get("num_speculative_tokens")
        if number is None or not self.is_dynamic or (self.eagle_topk, self.eagle_depth) != (None, None):
            return None
        return (
            f"num_speculative_tokens={number} counts the nodes of a draft tree: add eagle_topk=1 for vLLM's chain of "
            f"that length"
        )

    @property
    def top_k(self) -> int:
        return self.eagle_topk or 1

    @property
    def min_prob(self) -> float:
        return self.eagle_min_prob or 0.0

    def depth(self, num_speculative_tokens: int) -> int:
        """Number of levels of a dynamic tree below its first level, which holds the root's children."""
        return num_speculative_tokens - 1 if self.eagle_depth is None else self.eagle_depth

    def default_num_speculative_tokens(self, device: torch.device) -> int:
        config = self.on(device)
        if config.top_k > 1:
            most = size_on(device).num_nodes
            return min(most, config._num_expanded(most))
        if config.eagle_depth is not None:
            return config.eagle_depth + 1
        return super().default_num_speculative_tokens(device)

    def _num_expanded(self, num_speculative_tokens: int) -> int:
        """Number of nodes that the head generates for a dynamic tree, before the best are selected. The first level has
        top_k nodes, and every later level has top_k * top_k nodes."""
        return self.top_k * (1 + self.top_k * self.depth(num_speculative_tokens))

    def context_tokens(self, *, has_all: bool, is_aligned: bool) -> int:
        """Largest number of tokens outside the head's vocabulary that can be drafted for a request. These are the
        tokens that occurred most recently in the request. The number is the option eagle_context_tokens or, if this
        option is None, the default for the head.

        has_all: whether the head's vocabulary is the target's.
        is_aligned: whether the head was trained so that the target's LM head can read its outputs.

        Raises ConfigError if the option is given for a head that has all tokens.
        """
        if has_all and self.eagle_context_tokens:
            raise ConfigError(
                f"eagle_context_tokens={self.eagle_context_tokens} adds tokens that a draft head lacks, but this head "
                f"has all of the target's: leave it out"
            )
        if self.eagle_context_tokens is not None or has_all or not is_aligned:
            return self.eagle_context_tokens or 0
        return DEFAULT_CONTEXT_TOKENS

    def check(self, num_speculative_tokens: int) -> None:
        """Raise ConfigError if no draft tree with these options can have num_speculative_tokens draft tokens."""
        super().check(num_speculative_tokens)
        if self.speculative_token_tree:
            return
        most, depth = self._num_expanded(num_speculative_tokens), self.depth(num_speculative_tokens)
        if num_speculative_tokens > most:
            raise ConfigError(
                f"num_speculative_tokens={num_speculative_tokens}, but with eagle_topk={self.top_k} and "
                f"eagle_depth={depth} a tree has at most {most} nodes: lower it, or raise these"
            )

    def scratch_slots(self, num_speculative_tokens: int) -> int:
        """Largest number of KV-cache slots that the draft tokens of a request can need. In a dynamic tree the head
        forwards top_k nodes of each level but the last, so only these need slots."""
        if not self.is_dynamic:
            return num_speculative_tokens
        depth = self.depth(num_speculative_tokens)
        return max(self.top_k * depth, min(depth + 1, num_speculative_tokens) if self.may_draw else 0)
