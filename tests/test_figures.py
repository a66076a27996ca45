"""What the README says was measured is what was measured."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_readme_says_what_the_results_say() -> None:
    subprocess.run([sys.executable, ROOT / "benchmarks" / "readme.py", "--check"], check=True)
