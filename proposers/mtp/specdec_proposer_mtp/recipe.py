"""The training recipe of an MTP module for a target that stays as it is (FastMTP, Cai et al. 2025)."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec_core import TargetInfo, TrainingRecipe, TrainingTarget, number, option, whole_number

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class MTPOptions:
    num_steps: int = option(
        whole_number(1, 64), "Draft tokens in a row that the module learns to draft, from its own output.", default=3
    )
    decay: float = option(
        number(0, 1, low_open=True),
        "Weight of each draft token's loss relative to that of the token before.",
        default=0.6,
    )


def _make(options: MTPOptions, target: TrainingTarget, token_counts: torch.Tensor) -> Any:
    from specdec_proposer_mtp.trainee import MTPTrainee

    return MTPTrainee(options, target)


def _taps(options: MTPOptions, target: TargetInfo) -> tuple[str, ...]:
    from specdec_proposer_mtp.loading import family_of

    return (family_of(target.model, target.model_type).tap(target.num_layers),)


RECIPE = TrainingRecipe(
    options=MTPOptions,
    make=_make,
    learning_rate=6e-4,
    taps=_taps,
    evaluation=MappingProxyType({"num_speculative_tokens": 5}),
)
