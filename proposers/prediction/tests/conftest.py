"""Puts the tests' folder on sys.path, so that tests can import helper modules from it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
