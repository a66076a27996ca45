"""Training recipes: EAGLE as in Li et al. 2024, EAGLE-3 with the training-time test of Li et al. 2025, which trains a
head on its own outputs over several steps."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec_core import (
    ConfigError,
    TargetInfo,
    TrainingRecipe,
    TrainingTarget,
    checked_vocab_size,
    flag,
    number,
    option,
    shown,
    whole_number,
)
from specdec_proposer_eagle.config import MOST_LEVELS
from specdec_proposer_eagle.published import aux_layers

if TYPE_CHECKING:
    import torch

MOST_DRAFT_VOCAB = 32000
"""Default limit of an EAGLE-3 head's vocabulary, the size of the authors' heads."""


@frozen(kw_only=True)
class HeadOptions:
    num_layers: int = option(whole_number(1, 64), "Layers of the head.", default=1)
    intermediate_size: int | None = option(whole_number(1, optional=True), "Width of its MLP. Default: the target's.")
    decay: float = option(
        number(0, 1, low_open=True),
        "Weight of each training-time test step's loss relative to the step before.",
        default=0.8,
    )


@frozen(kw_only=True)
class EagleOptions(HeadOptions):
    ttt_steps: int = option(
        whole_number(1, MOST_LEVELS), "Steps of the training-time test. 1: as in the EAGLE paper.", default=1
    )
    noise: float = option(number(0, 100), "Width of the uniform noise on hidden states.", default=0.2)
    feature_weight: float = option(number(0, 1e6), "Weight of the smooth L1 loss on hidden states.", default=1.0)
    token_weight: float = option(
        number(0, 1e6), "Weight of the cross entropy with the target's distribution.", default=0.1
    )
    bias: bool = option(flag, "Whether fc has a bias.", default=True)


@frozen(kw_only=True)
class Eagle3Options(HeadOptions):
    ttt_steps: int = option(whole_number(1, MOST_LEVELS), "Steps of the training-time test.", default=7)
    draft_vocab_size: int | None = option(
        whole_number(1, optional=True),
        f"Size of the head's vocabulary: the data's most frequent tokens. Default: {MOST_DRAFT_VOCAB}, at most all.",
    )
    feature_weight: float = option(
        number(0, 1e6),
        "Weight of the smooth L1 loss between the LM head's inputs and the target's. 0: as in the EAGLE-3 paper.",
        default=0.0,
    )
    aux_layers: tuple[int, ...] | None = option(
        None,
        "Layers of the target whose inputs the head reads, as in 2,16,29; the number of layers for the last one's "
        "output. Default: a low, the middle and a high layer.",
        converter=lambda given: None if given is None else _numbers(given),
    )

    def layers(self, target: TargetInfo) -> tuple[int, ...]:
        """Return the indices of the target's layers whose inputs the head reads. Raises ConfigError if the user gave a
        layer that the target lacks."""
        num_layers = target.num_layers
        if self.aux_layers is None:
            if num_layers >= 7:
                return aux_layers(num_layers)
            return tuple(sorted({min(1, num_layers // 4), num_layers // 2, num_layers - 1}))
        if not self.aux_layers or not all(0 <= layer <= num_layers for layer in self.aux_layers):
            raise ConfigError(
                f"aux_layers={','.join(map(str, self.aux_layers))}, but the target's layers are 0 to {num_layers - 1}: "
                f"give some of these, or {num_layers} for the last one's output"
            )
        return self.aux_layers

    def vocab_size(self, target: TargetInfo) -> int:
        """Return the size of the head's vocabulary. By default this is the smaller of 32000 and the size of the
        target's vocabulary. Raises ConfigError if a given size exceeds the target's."""
        if self.draft_vocab_size is None:
            return min(MOST_DRAFT_VOCAB, target.vocab_size)
        return checked_vocab_size("draft_vocab_size", self.draft_vocab_size, target.vocab_size)


def _numbers(given: Any) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in (given.split(",") if isinstance(given, str) else given))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"aux_layers={shown(given)} is not a list of layers: write them as in 2,16,29") from error


def _make_eagle(options: EagleOptions, target: TrainingTarget, token_counts: torch.Tensor) -> Any:
    from specdec_proposer_eagle.trainees import EagleTrainee

    return EagleTrainee(options, target)


def _make_eagle3(options: Eagle3Options, target: TrainingTarget, token_counts: torch.Tensor) -> Any:
    from specdec_proposer_eagle.trainees import Eagle3Trainee

    return Eagle3Trainee(options, target, token_counts)


_CHAIN = MappingProxyType({"eagle_topk": 1, "num_speculative_tokens": 5})

EAGLE = TrainingRecipe(options=EagleOptions, make=_make_eagle, learning_rate=3e-4, evaluation=_CHAIN)
EAGLE3 = TrainingRecipe(
    options=Eagle3Options,
    make=_make_eagle3,
    learning_rate=3e-4,
    taps=lambda options, target: tuple(f"input.{layer}" for layer in options.layers(target)),
    evaluation=_CHAIN,
)
