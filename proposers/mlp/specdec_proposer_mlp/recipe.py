"""The training recipe of MLP speculators."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from specdec_core import TrainingRecipe, TrainingTarget, flag, whole_number
from specdec_proposer_mlp.config import MOST_HEADS

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class MLPSpeculatorOptions:
    n_predict: int = field(default=3, validator=whole_number(1, MOST_HEADS), metadata={"help": "Number of heads."})
    inner_dim: int | None = field(
        default=None,
        validator=whole_number(1, optional=True),
        metadata={"help": "Width of the heads. Default: the target's hidden size, or with --start the start's."},
    )
    tie_weights: bool = field(
        default=False, validator=flag, metadata={"help": "Whether the heads share their weights."}
    )
    scale_input: bool = field(
        default=False, validator=flag, metadata={"help": "Whether the target's hidden state is normalized first."}
    )
    init_from_target: bool = field(
        default=False,
        validator=flag,
        metadata={"help": "Whether embeddings and LM heads start as the target's, projected to inner_dim."},
    )
    distill: bool = field(
        default=False,
        validator=flag,
        metadata={"help": "Whether the heads learn the target's distributions, instead of the tokens of the texts."},
    )


def _make(options: MLPSpeculatorOptions, target: TrainingTarget, token_counts: torch.Tensor) -> Any:
    from specdec_proposer_mlp.trainee import SpeculatorTrainee

    return SpeculatorTrainee(options, target)


RECIPE = TrainingRecipe(options=MLPSpeculatorOptions, make=_make, learning_rate=1e-3, evaluation=MappingProxyType({}))
