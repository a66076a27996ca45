"""On a GPU, each variant of a Triton kernel that requests launch was launched, and so compiled, when the engine was
built. Kernels are only recorded here: the reference operations compute their results."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specdec_core import LLM, SamplingParams
from specdec_core.ops import REFERENCE
from specdec_testing.pretend_cuda import PretendCuda

gpu = pytest.importorskip("specdec_kernels.gpu", reason="needs triton")
interpreter = pytest.importorskip("triton.runtime.interpreter")

CONFIGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "eagle3": {"eagle_topk": 4, "num_speculative_tokens": 12},
    "draft_model": {"num_speculative_tokens": 3},
}
PROMPTS = [[*range(7)], [*range(50, 57)] * 41]
PARAMS = [SamplingParams(temperature=t, max_tokens=6, ignore_eos=True, seed=seed) for t in (0, 1) for seed in (None, 0)]
Variant = tuple[str, tuple[tuple[str, Any], ...], tuple[torch.dtype, ...]]
"""What Triton compiles once: a kernel with its constants and launch options, and with the dtypes of its tensors."""


class Both:
    """Calls of two objects, or of what they return. The results are those of the second one."""

    def __init__(self, recorded: Any, computing: Any) -> None:
        self._recorded, self._computing = recorded, computing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorded, computed = self._recorded(*args, **kwargs), self._computing(*args, **kwargs)
        is_result = computed is None or isinstance(computed, torch.Tensor | tuple)
        return computed if is_result else Both(recorded, computed)

    def __getattr__(self, name: str) -> Any:
        recorded, computed = getattr(self._recorded, name), getattr(self._computing, name)
        return Both(recorded, computed) if callable(computed) and not isinstance(computed, torch.Tensor) else computed


def forward(linear: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """Of linear layers: core packs no weights of the pretend device's class."""
    gpu.pack_linear(linear.weight, linear.bias)(rows)
    return torch.nn.functional.linear(rows, linear.weight, linear.bias)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Variant]:
    """The variants that are launched."""
    found: set[Variant] = set()

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        parameters = inspect.signature(kernel.fn).parameters
        given = dict(zip(parameters, args, strict=False)) | options
        constants = {name for name, each in parameters.items() if "constexpr" in str(each.annotation)}
        values = tuple((name, value) for name, value in given.items() if name in constants or name not in parameters)
        dtypes = tuple(value.dtype for value in given.values() if isinstance(value, torch.Tensor))
        found.add((kernel.fn.__name__, values, dtypes))

    names = gpu.OPS.keys() - {"fuse_layers", "pack_linear"}
    monkeypatch.setattr(gpu, "OPS", {name: Both(gpu.OPS[name], REFERENCE[name]) for name in names})
    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    monkeypatch.setattr(interpreter.InterpretedFunction, "run", record)
    monkeypatch.setattr(gpu, "supports", lambda name, context: True)
    return found


@pytest.fixture(autouse=True)
def pretend() -> Iterator[None]:
    with PretendCuda():
        yield


@pytest.mark.parametrize(
    ("method", "enforce_eager"),
    [("plain", False), ("ngram", True), ("eagle3", False), ("eagle3", True), ("draft_model", False)],
)
def test_no_variant_is_new_to_the_first_request(method: str, enforce_eager: bool, launched: set[Variant]) -> None:
    config = CONFIGS[method]
    config = config and {"method": method, "adaptive_draft_length": False, **config}
    with LLM(
        "tiny", device="cuda", dtype="float32", speculative_config=config, enforce_eager=enforce_eager,
        max_model_len=300, max_num_seqs=8, num_kv_blocks=64,
    ) as llm:  # fmt: skip
        before = {*launched}
        launched.clear()
        for params in PARAMS:
            llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    assert launched <= before
    assert {"_attend", "_add_parts", "_multiply", "_pick"} <= {name for name, _, _ in launched}
    constants = {each for _, values, _ in before for each in values}
    assert {("IS_WHOLE", False), ("IS_WHOLE", True), ("IS_APART", False), ("IS_APART", True)} <= constants
