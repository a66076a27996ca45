"""`pip install .` installs every package of this repository, each as a distribution of its own.

The distribution `specdec` has no files of its own. It requires the packages in the folders here, by their paths.
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
