"""Train drafts for the tiny model: EAGLE, EAGLE-3 and Medusa heads, a draft model, an MTP module, an MLP speculator.

They are trained on excerpts of the corpus, and on the tiny model's own greedy and sampled continuations of excerpts.
Neither kind of text comes from the held-out modules.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tqdm import tqdm

from specdec_core import LLM, Plugins, SamplingParams
from specdec_train.run import train
from specdec_train.settings import Settings

from .card import ROOT, replace_section
from .export import INDEX, SHARDS, WEIGHTS, WHOLE
from .model import DTYPE

LENGTH = 1024
"""Length of a training text in tokens: heads trained on shorter contexts draft worse in longer ones."""
EXCERPTS = 2000
SELF_GENERATED = {"greedy": (6500, 0.0), "sampled": (3500, 1.0)}
"""Texts that the model generates itself: (number, temperature) of each kind."""
LENGTH_GENERATED = 512
SHORTEST_PROMPT = 16
END = 0
"""<|endoftext|>"""
AT_ONCE = 128
MOST_BYTES = 5_000_000
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {
        "ttt_steps": 3,
        "draft_vocab_size": 2048,
        "intermediate_size": 1536,
        "aux_layers": (3, 5, 7),
        "feature_weight": 10.0,
    },
    "eagle": {"intermediate_size": 1536, "ttt_steps": 3, "feature_weight": 10.0, "token_weight": 1.0},
    "draft_model": {"hidden_size": 192, "intermediate_size": 512, "num_heads": 3},
    "mtp": {"num_steps": 3},
    "mlp_speculator": {
        "n_predict": 4,
        "inner_dim": 144,
        "tie_weights": True,
        "scale_input": True,
        "init_from_target": True,
        "distill": True,
    },
    "medusa": {"num_heads": 4, "truncated_vocab_size": 2048, "distill": True},
}
"""aux_layers are the layers whose hidden states the EAGLE-3 head reads. This model has only eight layers, and the usual
choice for large models would leave out the last three."""
WINDOWS: dict[str, Any] = {"optimizer": "adamw", "batch": 160, "window": 16}
"""For heads that read one position at a time: windows of 160 texts vary more than two whole texts. With windows,
Medusa's trees of 63 nodes had an acceptance length of 1.91 after 2,000 updates; with whole texts, 1.74 after 1,200."""
SETTINGS: dict[str, dict[str, Any]] = {
    "eagle3": {"steps": 3500, "lr": 6e-4},
    "eagle": {"steps": 3450, "lr": 3e-4},
    "draft_model": {"steps": 1100, "lr": 1.5e-3},
    "mtp": {"steps": 500, "lr": 1e-3},
    "mlp_speculator": {"steps": 3000, "lr": 2.5e-2, **WINDOWS},
    "medusa": {"steps": 4300, "lr": 5e-3, **WINDOWS},
}
"""Settings of the runs by method: their optimizer steps are those for the present weights, which began with drafts for
earlier ones. Medusa's were two runs: 2,000 steps at this rate, and 2,300 more at 4e-3. EAGLE's layer has neither an
input nor an output norm, and diverges at the others' rates. An MLP speculator's weights are nearly all embeddings and
LM heads, which take a high rate."""


def build_texts(work: Path) -> list[Path]:
    """Write the training texts as files of token ids, unless the files exist. Returns the paths of the files."""
    folder = work / "drafts"
    folder.mkdir(exist_ok=True)
    ids = np.load(work / "train.npy", mmap_mode="r")
    files = [folder / f"excerpts-{EXCERPTS}x{LENGTH}.npy"]
    if not files[0].exists():
        save(files[0], cut(ids, LENGTH, 0, EXCERPTS))
    first = EXCERPTS
    weights = next(WEIGHTS / name for name in (WHOLE, SHARDS[0]) if (WEIGHTS / name).exists())
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()[:8]  # other weights write other texts
    for kind, (number, temperature) in SELF_GENERATED.items():
        files.append(folder / f"{kind}-{number}x{LENGTH_GENERATED}-{digest}.npy")
        if not files[-1].exists():
            texts, _ = continue_excerpts(cut(ids, LENGTH_GENERATED, first, number), temperature)
            save(files[-1], join(texts))
        first += number
    return files


def cut(ids: np.ndarray, length: int, first: int, number: int) -> np.ndarray:
    """Return excerpts of the corpus, int32 [number, length]. The corpus is cut into excerpts of ``length`` tokens. They
    are shuffled with a fixed seed, and ``number`` of them are returned, from index ``first`` on.

    ids: token ids of the corpus.
    """
    chosen = np.random.default_rng(0).permutation(len(ids) // length)[first : first + number]
    return ids[: len(ids) // length * length].reshape(-1, length)[chosen].astype(np.int32)


def join(texts: np.ndarray) -> np.ndarray:
    """Concatenate texts, with END (<|endoftext|>) after each, and split the result into rows of LENGTH token ids.
    Returns int32 [number of rows, LENGTH]; token ids that do not fill a row are left out.

    END is added even after a text that ends with a generated END.

    texts: token ids, int32 [number of texts, length], padded with -1.
    """
    ids = np.concatenate([np.append(row[row >= 0], END) for row in texts])
    return ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH).astype(np.int32)


def save(file: Path, texts: np.ndarray) -> None:
    partial = file.with_suffix(".partial.npy")
    np.save(partial, texts)
    partial.replace(file)


def continue_excerpts(
    excerpts: np.ndarray, temperature: float, weights: Path = WEIGHTS
) -> tuple[np.ndarray, np.ndarray]:
    """Use a beginning of each excerpt, of random length up to half of it, as a prompt, and let the tiny model continue
    it up to the excerpt's length.

    excerpts: token ids, int32 [number of excerpts, length].
    weights: folder of the model.

    Returns prompts with their continuations, in the shape of `excerpts`, padded with -1 where a continuation ends
    early, and the lengths of the prompts, int64 [number of excerpts].
    """
    lengths = np.random.default_rng(1).integers(SHORTEST_PROMPT, excerpts.shape[1] // 2, len(excerpts))
    prompts = [row[:length].tolist() for row, length in zip(excerpts, lengths, strict=True)]
    texts = np.full_like(excerpts, -1)
    with LLM(str(weights), max_num_seqs=AT_ONCE, skip_tokenizer_init=True, disable_log_stats=True) as llm:
        for start in tqdm(range(0, len(prompts), AT_ONCE), desc=f"texts at temperature {temperature:g}"):
            part = prompts[start : start + AT_ONCE]
            params = [
                SamplingParams(temperature=temperature, max_tokens=excerpts.shape[1] - len(ids), seed=start + i)
                for i, ids in enumerate(part)
            ]
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in part], params, use_tqdm=False)
            for i, (prompt, output) in enumerate(zip(part, outputs, strict=True)):
                text = [*prompt, *output.outputs[0].token_ids]
                texts[start + i, : len(text)] = text
    return texts, lengths


def train_draft(work: Path, method: str, threads: int | None, *, further: bool = False) -> None:
    """Train a draft model or draft head, or resume its training, and copy its checkpoint into the package.

    method: name of the proposer for which it is trained, such as "eagle3".
    threads: number of CPU threads. None: torch's default.
    further: start from the draft in the package, as after a change of the target's weights. Drafts that the package
        lacks start from new weights, and so does the MTP module, which belongs to the target's checkpoint.

    Raises ValueError if the trained weights are too large to ship.
    """
    spec = Plugins.load().proposer(method)
    out = work / "drafts" / method
    start = copy_packaged(work, method) if further else None
    given: dict[str, Any] = {"batch": 2, "data": tuple(build_texts(work)), **SETTINGS[method]}
    if "window" in given:
        given |= {"data": given["data"][1:], "features": work / "drafts" / "features"}  # all but the excerpts
    settings = Settings(
        **given,
        target=str(WEIGHTS),
        held_out=(work / "heldout.jsonl",),
        out=out,
        start=None if start is None else str(start),
        length=LENGTH,
        warmup=0.02,
        autocast=DTYPE is torch.bfloat16,
        threads=threads,
        evaluate_every=1000,
        eval_prompts=32,
        prompt_len=256,
        resume=out.exists(),
    )
    options = {key: value for key, value in OPTIONS[method].items() if start is None or key != "init_from_target"}
    train(spec, settings, spec.train.options(**options))
    size = (out / "model.safetensors").stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"the draft of {method} has {size} bytes, and at most {MOST_BYTES} may be shipped")
    if method == "mtp":
        add_shard(out / "model.safetensors")
    else:
        target = WEIGHTS / "drafts" / method
        target.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(out / name, target / name)


def copy_packaged(work: Path, method: str) -> Path | None:
    """Copy the draft in the package into ``work``, unless that was done before: the end of training replaces the
    original. Returns the folder of the copy; None if the package has no such draft."""
    folder, copy = WEIGHTS / "drafts" / method, work / "drafts" / "before" / method
    if not copy.exists() and folder.exists():
        shutil.copytree(folder, copy)
    return copy if copy.exists() else None


def add_shard(module: Path) -> None:
    """Add an MTP module to the tiny model's checkpoint, as its second shard. module: a file with its tensors."""
    first, second = (WEIGHTS / name for name in SHARDS)
    if (WEIGHTS / WHOLE).exists():
        (WEIGHTS / WHOLE).rename(first)
    shutil.copy(module, second)
    names = {file.name: load_file(file) for file in (first, second)}
    index = {name: file for file, tensors in names.items() for name in tensors}
    size = sum(each.numel() * each.element_size() for tensors in names.values() for each in tensors.values())
    write_json(WEIGHTS / INDEX, {"metadata": {"total_size": size}, "weight_map": index})
    config = json.loads((WEIGHTS / "config.json").read_text())
    write_json(WEIGHTS / "config.json", config | {"num_nextn_predict_layers": 1})


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_card(work: Path, root: Path = ROOT) -> None:
    """Write a table of the draft model and draft heads trained in `work` into the model card. The table contains their
    acceptance lengths, measured at the end of training."""
    lines = ["| Draft | MB | Updates | Tokens | Greedy | Temperature 1 |", "|---|---|---|---|---|---|"]
    for method in OPTIONS:
        file = WEIGHTS / SHARDS[1] if method == "mtp" else WEIGHTS / "drafts" / method / "model.safetensors"
        log_file = work / "drafts" / method / "log.jsonl"
        if not file.exists() or not log_file.exists():
            continue
        log = [json.loads(line) for line in log_file.read_text().splitlines()]
        tokens = max(line.get("tokens", 0) for line in log)
        lengths = [line["acceptance_length"] for line in log if "acceptance_length" in line][-1]
        lines.append(
            f"| `{method}` | {file.stat().st_size / 1e6:.1f} | {log[-1]['step']} | {tokens / 1e6:.1f}M "
            f"| {lengths['greedy']:.2f} | {lengths['temperature_1']:.2f} |"
        )
    path = root / "README.md"
    path.write_text(replace_section(path.read_text(encoding="utf-8"), "drafts", "\n".join(lines)), encoding="utf-8")


def main() -> None:
    """The command ``python -m training.drafts``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the corpus")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--further", action="store_true", help="start from the drafts in the package (not mtp)")
    parser.add_argument("methods", nargs="*", default=list(OPTIONS), help=f"default: {' '.join(OPTIONS)}")
    arguments = parser.parse_args()
    for method in arguments.methods:
        train_draft(arguments.work, method, arguments.threads, further=arguments.further)
        write_card(arguments.work)


if __name__ == "__main__":
    main()
