"""How much memory the largest step takes, beside weights and KV cache."""

from __future__ import annotations

from attrs import frozen

from specdec_core.config.engine import EngineConfig
from specdec_core.contracts.target import TargetInfo

ACTIVATIONS = 16
"""Tensors of the size of a step's hidden states that a decoder layer has at once: its MLP's make up most of them."""
COPIES = 10
"""Numbers in float32 that sampling and verification have at once for each logit (tests/test_step_memory.py)."""


@frozen
class StepMemory:
    """The largest step: the most tokens of a forward pass, and of rows of logits, one for each request and draft token.
    Logits of prompts (`prompt_logprobs`) come on top."""

    num_tokens: int
    num_rows: int
    num_bytes: int

    @classmethod
    def of(cls, target: TargetInfo, config: EngineConfig, num_speculative_tokens: int) -> StepMemory:
        """num_speculative_tokens: the most draft tokens of a request."""
        num_tokens = config.max_num_batched_tokens
        num_rows = min(num_tokens, config.max_num_seqs * (1 + num_speculative_tokens))
        per_logit = target.dtype.itemsize + 4 * COPIES
        activations = num_tokens * target.hidden_size * target.dtype.itemsize * ACTIVATIONS
        return cls(num_tokens, num_rows, activations + num_rows * target.vocab_size * per_logit)
