"""Compiles functions with numba, and keeps the machine code where every checkout and environment of a user finds it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def compiled(signature: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function with numba's njit. The package that uses it must depend on numba.

    The machine code is cached in the user's cache directory, or in the folder that NUMBA_CACHE_DIR names. It is found
    again by whatever installation has the same package, down to the last source file: a change anywhere in the package
    compiles its functions anew. Where the folder cannot be written, each process says so once, and compiles.

    signature: the argument types, in numba's words. The function is compiled when it is defined. None: it is compiled
        when it is first called with arguments of other types.
    options: of njit.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        from numba import njit

        dispatcher = njit(**options)(function)
        try:
            dispatcher._cache = _cache_class()(function)
        except (RuntimeError, ImportError, AttributeError):  # no folder, or a numba with other names inside
            logger.debug("the machine code of %s is not cached", function.__qualname__, exc_info=True)
        if signature is not None:
            dispatcher.compile(signature)
            dispatcher.disable_compile()
        return dispatcher

    return decorate


@cache
def _cache_class() -> type:
    from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

    class Locator(_CacheLocator):  # type: ignore[misc]
        """Where numba keeps a function's machine code, and what tells whether it is still that of the source."""

        def __init__(self, function: Callable[..., Any], file: Path) -> None:
            self._line = function.__code__.co_firstlineno
            package = _package(file)
            self._digest = _digest(package)
            self._folder = _cache_folder() / f"{package.name}-{self._digest[:16]}-{_compiler()}"

        def get_cache_path(self) -> str:
            return str(self._folder)

        def get_source_stamp(self) -> str:
            return self._digest

        def get_disambiguator(self) -> str:
            return str(self._line)

        @classmethod
        def from_function(cls, py_func: Callable[..., Any], py_file: str) -> Locator | None:
            """Return the locator of a function, or None if it has no file or its folder cannot be written."""
            if not Path(py_file).exists():
                return None
            locator = cls(py_func, Path(py_file))
            try:
                locator.ensure_cache_path()
            except OSError as error:
                _announce_uncached(_cache_folder(), error.strerror)  # its text may name another file each time
                return None
            return locator

    class Files(CompileResultCacheImpl):  # type: ignore[misc]
        _locator_classes = (Locator,)

    class Cache(FunctionCache):  # type: ignore[misc]
        _impl_class = Files

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            found = super().load_overload(sig, target_context)
            if found is None:
                _announce()
            return found

    return Cache


@cache
def _announce() -> None:
    """Say once in a process that something is compiled."""
    logger.warning("specdec: compiling kernels for this processor, once for each version; this takes up to a minute")


@cache
def _announce_uncached(folder: Path, why: str | None) -> None:
    """Say once in a process that each process compiles."""
    logger.warning(
        "specdec: each process compiles its kernels, for up to a minute, because the folder of compiled code, %s, "
        "cannot be written (%s): set NUMBA_CACHE_DIR to a folder that can be written",
        folder,
        why,
    )


def _cache_folder() -> Path:
    from numba import config
    from numba.misc.appdirs import AppDirs

    return Path(config.CACHE_DIR or AppDirs(appname="specdec", appauthor=False).user_cache_dir) / "specdec-kernels"


def _compiler() -> str:
    """The versions that machine code depends on. numba overwrites code of another one."""
    return "-".join(version(name) for name in ("numba", "llvmlite"))


def _package(file: Path) -> Path:
    """Return the folder of the outermost package that a module is in, or the module's own folder."""
    folder = file.resolve().parent
    while (folder.parent / "__init__.py").exists():
        folder = folder.parent
    return folder


@cache
def _digest(package: Path) -> str:
    """Return the SHA-256 of all Python files of a package."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()
