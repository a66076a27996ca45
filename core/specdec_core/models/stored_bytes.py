"""The size of a checkpoint's weight files, without reading the weights."""

from __future__ import annotations

from os.path import isdir
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from specdec_core.errors import CompatibilityError, ConfigError, reason
from specdec_core.models.checkpoint import MOST_FAULTS, WEIGHT_FILES, indexed_files

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""safetensors' names of the dtypes of weights that need no scales."""


def stored_bytes(path: str, revision: str | None = None, *, is_quantized: bool = True) -> int | None:
    """Return the size in bytes of all weight files of a checkpoint on this machine. None for a checkpoint of the model
    hub that is not completely in the local cache.

    path: a folder, or a name on the model hub.
    is_quantized: whether weights may be other than floating-point numbers. This is checked in safetensors files only.

    Raises ConfigError if a folder has no weight files, or if a file is missing or cut off. Raises CompatibilityError if
    weights are quantized that may not be: without their scales, the model would compute nonsense.
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
        wrong: list[str] = []
        for file in files:
            if file.suffix == ".safetensors":
                opened: Any
                with safe_open(file, framework="numpy") as opened:  # compares the file's size with the header
                    dtypes = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
                wrong += [f"{name} {dtype}" for name, dtype in dtypes.items() if dtype not in FLOATS]
        wrong = [each for each in wrong if not is_quantized and ".weight " in each]  # buffers may be integers
        if wrong:
            raise CompatibilityError(
                f"config.json of {path!r} has no quantization_config, but its weights are quantized, or no "
                f"floating-point numbers: {', '.join(sorted(wrong)[:MOST_FAULTS])}. Use a checkpoint in float32, "
                f"float16 or bfloat16, or one with its quantization_config"
            )
        return sum(file.stat().st_size for file in files)
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise ConfigError(
            f"the weights of {path!r} cannot be loaded: {type(error).__name__}: {reason(error)}. Download or save them "
            f"again"
        ) from error
