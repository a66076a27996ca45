"""Reference outputs: transformers' own generation, one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

NUM_TOKENS = 24


@frozen
class Reference:
    token_ids: list[int]
    margin: float  # the smallest difference between the best and the second best logit along the way


def load(model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()


def greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> Reference:
    """Return the greedy continuation of exactly num_tokens tokens. End-of-sequence tokens do not end it."""
    from transformers import GenerationConfig

    inputs = torch.tensor([list(prompt)])
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=num_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(output.logits).topk(2).values
    return Reference(output.sequences[0, inputs.shape[1] :].tolist(), float((best[:, 0] - best[:, 1]).min()))


@torch.inference_mode()
def logits(model: Any, token_ids: Sequence[int], positions: Sequence[int] | None = None) -> torch.Tensor:
    """Return logits float32 [num_tokens, vocab] from one forward pass over all tokens.

    positions: position ids; None: 0, 1, 2 and so on.
    """
    position_ids = torch.tensor([list(range(len(token_ids)) if positions is None else positions)])
    return model(torch.tensor([list(token_ids)]), position_ids=position_ids, use_cache=False).logits[0]


@torch.inference_mode()
def final_hidden_states(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the hidden states float32 [num_tokens, hidden] after the final norm."""
    return model(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False).hidden_states[-1][0]


def prompts(vocab_size: int, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Make random prompts of the given lengths. Every other prompt repeats a pattern of at most 5 tokens, for proposers
    that search for repetitions."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i, length in enumerate(lengths):
        pattern = torch.randint(vocab_size, (length if i % 2 == 0 else min(length, 5),), generator=generator).tolist()
        made.append((pattern * length)[:length])
    return made
