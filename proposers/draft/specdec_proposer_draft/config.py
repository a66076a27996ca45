"""The options of the method `draft_model`."""

from __future__ import annotations

from attrs import frozen

from specdec_core import DraftModelConfig, DraftSamplingConfig, DraftTreeConfig, DraftWindowConfig, flag, option


@frozen(kw_only=True)
class DraftConfig(DraftModelConfig, DraftTreeConfig, DraftWindowConfig, DraftSamplingConfig):
    """Options of the method `draft_model`: the draft model, the shape of its drafts, how they are sampled and when they
    stop. Raises ConfigError if a value is out of range."""

    use_heterogeneous_vocab: bool = option(
        flag, "Allow a draft model with another tokenizer; it drafts the tokens that both models have.", default=False
    )
