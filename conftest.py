"""Settings of the whole test suite, made before anything is imported."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # the tests never reach the network
os.environ["TOKENIZERS_PARALLELISM"] = "false"
