"""Drafting with EAGLE heads, from the target's hidden states: chains, fixed trees, and dynamic trees."""

from __future__ import annotations

import numpy as np
import torch

from specdec_core import (
    BuildContext,
    CompatibilityError,
    Draft,
    FeatureProposer,
    ProposerBatch,
    RequestView,
    TokenTree,
    TreeGrower,
    draws_some,
    dynamic_grower_of,
    grower_of,
)
from specdec_proposer_eagle.config import EagleConfig
from specdec_proposer_eagle.context_vocabulary import ContextVocabulary
from specdec_proposer_eagle.head_config import HeadConfig
from specdec_proposer_eagle.modules import Head


class EagleProposer(FeatureProposer):
    """Drafts with an EAGLE head, which has a KV cache of its own beside the target's."""

    run_is_pure = True

    def __init__(
        self,
        config: EagleConfig,
        context: BuildContext,
        head: HeadConfig,
        module: Head,
        to_target: torch.Tensor | None,
    ) -> None:
        super().__init__(context, head.taps, head.layer.hidden_size, config.draft_window, module.embed_tokens)
        self._config, self._head = config, module
        self._vocabulary = _context_vocabulary(config, context, head, to_target)
        self._own_ids = to_target
        self._depth = config.depth(context.num_speculative_tokens)
        self._shape = config.shape(context.num_speculative_tokens)
        if config.is_dynamic:  # of chains
            self._shape = TokenTree.chain(min(self._depth + 1, context.num_speculative_tokens))
        context.speed_up(module)
        # A dynamic tree has the same levels for all requests, and may exceed the length limit of some.
        positions = torch.arange(context.target.max_model_len + self._depth, device=context.device)
        self._rotation = module.rotation(positions, context.target.dtype)

    def finish(self, request: RequestView, reason: str) -> None:
        super().finish(request, reason)
        if self._vocabulary is not None:
            self._vocabulary.finish(request)

    def propose(self, batch: ProposerBatch) -> Draft:
        if self._vocabulary is not None:
            self._vocabulary.begin(batch.requests)
        return super().propose(batch)

    def grower(self, batch: ProposerBatch) -> TreeGrower:
        config = self._config
        to_target = self._own_ids if self._vocabulary is None else self._vocabulary.to_target
        method, min_prob = config.draft_sample_method, config.min_prob
        if config.is_dynamic and config.top_k > 1 and not draws_some(batch, method):
            return dynamic_grower_of(batch, config.top_k, self._depth, to_target, min_prob)
        return grower_of(batch, self._shape, method, to_target, min_prob=min_prob)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return self._head.fuse(features)

    def run(
        self, embedded: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._head(embedded, features, self._rotation, self._attention.attend, rows, positions)

    def logits(self, outputs: torch.Tensor, requests: np.ndarray) -> torch.Tensor:
        """Return the logits of the next draft tokens over the head's vocabulary, followed by those of tokens outside of
        it that can be drafted, too."""
        lm_head = self._head.lm_head
        own = self._context.output_head(outputs) if lm_head is None else lm_head(outputs)
        if self._vocabulary is None:
            return own
        return self._vocabulary.logits(own, outputs, requests)


def _context_vocabulary(
    config: EagleConfig, context: BuildContext, head: HeadConfig, to_target: torch.Tensor | None
) -> ContextVocabulary | None:
    num_tokens = config.context_tokens(has_all=head.has_all_tokens, is_aligned=head.is_aligned)
    if not num_tokens or to_target is None:
        return None
    try:
        context.output_rows(to_target[:1])
    except CompatibilityError as error:
        if config.eagle_context_tokens is None:
            return None
        raise CompatibilityError(f"eagle_context_tokens={num_tokens} is not possible: {error}") from error
    return ContextVocabulary(to_target, context.target.vocab_size, num_tokens, context.output_rows)
