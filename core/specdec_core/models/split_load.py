"""Loads a rank's part of a model: of each file, only this part is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from attrs import frozen
from transformers import GenerationConfig, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from specdec_core.config.fields import shown
from specdec_core.contracts.target import TargetInfo
from specdec_core.errors import CompatibilityError, ConfigError
from specdec_core.models.attention import IMPLEMENTATION, probe
from specdec_core.models.checkpoint import Checkpoint
from specdec_core.models.compatibility import refusing_failures
from specdec_core.models.empty_model import GuessedValues, empty_model
from specdec_core.models.families import RECURRENT
from specdec_core.models.load import ModelSource, checked
from specdec_core.models.placing import placing_on
from specdec_core.models.quantization import own_quantization
from specdec_core.models.rope import pin_positions
from specdec_core.models.split import Cut, Split, shrink
from specdec_core.models.split_modules import Part
from specdec_core.models.split_plan import split_of

STACKING = frozenset({"MergeModulelist", "Concatenate"})
"""transformers' conversions that put the tensors of single experts together: their parts are put together likewise."""


def plan_split(source: ModelSource, config: PretrainedConfig, info: TargetInfo, part: Part) -> Split:
    """Find out what a rank holds of a checkpoint's model, without its weights.

    Raises CompatibilityError if the model cannot be split among these ranks, ConfigError if it would be quantized.
    """
    family = config.get_text_config().model_type
    if family in RECURRENT:
        raise CompatibilityError(
            f"{family!r} models have layers that keep a state for each request, and these cannot be split: give "
            f"tensor_parallel_size=1"
        )
    if source.quantization is not None or own_quantization(config) is not None:
        raise ConfigError(
            f"model={source.path!r} is quantized (quantization={shown(source.quantization)}), and only weights that "
            f"are not quantized can be split: give tensor_parallel_size=1, or another checkpoint without quantization"
        )
    empty = empty_model(source, config, info.dtype)
    with looking_at(empty):
        pin_positions(empty, info.max_model_len)
        return split_of(empty, probe(empty), part)


@contextmanager
def looking_at(empty: Any) -> Iterator[None]:
    """A context for forward passes of a model on the meta device. The model gets another dtype: grouped matrix products
    of meta tensors exist only in bfloat16, and shapes do not depend on it."""
    empty.to(torch.bfloat16)
    with torch.no_grad(), refusing_failures(empty), GuessedValues():  # type: ignore[no-untyped-call]
        yield


def load_part(source: ModelSource, config: PretrainedConfig, info: TargetInfo, split: Split) -> Any:
    """Load a rank's part of a model to its device, in evaluation mode. The modules exchange nothing yet: see
    `split.connect`. Raises ConfigError or CompatibilityError as `weights.load_weights` does."""
    whole = empty_model(source, config, info.dtype)
    base = type(whole)

    def make(model: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(model, *args, **kwargs)
        shrink(model, split)

    def load() -> tuple[Any, Mapping[str, Any]]:
        # The class has the original's name, by which transformers finds how names in files are converted.
        placing = placing_on(base, source.device)
        part_class: Any = type(base.__name__, (placing,), {"__init__": make, "__module__": base.__module__})
        loaded: tuple[Any, Mapping[str, Any]] = part_class.from_pretrained(
            None,
            config=config,
            state_dict=_parts(Checkpoint(source.path, source.revision).slices(), whole, split.cuts),
            dtype=info.dtype,
            attn_implementation=IMPLEMENTATION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        return loaded

    model = checked(source, config, load)
    with suppress(OSError):  # the checkpoint has none, and the model made one of its config.json
        model.generation_config = GenerationConfig.from_pretrained(source.path, **source.revisions)
    return model.to(source.device).eval().requires_grad_(False)


@frozen
class _PartOfFile:
    """Reads a part of a tensor when transformers asks for all of it, as `tensor[...]`."""

    whole: Any
    cut: Cut | None

    def __getitem__(self, everything: Any) -> torch.Tensor:
        return self.whole[...] if self.cut is None else self.cut.read(self.whole)


def _parts(slices: Mapping[str, Any], model: Any, cuts: Mapping[str, Cut]) -> dict[str, _PartOfFile]:
    """Choose a rank's part of each tensor in the files, by the parameter that it becomes.

    slices: {name in the files: what safetensors' `get_slice` returns}.
    model: the whole model, on the meta device.
    """
    transforms, state = get_model_conversion_mapping(model), model.state_dict()
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = {
        pattern: each for each in transforms if isinstance(each, WeightConverter) for pattern in each.source_patterns
    }
    several = list(dict.fromkeys(converters.values()))
    found = {}
    for name, tensor in slices.items():
        parameter, pattern = rename_source_key(name, renamings, several, model.base_model_prefix, state)
        cut = cuts.get(parameter)
        if cut is not None:
            converter = None if pattern is None else converters[pattern]
            cut = _cut_before(cut, tuple(tensor.get_shape()), converter, parameter)
        found[name] = _PartOfFile(tensor, cut)
    return found


def _cut_before(cut: Cut, shape: tuple[int, ...], converter: Any, parameter: str) -> Cut:
    """The part of a tensor of this shape that becomes the part of a parameter. Raises CompatibilityError if
    transformers converts the tensor in another way than stacking those of single experts.

    converter: what makes parameters of tensors in the files; None: the tensor is the parameter.
    """
    if converter is None or shape == cut.shape:
        return cut
    if not {type(each).__name__ for each in converter.operations} <= STACKING or len(shape) != len(cut.shape) - 1:
        raise CompatibilityError(
            f"transformers converts tensors of the files when it loads {parameter} "
            f"({', '.join(type(each).__name__ for each in converter.operations)}), so that no part of it can be read: "
            f"give tensor_parallel_size=1, or save the model with this version of transformers"
        )
    dim, (start, end) = cut.dim - 1, cut.intervals[0]
    return Cut(shape, dim, ((start, end),))
