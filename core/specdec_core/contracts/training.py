"""The contract of training a draft model: what a plugin provides, and what `specdec-train` gives to it."""

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
    """The target model for which a draft model is trained. Its weights are frozen and get no gradients."""

    info: TargetInfo
    config: Any  # transformers' configuration of its text model
    model: torch.nn.Module  # transformers' own
    embed: Callable[[torch.Tensor], torch.Tensor]  # int64 [...] -> [..., hidden], as it enters the first layer
    output_head: Callable[[torch.Tensor], torch.Tensor]  # [..., hidden] after the final norm -> logits [..., vocab]


@frozen(eq=False)
class TrainingBatch:
    """Token sequences, padded on the right, with the target's hidden states."""

    token_ids: torch.Tensor  # int64 [batch, length]
    counts: torch.Tensor  # bool [batch, length]   loss mask: False for tokens not to predict: padding, prompts
    features: Mapping[str, torch.Tensor]  # {tap: hidden states [batch, length, width]}; always has "final"


class Trainee(Protocol):
    """The draft model in training: a torch.nn.Module. Training changes only its parameters, which are float32. Random
    numbers come from torch's default generators, which are seeded before each step."""

    def __call__(self, batch: TrainingBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the loss of the batch, a scalar tensor, and a dict of scalar tensors to log, by name."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint into `folder`, which exists, in the format in which draft models of this method are
        published. Users can then give the folder as `model`."""

    def load(self, model: str) -> Mapping[str, Any]:
        """Take over the weights and sizes of a checkpoint, a folder or a name on the hub, to train it further. Returns
        its sizes as {option of the recipe: value}; the run refuses other values than these and None. Raises ConfigError
        or CompatibilityError if it does not fit. Optional: without this method, every run starts from new weights."""


@frozen(eq=False)
class TrainingRecipe:
    """How a method's draft model is trained (`ProposerSpec.train`). Heavy imports belong into `make`.

    options: attrs class of the user's options; each field's metadata may have a "help".
    make: called with the options, a TrainingTarget and each token's count in the data (int64 [vocab]), returns the
        Trainee. It initializes parameters with torch's default generator.
    learning_rate: the default learning rate.
    taps: called with the options and TargetInfo, returns names of the hidden states that the loss needs (`Plan.taps`).
    evaluation: speculative_config keys, besides method and model, to measure the draft model's acceptance length.
    """

    options: type
    make: Callable[[Any, TrainingTarget, torch.Tensor], Any]
    learning_rate: float
    taps: Callable[[Any, TargetInfo], tuple[str, ...]] = lambda options, target: ("final",)
    evaluation: Mapping[str, Any] = MappingProxyType({})
