"""Virtual environments that share this environment's third-party packages, but not its specdec packages."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def link_third_party(folder: Path) -> Path:
    """Link all packages of this environment into `folder`, except specdec's packages and .pth files.

    Adding this environment's site-packages to sys.path instead would expose the metadata of specdec packages that are
    installed in editable mode.
    """
    for path in sys.path:
        if Path(path).name in {"site-packages", "dist-packages"}:
            for entry in Path(path).iterdir():
                ours = entry.name.lower().startswith(("specdec", "__editable__")) or entry.suffix == ".pth"
                if not ours and not (folder / entry.name).exists():
                    (folder / entry.name).symlink_to(entry)
    return folder


class Environment:
    def __init__(self, folder: Path, third_party: Path):
        venv.create(folder)  # without pip, which is among the third-party packages
        self.folder = folder
        self.bin = folder / "bin"
        site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
        (site / "third_party.pth").write_text(f"{third_party}\n")

    def run(self, *command: str | Path, cwd: Path | None = None) -> str:
        """Run a command and assert that it succeeds. Returns its standard output.

        cwd: the working directory; None: the folder that contains the environment.
        """
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTEST_", "PYTHON"))}
        alone = {"PIP_CONFIG_FILE": os.devnull, "PYTHONNOUSERSITE": "1", "PATH": f"{self.bin}:{os.environ['PATH']}"}
        result = subprocess.run(
            command, cwd=cwd or self.folder.parent, env=kept | alone, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout

    def install(self, *arguments: str | Path, cwd: Path | None = None) -> None:
        """Run pip install with these arguments, without network access."""
        pip = [self.bin / "python", "-m", "pip", "install", "--no-index", "--disable-pip-version-check"]
        self.run(*pip, *arguments, cwd=cwd)
