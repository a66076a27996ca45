"""The options of the method `mtp`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from specdec_core import ConfigError, DraftHeadConfig, DraftWindowConfig, option, optional_checkpoint, shown

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class MTPConfig(DraftHeadConfig, DraftWindowConfig):
    """Options of the method `mtp`. By default it drafts one token, for which the module was trained. With more, the
    module reads its own output, and drafts a chain. If the checkpoint has several modules, each drafts the token at its
    depth. Raises ConfigError if a value is out of range."""

    model: str | Path | None = option(
        optional_checkpoint,
        "The checkpoint with the MTP modules: a folder, or a name on the model hub. None: the target's.",
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.revision is not None and self.model is None:
            raise ConfigError(
                f"revision={shown(self.revision)} selects a revision of model, which is not given: give model, or "
                f"leave revision out to use the target's checkpoint"
            )

    def default_num_speculative_tokens(self, device: torch.device) -> int:
        return 1 if self.speculative_token_tree is None else super().default_num_speculative_tokens(device)
