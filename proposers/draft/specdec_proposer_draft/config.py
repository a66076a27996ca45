"""The options of the method `draft_model`."""

from __future__ import annotations

from attrs import field, frozen

from specdec_core import (
    DraftModelConfig,
    DraftSamplingConfig,
    DraftStopConfig,
    DraftTreeConfig,
    DraftWindowConfig,
    flag,
)


@frozen(kw_only=True)
class DraftConfig(DraftModelConfig, DraftTreeConfig, DraftWindowConfig, DraftSamplingConfig, DraftStopConfig):
    """Which draft is loaded, and what shape its drafts have. Raises ConfigError."""

    use_heterogeneous_vocab: bool = field(
        default=False,
        validator=flag,
        metadata={"help": "The draft may have another tokenizer. It drafts by the tokens that both models have."},
    )
