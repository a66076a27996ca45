"""Adds this folder to the module search path, so that tests import its helper modules in any import mode of pytest."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
