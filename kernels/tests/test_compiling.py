"""The compiled operations without a cache folder, with numba's simplest threading layer, and on other devices."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from llvmlite import binding

import specdec_kernels
from specdec_core import KVLayout, OpsContext, Plugins, compiled
from specdec_core.ops import OUTSIDE_OF_LAYERS, REFERENCE, resolve
from specdec_kernels.cpu import OPS, lanes

CPU = torch.device("cpu")
LEFT = {*OUTSIDE_OF_LAYERS} - {"draw"}
"""Operations that it does not have for a CPU."""


def test_it_is_found_as_a_plugin() -> None:
    assert entry_points(group="specdec")["kernels"].load() is specdec_kernels
    assert set(specdec_kernels.specdec_ops("cpu").ops) == set(REFERENCE) - LEFT
    assert specdec_kernels.specdec_ops("mps") is None


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_it_has_operations_for_gpus() -> None:
    assert set(specdec_kernels.specdec_ops("cuda").ops) == set(REFERENCE)


def resolved(dtype: torch.dtype, dtype_of_cache: torch.dtype) -> dict:
    layout = KVLayout(2, 1, 64, 64, dtype_of_cache)
    return resolve(Plugins.load().ops("cpu"), [OpsContext(CPU, dtype, layout)])


@pytest.mark.parametrize("dtype", lanes.NEEDED, ids=str)
def test_it_is_used_for_the_types_that_it_takes(dtype: torch.dtype) -> None:
    needing = () if lanes.is_supported(dtype) else ("pack_linear", "fuse_layers")
    assert resolved(dtype, dtype) == OPS | {name: REFERENCE[name] for name in (*LEFT, *needing)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_other_types_are_left_to_the_reference(dtype: torch.dtype) -> None:
    assert resolved(dtype, dtype) == REFERENCE | {"draw": OPS["draw"]}
    mixed = resolved(torch.float32, dtype)
    assert [mixed[name] for name in ("paged_attention", "store_kv")] == [
        REFERENCE[name] for name in ("paged_attention", "store_kv")
    ]


def test_it_compiles_where_nothing_can_be_cached() -> None:
    """A function is compiled even if numba cannot cache the result, here because the function has no file."""
    names: dict = {}
    exec("def double(numbers):\n    numbers[:] *= 2", names)
    numbers = np.arange(3.0)
    compiled()(names["double"])(numbers)
    assert numbers.tolist() == [0, 2, 4]


def test_listing_plugins_compiles_nothing() -> None:
    script = "import sys, specdec_kernels; assert not {'torch', 'numba'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("dropped", ["avx512bf16", pytest.param("avx512f", marks=pytest.mark.nightly)])
def test_it_runs_without_the_newest_instructions(dropped: str, tmp_path: Path) -> None:
    script = """
        import torch
        from passes import Request, make_pass
        from specdec_core.ops import REFERENCE
        from specdec_kernels.cpu import OPS

        for dtype in (torch.float32, torch.bfloat16):
            made = make_pass([Request(30, 20), Request(40, 1, (-1, 0, -1))], dtype=dtype)
            found, expected = (ops["paged_attention"](*made.features, 0.3) for ops in (OPS, REFERENCE))
            torch.testing.assert_close(found, expected, rtol=2**-6, atol=2e-2)
            torch.testing.assert_close(*(ops["rms_norm"](made.query, torch.ones(16, dtype=dtype), 1e-5)
                                         for ops in (OPS, REFERENCE)))
        rows, weight = torch.randn(23, 64), torch.randn(200, 64)
        torch.testing.assert_close(OPS["pack_linear"](weight, None)(rows), rows @ weight.T, rtol=1e-4, atol=1e-4)
        print("ran")
    """
    features = (name for name, has in binding.get_host_cpu_features().items() if has and not name.startswith(dropped))
    if dropped == "avx512f":
        features = (name for name in features if "avx512" not in name)
    settings = {
        "NUMBA_CPU_NAME": binding.get_host_cpu_name(),
        "NUMBA_CPU_FEATURES": ",".join([*(f"+{name}" for name in features), f"-{dropped}"]),
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, env=os.environ | settings, capture_output=True
    )
    assert ran.stdout == b"ran\n"


def test_threads_may_share_numbas_simplest_threading_layer() -> None:
    """Several threads can run attention at the same time on the threading layer workqueue, which kills the process if
    two threads are in a parallel loop at once."""
    script = """
        from threading import Thread
        import numba, torch
        from passes import Request, make_pass
        from specdec_kernels.cpu import OPS

        def run():
            torch.set_num_threads(2)
            for seed in range(40):
                made = make_pass([Request(900, 1, (-1, 0, -1))] * 4, seed=seed)
                for _ in range(10):
                    OPS["paged_attention"](*made.features, 0.3)

        threads = [Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert numba.threading_layer() == "workqueue"
    """
    settings = {"NUMBA_THREADING_LAYER": "workqueue", "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=os.environ | settings)


def run_in_parallel(**settings: str) -> subprocess.CompletedProcess[str]:
    script = """
        from specdec_core import ConfigError
        from specdec_kernels.cpu.threads import in_parallel

        try:
            in_parallel(lambda: print("ran"))
        except ConfigError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, check=True, env=os.environ | settings, capture_output=True, text=True)


def test_a_threading_layer_that_numba_does_not_know_is_refused() -> None:
    found = run_in_parallel(NUMBA_THREADING_LAYER="foo").stdout
    assert found.startswith("NUMBA_THREADING_LAYER='foo' cannot be used: ")
    assert found.endswith("give 'omp' or 'workqueue', or leave it unset\n")
    assert run_in_parallel(NUMBA_THREADING_LAYER="workqueue").stdout == "ran\n"


@pytest.mark.parametrize("settings", [{"NUMBA_CACHE_DIR": "/dev/null/x"}, {"XDG_CACHE_HOME": "/dev/null"}], ids=str)
def test_a_cache_that_cannot_be_written_is_announced_once(settings: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(
        "from specdec_core import compiled\n\n"
        "@compiled()\ndef one():\n    return 1\n\n"
        "@compiled()\ndef two():\n    return 2\n\n"
        "print(one() + two())\n"
    )
    env = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"} | settings
    ran = subprocess.run(
        [sys.executable, "-c", "import functions"], check=True, env=env, capture_output=True, text=True, cwd=tmp_path
    )
    assert ran.stdout == "3\n"
    (line,) = ran.stderr.splitlines()
    assert "cannot be written" in line
    assert "/dev/null" in line
    assert line.endswith("set NUMBA_CACHE_DIR to a folder that can be written")
