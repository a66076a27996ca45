"""How a draft model is trained: it learns the target's own distribution over the next token, token by token, on texts
that the target says as well (DistillSpec, Zhou et al. 2023, with the forward divergence)."""

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
    """Raises ConfigError."""

    from_layers: int | None = _size("Begin with this many of the target's layers; sizes are the target's then.", None)
    num_layers: int | None = _size("Layers. Default: 2.", None)
    hidden_size: int | None = _size("Default: half the target's.", None)
    intermediate_size: int | None = _size("Default: three times hidden_size.", None)
    num_heads: int | None = _size("Attention heads. Default: one for every 64 of hidden_size.", None)
    tie: bool | None = field(
        default=None,
        validator=optional(flag),
        metadata={"help": "Whether the output head is the embedding. Default: it is; with from_layers, as the target."},
    )
    hard_weight: float = field(
        default=0.0,
        validator=number(0, 1),
        metadata={"help": "How much the data's own next token counts; the rest is the target's distribution."},
    )

    def __attrs_post_init__(self) -> None:
        shape = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "tie")
        given = [name for name in shape if getattr(self, name) is not None]
        if self.from_layers is not None and given:
            raise ConfigError(
                f"from_layers={self.from_layers} takes the target's layers as they are, and {', '.join(given)} says "
                f"otherwise: leave either out"
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
