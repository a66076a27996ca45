"""Plain stand-ins for what vLLM hands to a custom class: its VllmConfig, and the rows of its persistent batch.

They have what specdec_vllm reads and nothing else. test_real_vllm.py runs the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

VOCAB_SIZE = 100
NOISE = 77
"""What stands in rows beside the tokens that count."""


def vllm_config(*, num_speculative_tokens: int | None = 4, max_model_len: int = 512, max_num_seqs: int = 8) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=num_speculative_tokens, num_speculative_tokens_per_batch_size=None
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        model_config=SimpleNamespace(
            model="none",
            max_model_len=max_model_len,
            dtype=torch.float32,
            hf_text_config=SimpleNamespace(model_type="llama", num_hidden_layers=2),
            get_vocab_size=lambda: VOCAB_SIZE,
            get_hidden_size=lambda: 8,
        ),
    )


class PersistentBatch:
    """Requests in rows. A new one takes the first free row; `condense` fills gaps with the last rows."""

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        self.token_ids = np.full((num_rows, max_model_len), NOISE, dtype=np.int32)
        self.num_tokens = np.zeros(num_rows, dtype=np.int32)
        self.ids: list[Any] = []

    def add(self, request_id: Any, token_ids: Sequence[int]) -> None:
        if None not in self.ids:
            self.ids.append(None)
        row = self.ids.index(None)
        self.ids[row] = request_id
        self.num_tokens[row] = 0
        self.append(row, token_ids)

    def append(self, row: int, token_ids: Sequence[int], drafted: Sequence[int] = ()) -> None:
        """Add tokens to a row, where the drafted ones stand already."""
        start = self.num_tokens[row]
        self.token_ids[row, start : start + len(drafted)] = drafted
        self.token_ids[row, start : start + len(token_ids)] = token_ids
        self.num_tokens[row] += len(token_ids)

    def remove(self, request_id: Any) -> None:
        self.ids[self.ids.index(request_id)] = None

    def condense(self) -> None:
        while None in self.ids:
            last = self.ids.pop()
            if last is not None:
                row = self.ids.index(None)
                self.ids[row] = last
                self.token_ids[row] = self.token_ids[len(self.ids)]
                self.num_tokens[row] = self.num_tokens[len(self.ids)]

    def swap(self, first: int, second: int) -> None:
        rows, others = [first, second], [second, first]
        self.ids[first], self.ids[second] = self.ids[second], self.ids[first]
        self.token_ids[rows], self.num_tokens[rows] = self.token_ids[others], self.num_tokens[others]
