"""The options of the methods `eagle` and `eagle3`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attrs import evolve, field, frozen

from specdec_core import (
    ConfigError,
    DraftModelConfig,
    DraftSamplingConfig,
    DraftStopConfig,
    DraftTreeConfig,
    DraftWindowConfig,
)
from specdec_core.config.fields import number, whole_number

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
"""Of EAGLE-2's authors: for GPUs, on which a pass over so many nodes takes little longer than one over the root."""
ON_CPU = TreeSize(3, 6, 7, 0.3)
"""Measured with the embedded model: there every level and row is dear, and rows come cheapest in eights."""


def size_on(device: torch.device) -> TreeSize:
    return AUTHORS if device.type == "cuda" else ON_CPU


@frozen(kw_only=True)
class EagleConfig(DraftModelConfig, DraftTreeConfig, DraftWindowConfig, DraftSamplingConfig, DraftStopConfig):
    """Which tree is drafted: by default the dynamic one of EAGLE-2, whose nodes are the num_speculative_tokens most
    probable of all candidates. Raises ConfigError."""

    eagle_topk: int | None = field(
        default=None,
        validator=whole_number(1, MOST_CHILDREN, optional=True),
        metadata={
            "help": "In a dynamic tree, how many nodes of each level get children, and how many they get; 1: a chain. "
            "None: 10 on a GPU, 3 on a CPU."
        },
    )
    eagle_depth: int | None = field(
        default=None,
        validator=whole_number(0, MOST_LEVELS, optional=True),
        metadata={
            "help": "In a dynamic tree, how many levels there are below the root's children. None: 7 on a GPU, 6 on a "
            "CPU; in a chain, as many as num_speculative_tokens needs."
        },
    )
    eagle_min_prob: float | None = field(
        default=None,
        validator=number(0, 1, optional=True),
        metadata={
            "help": "A request's dynamic tree gets no more levels where each of its paths is less probable than this, "
            "by the head's own probabilities. None: 0; on a CPU 0.3, if eagle_topk, eagle_depth and "
            "adaptive_draft_length are left out."
        },
    )
    eagle_context_tokens: int | None = field(
        default=None,
        validator=whole_number(0, optional=True),
        metadata={
            "help": "How many tokens that the head's vocabulary lacks can be drafted all the same: those that are the "
            "most recent in the request's text. None: 64 if the head is trained for it and the target's logits are "
            "products with rows of one matrix, else 0."
        },
    )
    code_revision: None = field(default=None, metadata={"help": "Refused: a head brings no code.", "allowed": "None"})
    quantization: None = field(
        default=None,
        metadata={"help": "Refused: it is for draft models that are language models themselves.", "allowed": "None"},
    )

    def __attrs_post_init__(self) -> None:
        for key in ("quantization", "code_revision"):
            if getattr(self, key) is not None:
                raise ConfigError(f"{key} is for draft models that are language models themselves: leave it out")
        if self.speculative_token_tree and (self.eagle_topk is not None or self.eagle_depth is not None):
            raise ConfigError(
                "speculative_token_tree is a shape, and eagle_topk and eagle_depth are of trees without one: leave "
                "either out"
            )
        if self.eagle_min_prob and (self.adaptive_draft_length or not self.is_dynamic):
            raise ConfigError(
                f"eagle_min_prob={self.eagle_min_prob} ends trees of the likeliest tokens by a fixed rule: leave it "
                f"out, or else adaptive_draft_length, speculative_token_tree and draft_sample_method"
            )
        if self.draft_sample_method != "greedy" and (self.eagle_topk or 1) > 1:
            raise ConfigError(
                f"draft_sample_method={self.draft_sample_method!r} draws tokens, and eagle_topk={self.eagle_topk} is "
                f"of trees of the likeliest ones: leave eagle_topk out for a chain, or give a speculative_token_tree"
            )

    @property
    def is_dynamic(self) -> bool:
        """Chains of the likeliest tokens are, too."""
        return self.speculative_token_tree is None and self.draft_sample_method == "greedy"

    def on(self, device: torch.device) -> EagleConfig:
        """With the defaults of dynamic trees for this device."""
        if not self.is_dynamic or self.eagle_topk == 1:
            return self
        size, min_prob = size_on(device), self.eagle_min_prob
        if (self.eagle_topk, self.eagle_depth, min_prob) == (None, None, None) and not self.adaptive_draft_length:
            min_prob = size.min_prob  # which was measured for the default shape alone
        return evolve(
            self,
            eagle_topk=self.eagle_topk or size.top_k,
            eagle_depth=size.depth if self.eagle_depth is None else self.eagle_depth,
            eagle_min_prob=min_prob,
        )

    @property
    def top_k(self) -> int:
        return self.eagle_topk or 1

    @property
    def min_prob(self) -> float:
        return self.eagle_min_prob or 0.0

    def depth(self, num_speculative_tokens: int) -> int:
        """Levels that are expanded below the root's children."""
        return num_speculative_tokens - 1 if self.eagle_depth is None else self.eagle_depth

    def default_num_speculative_tokens(self, device: torch.device) -> int:
        config = self.on(device)
        if config.top_k > 1:
            most = size_on(device).num_nodes
            return min(most, config._num_candidates(most))
        if config.eagle_depth is not None:
            return config.eagle_depth + 1
        return super().default_num_speculative_tokens(device)

    def _num_candidates(self, num_speculative_tokens: int) -> int:
        """The root's children, and those of the nodes that are expanded at each level."""
        return self.top_k * (1 + self.top_k * self.depth(num_speculative_tokens))

    def context_tokens(self, *, has_all: bool, is_aligned: bool) -> int:
        """has_all: the head's vocabulary is the target's. is_aligned: its outputs are meant for the target's output
        layer. Raises ConfigError if all tokens are the head's, and some of the context's are asked for."""
        if has_all and self.eagle_context_tokens:
            raise ConfigError(
                f"eagle_context_tokens={self.eagle_context_tokens} is of tokens that a draft head lacks, and this one "
                f"has all of the target's: leave it out"
            )
        if self.eagle_context_tokens is not None or has_all or not is_aligned:
            return self.eagle_context_tokens or 0
        return DEFAULT_CONTEXT_TOKENS

    def check(self, num_speculative_tokens: int) -> None:
        """Raises ConfigError if a tree never has so many nodes."""
        super().check(num_speculative_tokens)
        if self.speculative_token_tree:
            return
        most, depth = self._num_candidates(num_speculative_tokens), self.depth(num_speculative_tokens)
        if num_speculative_tokens > most:
            raise ConfigError(
                f"num_speculative_tokens={num_speculative_tokens}, but with eagle_topk={self.top_k} and "
                f"eagle_depth={depth} there are never more than {most} nodes: give at most as many, or raise these"
            )

    def scratch_slots(self, num_speculative_tokens: int) -> int:
        """Nodes that the head forwards at most: of all levels but the last."""
        if not self.is_dynamic:
            return num_speculative_tokens
        return self.top_k * self.depth(num_speculative_tokens)
