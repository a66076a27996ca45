"""Runs requests in vLLM and prints what they generated: `run_in_vllm.py SETTINGS`, with a Python that has vLLM.

SETTINGS is a JSON object: model, a folder; speculative_config; requests, of each [step in which it comes, id, prompt's
token ids, number of tokens, step in which it is aborted or null]; num_blocks, of 32 tokens, of the KV cache.
Prints {"outputs": {id: token ids}, "metrics": {name: value}}.
"""

import json
import os
import sys
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # vLLM prints to standard output, too
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    settings = json.loads(sys.argv[1])
    llm = LLM(
        model=settings["model"], speculative_config=settings["speculative_config"], dtype="float32", max_model_len=256,
        max_num_seqs=4, max_num_batched_tokens=64, block_size=32, num_gpu_blocks_override=settings["num_blocks"],
        enforce_eager=True, enable_prefix_caching=False, disable_log_stats=False, skip_tokenizer_init=True,
    )  # fmt: skip
    engine, outputs, step, waiting = llm.llm_engine, {}, 0, settings["requests"]
    while waiting or engine.has_unfinished_requests():
        for _, name, prompt, max_tokens, _ in [each for each in waiting if each[0] <= step]:
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        waiting = [each for each in waiting if each[0] > step]
        engine.abort_request([name for _, name, _, _, end in settings["requests"] if end == step])
        for output in engine.step():
            outputs[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    metrics: dict[str, Any] = {each.name: getattr(each, "value", None) for each in llm.get_metrics()}
    print(json.dumps({"outputs": outputs, "metrics": metrics}), file=answers, flush=True)


if __name__ == "__main__":
    main()
