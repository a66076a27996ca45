"""The training recipe of MLP speculators."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec_core import TrainingRecipe, TrainingTarget, flag, option, whole_number
from specdec_proposer_mlp.config import MOST_HEADS

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class MLPSpeculatorOptions:
    n_predict: int = option(whole_number(1, MOST_HEADS), "Number of heads.", default=3)
    inner_dim: int | None = option(
        whole_number(1, optional=True),
        "Width of the heads. Default: the target's hidden size, or with --start the start's.",
    )
    tie_weights: bool = option(flag, "Whether the heads share their weights.", default=False)
    scale_input: bool = option(flag, "Whether the target's hidden state is normalized first.", default=False)
    init_from_target: bool = option(
        flag, "Whether embeddings and LM heads start as the target's, projected to inner_dim.", default=False
    )
    distill: bool = option(
        flag, "Whether the heads learn the target's distributions, instead of the tokens of the texts.", default=False
    )


def _make(options: MLPSpeculatorOptions, target: TrainingTarget, token_counts: torch.Tensor) -> Any:
    from specdec_proposer_mlp.trainee import SpeculatorTrainee

    return SpeculatorTrainee(options, target)


RECIPE = TrainingRecipe(options=MLPSpeculatorOptions, make=_make, learning_rate=1e-3, evaluation=MappingProxyType({}))
