"""A draft's checkpoint: its configuration and its tensors, named and measured before they are loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from os.path import isdir
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from attrs import frozen
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from specdec_core.errors import ConfigError
from specdec_core.target import weight_files
from specdec_core.target.load import refuse_revision

CONFIG = "config.json"


@frozen
class Checkpoint:
    """A folder, or a repository of the model hub, with config.json and weights as safetensors or as a file of torch's.

    Nothing but tensors is ever unpickled. All of it raises ConfigError where something is missing, cut off or unsafe.
    """

    name: str
    revision: str | None = None

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json as it is."""
        file = self._find(CONFIG)
        if file is None:
            raise ConfigError(f"there is no {CONFIG} in {self.name!r}: give a folder or repository with a draft model")
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file} cannot be read: {error}. Download or save it again") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{file} holds {type(found).__name__}, not an object: download or save it again")
        return found

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """{name: shape} of all tensors, without loading them."""
        return {name: tuple(tensor.shape) for name, tensor in self._all(outline=True).items()}

    def load(self) -> dict[str, torch.Tensor]:
        """{name: tensor} on the CPU."""
        return self._all(outline=False)

    def _all(self, *, outline: bool) -> dict[str, torch.Tensor]:
        return {name: tensor for file in self._files for name, tensor in self._read(file, outline=outline).items()}

    @cached_property
    def _files(self) -> list[Path]:
        found = self._find(*weight_files.NAMES)
        if found is None:
            raise ConfigError(
                f"there are no weights in {self.name!r}: one of {', '.join(weight_files.NAMES)} must be there"
            )
        if not found.name.endswith(".index.json"):
            return [found]
        try:
            names = sorted(set(json.loads(found.read_text(encoding="utf-8"))["weight_map"].values()))
            inside = [name for name in names if Path(name).name == name]
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise self._unreadable(found, error) from error
        files = {name: self._find(name) for name in inside}
        missing = [name for name in names if files.get(name) is None]
        if missing:
            raise ConfigError(f"{found} names {', '.join(missing)}, which is not there: download or save it again")
        return [file for file in files.values() if file is not None]

    def _read(self, file: Path, *, outline: bool) -> Mapping[str, torch.Tensor]:
        """outline: on the meta device, so that nothing but names and shapes is read."""
        if file.suffix != ".safetensors":
            return self._unpickled(file, "meta" if outline else "cpu")
        try:
            with safe_open(file, framework="pt") as opened:  # it compares the file's size with what the header says
                names = list(opened.keys())
                if outline:
                    return {name: torch.empty(opened.get_slice(name).get_shape(), device="meta") for name in names}
                return {name: opened.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise self._unreadable(file, error) from error

    def _unpickled(self, file: Path, device: str) -> dict[str, torch.Tensor]:
        try:
            # Files of torch before 1.6 are no archives, and cannot be mapped.
            found = torch.load(file, map_location=device, weights_only=True, mmap=is_zipfile(file))
        except UnpicklingError as error:
            raise ConfigError(
                f"{file} holds more than tensors, or is damaged, so for safety it is not loaded: convert it to "
                f"safetensors"
            ) from error
        except Exception as error:  # whatever a broken file makes its reader raise
            raise self._unreadable(file, error) from error
        if not isinstance(found, Mapping) or not all(isinstance(each, torch.Tensor) for each in found.values()):
            raise ConfigError(f"{file} holds no tensors by their names: save a state dict")
        return {str(name): tensor for name, tensor in found.items()}

    def _find(self, *file_names: str) -> Path | None:
        """The first of these that the checkpoint has, downloaded if it must be; None if it has none of them."""
        refuse_revision(self.name, "model", "revision", self.revision)
        if isdir(self.name):
            return next(filter(Path.is_file, (Path(self.name, file_name) for file_name in file_names)), None)
        failure: Exception | None = None
        for file_name in file_names:
            is_local = failure is not None  # asking in vain takes long
            try:
                return Path(hf_hub_download(self.name, file_name, revision=self.revision, local_files_only=is_local))
            except LocalEntryNotFoundError as error:  # the hub cannot be asked, but the next one may have been kept
                failure = error
            except EntryNotFoundError:
                pass
            except Exception as error:  # whatever else the hub makes it raise
                failure = error
                break
        if failure is None:
            return None
        raise ConfigError(
            f"the draft model {self.name!r} is no folder, and {' or '.join(file_names)} of a repository of that name "
            f"cannot be had: {failure}. Check the name, or give a folder"
        ) from failure

    def _unreadable(self, file: Path, error: Exception) -> ConfigError:
        return ConfigError(
            f"the weights in {file} cannot be read: {type(error).__name__}: {error}. Download or save them again"
        )
