"""From a published checkpoint to a head that is ready to run, or an error that names each tensor that is wrong."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from specdec_core import Checkpoint, CompatibilityError, TargetInfo
from specdec_proposer_eagle import head_config
from specdec_proposer_eagle.config import EagleConfig
from specdec_proposer_eagle.head_config import TABLES, HeadConfig, our_name
from specdec_proposer_eagle.modules import Head

IGNORED = ("rotary_emb.inv_freq",)
"""Endings of tensors that old versions of transformers saved, and that are computed."""


def read_config(config: EagleConfig, target: TargetInfo, *, is_eagle3: bool) -> HeadConfig:
    """What the checkpoint is, checked by shapes alone. Raises ConfigError or CompatibilityError."""
    checkpoint = Checkpoint(str(config.model), config.revision)
    shapes = {name: shape for name, shape in checkpoint.shapes.items() if not name.endswith(IGNORED)}
    head = head_config.read(checkpoint.config, shapes, target, is_eagle3=is_eagle3)
    expected = {name: tuple(tensor.shape) for name, tensor in _outline(head).items()}
    _check_shapes(str(config.model), target, expected, head.shapes)
    _check_ends(str(config.model), target, head)
    _check_tables(str(config.model), head, shapes)
    return head


def load(config: EagleConfig, head: HeadConfig, target: TargetInfo) -> tuple[Head, torch.Tensor | None]:
    """The head, in the target's dtype and on its device, and int64 [draft_vocab], the target's id of each token of the
    draft's; None if they are the same."""
    tensors = {our_name(name): tensor for name, tensor in Checkpoint(str(config.model), config.revision).load().items()}
    module = Head(head)
    _check_dtypes(str(config.model), tensors)
    module.load_state_dict({name: tensors[name] for name in module.state_dict()})
    infinite = [name for name, tensor in module.state_dict().items() if not tensor.isfinite().all()]
    if infinite:
        raise CompatibilityError(
            f"the draft head {str(config.model)!r} has numbers that are not finite in {', '.join(infinite)}: download "
            f"or save it again"
        )
    for parameter in module.to(target.device).requires_grad_(False).eval().parameters():
        parameter.data = parameter.data.to(target.dtype)  # and not the rotary frequencies, which need all their bits
    return module, _to_target(str(config.model), tensors, head, target)


def _check_shapes(
    model: str, target: TargetInfo, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> None:
    faults = [f"{name} {list(expected[name])} is missing" for name in expected.keys() - found.keys()]
    faults += [f"{name} {list(found[name])} is not known" for name in found.keys() - expected.keys()]
    faults += [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if faults:
        raise CompatibilityError(
            f"the draft head {model!r} does not fit this target or its own config.json: {'; '.join(sorted(faults))}. "
            f"Use a complete one that was trained for {target.model!r}"
        )


def _check_ends(model: str, target: TargetInfo, head: HeadConfig) -> None:
    lacking = [name for name in ("embed_tokens.weight", "lm_head.weight") if not head.has(name)]
    if lacking and head.layer.hidden_size != target.hidden_size:
        raise CompatibilityError(
            f"the draft head {model!r} lacks {' and '.join(lacking)}, and cannot use the target's: its hidden_size is "
            f"{head.layer.hidden_size} and the target's {target.hidden_size}. Use a complete head"
        )


def _check_tables(model: str, head: HeadConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if "d2t" not in shapes and not head.has_all_tokens:
        raise CompatibilityError(
            f"the draft head {model!r} has {head.draft_vocab_size} tokens of the target's {head.vocab_size}, and no "
            f"d2t [{head.draft_vocab_size}] that says which: the checkpoint is not complete"
        )
    if "d2t" in shapes and shapes["d2t"] != (head.draft_vocab_size,):
        raise CompatibilityError(
            f"d2t of the draft head {model!r} is {list(shapes['d2t'])}, not [{head.draft_vocab_size}] as "
            f"lm_head.weight has it"
        )


def _check_dtypes(model: str, tensors: Mapping[str, torch.Tensor]) -> None:
    wrong = [f"{n} {t.dtype}" for n, t in tensors.items() if n not in TABLES and not t.dtype.is_floating_point]
    if wrong:
        raise CompatibilityError(
            f"the draft head {model!r} has weights that are no floating-point numbers: {', '.join(sorted(wrong))}. "
            f"Quantised heads are not supported"
        )


def _to_target(
    model: str, tensors: Mapping[str, torch.Tensor], head: HeadConfig, target: TargetInfo
) -> torch.Tensor | None:
    """d2t holds differences: a token's id in the target's vocabulary less that in the draft's."""
    if "d2t" not in tensors:
        return None
    ids = tensors["d2t"].to(torch.int64) + torch.arange(head.draft_vocab_size)
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or len(ids.unique()) < len(ids):
        raise CompatibilityError(
            f"d2t of the draft head {model!r} does not lead to {len(ids)} different ids below {target.vocab_size}: the "
            f"head was made for another target, or is damaged"
        )
    return ids.to(target.device)


def num_bytes(head: HeadConfig, dtype: torch.dtype) -> int:
    return sum(tensor.numel() for tensor in _outline(head).values()) * dtype.itemsize


def _outline(head: HeadConfig) -> dict[str, torch.Tensor]:
    """Its tensors by name, without memory."""
    try:
        with torch.device("meta"):
            return Head(head).state_dict()
    except Exception as error:  # whatever values that make no sense make transformers raise
        raise CompatibilityError(
            f"the draft head's config.json makes no sense: {type(error).__name__}: {error}. Download or save it again"
        ) from error
