"""Fixtures of the losslessness tests: models, transformers' outputs for them, and LLMs that can run test-only
proposers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside this file, however pytest imports it

import merged_draft
import random_tree
import reference
import table_draft
from lasting_ranks import lasting_ranks
from tiny_models import save_tiny_model

from specdec_core.engine import design

MODELS = ["llama", pytest.param("qwen3", marks=pytest.mark.nightly), "embedded"]
SPECS = (random_tree.RANDOM_TREE, table_draft.TABLE_DRAFT, merged_draft.MERGED_DRAFT)
PROMPT_LENGTHS = [1, 23, 60, 2, 7, 8, 15, 16, 17, 31, 32, 33, 5, 48, 3, 11]


class PluginsForTests:
    """Stands in for `Plugins`: the installed plugins and the test-only proposers."""

    def __init__(self) -> None:
        from specdec_core import Plugins

        self._installed = Plugins.load()
        self._added = {spec.name: spec for spec in SPECS}

    def proposer(self, name: str) -> Any:
        return self._added[name] if name in self._added else self._installed.proposer(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._installed, name)


def _make_llm(
    model_dir: Path, method: str | list[Any] | None, *, options: dict[str, Any] | None = None, **kw: Any
) -> Any:
    """Make an LLM.

    method: the draft method, or several as in speculative_config; None: plain decoding.
    options: the method's own keys of speculative_config.
    kw: keyword arguments of LLM.
    """
    from specdec_core import LLM

    settings = {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "block_size": 16,
        "num_kv_blocks": 256,
        "skip_tokenizer_init": True,
        "seed": 0,
        **kw,
    }
    if method is not None:
        num_tokens = {"random_tree": 32, "merged": 24, "table": 9}.get(str(method), 5)
        settings["speculative_config"] = {"method": method, "num_speculative_tokens": num_tokens, **(options or {})}
    return LLM(str(model_dir), plugins=PluginsForTests(), **settings)


@pytest.fixture(scope="session")
def make_llm() -> Callable[..., Any]:
    return _make_llm


@pytest.fixture(scope="session")
def generate() -> Callable[..., list[Any]]:
    """Return a function that takes an LLM, prompts, and one SamplingParams for all prompts or one for each. It returns
    one CompletionOutput per prompt."""

    def run(llm: Any, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
        outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    return run


@pytest.fixture(scope="session")
def counter() -> Callable[[Any, str], float]:
    """Return a function that takes an LLM and a metric's name without the prefix "vllm:spec_decode_". It returns the
    metric's value from `llm.get_metrics()`."""

    def read(llm: Any, name: str) -> float:
        return next(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:spec_decode_{name}")

    return read


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Run torch on one thread, on which models of this size run fastest, above all if other processes use the same CPU
    cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def kv_manager() -> Iterator[str]:
    """The name of the KV manager that the tests use. The environment variable SPECDEC_KV_MANAGER sets it for the whole
    suite, except for tests that choose a KV manager themselves."""
    name = os.environ.get("SPECDEC_KV_MANAGER", "paged")
    choose = design._kv_manager

    def chosen(config: Any, plugins: Any) -> Any:
        return choose(evolve(config, kv_manager=name) if config.kv_manager == "paged" else config, plugins)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(design, "_kv_manager", chosen)
        yield name


@pytest.fixture(scope="session")
def lasting() -> Iterator[None]:
    """The processes of ranks stay from one LLM to the next, if it was closed."""
    with lasting_ranks():
        yield


@pytest.fixture(autouse=True)
def clean_records() -> Iterator[None]:
    random_tree.forget_everything()
    yield
    random_tree.forget_everything()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny_models")
    return {family: save_tiny_model(family, folder / family) for family in ("llama", "qwen3")}


@pytest.fixture(scope="session", params=MODELS)
def model_dir(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Path:
    if request.param != "embedded":
        return tiny_models[request.param]
    if find_spec("specdec_model_tiny") is None:
        pytest.skip("specdec-model-tiny, the embedded model, is not installed")
    from specdec_model_tiny import model_path

    folder = Path(model_path())
    if not (folder / "config.json").exists():
        pytest.skip(f"the embedded model has no weights yet in {folder}")
    return folder


@pytest.fixture(scope="session")
def target(model_dir: Path) -> Any:
    """The model of `model_dir`, loaded by transformers."""
    return reference.load(model_dir)


@pytest.fixture(scope="session")
def prompts(target: Any) -> list[list[int]]:
    return reference.prompts(target.config.vocab_size, PROMPT_LENGTHS, seed=1)


@pytest.fixture(scope="session")
def references(target: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations of the prompts by transformers. The two highest logits are never so close that rounding
    could swap them."""
    found = [reference.greedy(target, prompt, reference.NUM_TOKENS) for prompt in prompts]
    assert min(r.margin for r in found) > 2e-5, "a near tie: choose other prompts"
    return [r.token_ids for r in found]
