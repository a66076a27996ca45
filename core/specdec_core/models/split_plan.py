"""Finds out what each rank holds of a model, by transformers' plan for the model's family.

Key and value heads are repeated if there are fewer than ranks: then a rank holds the one head that its query heads
share with those of other ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import field, frozen
from torch import nn

from specdec_core.errors import CompatibilityError
from specdec_core.models.attention import ProbeSite
from specdec_core.models.families import GROUPS
from specdec_core.models.split import Cut, Interval, Split
from specdec_core.models.split_modules import Part
from specdec_core.models.split_styles import OF_HEAD, STYLES, Style

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

REMEDY = "give another tensor_parallel_size, or for a draft model draft_tensor_parallel_size=1"


def split_of(model: Any, sites: ProbeSite, part: Part) -> Split:
    """Find out what a rank holds of a model. The model may be on the meta device; `sites` is what `probe` found in it.

    Raises CompatibilityError if the family has no plan, or if its plan or its sizes cannot be split among these ranks.
    """
    config = model.config.get_text_config()
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise CompatibilityError(
            f"transformers has no plan for splitting {config.model_type!r} models (base_model_tp_plan): give "
            f"tensor_parallel_size=1, or use a model of another family"
        )
    names = {module: name for name, module in model.named_modules()}
    return _Splitting(model, names, sites, part, plan, config.model_type).result()


@frozen(eq=False)
class _Splitting:
    model: Any
    names: Mapping[nn.Module, str]
    sites: ProbeSite
    part: Part
    plan: Mapping[str, str]
    family: str
    cuts: dict[str, Cut] = field(init=False, factory=dict)
    styles: dict[str, Style] = field(init=False, factory=dict)

    def result(self) -> Split:
        heads: dict[str, tuple[int, int]] = {}
        shapes: list[tuple[int, int, int]] = []
        repeated: dict[str, Interval] = {}
        for module, shape in zip(self.sites.modules, self.sites.shapes, strict=True):
            found = self._heads(module, shape)
            shapes.append(shape if found is None else (found[1], *shape[1:]))
            if found is not None:
                heads[self.names[module]] = found
                repeated.update(self._repeated(module, shape))
        base = self.model.base_model
        prefix = self.names[base]
        for name, module in base.named_modules(prefix=prefix):
            if (style := self._style(name, prefix)) is not None:
                self._add(name, module, style, repeated.get(name) if style.dim == 0 else None)
        for name, parameter in base.named_parameters(prefix=prefix):
            if (style := self._style(name, prefix)) is not None:
                self._cut(name, parameter, style)
        head, is_tied = self._head()
        return Split(self.cuts, self.styles, heads, tuple(shapes), head, is_tied)

    def _style(self, name: str, prefix: str) -> Style | None:
        named = self.plan.get(_NUMBER.sub("*", name.removeprefix(prefix).removeprefix(".")))
        if named is not None and named not in STYLES:
            raise CompatibilityError(
                f"the plan for splitting {self.family!r} models has {named!r} for {name}, which is not supported: give "
                f"tensor_parallel_size=1, or use a model of another family"
            )
        return None if named is None else STYLES[named]

    def _heads(self, attention: nn.Module, shape: tuple[int, int, int]) -> tuple[int, int] | None:
        """The numbers of query and key heads of a rank; None if each rank computes the whole attention."""
        prefix = self.names[self.model.base_model]
        styles = (self._style(self.names[child], prefix) for child in attention.modules())
        if not any(style is not None and style.dim == 0 and not style.gathers for style in styles):
            return None
        num_kv_heads, size = shape[0], self.part.size
        num_heads = num_kv_heads * getattr(attention, GROUPS, 1)
        if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
            raise CompatibilityError(
                f"{self.names[attention]} has {num_heads} query heads and {num_kv_heads} key heads, which "
                f"{size} ranks cannot share evenly: {REMEDY}"
            )
        return num_heads // size, max(1, num_kv_heads // size)

    def _repeated(self, attention: nn.Module, shape: tuple[int, int, int]) -> Iterator[tuple[str, Interval]]:
        """Yield the rows of this rank in each linear layer that computes keys or values, if heads are repeated. These
        layers are known by their number of outputs, among those whose outputs are split."""
        num_kv_heads, *dims = shape
        if num_kv_heads % self.part.size == 0:
            return
        widths = {num_kv_heads * dim: dim for dim in dims}
        prefix = self.names[self.model.base_model]
        found = []
        for child in attention.modules():
            style = self._style(self.names[child], prefix)
            if style is not None and style.dim == 0 and getattr(child, "out_features", None) in widths:
                found.append(child)
        if len(found) > 2:
            names = ", ".join(self.names[child] for child in found)
            raise CompatibilityError(
                f"{names} have as many outputs as the keys or values, so that it is not known which of them compute "
                f"these: {REMEDY}"
            )
        head = self.part.rank * num_kv_heads // self.part.size
        for child in found:
            width = widths[child.out_features]  # type: ignore[index]
            yield self.names[child], (head * width, (head + 1) * width)

    def _add(self, name: str, module: nn.Module, style: Style, interval: Interval | None) -> None:
        if style.dim is not None and type(module) is not nn.Linear:
            raise CompatibilityError(
                f"the plan for splitting {self.family!r} models splits {name}, a {type(module).__name__}, and only "
                f"linear layers are supported: give tensor_parallel_size=1"
            )
        if style.dim is not None:
            for own, parameter in module.named_parameters(recurse=False):
                self._cut(f"{name}.{own}", parameter, style, interval)
        if style.sums or style.gathers or style.divides:
            self.styles[name] = style

    def _cut(self, name: str, parameter: torch.Tensor, style: Style, interval: Interval | None = None) -> None:
        """Note what a rank holds of a parameter. A vector has outputs alone, and is whole if inputs are split."""
        if style.dim is None or (parameter.dim() == 1 and style.dim == 1):
            return
        dim = max(0, parameter.dim() - 2) if style.dim == 0 else parameter.dim() - 1
        length, size, pieces = parameter.shape[dim], self.part.size, style.num_pieces
        if interval is not None:
            self.cuts[name] = Cut(tuple(parameter.shape), dim, (interval,))
            return
        if length % (size * pieces):
            raise CompatibilityError(
                f"{name} has the shape {list(parameter.shape)}, and {size} ranks cannot share {length // pieces} "
                f"evenly: {REMEDY}"
            )
        width = length // size // pieces
        starts = [piece * length // pieces + self.part.rank * width for piece in range(pieces)]
        self.cuts[name] = Cut(tuple(parameter.shape), dim, tuple((start, start + width) for start in starts))

    def _head(self) -> tuple[str | None, bool]:
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if type(head) is not nn.Linear or head.out_features % self.part.size:
            return None, False
        name, is_tied = self.names[head], head.weight is embedding.weight
        if not is_tied:
            for own, parameter in head.named_parameters(recurse=False):
                self._cut(f"{name}.{own}", parameter, OF_HEAD)
        return name, is_tied
