"""How much memory the largest step takes, beside weights and KV cache."""

from __future__ import annotations

from attrs import frozen

from specdec_core.config.engine import EngineConfig
from specdec_core.models.graph_buffers import NUM_TOKENS
from specdec_core.models.graph_memory import attention_graph_bytes
from specdec_core.models.meta_load import Outline

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


@frozen
class StepMemory:
    """The largest step: the most tokens of a forward pass, and of rows of logits, one for each request and draft token.
    Logits of prompts (`prompt_logprobs`) come on top. graph_bytes: of CUDA graphs, which are included in num_bytes."""

    num_tokens: int
    num_rows: int
    num_bytes: int
    graph_bytes: int

    @classmethod
    def of(
        cls,
        target: Outline,
        config: EngineConfig,
        num_speculative_tokens: int,
        num_taps: int,
        draft_graph_bytes: int = 0,
    ) -> StepMemory:
        """num_speculative_tokens: the most draft tokens of a request. num_taps: hidden states of a token that proposers
        observe. draft_graph_bytes: of CUDA graphs of draft models and heads, on a GPU."""
        info, num_tokens = target.info, config.max_num_batched_tokens
        num_rows = min(num_tokens, config.max_num_seqs * (1 + num_speculative_tokens))
        num_processed = min(num_rows, max(rows_at_once(info.vocab_size), 1 + num_speculative_tokens))
        hidden_bytes = info.hidden_size * info.dtype.itemsize
        per_token = target.bytes_per_token
        observed = max(num_tokens * num_taps * hidden_bytes, STORED_BYTES) if num_taps else 0
        logits = (num_rows * info.dtype.itemsize + num_processed * 4 * COPIES) * info.vocab_size
        graph_bytes = 0
        if info.device.type == "cuda":
            is_whole = config.tensor_parallel_size == 1 and target.kv_groups.states is None
            has_graphs = is_whole and not config.enforce_eager
            graph_bytes = draft_graph_bytes
            if has_graphs:
                graph_bytes += target.graph_bytes + NUM_TOKENS[-1] * num_taps * hidden_bytes
                graph_bytes += attention_graph_bytes(info, config.block_size, num_speculative_tokens)
        masks = num_rows * num_speculative_tokens * PATH_BYTES
        num_bytes = num_tokens * per_token + observed + logits + masks + graph_bytes
        if (states := target.kv_groups.states) is not None:
            kept = (num_rows - config.max_num_seqs) * len(states.layers) * hidden_bytes  # inputs at draft tokens
            num_bytes += max(0, kept) + num_rows * STATE_COPIES * states.most_layer_bytes
        return cls(num_tokens, num_rows, num_bytes, graph_bytes)


def rows_at_once(vocab_size: int) -> int:
    """How many rows of logits are processed and verified at once. A request's are never split."""
    return max(1, MOST_LOGITS // vocab_size)
