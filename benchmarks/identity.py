"""Measures how often speculative output equals plain output in every token, despite floating-point rounding.

    python benchmarks/identity.py            # writes benchmarks/results/identity.json

Plain decoding completes one prompt at a time. Speculative decoding then completes all prompts as one batch. Its drafts
are chains or trees that contain most tokens of the plain output (known_output.py). In a tree the correct branch comes
last, so that its tokens have other KV-cache slots than in plain decoding. Plain and speculative decoding are compared
with and without the compiled operations of specdec-kernels.

At the first position where two outputs differ, the script records the gap between the two tokens' float32 logits.
Rounding errors as large as this gap can change which token is chosen.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from statistics import median
from typing import Any

import known_output
import torch
from measuring import machine
from prompts import edit_prompts, plain_prompts
from transformers import AutoModelForCausalLM

from specdec_core import LLM, Plugins, SamplingParams, resolve_model

RESULTS = Path(__file__).parent / "results"
SHAPES = {"chain of 8": (8, 0), "tree of 24": (24, 2)}  # num_speculative_tokens, wrong siblings before each node
TEMPERATURES = (0.0, 0.8)
NUM_SEEDS = 2  # at temperature 0.8


def complete(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def compare(dtype: str, *, kernels: bool, max_tokens: int) -> dict[str, Any]:
    disable = () if kernels else ("kernels",)
    settings = {"dtype": dtype, "max_num_seqs": 64, "plugins": Plugins.load(disable, modules=["known_output"])}
    plain = LLM("tiny", **settings)
    tokenizer = plain.get_tokenizer()
    prompts = [tokenizer(text).input_ids for text in (edit_prompts() | plain_prompts()).values()]
    wishes = {
        temperature: [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True)
            for seed in range(NUM_SEEDS if temperature else 1)
        ]
        for temperature in TEMPERATURES
    }
    expected = {
        params: [complete(plain, [prompt], params)[0] for prompt in prompts]
        for each in wishes.values()
        for params in each
    }
    figures = {}
    for shape, (num_tokens, branches) in SHAPES.items():
        config = {"method": "known_output", "num_speculative_tokens": num_tokens, "known_branches": branches}
        speculating = LLM("tiny", **settings, speculative_config=config)
        for temperature, each in wishes.items():
            pairs = []
            for params in each:
                known_output.OUTPUTS.update(zip(map(tuple, prompts), expected[params], strict=True))
                pairs += zip(prompts, expected[params], complete(speculating, prompts, params), strict=True)
            figures[f"{shape}, temperature {temperature}"] = summary(pairs)
            print(dtype, f"{kernels=}", list(figures.items())[-1], flush=True)
    return figures


def summary(outputs: list[tuple[list[int], list[int], list[int]]]) -> dict[str, Any]:
    """Compute one setting's results: the share of outputs that are identical, and the logit gaps of the others.

    outputs: (prompt, plain output, speculative output) of each request, as token ids.
    """
    parted = [each for each in outputs if each[1] != each[2]]
    reference = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32).eval()
    gaps = [gap(reference, *each) for each in parted]
    return {
        "num_outputs": len(outputs),
        "identical": round(1 - len(parted) / len(outputs), 4),
        "median_logit_gap": round(median(gaps), 5) if gaps else None,
        "largest_logit_gap": round(max(gaps), 5) if gaps else None,
    }


@torch.inference_mode()
def gap(reference: Any, prompt: list[int], want: list[int], got: list[int]) -> float:
    """Find the first position at which two outputs differ, and return the gap between the two tokens' logits there.

    reference: the model in float32, which computes the logits.
    prompt: token ids.
    want, got: two different outputs of this prompt, as token ids.
    """
    i = next(i for i, pair in enumerate(zip(want, got, strict=True)) if pair[0] != pair[1])
    logits = reference(torch.tensor([[*prompt, *want[:i]]]), use_cache=False).logits[0, -1]
    return abs(float(logits[want[i]] - logits[got[i]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--output", type=Path, default=RESULTS / "identity.json")
    args = parser.parse_args()
    results = {
        f"{dtype}, {'specdec-kernels' if kernels else 'core alone'}": compare(
            dtype, kernels=kernels, max_tokens=args.max_tokens
        )
        for dtype in ("float32", "bfloat16")
        for kernels in (True, False)
    }
    command = shlex.join(["python", "benchmarks/identity.py", *sys.argv[1:]])
    report = {"command": command, "machine": machine(), "max_tokens": args.max_tokens, "results": results}
    args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
