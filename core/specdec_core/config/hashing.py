"""A digest of a configuration that is the same in every process."""

from __future__ import annotations

import json
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from attrs import Attribute, fields, has

from specdec_core.errors import ConfigError

UNHASHED = {"specdec_unhashed": True}
"""`metadata` of an attrs field that does not change what is computed, so `config_hash` leaves it out."""


def config_hash(config: Any) -> str:
    """The sha256, in hex, of an attrs object's class and fields. Equal configurations have the same digest in every
    process. Fields marked UNHASHED, which do not change what is computed, are left out. A field whose check has a
    `hashed_as` is included as what that returns: of a checkpoint's folder, the contents.

    Raises ConfigError if a value has no stable form, or if a file of a checkpoint cannot be read."""
    try:
        text = json.dumps(_plain(config), sort_keys=True, default=_plain)
    except ConfigError:
        raise
    except Exception as error:  # of a class of the caller's own
        raise ConfigError(
            f"a value in {type(config).__name__} cannot be written down for a hash: {type(error).__name__}: {error}. "
            f"Use attrs classes, numbers, text, lists or dicts"
        ) from error
    return sha256(text.encode()).hexdigest()


def content_digest(checkpoint: str | Path) -> Any:
    """Return {name: sha256 of the content} for the files of a checkpoint's folder, so that copies of a folder are
    equal. Subfolders and hidden files are left out. If there is no such folder, returns the name, as of a repository on
    the model hub. Reads every file. Raises ConfigError if one cannot be read."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        return str(checkpoint)
    files = (file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    try:
        return {file.name: _file_digest(file) for file in files}
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read for a hash: {error.strerror}. Make it readable, or give another folder"
        ) from error


def _file_digest(file: Path) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def _plain(value: Any) -> Any:
    """Convert a value of any type to one for `json.dumps`. Raises ConfigError if the value has only
    Python's default repr, since the memory address in it differs between processes."""
    if has(type(value)):
        hashed = [attribute for attribute in fields(type(value)) if not attribute.metadata.get("specdec_unhashed")]
        return {"class": type(value).__qualname__, **{each.name: _hashed(value, each) for each in hashed}}
    for convert in ("to_dict", "item"):  # transformers' configurations, numbers of numpy
        if hasattr(value, convert):
            return getattr(value, convert)()
    if callable(value) and hasattr(value, "__qualname__"):  # its repr would hold an address
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if type(value).__repr__ is object.__repr__:  # type: ignore[comparison-overlap]
        raise ConfigError(
            f"{value!r} has no stable form to make a hash of: use attrs classes, numbers, text, lists or dicts"
        )
    return str(value)


def _hashed(instance: Any, attribute: Attribute[Any]) -> Any:
    value, convert = getattr(instance, attribute.name), getattr(attribute.validator, "hashed_as", None)
    return value if convert is None or value is None else convert(value)
