"""Computes from scratch what the methods `eagle` and `eagle3` must draft, without a KV cache.

transformers runs the target over a request's whole text. Reference implementations of the draft heads and of dynamic
trees, written from the papers, then make the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import reference
import torch
from probe_recorder import Drafted
from recorded_runs import Expected
from reference_heads import reference_eagle, reference_eagle3, target_token_ids
from reference_tree import dynamic_tree
from static_drafts import MARGIN, NUDGE, inner_paths, static_draft
from tiny_heads import TinyHead

from specdec_core import TokenTree

Path_ = tuple[int, ...]


class EagleFromScratch:
    """A callable that takes a recorded draft and returns the draft that the proposer should have made.

    taps: indices of the target's hidden states in transformers that the draft head reads. [-1] means EAGLE, others
        EAGLE-3.
    shape: the shape of static trees; None: trees are dynamic, with top_k and depth.
    is_sampled: whether draft tokens are sampled at temperatures above 0. Sampled tokens are copied from the recorded
        draft, and only their probabilities are computed.
    context_tokens: how many tokens outside the draft head's vocabulary can also be drafted. These are the latest such
        tokens in the request's text. If not 0, draft probabilities are over the target's vocabulary.
    window: how many positions each token attends to; None: all.
    """

    def __init__(
        self,
        target: Path,
        head: TinyHead,
        taps: list[int],
        *,
        shape: TokenTree | None = None,
        top_k: int = 0,
        depth: int = 0,
        is_sampled: bool = False,
        context_tokens: int = 0,
        window: int | None = None,
    ) -> None:
        self.target, self.head, self.taps = reference.load(target).double(), head, taps
        self.reference = reference_eagle if taps == [-1] else reference_eagle3
        self.shape, self.top_k, self.depth, self.is_sampled = shape, top_k, depth, is_sampled
        self.context_tokens, self.config = context_tokens, {**head.config, "draft_window": window}
        self.features: dict[str, torch.Tensor] = {}  # float64 of each request's whole text
        self.random = torch.Generator().manual_seed(0)

    @torch.inference_mode()
    def __call__(self, drafted: Drafted, text: list[int]) -> Expected:
        if drafted.request_id not in self.features:
            states = self.target(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
            self.features[drafted.request_id] = torch.cat([states[i][0] for i in self.taps], dim=-1)
        num_slots = len(drafted.history) - 1
        tensors = self._with_context(drafted.history)
        features = self.features[drafted.request_id][:num_slots]
        logits_of = partial(
            self.reference,
            tensors,
            self.config,
            self.target.get_input_embeddings(),
            self.target.get_output_embeddings(),
            drafted.history,
        )

        known: dict[tuple[Path_, bool], torch.Tensor] = {}

        def after(path: Path_, *, is_nudged: bool = False) -> torch.Tensor:
            if (path, is_nudged) not in known:
                nodes = [(token, depth - 1) for depth, token in enumerate(path)]
                rows = logits_of(features * (1 + NUDGE * noise) if is_nudged else features, nodes)
                known.update(((path[:depth], is_nudged), row) for depth, row in enumerate(rows))
            return known[path, is_nudged]

        noise = torch.randn(features.shape, generator=self.random, dtype=features.dtype)
        for path in inner_paths(drafted):  # first what was drafted: if it is right, no more is asked
            after(path)
            if self.is_sampled and drafted.temperature > 0:
                after(path, is_nudged=True)
        if self.shape is not None:
            ids = target_token_ids(tensors, len(after(())))
            size = self.target.config.vocab_size if self.context_tokens else None
            return static_draft(drafted, self.shape, after, ids, is_sampled=self.is_sampled, num_target_tokens=size)
        return self._dynamic(drafted, after, tensors)

    def _with_context(self, history: list[int]) -> dict[str, torch.Tensor]:
        """Return the draft head's tensors with an LM head extended by rows of the target's LM head.

        The rows are those of the latest context_tokens tokens in history (token ids) that the draft head's vocabulary
        lacks.
        """
        tensors = self.head.tensors
        if not self.context_tokens:
            return tensors
        rows = self.target.get_output_embeddings().weight
        own = target_token_ids(tensors, len(tensors["lm_head.weight"]))
        lacking = [token for token in dict.fromkeys(reversed(list(history))) if token not in own.tolist()]
        added = torch.tensor(lacking[: self.context_tokens], dtype=torch.int64)
        ids = torch.cat([own, added])
        weight = torch.cat([tensors["lm_head.weight"].double(), rows[added]])
        return tensors | {"lm_head.weight": weight, "d2t": ids - torch.arange(len(ids))}

    def _dynamic(
        self, drafted: Drafted, after: Callable[[Path_], torch.Tensor], tensors: dict[str, torch.Tensor]
    ) -> Expected:
        """Build the dynamic tree that the proposer should have drafted.

        The result's is_clear is true if slightly different log-probs lead to the same nodes in the same order.
        """

        def next_log_probs(path: Path_) -> dict[int, float]:
            log_probs = after(path).log_softmax(dim=-1)
            return dict(zip(target_token_ids(tensors, len(log_probs)).tolist(), log_probs.tolist(), strict=True))

        trees = [
            dynamic_tree(partial(_nudged, next_log_probs, amount), self.top_k, self.depth, drafted.max_draft_tokens)
            for amount in (0.0, MARGIN / 10, -MARGIN / 10)
        ]
        tree = trees[0]
        is_clear = all((other.token_ids, other.parents) == (tree.token_ids, tree.parents) for other in trees)
        return Expected(tree.token_ids, tree.parents, [None] * len(tree.token_ids), is_clear)


def _nudged(next_log_probs: Callable[[Path_], dict[int, float]], amount: float, path: Path_) -> dict[int, float]:
    """Return the log-probs of the token after a path: some raised by `amount` (to at most 0), the others lowered by
    `amount`."""
    return {token: min(0.0, p + amount * (-1) ** (token + sum(path))) for token, p in next_log_probs(path).items()}
