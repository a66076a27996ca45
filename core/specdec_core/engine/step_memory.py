"""How much memory the largest step takes, beside weights and KV cache."""

from __future__ import annotations

from attrs import frozen

from specdec_core.config.engine import EngineConfig
from specdec_core.models.graph_inputs import NUM_TOKENS
from specdec_core.models.meta_load import Outline

ACTIVATIONS = 16
"""Tensors of the size of a step's hidden states that a decoder layer has at once, where the model's own number is not
known. Its MLP's make up most of them."""
COPIES = 10
"""Numbers in float32 that sampling and verification have at once for each logit (core/tests/test_step_memory.py)."""
MOST_LOGITS = 2**25
"""Logits that are processed and verified at once: 256 rows of a vocabulary of 131,072. Larger steps are verified in
parts, so that they take no more memory."""
PATH_BYTES = 64
"""Of the tree attention mask, for each row and draft token that may stand on its path: addresses, and what the mask is
made of (core/tests/test_step_memory.py)."""
STATE_COPIES = 3
"""Copies of a recurrent layer's states that there are at once for each root and draft token: its parent's, its own, and
one while it is computed."""
STORED_BYTES = 128 * 2**20
"""Of hidden states that a proposer has not seen yet; more if a step's tokens have more."""
NUM_KINDS = 2
"""Kinds of forward passes with CUDA graphs of their own: with trees and without."""


@frozen
class StepMemory:
    """The largest step: the most tokens of a forward pass, and of rows of logits, one for each request and draft token.
    Logits of prompts (`prompt_logprobs`) come on top. graph_bytes: of CUDA graphs, which are included in num_bytes."""

    num_tokens: int
    num_rows: int
    num_bytes: int
    graph_bytes: int

    @classmethod
    def of(cls, target: Outline, config: EngineConfig, num_speculative_tokens: int, num_taps: int) -> StepMemory:
        """num_speculative_tokens: the most draft tokens of a request. num_taps: hidden states of a token that proposers
        observe."""
        info, num_tokens = target.info, config.max_num_batched_tokens
        num_rows = min(num_tokens, config.max_num_seqs * (1 + num_speculative_tokens))
        num_processed = min(num_rows, max(rows_at_once(info.vocab_size), 1 + num_speculative_tokens))
        hidden_bytes = info.hidden_size * info.dtype.itemsize
        per_token = target.activation_bytes or hidden_bytes * ACTIVATIONS
        observed = max(num_tokens * num_taps * hidden_bytes, STORED_BYTES) if num_taps else 0
        logits = (num_rows * info.dtype.itemsize + num_processed * 4 * COPIES) * info.vocab_size
        graph_bytes = 0
        has_graphs = info.device.type == "cuda" and not config.enforce_eager and target.kv_groups.states is None
        if has_graphs:
            of_logits = sum(NUM_TOKENS) * info.vocab_size * info.dtype.itemsize
            graph_bytes = NUM_KINDS * (of_logits + NUM_TOKENS[-1] * per_token)
        masks = num_rows * num_speculative_tokens * PATH_BYTES
        num_bytes = num_tokens * per_token + observed + logits + masks + graph_bytes
        if (states := target.kv_groups.states) is not None:
            kept = (num_rows - config.max_num_seqs) * len(states.layers) * hidden_bytes  # inputs at draft tokens
            num_bytes += max(0, kept) + num_rows * STATE_COPIES * states.most_layer_bytes
        return cls(num_tokens, num_rows, num_bytes, graph_bytes)


def rows_at_once(vocab_size: int) -> int:
    """How many rows of logits are processed and verified at once. A request's are never split."""
    return max(1, MOST_LOGITS // vocab_size)
