"""The training recipe of Medusa heads: Medusa-1, in which the target stays as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec_core import (
    TargetInfo,
    TrainingRecipe,
    TrainingTarget,
    checked_vocab_size,
    flag,
    number,
    option,
    whole_number,
)

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class MedusaOptions:
    num_heads: int = option(whole_number(1, 64), "Number of heads.", default=5)
    num_layers: int = option(whole_number(0, 64), "Residual layers of each head.", default=1)
    decay: float = option(
        number(0, 1, low_open=True), "Weight of each head's loss relative to that of the head before.", default=0.8
    )
    truncated_vocab_size: int | None = option(
        whole_number(1, optional=True),
        "Size of the heads' vocabulary: the data's most frequent tokens. Default: all tokens.",
    )
    distill: bool = option(
        flag, "Whether the heads learn the target's distributions, instead of the tokens of the texts.", default=False
    )

    def vocab_size(self, target: TargetInfo) -> int:
        """Return the size of the heads' vocabulary. Raises ConfigError if it exceeds the target's."""
        if self.truncated_vocab_size is None:
            return target.vocab_size
        return checked_vocab_size("truncated_vocab_size", self.truncated_vocab_size, target.vocab_size)


def _make(options: MedusaOptions, target: TrainingTarget, token_counts: torch.Tensor) -> Any:
    from specdec_proposer_medusa.trainee import MedusaTrainee

    return MedusaTrainee(options, target, token_counts)


RECIPE = TrainingRecipe(options=MedusaOptions, make=_make, learning_rate=1e-3)
