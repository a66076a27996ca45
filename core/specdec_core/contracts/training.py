"""The contract of training a draft model: what a plugin provides, and what it gets from `specdec-train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from specdec_core.contracts.target import TargetInfo

if TYPE_CHECKING:
    import torch


@frozen(eq=False)
class TrainingTarget:
    """The target model that a draft is trained for. Its weights are frozen and get no gradients."""

    info: TargetInfo
    config: Any  # transformers' configuration of its text model
    model: torch.nn.Module  # transformers' own
    embed: Callable[[torch.Tensor], torch.Tensor]  # int64 [...] -> [..., hidden], as it enters the first layer
    output_head: Callable[[torch.Tensor], torch.Tensor]  # [..., hidden] after the final norm -> logits [..., vocab]


@frozen(eq=False)
class TrainingBatch:
    """Token sequences, padded on the right, with the target's hidden states."""

    token_ids: torch.Tensor  # int64 [batch, length]
    counts: torch.Tensor  # bool [batch, length]   loss mask: whether this token is to be predicted; False: padding,
    #                       prompts
    features: Mapping[str, torch.Tensor]  # {tap: hidden states [batch, length, width]}; always has "final"


class Trainee(Protocol):
    """The draft as a torch.nn.Module with float32 parameters, the only state that training changes. It takes random
    numbers from torch's default generators, which are seeded before each step."""

    def __call__(self, batch: TrainingBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the loss, a scalar, and {name: scalar} for the log."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint that the method's `model` option can name, in the format in which such drafts are
        published. The folder exists."""


@frozen(eq=False)
class TrainingRecipe:
    """How a method's draft is trained (`ProposerSpec.train`). Heavy imports belong into `make`.

    options: attrs class of the user's options; each field's metadata may have a "help".
    make: (options, target, token counts of the data int64 [vocab]) -> the trainee, initialized with torch's default
        generator.
    learning_rate: the default.
    taps: (options, target) -> names of the hidden states that the loss needs (see `Plan.taps`).
    evaluation: speculative_config keys, besides method and model, for measuring the draft's acceptance length.
    """

    options: type
    make: Callable[[Any, TrainingTarget, torch.Tensor], Any]
    learning_rate: float
    taps: Callable[[Any, TargetInfo], tuple[str, ...]] = lambda options, target: ("final",)
    evaluation: Mapping[str, Any] = MappingProxyType({})
