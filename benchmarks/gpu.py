"""Measures plain decoding, `ngram` and `eagle3` on a GPU: tokens per second, and blocking CUDA calls per step.

    python benchmarks/gpu.py            # writes benchmarks/results/gpu.json; needs a GPU of 80 GB
    python benchmarks/gpu.py --small    # a quick test, also on a CPU: small models and short runs

There are two target models: "tiny" is specdec's embedded model; "llama" has the shape of Llama 3 8B, random weights,
and a random EAGLE-3 head. The acceptance rate of a random head is near 0, so "llama" shows the cost of a step, not the
gain from drafts. With --small, "llama" has a few narrow layers, and the results go to gpu_small.json: they only show
that the script works, not how fast specdec is.

One process holds an engine for each method. The engines take turns, so that other load on the machine affects all. Only
decode steps are timed, and results are medians over the rounds. CUDA calls are counted in additional untimed steps,
since the profiler slows steps down. On a CPU the counts in the results are null.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice, product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from attrs import evolve
from measuring import DISTRIBUTIONS, RESULTS, command, machine, write
from prompts import edit_prompts, plain_prompts
from random_models import prompt
from safetensors.torch import save_file
from torch.autograd import DeviceType
from torch.profiler import profile, record_function
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from specdec_core import LLM, DraftCounts, Engine, SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": NGRAM,
    "eagle3": {"method": "eagle3", "adaptive_draft_length": False},
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
LARGE = dict(zip((*SIZES, "vocab_size"), (4096, 14336, 32, 32, 8, 128256), strict=True))
SMALL = dict(zip((*SIZES, "vocab_size"), (256, 896, 6, 8, 2, 8192), strict=True))
MAX_MODEL_LEN = 2048
OURS = (*DISTRIBUTIONS, "specdec-proposer-eagle", "specdec-model-tiny")

REGION = "the steps that are counted"
COUNTED = ("blocking_calls_per_step", "kernel_launches_per_step", "calls_per_step")
DRAFTED = "draft_tokens_per_counted_step"
NO_COUNTS = dict.fromkeys((DRAFTED, *COUNTED))
SPEEDS = ("tokens_per_s", "ms_per_step")
COLUMNS = ("model", "batch", "temperature", "method", *SPEEDS, "speed_up", "acceptance_length", *COUNTED[:2])
VERSION = re.compile(r"(_ptsz|_ptds)?(_v\d+)?$")  # what some versions of CUDA add to a call's name
WAIT = re.compile(r"cu(da)?(Stream|Event|Device|Ctx)Synchronize|cudaMemcpy(2D|3D)?(To|From)?(Array|Symbol)?")
LAUNCH = re.compile(r"cu(da)?(Launch(Cooperative)?Kernel(Ex|ExC)?|GraphLaunch)")
synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None


def count_calls(events: Iterable[Any], num_steps: int) -> dict[str, Any]:
    """Count the CUDA calls per step in a profile of several steps.

    events: the profiler's events. Only calls that begin within the event named REGION count.
    num_steps: number of steps within that event.
    Returns a dict with the keys of COUNTED. All values are None if the profiler recorded no CUDA call.
    - blocking_calls_per_step: calls that make the host wait for the GPU. There are three kinds: synchronization with a
      stream, event, device or context (such as cudaStreamSynchronize), synchronous copies (such as cudaMemcpy), and
      cudaMemcpyAsync to or from pageable memory. A call of the last kind and a cudaStreamSynchronize right after it
      count as one call; `.item()`, `.cpu()`, `nonzero()` and `torch.tensor(..., device="cuda")` make such pairs. A
      cudaMemcpyAsync to or from pinned memory does not count, since it returns at once. cudaMalloc, cudaFree and
      cudaHostAlloc do not count, though they may wait.
    - kernel_launches_per_step: launches of a kernel or of a CUDA graph.
    - calls_per_step: {name of the call: calls per step} of all CUDA calls. The name of a cudaMemcpyAsync includes the
      kinds of memory that it copies from and to.
    """
    events = sorted(events, key=lambda event: event.time_range.start)
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    region = next(event.time_range for event in on_host if event.name == REGION)
    calls = [e for e in on_host if re.match("cu(da)?[A-Z]", e.name) and region.start <= e.time_range.start < region.end]
    if not calls:
        return dict.fromkeys(COUNTED)
    memory = {event.id: event.name.removeprefix("Memcpy ") for event in events if event.name.startswith("Memcpy ")}
    names = [VERSION.sub("", call.name) for call in calls]
    kinds = [f" {memory.get(call.id, '(unknown)')}" if "MemcpyAsync" in call.name else "" for call in calls]
    alone = (kind for kind, after in zip(kinds, [*names[1:], ""], strict=True) if after != "cudaStreamSynchronize")
    num_blocking = sum(bool(WAIT.fullmatch(name)) for name in names) + sum("Pageable" in kind for kind in alone)
    num_launches = sum(bool(LAUNCH.fullmatch(name)) for name in names)
    by_name = {name: n / num_steps for name, n in Counter(map(str.__add__, names, kinds)).most_common()}
    return dict(zip(COUNTED, (num_blocking / num_steps, num_launches / num_steps, by_name), strict=True))


def prefill(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[str]:
    """Submit a request for each prompt and run engine steps until all prompts are prefilled.

    prompts: token ids of each prompt.
    Returns the ids of the requests.
    """
    request_ids = [engine.add_request(token_ids, params) for token_ids in prompts]
    left = sum(map(len, prompts))
    while left > 0 and engine.has_unfinished:
        left -= engine.step().num_prefill_tokens
    synchronize()
    return request_ids


def run(engine: Engine, groups: list[list[list[int]]], params: SamplingParams) -> dict[str, float]:
    """Complete each group of prompts as one batch and time the decode steps, without prefill.

    groups: batches of prompts, each prompt as token ids.
    Returns {"tokens_per_s": output tokens per second, "ms_per_step": milliseconds per decode step}.
    """
    seconds, num_tokens, num_steps = 0.0, 0, 0
    for prompts in groups:
        prefill(engine, prompts, params)
        started = perf_counter()
        while engine.has_unfinished:
            num_tokens += engine.step().num_output_tokens
            num_steps += 1
        synchronize()
        seconds += perf_counter() - started
    return {"tokens_per_s": num_tokens / seconds, "ms_per_step": seconds / num_steps * 1e3}


def profile_run(engine: Engine, prompts: list[list[int]], params: SamplingParams, num_steps: int) -> dict[str, Any]:
    request_ids = prefill(engine, prompts, evolve(params, max_tokens=MAX_MODEL_LEN // 2))  # none ends too early
    for _ in range(num_steps):  # until proposers have context to draft from
        engine.step()
    with profile() as profiler:
        with record_function(REGION):
            num_draft_tokens = sum(engine.step().num_draft_tokens for _ in range(num_steps))
        synchronize()
    for request_id in request_ids:
        engine.cancel(request_id)
    return {DRAFTED: num_draft_tokens / num_steps, **count_calls(profiler.events(), num_steps)}


def complete(llm: LLM, groups: list[list[list[int]]], params: SamplingParams) -> DraftCounts:
    batches = [[{"prompt_token_ids": token_ids} for token_ids in prompts] for prompts in groups]
    outputs = [output for batch in batches for output in llm.generate(batch, params, use_tqdm=False)]
    if errors := [output.outputs[0].error for output in outputs if output.outputs[0].finish_reason != "length"]:
        raise SystemExit(f"{len(errors)} requests did not get all of their tokens: {errors[0]}")
    return sum((output.speculation for output in outputs), DraftCounts())


def measure(llms: dict[str, LLM], groups: list[list[list[int]]], params: SamplingParams, args: Any) -> Iterator[Any]:
    """Measure all methods on the same prompts, and yield a row of results for each method.

    llms: {name of the method: LLM}.
    groups: batches of prompts, each prompt as token ids.
    args: the parsed command line.
    """
    drafts = {name: complete(llm, groups, params) for name, llm in llms.items()}  # also the warm-up
    rounds = [{name: run(llm.engine, groups, params) for name, llm in llms.items()} for _ in range(args.rounds)]
    for name, llm in llms.items():
        counts = profile_run(llm.engine, groups[0], params, args.counted_steps) if args.device == "cuda" else NO_COUNTS
        speed_ups = [each[name]["tokens_per_s"] / each["plain"]["tokens_per_s"] for each in rounds]
        yield {
            "method": name,
            "num_speculative_tokens": llm.engine.num_speculative_tokens,
            **{key: round(median(each[name][key] for each in rounds), 3) for key in SPEEDS},
            "speed_up": round(median(speed_ups), 3),
            "acceptance_length": round(drafts[name].acceptance_length, 3),
            "tokens_per_s_of_each_round": [round(each[name]["tokens_per_s"], 3) for each in rounds],
            **counts,
        }


def random_llama(shape: dict[str, int], device: str) -> PreTrainedModel:
    config = LlamaConfig(**shape, max_position_embeddings=8192, tie_word_embeddings=False, eos_token_id=None)
    with torch.device(device):  # where drawing weights is fast
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def save_head(folder: Path, shape: dict[str, int], device: str) -> None:
    """Save a random EAGLE-3 head with the tensor names of the checkpoints that EAGLE's authors published.

    The head is one Llama layer whose q, k and v projections read token embedding and hidden state, concatenated. The
    head's vocabulary is every fourth token of the target model's vocabulary.
    shape: sizes of the target model by config key, such as hidden_size and vocab_size.
    """
    layer, vocab_size = {**shape, "num_hidden_layers": 1}, shape["vocab_size"] // 4
    state = random_llama({**layer, "vocab_size": vocab_size}, device).state_dict()
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


def load(model: str, args: Any, folder: Path) -> dict[str, LLM]:
    """Build an LLM for each method. Returns {name of the method: LLM}.

    model: "tiny" for the embedded model, or "llama" for a Llama with random weights and a random EAGLE-3 head.
    folder: where the random weights are saved.
    """
    keywords = {key: vars(args)[key] for key in ("device", "dtype", "max_model_len", "max_num_seqs")}
    if model == "llama":
        torch.manual_seed(0)
        random_llama(args.shape, args.device).save_pretrained(folder)
        save_head(folder / "drafts" / "eagle3", args.shape, args.device)  # the method's default folder
        gc.collect()
        torch.cuda.empty_cache()  # an engine asks the GPU how much memory is free
        model, keywords["skip_tokenizer_init"] = str(folder), True
    return {method: LLM(model, speculative_config=config, **keywords) for method, config in METHODS.items()}


def prompts_for(llm: LLM, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Return the token ids of prompts that are alternately code to edit and code to continue.

    num_tokens: maximum number of tokens per prompt.
    If the LLM has no tokenizer, the token ids are arbitrary.
    """
    if (tokenizer := llm.get_tokenizer()) is None:
        return [prompt(num_tokens, i) for i in range(num_prompts)]
    texts = cycle(chain.from_iterable(zip(edit_prompts().values(), plain_prompts().values(), strict=True)))
    return [tokenizer.encode(text)[-num_tokens:] for text in islice(texts, num_prompts)]


def gpu(device: str) -> dict[str, str | None]:
    if device != "cuda":
        return {"gpu": None, "cuda": None, "driver": None}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout if shutil.which(query[0]) else ""
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver": found.partition("\n")[0] or None}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", choices=("tiny", "llama"))
    parser.add_argument("--device", choices=devices, default=devices[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--max-tokens", type=int, help="2 or more; default: 64, with --small 16")
    parser.add_argument("--rounds", type=int, help="default: 3, with --small 1")
    parser.add_argument("--counted-steps", type=int, default=8)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.device == "cpu" and not args.small:
        parser.error("without a CUDA device only small models are measured: use --small")
    args.shape, args.prompt_tokens = (SMALL, 32) if args.small else (LARGE, 256)
    args.max_tokens = args.max_tokens or (16 if args.small else 64)
    args.rounds = args.rounds or (1 if args.small else 3)
    args.max_model_len, args.max_num_seqs = MAX_MODEL_LEN, max(args.batches)
    args.dtype = "bfloat16" if args.device == "cuda" else "auto"
    args.output = args.output or RESULTS / ("gpu_small.json" if args.small else "gpu.json")
    return args


def main() -> None:
    args = arguments()
    setup = {key: value for key, value in vars(args).items() if key != "output"} | {"methods": METHODS}
    record = {"command": command("gpu.py"), "machine": machine(OURS) | gpu(args.device), "setup": setup, "rows": []}
    print(*COLUMNS)
    for model in [args.only] if args.only else ["tiny", "llama"]:
        with tempfile.TemporaryDirectory() as folder:
            llms = load(model, args, Path(folder))
        for batch, temperature in product(args.batches, (0.0, 1.0)):
            prompts = prompts_for(llms["plain"], max(batch, 2), args.prompt_tokens)  # one to edit, one to continue
            groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
            params = SamplingParams(temperature=temperature, seed=0, max_tokens=args.max_tokens, ignore_eos=True)
            for row in measure(llms, groups, params, args):
                row = {"model": model, "batch": batch, "temperature": temperature, **row}
                record["rows"].append(row)
                print(*(f"{row[key]!s:>{len(key)}}" for key in COLUMNS), flush=True)
            write(record, args.output)


if __name__ == "__main__":
    main()
