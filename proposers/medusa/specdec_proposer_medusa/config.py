"""The options of the method `medusa`."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from attrs import frozen
from attrs.converters import optional

from specdec_core import ConfigError, DraftHeadConfig, TokenTree, option, shown

if TYPE_CHECKING:
    import torch

ON_GPU, ON_CPU = 63, 7
"""Draft tokens of a tree where the user gives no number: the authors' 63, and on a CPU 7, since 8 tokens (these and the
root) are the cheapest forward pass."""


ROUNDING = 1e-6
"""By how much rounded shares may exceed their sum of 1."""


def parse_choices(given: Any) -> TokenTree:
    return TokenTree.parse(given, "medusa_choices")


def parse_accuracies(given: Any) -> tuple[tuple[float, ...], ...]:
    """Parse medusa_head_accuracies. Raises ConfigError."""
    is_valid = isinstance(given, (list, tuple)) and len(given) > 0
    for row in given if is_valid else ():
        is_valid &= isinstance(row, (list, tuple)) and len(row) > 0
        is_valid = is_valid and all(type(share) in (int, float) and 0 <= share <= 1 for share in row)
    if not is_valid:
        raise ConfigError(
            f"medusa_head_accuracies={shown(given)} is not a list of lists of numbers in [0, 1]: give for each head "
            f"the share of tokens that its likeliest guess gets right, its second likeliest, and so on"
        )
    for row in given:
        if sum(row) > 1 + ROUNDING:
            raise ConfigError(
                f"medusa_head_accuracies has {shown(row)}, whose sum is {sum(row):.4g}: the shares are of different "
                f"guesses, of which one at most is right, so give a sum of at most 1, and no cumulative shares"
            )
        if any(later > earlier for earlier, later in pairwise(row)):
            raise ConfigError(
                f"medusa_head_accuracies has {shown(row)}, which increases: give the share of the likeliest guess "
                f"first, then the second likeliest, and so on"
            )
    return tuple(tuple(float(share) for share in row) for row in given)


@frozen(kw_only=True)
class MedusaConfig(DraftHeadConfig):
    """Options of the method `medusa`. By default it drafts a tree of fixed shape, built from the accuracies of the
    heads.

    Raises ConfigError if a value is out of range or options contradict each other.
    """

    medusa_choices: TokenTree | None = option(
        None,
        "Shape of the drafts, as in the authors' medusa_choices; another name of speculative_token_tree. "
        "None: built from medusa_head_accuracies.",
        allowed="a list of paths, or that as text, or None",
        converter=optional(parse_choices),
    )
    medusa_head_accuracies: tuple[tuple[float, ...], ...] | None = option(
        None,
        "A list for each head: the share of tokens that its likeliest guess gets right, its second "
        "likeliest, ... The tree is built from them. None: as the checkpoint's config.json has them, else those of "
        "medusa-vicuna-7b-v1.3.",
        allowed="a list of lists of numbers in [0, 1] that fall and have a sum of at most 1, or None",
        converter=optional(parse_accuracies),
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        names = ("speculative_token_tree", "medusa_choices", "medusa_head_accuracies")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} each give the tree's shape: leave out all but one")
        if self.medusa_head_accuracies is not None and self.draft_sample_method == "probabilistic":
            raise ConfigError(
                f"medusa_head_accuracies builds trees of top-k tokens, and draft_sample_method="
                f"{self.draft_sample_method!r} samples chains: leave out the one or the other"
            )

    @property
    def tree(self) -> TokenTree | None:
        """The shape that the user gave; None: built from accuracies, or a chain if tokens are sampled."""
        return self.speculative_token_tree or self.medusa_choices

    @property
    def gives_shape(self) -> bool:
        return self.tree is not None or self.medusa_head_accuracies is not None

    def default_num_speculative_tokens(self, device: torch.device) -> int:
        """The number of nodes of the given tree; else of a tree built from accuracies, which is smaller on a CPU; or of
        a chain, a token for each head, if tokens are sampled."""
        from specdec_proposer_medusa.loading import built_tree

        if self.tree is not None:
            return len(self.tree.paths)
        return len(built_tree(self, ON_GPU if device.type == "cuda" else ON_CPU).paths)
