"""Measures `generate` of transformers with specdec's proposers, beside specdec's own engine.

    python benchmarks/in_transformers.py           # writes benchmarks/results/in_transformers.json

Each prompt is decoded greedily, one at a time: by `generate` and by the engine, each without drafts and with those of a
method. All four take turns, so that changes of the machine's speed affect each. A prompt's speed-up is the median over
the rounds of the ratio of two times: of `generate` to `generate` with drafts, and of the engine to the engine with
drafts. The engine drafts as many tokens as `generate` (`adaptive_draft_length` is off). Each round forgets the outputs
that suffix kept of earlier ones, so it drafts from the prompt and from the outputs of the round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from attrs import frozen
from end_to_end import arguments, ways_to_sample
from measuring import command, machine, write
from prompts import edit_prompts, plain_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from specdec_core import LLM, Plugins, SamplingParams, resolve_model
from specdec_transformers import Speculation, speculative

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"num_speculative_tokens": 8},
}
DISTRIBUTIONS = ("specdec-core", "specdec-kernels", "specdec-transformers", *(f"specdec-proposer-{m}" for m in METHODS))


@frozen
class Run:
    seconds: float
    token_ids: list[int]


def timed(run: Callable[[], list[int]]) -> Run:
    started = perf_counter()
    token_ids = run()
    return Run(perf_counter() - started, token_ids)


def by_generate(model: Any, prompt: list[int], max_tokens: int, faster: Speculation | None) -> list[int]:
    output = model.generate(torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, custom_generate=faster)
    new: list[int] = output[0, len(prompt) :].tolist()
    return new


def by_engine(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def figures(runs: dict[str, list[Run]], faster: Speculation) -> dict[str, Any]:
    """The results of one prompt. runs: {what ran: its runs}."""
    speed_ups = {}
    for where in ("generate", "engine"):
        pairs = zip(runs[where], runs[f"{where} with drafts"], strict=True)
        speed_ups[where] = round(median(plain.seconds / drafted.seconds for plain, drafted in pairs), 3)
    return {
        "num_tokens": len(runs["generate"][0].token_ids),
        "tokens_per_s": {n: round(median(len(r.token_ids) / r.seconds for r in rs), 1) for n, rs in runs.items()},
        "speed_up": speed_ups,
        "acceptance_length": round(faster.counts.acceptance_length, 3),
        "num_forward_passes": faster.num_forward_passes,
        "identical": {
            where: all(r.token_ids == runs[where][0].token_ids for r in runs[f"{where} with drafts"])
            for where in speed_ups
        },
    }


def measure(
    model: Any,
    plain: LLM,
    drafting: LLM,
    faster: Speculation,
    prompts: dict[str, list[int]],
    max_tokens: int,
    rounds: int,
) -> dict[str, Any]:
    params, _ = ways_to_sample(max_tokens)
    found: dict[str, dict[str, list[Run]]] = {name: {} for name in prompts}
    results = {}
    for number in range(rounds + 1):  # the first one warms up
        faster.forget()
        drafting.engine.forget()
        for name, prompt in prompts.items():
            for what, run in {
                "generate": partial(by_generate, model, prompt, max_tokens, None),
                "generate with drafts": partial(by_generate, model, prompt, max_tokens, faster),
                "engine": partial(by_engine, plain, prompt, params),
                "engine with drafts": partial(by_engine, drafting, prompt, params),
            }.items():
                done = timed(run)
                if number:
                    found[name].setdefault(what, []).append(done)
            if number:
                results[name] = figures(found[name], faster)
    return {
        "median_speed_up": {
            where: round(median(each["speed_up"][where] for each in results.values()), 3)
            for where in ("generate", "engine")
        },
        "all_identical": all(all(each["identical"].values()) for each in results.values()),
        "prompts": results,
    }


def main() -> None:
    parser = arguments(__doc__, "in_transformers.json")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--most-prompts", type=int, default=20, help="of each kind")
    args = parser.parse_args()

    logging.set_verbosity_error()
    path = resolve_model(args.model, Plugins.load().models)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    plain = LLM(args.model, dtype=args.dtype)
    results: dict[str, Any] = {}
    for method, options in METHODS.items():
        config = {"method": method, **options}
        drafting = LLM(args.model, dtype=args.dtype, speculative_config={**config, "adaptive_draft_length": False})
        faster = speculative(config)
        for kind, texts in {"edit": edit_prompts(), "go on": plain_prompts()}.items():
            some = dict(list(texts.items())[: args.most_prompts])
            prompts = {name: tokenizer(text).input_ids for name, text in some.items()}
            found = measure(model, plain, drafting, faster, prompts, args.max_tokens, args.rounds)
            results.setdefault(method, {})[kind] = found
            print(f"{method:8} {kind:6} speed-up {found['median_speed_up']} identical {found['all_identical']}")
    record = {
        "command": command("in_transformers.py"),
        "model": args.model,
        "dtype": args.dtype,
        "rounds": args.rounds,
        "max_tokens": args.max_tokens,
        "machine": machine(DISTRIBUTIONS),
        "settings": METHODS,
        "results": results,
    }
    write(record, args.out)


if __name__ == "__main__":
    main()
