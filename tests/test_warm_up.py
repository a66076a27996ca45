"""Building an engine compiles all that requests need."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
from numba.core.dispatcher import Dispatcher
from specdec_core import LLM, SamplingParams

def compiled():
    return {id(each): len(each.overloads) for each in gc.get_objects() if isinstance(each, Dispatcher)}

params = [SamplingParams(temperature=t, max_tokens=8, seed=0) for t in (0, 1)]
from specdec_model_tiny import model_path
drafts = {name: str(model_path() / "drafts" / name) for name in ("draft_model", "eagle", "eagle3")}
configs = [{"method": name, "num_speculative_tokens": 3} for name in ("ngram", "suffix", *drafts)]
configs = [config | {"model": drafts[config["method"]]} if config["method"] in drafts else config for config in configs]
for config in (None, *configs):
    with LLM("tiny", speculative_config=config, max_model_len=512, disable_log_stats=True) as llm:
        before = compiled()
        llm.generate(["for i in range(", "import os\\n" * 60], params, use_tqdm=False)
        print(config, compiled() == before, sum(before.values()) > 4)
"""


def test_requests_compile_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.count("True True") == 6, done.stdout
