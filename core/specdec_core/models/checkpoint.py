"""Reads the checkpoint of a draft model or draft head: the shapes of its tensors without loading weights, and the
weights without running pickled code."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from os.path import isdir, isfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar
from zipfile import is_zipfile

import torch
from attrs import NOTHING, frozen
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import nn

from specdec_core.config.fields import Check, shown
from specdec_core.contracts.target import TargetInfo
from specdec_core.errors import CompatibilityError, ConfigError, SpecdecError, reason
from specdec_core.models.hub import unreachable
from specdec_core.models.load import refuse_revision
from specdec_core.models.sizes import wrong_sizes

CONFIG = "config.json"
MOST_FAULTS = 10
"""How many faults of a checkpoint an error message lists."""
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Of weights that need no scales."""
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Names of weight files, in the order in which transformers looks for them."""
SUFFIXES = (".safetensors", ".bin", ".pt")

Shapes = Mapping[str, tuple[int, ...]]
Rename = Callable[[str], str | None]
"""Maps a tensor's name in a checkpoint to its name in a module; None if it does not belong to the module."""
Module = TypeVar("Module", bound=nn.Module)
Read = Callable[[Collection[str]], dict[str, torch.Tensor]]
"""Reads the tensors of these names from a file."""


@frozen
class _Key:
    """Stands in for the attribute of an attrs class, for a `Check`."""

    name: str


def config_value(config: Mapping[str, Any], key: str, check: Check, default: Any = NOTHING) -> Any:
    """Return a value of a config.json; `default`, if given, where it is missing or null. Call it within
    `Checkpoint.reading_config`, so that the error names the checkpoint.

    Raises CompatibilityError for a value that `check` refuses.
    """
    value = config.get(key)
    if value is None and default is not NOTHING:
        return default
    try:
        check.validate(config, _Key(key), value)  # type: ignore[arg-type]
    except ConfigError as error:
        found = shown(value) if key in config else "missing"
        raise CompatibilityError(
            f"{key} in config.json is {found}, and must be {check.allowed}: download or save it again"
        ) from error
    return value


def check_target_sizes(target: TargetInfo, sizes: Mapping[str, tuple[Any, int]]) -> None:
    """Raise CompatibilityError if a head was trained for a target of other sizes. Call it within
    `Checkpoint.reading_config`, so that the error names the checkpoint.

    sizes: by what they are of, such as "vocab_size", the head's and the target's; the head's may be None: unknown.
    """
    for what, (its, wanted) in sizes.items():
        if its is not None and its != wanted:
            raise CompatibilityError(
                f"it was trained for another target: {what} is {shown(its)}, and this target's is {wanted}. Use one "
                f"that was trained for {target.model!r}"
            )


@frozen
class Checkpoint:
    """The config.json and the weights of a draft model or draft head, in a folder or a repository of the model hub. The
    weights are in safetensors files, or in files written by torch.save.

    A proposer reads the tensors' shapes in its method `plan` and the weights in its method `build`. Use the same
    Checkpoint object in these two methods: it opens each file only once. Unpickling is restricted to tensors. All
    methods raise ConfigError if a file is missing, cut off or unsafe.
    """

    name: str
    revision: str | None = None
    own_files: tuple[str, ...] = ()  # names of weight files that count before WEIGHT_FILES; the first that is there

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of the checkpoint's config.json."""
        file = self._find(CONFIG)
        if file is None:
            raise ConfigError(f"there is no {CONFIG} in {self.name!r}: give a folder or repository with a draft model")
        try:
            found = json.loads(file.read_text(encoding="utf-8"), parse_constant=_constant)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file} cannot be read: {reason(error)}. Download or save it again") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{file} holds {type(found).__name__}, not an object: download or save it again")
        return found

    @contextmanager
    def reading_config(self) -> Iterator[dict[str, Any]]:
        """Give the content of config.json, and name the checkpoint in a CompatibilityError about it. Exceptions of
        other libraries become one: transformers and torch raise many types for values that are not valid."""
        try:
            yield self.config
        except CompatibilityError as error:
            raise CompatibilityError(f"{self.name!r} does not fit: {error}") from error
        except SpecdecError:
            raise
        except Exception as error:
            raise self._not_valid(error) from error

    @cached_property
    def shapes(self) -> Shapes:
        """The shapes of all tensors, {name: shape}, read without loading the tensors."""
        return {name: shape for shapes, _ in self._opened for name, shape in shapes.items()}

    def load(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Load these tensors to the CPU, those of them that there are. Returns {name: tensor}."""
        found: dict[str, torch.Tensor] = {}
        for shapes, read in self._opened:
            found.update(read([name for name in shapes if name in names]))
        return found

    def slices(self) -> dict[str, Any]:
        """Open the weights without reading them. Returns {name: what safetensors' `get_slice` returns}, of which
        indexing reads a part. Raises ConfigError for files written by torch.save, which are only read as a whole."""
        found: dict[str, Any] = {}
        for file in self._files:
            if file.suffix != ".safetensors":
                raise ConfigError(
                    f"{file} was written by torch.save, and ranks of a split model read parts of files: convert it to "
                    f"safetensors, or give tensor_parallel_size=1"
                )
            with _reading(file):
                opened: Any = safe_open(file, framework="pt")
                found |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return found

    def outline(self, build: Callable[[], Module], rename: Rename = str, publish: Callable[[str], str] = str) -> Module:
        """Build a module on the meta device, where it takes no memory, and check the checkpoint against it with
        `check_shapes`. Returns the module.

        build: makes the module as config.json describes it.

        Raises CompatibilityError if that fails, or if the checkpoint does not fit.
        """
        try:
            with torch.device("meta"):
                module = build()
        except SpecdecError:
            raise
        except Exception as error:  # torch and transformers raise many types for invalid values
            raise self._not_valid(error) from error
        self.check_shapes(module, rename, publish)
        return module

    def check_shapes(self, module: nn.Module, rename: Rename = str, publish: Callable[[str], str] = str) -> None:
        """Check that the checkpoint has exactly the module's tensors, in the same shapes.

        module: may be on the meta device.
        rename: maps a tensor's name in the checkpoint to its name in the module's state dict, or to None if the tensor
            is to be skipped.
        publish: maps the name of a tensor that is missing back, for the error message.

        Raises CompatibilityError that names each tensor that is missing, unknown or of another shape.
        """
        expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        found: dict[str, tuple[int, ...]] = {}
        faults = []
        for published, shape in self.shapes.items():
            if (name := rename(published)) is None:
                continue
            if name in found:
                faults.append(f"{published} is one tensor too many for {name}")
            elif name not in expected:
                faults.append(f"{published} {list(shape)} is not known")
            elif shape != expected[name]:
                faults.append(f"{published} is {list(shape)}, not {list(expected[name])}")
            found[name] = shape
        faults += [f"{publish(name)} {list(shape)} is missing" for name, shape in expected.items() if name not in found]
        if faults:
            more = f"; and {len(faults) - MOST_FAULTS} more" if len(faults) > MOST_FAULTS else ""
            raise CompatibilityError(
                f"the draft {self.name!r} does not fit this target or its own config.json: "
                f"{'; '.join(sorted(faults)[:MOST_FAULTS])}{more}. Use a complete one that was trained for this target"
            )

    def load_into(self, module: nn.Module, rename: Rename = str, *, dtype: torch.dtype, device: torch.device) -> None:
        """Load the checkpoint's tensors into a module. The module is moved to `device`, its parameters are converted to
        `dtype`, and it is set to evaluation mode. Buffers keep their dtype, since rotary frequencies need float32.

        rename: maps a tensor's name in the checkpoint to its name in the module's state dict, or to None if the tensor
            is not to be loaded into the module.

        Raises CompatibilityError that names each tensor that is missing, unknown, of another shape, quantized or not
        finite.
        """
        self.check_shapes(module, rename)
        names = {published: name for published in self.shapes if (name := rename(published)) is not None}
        ours = {names[published]: tensor for published, tensor in self.load(names).items()}
        publish = {name: published for published, name in names.items()}
        wrong = sorted(f"{publish[name]} {each.dtype}" for name, each in ours.items() if each.dtype not in DTYPES)
        if wrong:
            raise CompatibilityError(
                f"the draft {self.name!r} has weights that are quantized, or no floating-point numbers: "
                f"{', '.join(wrong[:MOST_FAULTS])}. Use a draft in float32, float16 or bfloat16"
            )
        for parameter in module.requires_grad_(False).eval().parameters():
            parameter.data = torch.empty_like(parameter, dtype=dtype)  # what is moved has its final size
        module.to(device).load_state_dict(ours)
        infinite = [name for name, tensor in module.state_dict().items() if not tensor.isfinite().all()]
        if infinite:
            fits = all(ours[name].isfinite().all() for name in infinite if name in ours)
            raise CompatibilityError(
                f"the draft {self.name!r} has numbers that {f'{dtype} cannot hold' if fits else 'are not finite'} in "
                f"{', '.join(publish.get(name, name) for name in infinite[:MOST_FAULTS])}: "
                + ("use a dtype of a larger range, such as bfloat16" if fits else "download or save it again")
            )

    def _not_valid(self, error: Exception) -> CompatibilityError:
        why = wrong_sizes(self.config) or f"{type(error).__name__}: {reason(error)}"
        return CompatibilityError(f"{CONFIG} of {self.name!r} is not valid: {why}. Download or save it again")

    @cached_property
    def _opened(self) -> list[tuple[Shapes, Read]]:
        """Of each file of weights, the shapes, and a function that reads the tensors to the CPU."""
        return [self._open(file) for file in self._files]

    @cached_property
    def _files(self) -> list[Path]:
        names = *self.own_files, *WEIGHT_FILES
        found = self._find(*names) or self._only_weights()
        if found is None:
            needed = ", ".join(names)
            other = f", or a single file of another name that ends in {' or '.join(SUFFIXES)}"
            raise ConfigError(
                f"there are no weights in {self.name!r}: one of {needed} must be there"
                f"{other if isdir(self.name) else ''}. Methods whose files have other names find them only if `method` "
                f"is given"
            )
        if not found.name.endswith(".index.json"):
            return [found]
        with _reading(found):
            listed = indexed_files(found)
            inside = [name for name in listed if Path(name).name == name]
        files = {name: self._find(name) for name in inside}
        missing = [name for name in listed if files.get(name) is None]
        if missing:
            raise ConfigError(f"{found} names {', '.join(missing)}, which is not there: download or save it again")
        return [file for file in files.values() if file is not None]

    def _only_weights(self) -> Path | None:
        """The folder's one file of tensors, whatever its name; None if there are none or several."""
        for suffix in SUFFIXES:
            if files := [*Path(self.name).glob(f"*{suffix}")] if isdir(self.name) else []:
                return files[0] if len(files) == 1 else None
        return None

    def _open(self, file: Path) -> tuple[Shapes, Read]:
        if file.suffix != ".safetensors":
            shapes = {name: tuple(tensor.shape) for name, tensor in self._unpickled(file, "meta").items()}

            def unpickle(names: Collection[str]) -> dict[str, torch.Tensor]:
                return {name: each for name, each in self._unpickled(file, "cpu").items() if name in names}

            return shapes, unpickle
        with _reading(file):
            opened: Any = safe_open(file, framework="pt")  # it compares the file's size with what the header says
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118

        def read(names: Collection[str]) -> dict[str, torch.Tensor]:
            with _reading(file):
                return {name: opened.get_tensor(name) for name in names}

        return shapes, read

    def _unpickled(self, file: Path, device: str) -> dict[str, torch.Tensor]:
        with _reading(file):
            found = torch.load(file, map_location=device, weights_only=True, mmap=is_zipfile(file))
        if not isinstance(found, Mapping) or not all(isinstance(each, torch.Tensor) for each in found.values()):
            raise ConfigError(f"{file} holds no tensors by their names: save a state dict")
        return {str(name): tensor for name, tensor in found.items()}

    def _find(self, *file_names: str) -> Path | None:
        """Return the path of the first of these files that the checkpoint has, after downloading the file if necessary.
        None if the checkpoint has none of the files."""
        refuse_revision(self.name, "model", "revision", self.revision)
        if isfile(self.name):
            raise ConfigError(f"the draft model {self.name!r} is a file: give the folder that has it and its {CONFIG}")
        if isdir(self.name):
            return next(filter(Path.is_file, (Path(self.name, file_name) for file_name in file_names)), None)
        if why := unreachable(self.name, *file_names, revision=self.revision):
            raise self._not_found(file_names, why)
        failure: Exception | None = None
        for file_name in file_names:
            is_local = failure is not None  # asking in vain takes long
            try:
                return Path(hf_hub_download(self.name, file_name, revision=self.revision, local_files_only=is_local))
            except LocalEntryNotFoundError as error:  # the hub cannot be asked, but the next one may have been kept
                failure = error
            except EntryNotFoundError:
                pass
            except Exception as error:  # the hub may raise anything else
                failure = error
                break
        if failure is None:
            return None
        raise self._not_found(file_names, reason(failure)) from failure

    def _not_found(self, file_names: Iterable[str], why: str) -> ConfigError:
        return ConfigError(
            f"the draft model {self.name!r} is not a folder, and {' or '.join(file_names)} of a repository of that "
            f"name is not available: {why}. Check the name, or give a folder"
        )


def _constant(text: str) -> float:
    """Parse what Python's json takes beside JSON's numbers: NaN, Infinity or -Infinity."""
    if text == "NaN":
        raise ValueError("NaN is no value")
    return float(text)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except UnpicklingError as error:
        raise ConfigError(
            f"{file} holds more than tensors, or is damaged, so for safety it is not loaded: convert it to safetensors"
        ) from error
    except Exception as error:  # a broken file may raise anything
        raise ConfigError(
            f"the weights in {file} cannot be read: {type(error).__name__}: {reason(error)}. Download or save them "
            f"again"
        ) from error


def indexed_files(file: Path) -> list[str]:
    """Read an index file (such as model.safetensors.index.json) and return the names of the weight files it lists."""
    index = json.loads(file.read_text(encoding="utf-8"))
    if "weight_map" not in index:
        raise ValueError("'weight_map' is missing in their index")
    return sorted(set(index["weight_map"].values()))
