"""Makes a copy of a Llama model that has several times as many layers and the same logits, bit for bit.

    python benchmarks/inflate.py FOLDER [--model tiny] [--times 6] [--shape 8B] [--drafts DRAFTS]

With the copy, draft models and heads have the same acceptance rate as with the original, while a forward pass
costs as much as a larger model's. Layer i becomes layer TIMES * i. The layers added in between have random weights, but
their output projections are zero, so that they add nothing to the residual stream.

With --shape, the embedded model gets the layers of a larger one, in width, too (widen.py), and so do its drafts. Then
the logits are the same up to rounding. The shape "8B" is Llama 3's with 64 query and 16 key heads of width 64 in place
of 32 and 8 of width 128, and a vocabulary of 8192.

DRAFTS is a folder that has a subfolder of weights for each method, such as eagle3. The default is the model's own
folder `drafts`. Draft models and heads are copied unchanged, except for the configs of EAGLE-3 heads: the hidden
states that a head reads come from layers with other numbers in the copy. MTP modules in the model's own checkpoint are
copied, too: as layers after its last one, they get other numbers.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from widen import Widths

from specdec_core import Checkpoint, TargetInfo, resolve_model

LAYER = re.compile(r"(.*\blayers\.)(\d+)\.(.*)")
OUTPUTS = ("self_attn.o_proj.", "mlp.down_proj.")
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
NOT_COPIED = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "drafts")
DEFAULT_TIMES = 6
SAME = Widths(hidden=1, intermediate=1, kv_heads=1)
SHAPES = {
    "1B": (2, Widths(hidden=8, intermediate=8, kv_heads=4, inner=16)),
    "8B": (4, Widths(hidden=16, intermediate=14, kv_heads=8, inner=16)),
}
"""How many times as deep and as wide the embedded model is in the shape of a larger one."""


@contextmanager
def deeper(model: str, times: int) -> Iterator[str]:
    """The name of the model; or, if `times` is more than 1, of a copy in a temporary folder that is so many times as
    deep."""
    if times == 1:
        yield model
        return
    with TemporaryDirectory() as folder:
        inflate(Path(resolve_model(model)), Path(folder) / "deep", times)
        yield str(Path(folder) / "deep")


def inflate(
    model: Path, folder: Path, times: int, drafts: Path | None = None, seed: int = 0, widths: Widths = SAME
) -> None:
    """Write a copy of a Llama model with several times as many layers into `folder`.

    The draft models and heads for this model are copied, too.

    model: folder of the model to copy. Raises SystemExit if it is not a Llama.
    times: factor by which the number of layers grows.
    drafts: a folder that has a subfolder of weights for each method; None: the model's own folder `drafts`.
    seed: seed of the added layers' random weights.
    widths: the factors by which the model and its drafts become wider.
    """
    inflate_all_but_weights(model, folder, times, drafts, widths)
    save_file(inflated(model, times, seed, widths), folder / "model.safetensors", metadata={"format": "pt"})


def inflate_all_but_weights(
    model: Path, folder: Path, times: int, drafts: Path | None = None, widths: Widths = SAME, device: str = "cpu"
) -> None:
    """Write what `inflate` does, but for the model's own weights. device: where drafts are widened."""
    checkpoint = Checkpoint(str(model))
    config = checkpoint.config
    if config["model_type"] != "llama":
        raise SystemExit(f"{model} is of type {config['model_type']}: only a llama can be inflated")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(model, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    _write(_wide(config, widths) | {"num_hidden_layers": times * config["num_hidden_layers"]}, folder / "config.json")
    for draft in sorted((drafts or model / "drafts").glob("*/")):
        inflate_draft(draft, folder / "drafts" / draft.name, _info(str(model), config), times, widths, device)


def inflated(
    model: Path, times: int, seed: int = 0, widths: Widths = SAME, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """The weights that `inflate` writes, on a device. Which random numbers the added layers get depends on it."""
    checkpoint = Checkpoint(str(model))
    tensors = _on(device, checkpoint)
    if widths != SAME:
        tensors = widths.tensors(tensors, checkpoint.config)
    return _deeper(tensors, checkpoint.config["num_hidden_layers"], times, seed)


def inflate_draft(
    draft: Path, folder: Path, target: TargetInfo, times: int, widths: Widths = SAME, device: str = "cpu"
) -> None:
    """Copy a draft model or a head, and adapt the config of an EAGLE-3 head to the target model's added layers.

    An EAGLE-3 head's config lists the ids of the target's layers whose hidden states the head reads; these ids change.
    draft, folder: the folder to copy and the folder to write.
    target: sizes of the target model before layers were added.
    times: factor by which the target's number of layers has grown.
    widths: the factors by which target and draft become wider.
    device: where the draft is widened.
    """
    from specdec_proposer_eagle import head_config, published

    shutil.copytree(draft, folder)
    checkpoint = Checkpoint(str(draft))
    if widths != SAME:
        (*files,) = folder.glob("*.safetensors")
        if len(files) != 1:
            raise SystemExit(f"{draft} has {len(files)} files of weights, and only one can be widened")
        wide = widths.tensors(_on(device, checkpoint), checkpoint.config)
        save_file(wide, files[0], metadata={"format": "pt"})
        _write(_wide(checkpoint.config, widths), folder / "config.json")
    if not published.is_eagle3(checkpoint.config, checkpoint.shapes):
        return
    head = head_config.read(checkpoint.config, checkpoint.shapes, target, is_eagle3=True)
    inputs = [times * i for i in head.aux_layer_ids]
    config = _wide(checkpoint.config, widths) | {AUX_LAYERS: inputs}
    if AUX_LAYERS in (config.get("eagle_config") or {}):  # here ids name layers whose outputs are tapped
        config["eagle_config"] = config["eagle_config"] | {AUX_LAYERS: [i - 1 for i in inputs]}
    _write(config, folder / "config.json")


def _on(device: str, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in checkpoint.load(checkpoint.shapes).items()}


def _wide(config: Mapping[str, Any], widths: Widths) -> dict[str, Any]:
    return dict(config) if widths == SAME else widths.config(config)


def _deeper(tensors: Mapping[str, torch.Tensor], num_layers: int, times: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(next(iter(tensors.values())).device).manual_seed(seed)
    deeper: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        match = LAYER.fullmatch(name)
        if match is None:
            deeper[name] = tensor
            continue
        before, layer, after = match[1], int(match[2]), match[3]
        if layer >= num_layers:
            deeper[f"{before}{(times - 1) * num_layers + layer}.{after}"] = tensor
            continue
        deeper[f"{before}{times * layer}.{after}"] = tensor
        for place in range(times * layer + 1, times * (layer + 1)):
            deeper[f"{before}{place}.{after}"] = _added(after, tensor, generator)
    return deeper


def _added(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Make one tensor of an added layer.

    name: the tensor's name within the layer.
    like: the tensor of this name in the original layer.
    Returns zeros for the weights of an output projection, which writes to the residual stream, and a copy of `like` if
    `like` is a vector. Any other tensor is random, with the standard deviation of `like`.
    """
    if name.startswith(OUTPUTS):
        return torch.zeros_like(like)
    if like.dim() < 2:
        return like.clone()
    noise = torch.randn(like.shape, generator=generator, device=like.device)
    return noise.mul_(like.float().std()).to(like.dtype)


def _info(model: str, config: Mapping[str, Any]) -> TargetInfo:
    return TargetInfo(
        model=model,
        model_type=config["model_type"],
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        max_model_len=config["max_position_embeddings"],
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def _write(config: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new one")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--times", type=int, default=DEFAULT_TIMES)
    parser.add_argument("--shape", choices=SHAPES, help="of the embedded model; its depth is in place of TIMES")
    parser.add_argument("--drafts", type=Path)
    args = parser.parse_args()
    times, widths = SHAPES[args.shape] if args.shape else (args.times, SAME)
    inflate(Path(resolve_model(args.model)), args.folder, times, args.drafts, widths=widths)


if __name__ == "__main__":
    main()
