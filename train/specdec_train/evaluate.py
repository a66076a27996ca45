"""Measures acceptance lengths of a draft model in training, by running the engine on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specdec_core import LLM, DraftCounts, SamplingParams, Trainee

TEMPERATURES = {"greedy": 0.0, "temperature_1": 1.0}


def acceptance_lengths(
    trainee: Trainee,
    target: str,
    speculative_config: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    dtype: str,
    device: str | None = None,
    seed: int,
    check: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Measure the mean acceptance length (1 + accepted draft tokens per verified draft) for greedy decoding and at
    temperature 1. Returns {"greedy": length, "temperature_1": length}.

    trainee: the draft model in training. It is saved to a temporary folder, from which the engine loads it.
    target: name or folder of the target model.
    speculative_config: the method and its options, without the draft model's folder.
    prompts: the token ids of each prompt.
    num_tokens: number of tokens generated for each prompt.
    seed: of the draws at temperature 1.
    check: called between parts of the work; raises KeyboardInterrupt if the run was interrupted.
    """
    block = 16
    longest = max(map(len, prompts)) + num_tokens
    num_blocks = longest // block + 8  # per prompt, with room for drafts
    with TemporaryDirectory(prefix="specdec-train-") as folder:
        trainee.save(Path(folder))
        with LLM(
            target,
            dtype=dtype,
            device=device,
            skip_tokenizer_init=True,
            max_num_seqs=len(prompts),
            block_size=block,
            max_model_len=longest,
            num_kv_blocks=num_blocks * len(prompts),
            seed=seed,  # requests with seeds of their own would get no sampled drafts
            disable_log_stats=True,
            # Not as much as pays: a draft in training accepts little at first.
            speculative_config={"adaptive_draft_length": False, **speculative_config, "model": folder},
        ) as llm:
            lengths = {}
            for name, temperature in TEMPERATURES.items():
                check()
                lengths[name] = _measure(llm, prompts, num_tokens, temperature)
            check()
            return lengths


def _measure(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float) -> float:
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
    return float(sum((output.speculation for output in outputs), DraftCounts()).acceptance_length)
