"""The options of the method `mlp_speculator`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec_core import ConfigError, DraftHeadConfig, option, shown, whole_number

if TYPE_CHECKING:
    import torch

MOST_CANDIDATES, MOST_HEADS = 1024, 64


def numbers_of_children(value: Any) -> tuple[int, ...] | None:
    """Parse top_k_tokens_per_head. Raises ConfigError."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not value or not all(type(k) is int and 1 <= k <= 64 for k in value):
        raise ConfigError(
            f"top_k_tokens_per_head={shown(value)} is not a list of whole numbers from 1 to 64, one for each head: "
            f"write it as in [4, 3, 2, 2]"
        )
    return tuple(value)


@frozen(kw_only=True)
class MLPSpeculatorConfig(DraftHeadConfig):
    """Options of the method `mlp_speculator`. By default it drafts a chain, of as many tokens as the speculator has
    heads.

    Raises ConfigError if a value is out of range or options contradict each other.
    """

    n_candidates: int | None = option(
        whole_number(1, MOST_CANDIDATES, optional=True),
        "Draft a tree: its paths are this many chains, the most probable ones of all that "
        "top_k_tokens_per_head allows. None: a chain, or the speculative_token_tree.",
    )
    top_k_tokens_per_head: tuple[int, ...] | None = option(
        None,
        "With n_candidates: how many tokens each head proposes after each path so far, the first head's "
        "number first. None: as the speculator's config.json has it.",
        allowed="a list of integers from 1 to 64, or None",
        converter=numbers_of_children,
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.top_k_tokens_per_head is not None and self.n_candidates is None:
            raise ConfigError(
                f"top_k_tokens_per_head={list(self.top_k_tokens_per_head)} is for a tree: give n_candidates, too"
            )
        others = {
            "speculative_token_tree": self.speculative_token_tree is not None,
            "draft_sample_method": self.draft_sample_method == "probabilistic",
        }
        if self.n_candidates is not None and any(others.values()):
            given = " and ".join(name for name, is_given in others.items() if is_given)
            raise ConfigError(
                f"n_candidates={self.n_candidates} grows trees of the most probable paths, and {given} other drafts: "
                f"leave out the one or the other"
            )

    def default_num_speculative_tokens(self, device: torch.device) -> int:
        """A token for each of the speculator's heads, or all nodes of a tree."""
        if self.speculative_token_tree is not None:
            return super().default_num_speculative_tokens(device)
        from specdec_proposer_mlp.loading import default_num_tokens

        return default_num_tokens(self)
