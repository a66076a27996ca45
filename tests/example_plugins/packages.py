"""What the tests of the example plugins share: the packages, and how their methods run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec_core import LLM, SamplingParams

EXAMPLES = sorted(path.parent for path in Path(__file__).parents[2].glob("examples/plugins/*/pyproject.toml"))
RELAXED = "relaxed_acceptance"
PROMPTS = [[3, 4, 3, 4, 5, 5, 40 + i, i] for i in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.8, max_tokens=12, seed=3)


def module_of(example: Path) -> str:
    return example.name.replace("-", "_")


def make_llm(target: Path, config: dict[str, Any] | None = None) -> LLM:
    fixed = config and {"adaptive_draft_length": False, **config}
    return LLM(target, dtype="float32", num_kv_blocks=200, speculative_config=fixed, skip_tokenizer_init=True)


def generate(llm: LLM, params: SamplingParams) -> list[Any]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
