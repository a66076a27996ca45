"""`pip install .` installs every package of this repository, each as a separate distribution.

The distribution `specdec` contains no code. It only requires the other packages, by the paths of their folders.
"""

import glob
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent.resolve()
PROJECTS = sorted(glob.glob("*/pyproject.toml", root_dir=ROOT) + glob.glob("*/*/pyproject.toml", root_dir=ROOT))
if not PROJECTS:
    raise SystemExit(f"No folder in {ROOT} has a pyproject.toml. Build specdec in a clone of its repository.")


def requirement(project: Path) -> str:
    name = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["name"]
    return f"{name} @ {project.parent.as_uri()}"


setup(install_requires=[requirement(ROOT / project) for project in PROJECTS])
