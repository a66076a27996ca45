"""What a plan or a proposer is told about the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

if TYPE_CHECKING:
    import torch


@frozen
class TargetInfo:
    """Facts about the loaded (or yet unloaded) target that a plan or a proposer may need.

    trust_remote_code: whether code that comes with checkpoints may run, a draft's too. tokenizer: the one that prompts
    are read with; None: prompts are token ids.
    """

    model: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    trust_remote_code: bool = False
    tokenizer: Any = field(default=None, eq=False, repr=False)
