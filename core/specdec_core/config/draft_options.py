"""The options of speculation that several methods share. The methods' config classes inherit from the classes here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.converters import optional

from specdec_core.config.fields import (
    checkpoint,
    flag,
    num_ranks,
    one_of,
    option,
    text,
    whole_number,
)
from specdec_core.config.idle import idle_option
from specdec_core.config.token_tree import TokenTree
from specdec_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

LONGEST_CHAIN = 4096
"""Draft tokens of a draft model or head in one step. `TokenTree` lists every node's path, so memory is quadratic."""
DEFAULT_CHAIN = 5
"""Draft tokens of a chain where users give no number."""
AUTO, GREEDY, PROBABILISTIC = "auto", "greedy", "probabilistic"


@frozen(kw_only=True)
class DraftModelConfig:
    """Options of methods that load a draft checkpoint."""

    model: str | Path = field(
        validator=checkpoint,
        metadata={
            "help": "The draft: a folder, or a name on the model hub. Left out, it is the folder drafts/METHOD in the "
            "target's folder."
        },
    )
    revision: str | None = option(
        text(optional=True), "Branch, tag or commit of the draft's repository on the hub. None: its main branch."
    )
    code_revision: str | None = option(
        text(optional=True),
        "Branch, tag or commit of the draft's code, where that has a repository of its own and the engine's "
        "trust_remote_code allows it. None: its main branch.",
    )
    quantization: Any = option(
        None,
        "How to quantize the draft's weights, written as the engine's quantization, which a draft does not inherit. "
        "None: they stay as the checkpoint has them, quantized or not.",
        allowed="a name, a mapping or an object, or None",
    )
    max_model_len: int | None = option(
        whole_number(1, optional=True),
        "A request is drafted for up to this many tokens, prompt and output together. None: as far as the target and "
        "the draft both go.",
    )
    draft_tensor_parallel_size: int = option(
        num_ranks,
        "Number of processes that share each layer of a draft model: 1, or the engine's tensor_parallel_size. Draft "
        "heads take 1.",
        default=1,
        hashed=False,
    )
    enforce_eager: bool = option(
        flag,
        "On a GPU, launch each kernel of a draft model or head by itself, instead of a CUDA graph of all of them, as "
        "the engine's enforce_eager does for target and draft. On a CPU it changes nothing.",
        default=False,
        hashed=False,
    )
    disable_padded_drafter_batch: bool = idle_option(
        flag, "on a CPU drafts are not padded, on a GPU always", default=False
    )

    def check_ranks(self, tensor_parallel_size: int) -> None:
        """Raise ConfigError if draft_tensor_parallel_size is neither 1 nor the target's tensor_parallel_size."""
        if self.draft_tensor_parallel_size not in (1, tensor_parallel_size):
            other = f" or {tensor_parallel_size}" * (tensor_parallel_size > 1)
            raise ConfigError(
                f"draft_tensor_parallel_size={self.draft_tensor_parallel_size} must be 1{other}, as the target's "
                f"tensor_parallel_size"
            )

    def checked_max_model_len(self, target_len: int, draft_len: int | None = None) -> int:
        """The longest request, in prompt and output tokens together, that the draft model drafts for: max_model_len if
        given, else the smaller limit of the target and the draft model. Raises ConfigError if max_model_len exceeds one
        of these limits.

        target_len: the target's limit.
        draft_len: the draft model's limit; None if it equals the target's.
        """
        longest = {} if draft_len is None else {"the draft model": draft_len}
        longest["the target"] = target_len
        if self.max_model_len is None:
            return min(longest.values())
        for whose, most in longest.items():
            if self.max_model_len > most:
                raise ConfigError(
                    f"speculative_config has max_model_len={self.max_model_len}, but {whose} takes {most} tokens at "
                    f"most: lower it, or leave it out"
                )
        return self.max_model_len


@frozen(kw_only=True, slots=False)  # with slots, no class could inherit from it and another
class DraftSamplingConfig:
    """The option draft_sample_method, for methods that can sample draft tokens."""

    draft_sample_method: str = option(
        one_of(AUTO, GREEDY, PROBABILISTIC),
        "'greedy' drafts the most probable tokens. 'probabilistic' draws them from the draft's distribution at the "
        "request's temperature, siblings without replacement. 'auto' draws them for requests that have a temperature "
        "above 0 and no seed, since more of these are accepted; in a step with such a request all drafts are chains, "
        "unless a shape is given.",
        default=AUTO,
    )


@frozen(kw_only=True, slots=False)
class DraftTreeConfig:
    """The option speculative_token_tree, for methods that can draft a tree of a given shape. Without this option, a
    method drafts chains, or chooses the tree's shape itself."""

    speculative_token_tree: TokenTree | None = option(
        None,
        "Shape of the drafts, as paths below the root: [(0,), (1,), (0, 0)] is the two most probable first tokens, and "
        "the most probable one after the first of them; num_speculative_tokens must be its number of nodes. None: "
        "chains, or the method's own trees.",
        allowed="a list of paths, or that as text, or None",
        converter=optional(TokenTree.parse),
    )

    @property
    def gives_shape(self) -> bool:
        """Whether the user gave the shape of the drafts."""
        return self.speculative_token_tree is not None

    def default_num_speculative_tokens(self, device: torch.device) -> int:
        """The value of num_speculative_tokens if the user gives none: the number of draft tokens in the tree's shape,
        or DEFAULT_CHAIN without a shape."""
        tree = self.speculative_token_tree
        return DEFAULT_CHAIN if tree is None else len(tree.paths)

    def check(self, num_speculative_tokens: int) -> None:
        """Raise ConfigError if the tree's shape has another number of draft tokens than num_speculative_tokens, or if
        drafts are chains of more than LONGEST_CHAIN."""
        if self.speculative_token_tree is None and num_speculative_tokens > LONGEST_CHAIN:
            raise ConfigError(
                f"num_speculative_tokens={num_speculative_tokens}, but drafts of a model or head have at most "
                f"{LONGEST_CHAIN} tokens: lower it"
            )
        if self.speculative_token_tree is not None:
            self.speculative_token_tree.check_number(num_speculative_tokens)

    def check_depth(self, depth: int, num_heads: int, what: str) -> None:
        """Raise ConfigError if drafts are deeper than a checkpoint has heads that draft a token each. what: the
        checkpoint, for the error."""
        if depth > num_heads:
            remedy = f"give paths of at most {num_heads} tokens" if self.gives_shape else "lower num_speculative_tokens"
            raise ConfigError(f"drafts would be {depth} tokens deep, but {what} has {num_heads} heads: {remedy}")

    def shape(self, num_speculative_tokens: int) -> TokenTree:
        """The first num_speculative_tokens nodes (draft tokens) of the tree's shape, or a chain if there is no
        shape."""
        tree = self.speculative_token_tree
        return TokenTree.chain(num_speculative_tokens) if tree is None else tree.first(num_speculative_tokens)


@frozen(kw_only=True, slots=False)
class DraftWindowConfig:
    """The option draft_window, a sliding window for methods whose draft models have attention layers."""

    draft_window: int | None = option(
        whole_number(1, optional=True),
        "In each attention layer of the draft, a token sees only this many positions: its own and those just before "
        "it, draft tokens among them. None: all of them. A layer with a smaller window of its own keeps that.",
    )


@frozen(kw_only=True)
class DraftHeadConfig(DraftModelConfig, DraftTreeConfig, DraftSamplingConfig):
    """Options of methods that load a draft head: layers trained for one target, which read its hidden states.

    Raises ConfigError if an option of whole draft models is given.
    """

    code_revision: None = option(None, "Refused: a head contains no code.", allowed="None")
    quantization: None = option(None, "Refused: only whole draft models can be quantized.", allowed="None")

    def __attrs_post_init__(self) -> None:
        if self.code_revision is not None:
            raise ConfigError("code_revision is for the method draft_model, not for draft heads: leave it out")
        if self.quantization is not None:
            raise ConfigError(
                "quantization is for the method draft_model, not for draft heads, which have the target's dtype: leave "
                "it out. The target can be quantized (the engine's quantization), and whole draft models"
            )
        if self.draft_tensor_parallel_size > 1:
            raise ConfigError(
                f"draft_tensor_parallel_size={self.draft_tensor_parallel_size} is for the method draft_model: a draft "
                f"head drafts on one rank, whatever the target's tensor_parallel_size. Give 1, or leave it out"
            )
