"""How a method's draft is trained: what a plugin says, and what it is given. `specdec-train` does the rest."""

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
    """The target that a draft is trained for, frozen. What it computes has no gradient of its own weights."""

    info: TargetInfo
    config: Any  # transformers' configuration of its text model
    model: torch.nn.Module  # transformers' own
    embed: Callable[[torch.Tensor], torch.Tensor]  # int64 [...] -> [..., hidden], as it enters the first layer
    output_head: Callable[[torch.Tensor], torch.Tensor]  # [..., hidden] after the final norm -> logits [..., vocab]


@frozen(eq=False)
class TrainingBatch:
    """Texts, padded at their ends, and what the target computed for them."""

    token_ids: torch.Tensor  # int64 [batch, length]
    counts: torch.Tensor  # bool [batch, length]: whether predicting this token is learned; False: padding, prompts
    features: Mapping[str, torch.Tensor]  # {tap: [batch, length, width]}, "final" always among them


class Trainee(Protocol):
    """A torch.nn.Module whose parameters are what is trained, in float32. It keeps nothing else of a run: chance comes
    from torch's default generators, which are seeded before each step."""

    def __call__(self, batch: TrainingBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The loss, a scalar, and what else is worth logging, scalars too."""

    def save(self, folder: Path) -> None:
        """Write the checkpoint that the method's `model` names, as others publish it too. The folder exists."""


@frozen(eq=False)
class TrainingRecipe:
    """`ProposerSpec.train`. Heavy imports belong into `make`.

    options: attrs class of what users may set; each field's metadata may have a "help". make: (options, target, how
    often each token occurs in the data, int64 [vocab]) -> the trainee, made with torch's default generator.
    learning_rate: where the user gives none. taps: (options, target) -> those of the target that the loss reads.
    evaluation: keys of the speculative_config that the acceptance length is measured with.
    """

    options: type
    make: Callable[[Any, TrainingTarget, torch.Tensor], Any]
    learning_rate: float
    taps: Callable[[Any, TargetInfo], tuple[str, ...]] = lambda options, target: ("final",)
    evaluation: Mapping[str, Any] = MappingProxyType({})
