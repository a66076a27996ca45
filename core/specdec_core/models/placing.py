"""Places a checkpoint's tensors on the model's device as transformers reads them.

transformers does so by itself if `from_pretrained` gets a `device_map`, but it demands the package accelerate then, of
which it calls nothing for a single device.
"""

from __future__ import annotations

import logging
from dataclasses import is_dataclass, replace
from typing import Any

import torch
import transformers

logger = logging.getLogger(__name__)

LOADER = "_load_pretrained_model"


def placing_on(base: Any, device: torch.device) -> Any:
    """Return a subclass of a transformers model class whose `from_pretrained` places each tensor of the files on
    `device` as soon as it is read, converted and stacked. The class has the original's name, by which transformers
    finds how names in files are converted.

    Buffers that are in no file, such as rotary frequencies, are computed on the CPU, so that they have the same bits
    for every device. Move the loaded model to the device: that moves these buffers, and all tensors if a release of
    transformers loads them in another way than those that this was written for (5.17 to 5.23). The log says so then.
    """

    def place(given: Any) -> Any:
        if is_dataclass(given) and getattr(given, "device_map", ...) is None:
            return replace(given, device_map={"": device})  # type: ignore[type-var]
        return given

    def load(*args: Any, **kwargs: Any) -> Any:
        placed, named = [*map(place, args)], {name: place(each) for name, each in kwargs.items()}
        if all(old is new for old, new in zip([*args, *kwargs.values()], [*placed, *named.values()], strict=True)):
            _log_fallback(base, f"{LOADER} gets no options with an empty device_map")
        return getattr(base, LOADER)(*placed, **named)

    if device.type == "cpu":
        return base
    if not hasattr(base, LOADER):
        _log_fallback(base, f"it has no {LOADER}")
        return base
    return type(base.__name__, (base,), {LOADER: staticmethod(load), "__module__": base.__module__})


def _log_fallback(base: Any, reason: str) -> None:
    logger.info(
        "weights of %s are loaded to the host's memory before they are moved: in transformers %s, %s",
        base.__name__,
        transformers.__version__,
        reason,
    )
