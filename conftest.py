"""Settings of the whole test suite, made before anything is imported."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # the tests never reach the network
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: more threads would only wait for each other
