"""The training recipe of Medusa heads: Medusa-1, in which the target stays as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from specdec_core import TargetInfo, TrainingRecipe, TrainingTarget, checked_vocab_size, flag, number, whole_number

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class MedusaOptions:
    num_heads: int = field(default=5, validator=whole_number(1, 64), metadata={"help": "Number of heads."})
    num_layers: int = field(
        default=1, validator=whole_number(0, 64), metadata={"help": "Residual layers of each head."}
    )
    decay: float = field(
        default=0.8,
        validator=number(0, 1, low_open=True),
        metadata={"help": "Weight of each head's loss relative to that of the head before."},
    )
    truncated_vocab_size: int | None = field(
        default=None,
        validator=whole_number(1, optional=True),
        metadata={"help": "Size of the heads' vocabulary: the data's most frequent tokens. Default: all tokens."},
    )
    distill: bool = field(
        default=False,
        validator=flag,
        metadata={"help": "Whether the heads learn the target's distributions, instead of the tokens of the texts."},
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
