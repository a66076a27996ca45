"""Adds this folder to the module search path, so that tests import its helper modules in any import mode of pytest.
Where Triton is not available (it is for Linux), its kernels are not tested."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: its kernels run on the CPU, in numpy
collect_ignore = [] if find_spec("triton") else ["gpu"]

sys.path.insert(0, str(Path(__file__).parent))
