"""The size of a checkpoint's weight files, without reading the weights."""

from __future__ import annotations

from os.path import isdir
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from specdec_core.errors import ConfigError, reason
from specdec_core.models.checkpoint import WEIGHT_FILES, indexed_files


def stored_bytes(path: str, revision: str | None = None) -> int | None:
    """Return the size in bytes of all weight files of a checkpoint on this machine. None for a checkpoint of the model
    hub that is not completely in the local cache.

    path: a folder, or a name on the model hub.

    Raises ConfigError if a folder has no weight files, or if a file is missing or cut off.
    """
    is_folder = isdir(path)
    kept = (Path(path, n) if is_folder else try_to_load_from_cache(path, n, revision=revision) for n in WEIGHT_FILES)
    found = next((Path(file) for file in kept if isinstance(file, str | Path) and Path(file).is_file()), None)
    if found is None:
        if not is_folder:
            return None
        raise ConfigError(f"there are no weights in {path!r}: one of {', '.join(WEIGHT_FILES)} must be there")
    try:
        files = [found]
        if found.name.endswith(".index.json"):
            files = [found.parent / name for name in indexed_files(found)]
            if not is_folder and not all(file.exists() for file in files):
                return None
        for file in files:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="numpy"):  # reads the header, and compares the file's size with it
                    pass
        return sum(file.stat().st_size for file in files)
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise ConfigError(
            f"the weights of {path!r} cannot be loaded: {type(error).__name__}: {reason(error)}. Download or save them "
            f"again"
        ) from error
