"""Settings of the whole test suite, made before anything is imported."""

import os

# What the caller has set for itself. Interpreters that tests start would take it over, and so would their output.
for name in ("COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "PYTHONWARNINGS", "SPECDEC_DISABLE", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)

os.environ["HF_HUB_OFFLINE"] = "1"  # the tests never reach the network
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: more threads would only wait for each other
