"""Evaluate an exported model on the held-out modules: bits per byte, loss by position, edits, renames, samples."""

from __future__ import annotations

import ast
import itertools
import json
import math
import random
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from .corpus import Document, read_jsonl
from .edits import RESULT, common_names, edit_document, rename, snippets

CONTEXT, STRIDE = 2048, 1536
POSITIONS = (0, 128, 256, 512, 1024, 2048)
EDITS = 60
RENAMES = 100
PROMPTS = (
    "def add(a, b):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    'def read_json(path):\n    """Return the parsed content of a JSON file."""\n',
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n",
    """# Task: rename `total` to `count`
def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)

# Result:
""",
)


@torch.inference_mode()
def token_losses(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """Compute the loss in nats of each token id after the first, with at least 512 tokens of context if available."""
    losses: list[torch.Tensor] = []
    done = 1
    for start in range(0, len(ids), STRIDE):
        window = torch.tensor([ids[start : start + CONTEXT]])
        new = window[0, done - start :]
        # Only the last logits are new: the ones before belong to ids which the window before has covered.
        logits = model(window, logits_to_keep=len(new) + 1, use_cache=False).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, new, reduction="none"))
        done = start + window.shape[1]
        if done == len(ids):
            break
    return torch.cat(losses)


def group(document: Document) -> str:
    """The name under which a held-out file is reported: its package or standard library module."""
    return document.source if document.source != "stdlib" else document.path.split("/")[0].removesuffix(".py")


def heldout(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, documents: list[Document]) -> dict[str, Any]:
    """Compute bits per byte in total and by module, and the mean loss by position in the document."""
    nats: dict[str, float] = defaultdict(float)
    sizes: dict[str, int] = defaultdict(int)
    by_position: dict[str, list[torch.Tensor]] = defaultdict(list)
    tokens = 0
    for document in tqdm(documents, desc="held-out modules"):
        ids = [tokenizer.eos_token_id, *tokenizer(document.text, verbose=False).input_ids]
        losses = token_losses(model, ids)
        nats[group(document)] += losses.sum().item()
        sizes[group(document)] += len(document.text.encode())
        tokens += len(losses)
        for low, high in itertools.pairwise(POSITIONS):
            by_position[f"{low}-{high}"].append(losses[low:high])
    total = sum(sizes.values())
    return {
        "bits_per_byte": sum(nats.values()) / total / math.log(2),
        "loss_per_token": sum(nats.values()) / tokens,
        "bytes_per_token": total / tokens,
        "bits_per_byte_by_module": {name: nats[name] / sizes[name] / math.log(2) for name in sorted(sizes)},
        "loss_by_position": {name: torch.cat(parts).mean().item() for name, parts in by_position.items()},
    }


@torch.inference_mode()
def copying(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, documents: list[Document]) -> dict[str, Any]:
    """Compute the top-1 accuracy of the model on the tokens of edited code. The edits are of held-out code. Returns
    {kind of edit: accuracy}, with the accuracy over all edits under "in all"."""
    rng = random.Random(0)
    names = common_names(documents)
    codes = [code for document in documents for code in snippets(document)]
    texts = [text for code in codes if (text := edit_document(code, rng, names)) is not None]
    hits: dict[str, list[torch.Tensor]] = defaultdict(list)
    for text in tqdm(rng.sample(texts, min(EDITS, len(texts))), desc="edits"):
        head, separator, result = text.partition(RESULT)
        prompt = tokenizer(head + separator).input_ids
        ids = torch.tensor([prompt + tokenizer(result).input_ids])
        if ids.shape[1] <= CONTEXT:
            guesses = model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
            hits["in all"].append((guesses == ids[0, len(prompt) :]).float())
            kind = " ".join(head.split("\n")[0].removeprefix("# Task: ").split()[:1])
            hits[kind].append(hits["in all"][-1])
    return {kind: torch.cat(parts).mean().item() for kind, parts in sorted(hits.items())}


@torch.inference_mode()
def exact_renames(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, documents: list[Document]
) -> dict[str, float]:
    """Compute the share of renames in held-out code that greedy decoding gets right to the last character. Returns it
    over all, and by the length of the result: {"in all", "shorter half", "longer half"}."""
    rng = random.Random(0)
    names = common_names(documents)
    edits = []
    for code in (code for document in documents for code in snippets(document)):
        try:
            edit = rename(code, ast.parse(code), rng, names)
        except SyntaxError:  # a method of a string that begins a line
            continue
        if edit is not None:
            edits.append((f"# Task: {edit[0]}\n{code}{RESULT}", edit[1]))
    right: list[tuple[int, bool]] = []
    for prompt, result in tqdm(rng.sample(edits, min(RENAMES, len(edits))), desc="renames"):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        length = inputs.input_ids.shape[1]
        room = min(len(tokenizer(result).input_ids) + 8, CONTEXT - length)
        output = model.generate(**inputs, max_new_tokens=room, do_sample=False)
        text = tokenizer.decode(output[0, length:], skip_special_tokens=True)
        right.append((len(result), text == result))
    right.sort()
    middle = len(right) // 2
    parts = {"in all": right, "shorter half": right[:middle], "longer half": right[middle:]}
    return {name: statistics.fmean(is_right for _, is_right in part) for name, part in parts.items()}


def samples(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """Continue each of PROMPTS by greedy decoding. Returns prompts and continuations."""
    found = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=80, do_sample=False)
        text = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        found.append({"prompt": prompt, "continuation": text})
    return found


def evaluate(work: Path, weights: Path) -> dict[str, Any]:
    """Compute all evaluation results for the model card.

    work: folder of the training run, with the held-out documents.
    weights: folder of the exported model.
    """
    tokenizer = AutoTokenizer.from_pretrained(weights)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    documents = read_jsonl(work / "heldout.jsonl")
    figures = heldout(model, tokenizer, documents)
    figures["edit_accuracy"] = copying(model, tokenizer, documents)
    figures["exact_renames"] = exact_renames(model, tokenizer, documents)
    figures["samples"] = samples(model, tokenizer)
    figures["parameters"] = model.num_parameters()
    text = json.dumps(figures)
    rounded: dict[str, Any] = json.loads(text, parse_float=lambda number: round(float(number), 4))
    return rounded
