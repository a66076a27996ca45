"""Loading a model: its revision, device and dtype, and what is printed and logged meanwhile."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_core import LLM, AsyncLLM, CapacityError, ConfigError, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)

HUB = """
from specdec_core import LLM, CapacityError, ConfigError, SamplingParams

for keywords in ({}, {"revision": "v2"}, {"tokenizer_revision": "v2"}):
    llm = LLM("some/model", **keywords)
    (output,) = llm.generate("a b", SamplingParams(max_tokens=1))
    print(llm.engine.target.info.num_layers, output.prompt_token_ids)
try:
    LLM("some/model", revision="v3")
except ConfigError as error:
    print("revision='v3'" in str(error))
"""


def make_hub(folder: Path) -> Path:
    """Make a cache folder in huggingface_hub's layout that holds two revisions of a model. They differ in number of
    layers and in tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from specdec_model_tiny import model_path

    repository = folder / "models--some--model"
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    for branch, commit, num_layers in (("main", "a" * 40, 1), ("v2", "b" * 40, 2)):
        snapshot = repository / "snapshots" / commit
        config = LlamaConfig(vocab_size=len(tokenizer) + 1, hidden_size=32, intermediate_size=32, num_attention_heads=2,
                             num_hidden_layers=num_layers, max_position_embeddings=64)  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
        tokenizer.add_tokens(["a b"])  # the second revision has one token more
    return folder


def test_revisions(tmp_path: Path) -> None:
    env = {**os.environ, "HF_HUB_CACHE": str(make_hub(tmp_path)), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", HUB], env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    assert run.stdout.splitlines() == ["1 [66, 312]", "2 [8192]", "1 [8192]", "True"]


@pytest.mark.parametrize("key", ["revision", "tokenizer_revision"])
def test_a_folder_has_no_revisions(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}='v2' is one of a repository, but .* is a folder"):
        LLM("tiny", **{key: "v2"})


def test_loading_shows_no_bar_and_leaves_the_setting_alone(capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import set_tqdm_hook

    from specdec_model_tiny import model_path

    bars: list[str] = []

    def marked(factory: Any, args: Any, kwargs: Any) -> Any:
        bars.append(kwargs["desc"])
        return factory(*args, **kwargs)

    before = set_tqdm_hook(marked)
    try:
        LLM("tiny")
        assert not bars
        assert "Loading weights" not in capfd.readouterr().err
        AutoModelForCausalLM.from_pretrained(model_path())
        assert bars == ["Loading weights"], "there is no bar that could have been hidden"
    finally:
        assert set_tqdm_hook(before) is marked


@pytest.mark.parametrize("is_disabled", [False, True])
def test_lines_in_the_log(is_disabled: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_core.api.session.LOG_INTERVAL_S", 1e-9)
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    llm = LLM("tiny", speculative_config=config, disable_log_stats=is_disabled, metrics_prefix="mine")
    with caplog.at_level(logging.INFO, "specdec_core.engine.metrics"):
        llm.generate("x = x + x + x + x + x", GREEDY)
    assert bool(caplog.messages) != is_disabled
    assert all(line.startswith("specdec: ") for line in caplog.messages)


SCRIPT = """if True:
    import logging, sys
    from specdec_core import LLM, SamplingParams
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    def run(**options):
        llm = LLM("tiny", speculative_config=ngram, max_model_len=64, **options)
        llm.generate("x = x + x + x + x + x", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        return llm
    run().close()
    print("set up", file=sys.stderr)
    logging.basicConfig(level=logging.INFO)
    run(disable_log_stats=True).close()
    llm = run(metrics_prefix="mine")
"""


def test_the_last_line_in_a_plain_script() -> None:
    """A script sees no line until it sets up logging. Then it sees the totals of an engine at the script's end, also if
    the engine is not closed and worked for less than ten seconds."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    before, after = done.stderr.split("set up\n")
    assert "tokens" not in before
    (line,) = [line for line in after.splitlines() if "specdec" in line or "mine" in line]
    assert line.startswith("INFO:specdec_core.engine.metrics:specdec: closed after 11 prompt and 8 output tokens in ")
    assert re.search(r"; \d+ drafts, \d+ of \d+ tokens accepted; acceptance rate [\d.]+, per position ", line)


@pytest.mark.parametrize("how", ["close", "with", "garbage", "shutdown"])
def test_the_last_line_comes_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "specdec_core.engine.metrics"):
        if how == "shutdown":
            asyncio.run(_one_answer())
        elif how == "with":
            with LLM("tiny", max_model_len=64) as llm:
                llm.generate("x = x", GREEDY)
                assert not caplog.messages
        else:
            llm = LLM("tiny", max_model_len=64)
            llm.generate("x = x", GREEDY)
            if how == "close":
                llm.close()
                llm.close()
            del llm
            gc.collect()
    (line,) = caplog.messages
    assert line.startswith("specdec: closed after ")


async def _one_answer() -> None:
    async with AsyncLLM("tiny", max_model_len=64) as llm:
        assert [output async for output in llm.generate("x = x", GREEDY)]
        await llm.shutdown()


def test_a_prompt_that_is_too_long_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A prompt that is too long is reported only by CapacityError. LLM hides transformers' warning about indexing
    errors, but direct calls of the tokenizer still show it."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")
    warning = "Token indices sequence length is longer"
    with LLM("tiny", max_model_len=16) as llm:
        tokenizer = llm.get_tokenizer()
        tokenizer.model_max_length = 16
        with pytest.raises(CapacityError, match="leaves no room"):
            llm.generate("word " * 20, GREEDY)
        assert warning not in caplog.text
        tokenizer("word " * 20)
        assert warning in caplog.text


def test_names_of_dtypes(tmp_path: Path) -> None:
    found = [LLM("tiny", dtype=name, max_model_len=32).engine.target.info.dtype for name in ("half", "float")]
    assert found == [torch.float16, torch.float32]


def test_the_slow_tokenizer_is_asked_for() -> None:
    llm = LLM("tiny", tokenizer_mode="slow")
    assert llm.generate("x", GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("abacus", "device='abacus' is not available here: give 'cpu'"),
        ("cuda:99", "device='cuda:99' is not available here"),
        pytest.param(
            "cuda",
            "device='cuda' is not available here: this build of torch has no CUDA. Give 'cpu', or install one with it",
            marks=pytest.mark.skipif(torch.version.cuda is not None, reason="needs a build of torch without CUDA"),
        ),
        ("meta", "device='meta' is not supported: give 'cpu'"),
    ],
)
def test_devices_that_are_none(device: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM("tiny", device=device)


def test_a_length_that_leaves_no_room_for_output_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len=1 is too small: give an integer from 2"):
        LLM("tiny", max_model_len=1)


def test_a_device_by_name() -> None:
    with LLM("tiny", device="cpu", max_model_len=64) as llm:
        assert llm.engine.target.info.device.type == "cpu"
