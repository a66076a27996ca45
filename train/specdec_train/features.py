"""What the frozen target computes for a batch of texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from specdec_core import CompatibilityError, TrainingTarget

NUM_SAMPLED = 64


@torch.no_grad()
def features_of(target: TrainingTarget, token_ids: torch.Tensor, taps: Sequence[str]) -> dict[str, torch.Tensor]:
    """{tap: [batch, length, width]} for int64 token_ids [batch, length], padded at the ends: what is padded is seen by
    nothing before it."""
    model: Any = target.model.base_model
    found: dict[str, torch.Tensor] = {}
    after_last = f"input.{target.info.num_layers}"  # the last of transformers' hidden states is normed already
    with _kept(model, after_last, found) if after_last in taps else nullcontext():
        output = model(token_ids, use_cache=False, output_hidden_states=any(tap != "final" for tap in taps))
    found["final"] = output.last_hidden_state
    return {tap: found[tap] if tap in found else output.hidden_states[int(tap.partition(".")[2])] for tap in taps}


@contextmanager
def _kept(model: nn.Module, tap: str, found: dict[str, torch.Tensor]) -> Iterator[None]:
    """While the block runs, what the last layer leaves."""
    num_layers = int(tap.partition(".")[2])
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == num_layers]
    if not lists:
        raise CompatibilityError(
            f"no list of {num_layers} layers was found in {type(model).__name__}, whose last one's output {tap} is: "
            f"give other aux_layers"
        )

    def keep(module: nn.Module, args: Any, out: Any) -> None:
        found[tap] = out[0] if isinstance(out, tuple) else out

    handle = lists[0][-1].register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def weights_fingerprint(target: TrainingTarget) -> str:
    """Of some numbers of each tensor: weights that were trained further under the same name have another one."""
    digest = hashlib.sha256()
    for name, tensor in target.model.state_dict().items():
        sample = tensor.flatten()[:: max(1, tensor.numel() // NUM_SAMPLED)]
        digest.update(f"{name} {list(tensor.shape)} {sample.double().tolist()}".encode())
    return digest.hexdigest()
