"""The options of the method `draft_model`."""

from __future__ import annotations

from attrs import field, frozen

from specdec_core import (
    DraftModelConfig,
    DraftSamplingConfig,
    DraftTreeConfig,
    DraftWindowConfig,
    flag,
)


@frozen(kw_only=True)
class DraftConfig(DraftModelConfig, DraftTreeConfig, DraftWindowConfig, DraftSamplingConfig):
    """Options of the method `draft_model`: the draft model, the shape of its drafts, how they are sampled and when they
    stop. Raises ConfigError if a value is out of range."""

    use_heterogeneous_vocab: bool = field(
        default=False,
        validator=flag,
        metadata={"help": "Allow a draft model with another tokenizer; it drafts the tokens that both models have."},
    )
