"""Writes checkpoints of draft heads, and runs the installed proposers of heads that read one hidden state per request,
without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specdec_core import BuildContext, Draft, Observation, Plugins, TargetInfo
from specdec_testing.drive import SimpleRequest, batch_of

SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"
CPU = torch.device("cpu")
ROWS_EACH = 4  # of each request in an observation
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def state(**values: Any) -> Change:
    """A change of config.json."""
    return lambda config, tensors: config.update(values)


def put(name: str, value: torch.Tensor | None) -> Change:
    """A change of one tensor. None: it is missing."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    return change


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    file: str = SAFETENSORS,
    change: Change | None = None,
) -> Path:
    """Write config.json and a file of weights, and return the folder. change: modifies the config and the tensors
    first."""
    config, tensors = dict(config), dict(tensors)
    if change is not None:
        change(config, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / file)  # shared memory is refused
    else:
        torch.save(tensors, folder / file)
    return folder


def write_header(
    folder: Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    file: str = SAFETENSORS,
    dtypes: Mapping[str, tuple[str, int]] | None = None,
) -> Path:
    """Write config.json and a safetensors file of zeros that takes no room on the disk, and return the folder.

    dtypes: by the name of a tensor, its dtype in safetensors' words and the bytes of a number; others are float16.
    """
    header, end = {}, 0
    for name, shape in shapes.items():
        dtype, size = (dtypes or {}).get(name, ("F16", 2))
        begin, end = end, end + size * prod(shape)
        header[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / file).open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)  # the rest of the file is a hole
    return folder


def target_info(vocab_size: int, hidden_size: int, dtype: torch.dtype = torch.float32) -> TargetInfo:
    return TargetInfo("any", "llama", vocab_size, hidden_size, 2, 512, dtype, CPU)


def build_proposer(
    method: str,
    target: TargetInfo,
    *,
    num_speculative_tokens: int,
    max_num_seqs: int = 8,
    output_head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    **options: Any,
) -> Any:
    """Build an installed proposer that needs no KV cache, as the engine does.

    output_head: the target's LM head; None: the proposer may not call it.
    options: the method's own keys of speculative_config.
    """
    spec = Plugins.load().proposer(method)
    config = spec.config(**options)
    plan = spec.plan(config, target, num_speculative_tokens)
    no_service: Any = None  # a proposer that calls it fails
    context = BuildContext(
        target=target,
        num_speculative_tokens=num_speculative_tokens,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        device=target.device,
        embed=no_service,
        output_head=output_head or no_service,
        output_rows=no_service,
        attention=None,
        load_model=no_service,
        speed_up=lambda module: None,
        state=plan.state,
    )
    with torch.inference_mode():
        return spec.build(config, context)


def drafts(
    method: str,
    target: TargetInfo,
    hidden: torch.Tensor,
    root_token_ids: Sequence[int],
    max_draft_tokens: Sequence[int],
    **building: Any,
) -> Draft:
    """Draft once for a batch of requests with an installed proposer, greedily.

    The proposer starts and observes the requests in another order than that of the batch. An observation has rows
    before and after the one with the hidden state to draft from.

    hidden: [batch, hidden_size], the target's hidden state before each request's last token.
    root_token_ids: each request's last token.
    building: keyword arguments of `build_proposer`.
    """
    proposer = build_proposer(method, target, max_num_seqs=len(root_token_ids), **building)
    requests = [SimpleRequest(str(i), [1, 2, token]) for i, token in enumerate(root_token_ids)]
    with torch.inference_mode():
        for request in requests[::-1]:
            proposer.start(request)
        proposer.observe(_observation(requests[1:] + requests[:1], torch.cat([hidden[1:], hidden[:1]])))
        draft: Draft = proposer.propose(batch_of(requests, max_draft_tokens, temperature=0.0))
        return draft


def _observation(requests: Sequence[SimpleRequest], hidden: torch.Tensor) -> Observation:
    """Make an observation in which `hidden` has the last valid row of each request, and all other rows are noise."""
    offsets = range(0, ROWS_EACH * len(requests) + 1, ROWS_EACH)
    num_valid = [1 + i % (ROWS_EACH - 1) for i in range(len(requests))]
    last_rows = torch.tensor([first + valid - 1 for first, valid in zip(offsets, num_valid, strict=False)])
    rows = torch.randn(offsets[-1], hidden.shape[1], generator=torch.Generator().manual_seed(0)).to(hidden.dtype)
    return Observation(
        requests=requests,
        starts=(0,) * len(requests),
        offsets=tuple(offsets),
        num_valid=torch.tensor(num_valid, dtype=torch.int32),
        last_rows=last_rows,
        token_ids=torch.zeros(len(rows), dtype=torch.int64),
        positions=torch.arange(len(rows)),
        features={"final": rows.index_copy(0, last_rows, hidden)},
        next_token_ids=torch.tensor([int(request.token_ids[-1]) for request in requests]),
    )
