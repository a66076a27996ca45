"""Measures prefix caching in conversations, for each method: time to the first token of the second turn, cached tokens,
acceptance length after a hit, and how often the output is that of an engine without a cache.

    python benchmarks/prefix_cache.py     # writes benchmarks/results/prefix_cache.json

Both engines get the same prompts in turn, one at a time, in bfloat16. The second turn's prompt is the first one, its
output, and a question. A time is the median over conversations of the ratio to that of the engine without a cache.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import heldout
from attrs import define
from measuring import RESULTS, command, machine, write

from specdec_core import LLM, SamplingParams

METHODS = (None, "ngram", "suffix", "draft_model", "eagle3", "mlp_speculator", "medusa", "mtp")
NUM_PROMPT_TOKENS, NUM_DRAFT_TOKENS = 1400, 4
QUESTION = "\n\n\ndef main():\n"
MANAGERS = ("prefix", "paged")


@define
class Answer:
    """Of one turn. acceptance_length: 1 + accepted draft tokens, the mean over drafts; 1 without drafts."""

    token_ids: list[int]
    first_token_s: float
    num_cached: int
    num_drafts: int
    num_accepted: int


def answer(llm: LLM, prompt: list[int], max_tokens: int) -> Answer:
    ended: list[Any] = []
    first: list[float] = []

    def listen(request: Any, pieces: Any) -> None:
        first.append(perf_counter())
        if request.finish_reason is not None:
            ended.append(request)

    started = perf_counter()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    llm.engine.add_request(prompt, params, listen)
    while llm.engine.has_unfinished:
        llm.engine.step()
    (request,) = ended
    counts = request.counts
    return Answer(
        request.output_token_ids,
        first[0] - started,
        request.num_cached_tokens,
        counts.num_drafts,
        counts.num_accepted,
    )


def measure(llms: dict[str, LLM], prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    turns: list[dict[str, Answer]] = []
    num_same = 0
    for prompt in prompts:
        question = llms[MANAGERS[0]].get_tokenizer().encode(QUESTION)
        first = {name: answer(llm, prompt, max_tokens) for name, llm in llms.items()}
        again = [*prompt, *first["paged"].token_ids, *question]
        turns.append({name: answer(llm, again, max_tokens) for name, llm in llms.items()})
        num_same += all(len({tuple(each.token_ids) for each in turn.values()}) == 1 for turn in (first, turns[-1]))
    lengths = {
        name: 1 + sum(turn[name].num_accepted for turn in turns) / max(1, sum(turn[name].num_drafts for turn in turns))
        for name in llms
    }
    return {
        "conversations": len(turns),
        "same_output": num_same,
        "cached_tokens": median(turn["prefix"].num_cached for turn in turns),
        "first_token_of_cold": round(
            median(turn["prefix"].first_token_s / turn["paged"].first_token_s for turn in turns), 3
        ),
        "acceptance_length": {name: round(length, 3) for name, length in lengths.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS / "prefix_cache.json")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": command("prefix_cache.py"), "machine": machine(), "rows": []}
    record |= {"num_prompt_tokens": NUM_PROMPT_TOKENS, "num_speculative_tokens": NUM_DRAFT_TOKENS}
    for method in METHODS:
        config = method and {"method": method, "num_speculative_tokens": NUM_DRAFT_TOKENS}
        with ExitStack() as closing:
            llms = {
                name: closing.enter_context(LLM("tiny", kv_manager=name, speculative_config=config, max_num_seqs=4))
                for name in MANAGERS
            }
            encode = llms["paged"].get_tokenizer().encode
            texts = "\n\n".join(islice(heldout.texts(), 8 * args.conversations))
            token_ids = encode(texts)
            step = (len(token_ids) - NUM_PROMPT_TOKENS) // args.conversations
            prompts = [token_ids[i * step : i * step + NUM_PROMPT_TOKENS] for i in range(args.conversations)]
            row = {"method": method or "plain", **measure(llms, prompts, args.max_tokens)}
        print(*row.values(), flush=True)
        record["rows"].append(row)
        write(record, args.out)


if __name__ == "__main__":
    main()
