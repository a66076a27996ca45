"""Facts about the target model, for a proposer and its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

if TYPE_CHECKING:
    import torch


@frozen
class TargetInfo:
    """Facts about the target model, known before its weights are loaded.

    revision: branch, tag or commit of the target's repository on the model hub; None: its main branch.
    trust_remote_code: whether code that comes with the checkpoint of the target or of a draft model may run.
    tokenizer: the target's transformers tokenizer; None if prompts are given as token ids.
    """

    model: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    revision: str | None = None
    trust_remote_code: bool = False
    tokenizer: Any = field(default=None, eq=False, repr=False)
