"""The files that a checkpoint's weights are in, looked at without reading the weights."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from specdec_core.errors import ConfigError

NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""In the order in which transformers looks for them."""


def stored_bytes(path: str, revision: str | None = None) -> int | None:
    """The size of all weight files of a folder, or of a model of the hub that was downloaded before; else None.

    Raises ConfigError if a folder has none, or one is missing or cut off.
    """
    found = next(filter(None, (_find(path, name, revision) for name in NAMES)), None)
    if found is None:
        if not Path(path).is_dir():
            return None
        raise ConfigError(f"there are no weights in {path!r}: one of {', '.join(NAMES)} must be there")
    try:
        files = [found]
        if found.name.endswith(".index.json"):
            names = set(json.loads(found.read_text(encoding="utf-8"))["weight_map"].values())
            files = [found.parent / name for name in sorted(names)]
            if not Path(path).is_dir() and not all(file.exists() for file in files):
                return None
        return sum(_checked_bytes(file) for file in files)
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise ConfigError(
            f"the weights of {path!r} cannot be loaded: {type(error).__name__}: {error}. Download or save them again"
        ) from error


def _find(path: str, name: str, revision: str | None) -> Path | None:
    if Path(path).is_dir():
        return file if (file := Path(path, name)).is_file() else None
    cached = try_to_load_from_cache(path, name, revision=revision)
    return Path(cached) if isinstance(cached, str) else None


def _checked_bytes(file: Path) -> int:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="numpy"):  # reads the header, and compares the file's size with it
            pass
    return file.stat().st_size
