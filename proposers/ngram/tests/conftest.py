"""Puts the tests' folder on the path, so that they can import helpers in it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
