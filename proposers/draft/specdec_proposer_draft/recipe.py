"""Training recipe of draft models: distillation of the target's next-token distribution with the forward KL divergence,
on texts that the user gives or the target generates (DistillSpec, Zhou et al. 2023)."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import optional

from specdec_core import ConfigError, TrainingRecipe, TrainingTarget, flag, number, whole_number

if TYPE_CHECKING:
    import torch


def _size(text: str, default: int | None) -> Any:
    return field(default=default, validator=whole_number(1, optional=default is None), metadata={"help": text})


@frozen(kw_only=True)
class DraftTrainingOptions:
    """Options for training a draft model: its size and its loss. Raises ConfigError if from_layers is given together
    with a size, since from_layers copies layers of the target, which have the target's sizes."""

    from_layers: int | None = _size("Initialize with this many of the target's first layers, with its sizes.", None)
    num_layers: int | None = _size("Number of layers. Default: 2.", None)
    hidden_size: int | None = _size("Hidden size. Default: half the target's.", None)
    intermediate_size: int | None = _size("Width of the MLP. Default: three times hidden_size.", None)
    num_heads: int | None = _size("Attention heads. Default: one for every 64 of hidden_size.", None)
    tie: bool | None = field(
        default=None,
        validator=optional(flag),
        metadata={"help": "Tie LM head and embedding. Default: tied; with from_layers, as in the target."},
    )
    hard_weight: float = field(
        default=0.0,
        validator=number(0, 1),
        metadata={"help": "Weight of the text's next token in the labels; the rest is the target's distribution."},
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
