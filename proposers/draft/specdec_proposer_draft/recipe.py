"""Training recipe of draft models: distillation of the target's next-token distribution with the forward KL divergence,
on texts that the user gives or the target generates (DistillSpec, Zhou et al. 2023)."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec_core import ConfigError, TrainingRecipe, TrainingTarget, number, option, optional_flag, whole_number

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class DraftTrainingOptions:
    """Options for training a draft model: its size and its loss. Raises ConfigError if from_layers is given together
    with a size, since from_layers copies layers of the target, which have the target's sizes."""

    from_layers: int | None = option(
        whole_number(1, optional=True), "Initialize with this many of the target's first layers, with its sizes."
    )
    num_layers: int | None = option(whole_number(1, optional=True), "Number of layers. Default: 2.")
    hidden_size: int | None = option(whole_number(1, optional=True), "Hidden size. Default: half the target's.")
    intermediate_size: int | None = option(
        whole_number(1, optional=True), "Width of the MLP. Default: three times hidden_size."
    )
    num_heads: int | None = option(
        whole_number(1, optional=True), "Attention heads. Default: one for every 64 of hidden_size."
    )
    tie: bool | None = option(
        optional_flag, "Tie LM head and embedding. Default: tied; with from_layers, as in the target."
    )
    hard_weight: float = option(
        number(0, 1),
        "Weight of the text's next token in the labels; the rest is the target's distribution.",
        default=0.0,
    )

    def __attrs_post_init__(self) -> None:
        shape = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "tie")
        given = [name for name in shape if getattr(self, name) is not None]
        if self.from_layers is not None and given:
            raise ConfigError(
                f"from_layers={self.from_layers} copies the target's layers with their sizes, so {', '.join(given)} "
                f"cannot be given: leave either out"
            )


def make(options: DraftTrainingOptions, target: TrainingTarget, token_counts: torch.Tensor) -> Any:
    from specdec_proposer_draft.trainee import DraftTrainee

    return DraftTrainee(options, target)


RECIPE = TrainingRecipe(
    options=DraftTrainingOptions,
    make=make,
    learning_rate=1e-3,
    evaluation=MappingProxyType({"num_speculative_tokens": 5}),
)
