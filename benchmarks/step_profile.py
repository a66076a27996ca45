"""Measures how much each optimization speeds up the steps of plain decoding on a CPU.

    python benchmarks/step_profile.py

A variant is an engine with some of the optimizations. Each of VARIANTS has one optimization more than the variant
before it. The result of a variant is the milliseconds per step. One process holds the engines of all variants. The
engines step in turn, so that other load on the machine affects all. The model is a Llama of 82M random
weights in bfloat16, after prompts of 465 tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from attrs import evolve, frozen
from measuring import RESULTS, machine
from random_models import prompt, save_llama

from specdec_core import Plugins, SamplingParams
from specdec_core.config.engine import EngineConfig
from specdec_core.engine.engine import Engine
from specdec_core.models import model as target_model
from specdec_core.plugins.operations import OfferedOps

NUM_THREADS = 2
PROMPT_TOKENS = 465
BATCHES = (1, 4, 16)
NUM_STEPS = 60
NUM_WARM = 10
MOST_PREFILLS = 20
ATTENTION = ("paged_attention", "store_kv")


@frozen
class Variant:
    name: str
    linears: str  # "plain", "packed" or "shared"
    ops: tuple[str, ...] = ()  # operations from specdec-kernels; the others are core's


VARIANTS = (
    Variant("reference", "plain"),
    Variant("packed", "packed"),
    Variant("shared inputs", "shared"),
    Variant("attention", "shared", ATTENTION),
    Variant("norms", "shared", (*ATTENTION, "rms_norm")),
    Variant("rotary", "shared", (*ATTENTION, "rms_norm", "rotary")),
    Variant("linear layers", "shared", (*ATTENTION, "rms_norm", "rotary", "pack_linear")),
    Variant("fused layers", "shared", (*ATTENTION, "rms_norm", "rotary", "pack_linear", "fuse_layers")),
)


class SomeOps:
    """A stand-in for the installed plugins that offers only some of their compiled operations.

    names: names of the operations to offer.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._installed = names, Plugins.load()

    def ops(self, device: str) -> OfferedOps:
        offers = [
            evolve(offer, spec=evolve(offer.spec, ops={name: offer.spec.ops[name] for name in self._names}))
            for offer in self._installed.ops(device).offers
        ]
        return OfferedOps(tuple(offers))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._installed, name)


@contextmanager
def packing(linears: str) -> Iterator[None]:
    """Within this context, models are loaded with the given kind of linear layers.

    linears: "plain": the layers of transformers; "packed": layers whose weights are packed for oneDNN; "shared": packed
        layers, where layers that read the same input (such as q, k and v) are also fused into one.
    """
    original = target_model.pack_linears
    chosen = {
        "plain": lambda model, pack, groups: {},
        "packed": lambda model, pack, groups: original(model, pack),
        "shared": original,
    }
    target_model.pack_linears = chosen[linears]
    try:
        yield
    finally:
        target_model.pack_linears = original


class Timed:
    """Wraps a function and adds up the time spent in its calls, in `seconds`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.seconds = function, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = perf_counter()
        result = self._function(*args, **kwargs)
        self.seconds += perf_counter() - started
        return result


def engine_of(variant: Variant, folder: str) -> Engine:
    config = EngineConfig(
        model=folder, dtype="bfloat16", max_model_len=1024, max_num_seqs=max(BATCHES), num_kv_blocks=640
    )
    plugins: Any = SomeOps(variant.ops)
    with packing(variant.linears):
        engine = Engine.build(config, plugins)
    engine.target.forward = Timed(engine.target.forward)  # type: ignore[method-assign]
    return engine


def measure(engines: Mapping[str, Engine], batch: int) -> dict[str, list[tuple[float, float]]]:
    """Run the engines in turn, each on the same `batch` requests, and time their decode steps.

    engines: {name of the variant: its engine}.
    Returns for each variant a pair per step: the milliseconds in total, and those outside of the target's forward pass.
    """
    params = SamplingParams(temperature=0, max_tokens=NUM_WARM + NUM_STEPS + MOST_PREFILLS, ignore_eos=True)
    for engine in engines.values():
        for i in range(batch):
            engine.add_request(prompt(PROMPT_TOKENS, i), params)
        while engine.step().num_decode_requests < batch:  # until the last prompt is computed
            pass
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for _ in range(NUM_WARM + NUM_STEPS):
        for name, engine in engines.items():
            forward: Any = engine.target.forward
            forward.seconds, started = 0.0, perf_counter()
            engine.step()
            seconds = perf_counter() - started
            steps[name].append((round(seconds * 1e3, 3), round((seconds - forward.seconds) * 1e3, 3)))
    for engine in engines.values():
        while engine.has_unfinished:
            engine.step()
    return {name: times[NUM_WARM:] for name, times in steps.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "step_profile.json")
    args = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    results: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_llama(Path(folder))
        engines = {variant.name: engine_of(variant, folder) for variant in VARIANTS}
        for batch in BATCHES:
            results[str(batch)] = measure(engines, batch)
            print(
                batch,
                {name: round(median(ms for ms, _ in each), 2) for name, each in results[str(batch)].items()},
                flush=True,
            )
    medians = {
        batch: {name: median(ms for ms, _ in steps) for name, steps in found.items()}
        for batch, found in results.items()
    }
    shares = {
        batch: {name: median(outside / ms for ms, outside in steps) for name, steps in found.items()}
        for batch, found in results.items()
    }
    setup = {"context_tokens": PROMPT_TOKENS, "dtype": "bfloat16", "steps": NUM_STEPS}
    written = {
        "command": "python benchmarks/step_profile.py",
        "machine": machine(),
        "setup": setup,
        "median_ms": medians,
        "median_share_outside_forward": shares,
        "ms_and_ms_outside_forward": results,
    }
    args.output.write_text(json.dumps(written) + "\n")


if __name__ == "__main__":
    main()
