"""Checking and loading the published checkpoint of an EAGLE head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen

from specdec_core import Checkpoint, CompatibilityError, TargetInfo, checked_token_map
from specdec_proposer_eagle import head_config
from specdec_proposer_eagle.config import EagleConfig
from specdec_proposer_eagle.head_config import TABLES, HeadConfig, our_name
from specdec_proposer_eagle.modules import Head

IGNORED = ("rotary_emb.inv_freq",)
"""Name suffixes of tensors that old versions of transformers saved and that the head computes itself."""


@frozen(eq=False)
class Found:
    """An EAGLE head whose checkpoint was found and checked; its weights are not loaded yet."""

    head: HeadConfig
    checkpoint: Checkpoint
    num_weights: int


def find(options: EagleConfig, target: TargetInfo, *, is_eagle3: bool) -> Found:
    """Read a head's configuration from its checkpoint and check the shapes of its tensors, without loading weights.

    Raises ConfigError if the checkpoint cannot be found, CompatibilityError if it does not fit the target or is
    incomplete.
    """
    checkpoint = Checkpoint(str(options.model), options.revision)
    shapes = {name: shape for name, shape in checkpoint.shapes.items() if not name.endswith(IGNORED)}
    with checkpoint.reading_config() as config:
        head = head_config.read(config, shapes, target, is_eagle3=is_eagle3)
    _check_width(checkpoint.name, target, head)
    outline = checkpoint.outline(lambda: Head(head), _name_in_module)
    _check_tables(checkpoint.name, head, shapes)
    return Found(head, checkpoint, sum(each.numel() for each in outline.parameters()))


def load(found: Found, target: TargetInfo) -> tuple[Head, torch.Tensor | None]:
    """Load a head's weights in the target's dtype and onto its device.

    Returns the head and a tensor, int64 [draft_vocab], with the target's id of each token in the head's vocabulary. The
    tensor is None if the ids are the same in both vocabularies.
    """
    module = Head(found.head)
    found.checkpoint.load_into(module, _name_in_module, dtype=target.dtype, device=target.device)
    return module, _to_target(found.checkpoint.name, found.checkpoint.load(TABLES), found.head, target)


def _name_in_module(published: str) -> str | None:
    return None if published in TABLES or published.endswith(IGNORED) else our_name(published)


def _check_width(model: str, target: TargetInfo, head: HeadConfig) -> None:
    if not head.is_eagle3 and head.layer.hidden_size != target.hidden_size:
        raise CompatibilityError(
            f"the hidden_size of the draft head {model!r} is {head.layer.hidden_size}, and must be the target's, "
            f"{target.hidden_size}: after the first draft token, an EAGLE head reads its own output instead of the "
            f"target's hidden states. Use a head that was trained for {target.model!r}"
        )
    lacking = [name for name in ("embed_tokens.weight", "lm_head.weight") if not head.has(name)]
    if lacking and head.layer.hidden_size != target.hidden_size:
        raise CompatibilityError(
            f"the draft head {model!r} lacks {' and '.join(lacking)}, and cannot use the target's: its hidden_size is "
            f"{head.layer.hidden_size} and the target's {target.hidden_size}. Use a complete head"
        )


def _check_tables(model: str, head: HeadConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if "d2t" not in shapes and not head.has_all_tokens:
        raise CompatibilityError(
            f"the draft head {model!r} has {head.draft_vocab_size} of the target's {head.vocab_size} tokens, but no "
            f"d2t [{head.draft_vocab_size}] with their ids: download or save it again"
        )
    if "d2t" in shapes and shapes["d2t"] != (head.draft_vocab_size,):
        raise CompatibilityError(
            f"d2t of the draft head {model!r} has the shape {list(shapes['d2t'])}, but lm_head.weight needs "
            f"[{head.draft_vocab_size}]: download or save it again"
        )


def _to_target(
    model: str, tensors: Mapping[str, torch.Tensor], head: HeadConfig, target: TargetInfo
) -> torch.Tensor | None:
    """Return the target's id of each token in the head's vocabulary, int64 [draft_vocab], or None if the checkpoint has
    no tensor d2t. This tensor holds differences: the target's id minus the head's id."""
    if "d2t" not in tensors:
        return None
    table = tensors["d2t"]
    ids = checked_token_map(table + torch.arange(len(table)).to(table.dtype), f"d2t of {model!r}", target.vocab_size)
    return ids.to(target.device)
