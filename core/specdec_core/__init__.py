"""specdec-core: speculative decoding for PyTorch language models, where every way of drafting is a plugin.

`__init__.pyi` lists the public names. Each name is imported when it is first used. So `import specdec_core` does not
import torch, and neither does importing a plugin's module.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    name.name: str(node.module) for node in _STUB.body if isinstance(node, ast.ImportFrom) for name in node.names
}

__all__ = ["__version__", *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
