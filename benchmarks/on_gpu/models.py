"""The models that are measured. Their weights are made on the device, and are never written to a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from inflate import inflate_all_but_weights, inflated
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from widen import Widths

from specdec_core import resolve_model
from specdec_core.models import model as target_model
from specdec_core.models.attention import IMPLEMENTATION
from specdec_core.models.load import parse_dtype

MOST_POSITIONS = 2**15


def llama_config(shape: Mapping[str, int]) -> LlamaConfig:
    return LlamaConfig(
        **shape, max_position_embeddings=MOST_POSITIONS, tie_word_embeddings=False, eos_token_id=None, pad_token_id=None
    )


def random_llama(
    shape: Mapping[str, int], device: str, dtype: str = "auto", attention: str = IMPLEMENTATION
) -> PreTrainedModel:
    """A Llama with random weights. attention: the name of its attention function; IMPLEMENTATION: the engine's."""
    torch.manual_seed(0)
    return _empty(llama_config(shape), device, dtype, attention)


def save_without_weights(config: LlamaConfig, folder: Path) -> None:
    """Write what an engine reads of a checkpoint before it loads the weights."""
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    save_file({"not.in.use": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})


def inflated_tiny(folder: Path, times: int, widths: Widths, device: str, dtype: str) -> PreTrainedModel:
    """Make the embedded model deeper and wider, and its drafts (inflate.py).

    folder: where the config, the tokenizer, the drafts and the MTP modules are written.
    """
    tiny = Path(resolve_model("tiny"))
    inflate_all_but_weights(tiny, folder, times, widths=widths, device=device)
    tensors = inflated(tiny, times, widths=widths, device=device)
    config = AutoConfig.from_pretrained(folder)
    model = _empty(config, device, dtype, IMPLEMENTATION)
    missing, left = model.load_state_dict(tensors, strict=False)
    # Proposers read these from the file. Nothing else of the target does.
    save_file({name: tensors[name] for name in left}, folder / "model.safetensors", metadata={"format": "pt"})
    if missing:
        raise RuntimeError(f"the inflated model lacks {missing}")
    return model


def _empty(config: Any, device: str, dtype: str, attention: str) -> PreTrainedModel:
    with torch.device(device):  # where drawing weights is fast
        model = AutoModelForCausalLM.from_config(
            config, dtype=parse_dtype(dtype, torch.device(device)), attn_implementation=attention
        )
    return model.eval().requires_grad_(False)


@contextmanager
def loading(models: Mapping[str, Callable[[], PreTrainedModel]]) -> Iterator[None]:
    """Within this context, engines take these targets instead of loading weights. models: by the checkpoint's path."""
    original = target_model.load_weights

    def load(source: Any, config: Any, **given: Any) -> PreTrainedModel:
        return models[source.path]() if source.path in models else original(source, config, **given)

    target_model.load_weights = load
    try:
        yield
    finally:
        target_model.load_weights = original


def copies_of(model: PreTrainedModel) -> Callable[[], PreTrainedModel]:
    """An engine changes its model."""
    return lambda: deepcopy(model)


def num_weight_bytes(model: PreTrainedModel) -> int:
    """The bytes that a step of plain decoding reads: all weights, but for the embedding, of which it reads few rows."""
    table = model.get_input_embeddings().weight
    return sum(each.nbytes for each in model.parameters() if each is not table)


def save_head(folder: Path, shape: Mapping[str, int], device: str) -> None:
    """Save a random EAGLE-3 head with the tensor names of the checkpoints that EAGLE's authors published.

    The head is one Llama layer whose q, k and v projections read token embedding and hidden state, concatenated. The
    head's vocabulary is every fourth token of the target model's vocabulary.
    shape: sizes of the target model by config key, such as hidden_size and vocab_size.
    """
    layer, vocab_size = {**shape, "num_hidden_layers": 1}, shape["vocab_size"] // 4
    state = random_llama({**layer, "vocab_size": vocab_size}, device, "bfloat16").state_dict()
    renamed = {name.replace("model.layers.0", "midlayer").removeprefix("model."): each for name, each in state.items()}
    tensors = {name: tensor for name, tensor in renamed.items() if "embed_tokens" not in name}  # it uses the target's
    for name in (f"midlayer.self_attn.{part}_proj.weight" for part in "qkv"):
        tensors[name] = torch.cat([tensors[name], tensors[name].flip(1)], dim=1)
    tensors["midlayer.hidden_norm.weight"] = tensors["norm.weight"].clone()
    tensors["fc.weight"] = 0.02 * torch.randn(shape["hidden_size"], 3 * shape["hidden_size"], dtype=torch.bfloat16)
    tensors |= {"d2t": 3 * torch.arange(vocab_size), "t2d": torch.arange(shape["vocab_size"]) % 4 == 0}  # every fourth
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**layer, "draft_vocab_size": vocab_size}), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
