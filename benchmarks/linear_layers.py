"""Measures linear layers of specdec-kernels in bfloat16: with AMX, without it, and beside those of torch.

    python benchmarks/linear_layers.py     # writes benchmarks/results/linear_layers.json

All ways compute the same product in turn. Figures are medians, in microseconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from measuring import RESULTS, command, machine, write
from torch.nn.functional import linear

from specdec_kernels.cpu.linear import PackedProduct

SIZES = (256, 2048), (1024, 4096), (4096, 4096)
"""Inputs and outputs of the layers."""
NUM_ROWS = (1, 4, 16, 64, 256)
AMX, VECTORS, TORCH = "AMX", "AVX512-BF16", "torch"
NUM_ROUNDS, SECONDS = 15, 0.02
"""Rounds, and about how long each way runs in one."""


Way = Callable[[int], object]
"""Computes a result a number of times."""


def layers(num_in: int, num_out: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    weight = torch.randn(num_out, num_in).bfloat16()
    tiled, vectors = PackedProduct(weight, None), PackedProduct(weight, None)
    vectors.uses_amx = False
    found: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {AMX: tiled} if tiled.uses_amx else {}
    return found | {VECTORS: vectors, TORCH: partial(linear, weight=weight)}


def repeated(compute: Callable[[], object]) -> Way:
    def way(number: int) -> None:
        for _ in range(number):
            compute()

    return way


def medians_us(ways: Mapping[str, Way]) -> dict[str, float]:
    """The median microseconds of each way, which take turns."""
    for way in ways.values():
        way(1)  # which may compile
    numbers = {name: max(1, round(SECONDS / _seconds(way, 5))) for name, way in ways.items()}
    rounds = [{name: _seconds(way, numbers[name]) for name, way in ways.items()} for _ in range(NUM_ROUNDS)]
    return {name: round(1e6 * median(each[name] for each in rounds), 1) for name in ways}


def _seconds(way: Way, number: int) -> float:
    started = perf_counter()
    way(number)
    return (perf_counter() - started) / number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "linear_layers.json")
    args = parser.parse_args()
    rows = []
    for size, num_rows in product(SIZES, NUM_ROWS):
        given = torch.randn(num_rows, size[0]).bfloat16()
        us = medians_us({name: repeated(partial(layer, given)) for name, layer in layers(*size).items()})
        rows.append({"num_in": size[0], "num_out": size[1], "num_rows": num_rows, "us": us})
        print(*rows[-1].values(), flush=True)
    write({"command": command("linear_layers.py"), "machine": machine(), "rows": rows}, args.out)


if __name__ == "__main__":
    main()
