"""Settings for the whole test suite, applied before the tests import anything."""

import gc
import os
import tempfile
from pathlib import Path

import pytest

# What the caller has set. Interpreters that tests start would inherit it, and so would their output.
for name in ("COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "PYTHONWARNINGS", "SPECDEC_DISABLE", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)

os.environ["HF_HUB_OFFLINE"] = "1"  # the tests never reach the network
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(tempfile.gettempdir(), f"specdec-tests-{os.getuid()}")))
os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: its kernels run on the CPU, in numpy
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: more threads would only wait for each other


def pytest_collection_finish(session: pytest.Session) -> None:
    """After test collection, freeze all objects that imports created (gc.freeze), so that garbage collections skip
    them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else nanobind, which triton is bound with, lists what is not freed at the end


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `nightly`, unless the environment variable SPECDEC_NIGHTLY is set."""
    if not os.environ.get("SPECDEC_NIGHTLY"):
        left_out = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
