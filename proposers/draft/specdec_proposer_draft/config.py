"""The options of the method `draft_model`."""

from __future__ import annotations

from attrs import field, frozen
from attrs.converters import optional

from specdec_core import ConfigError, DraftModelConfig, DraftSamplingConfig, DraftStopConfig, TokenTree, flag

DEFAULT_LENGTH = 5


@frozen(kw_only=True)
class DraftConfig(DraftModelConfig, DraftSamplingConfig, DraftStopConfig):
    """speculative_token_tree: the shape of the trees, as paths: [(0,), (1,), (0, 0)]. None: chains.

    draft_sample_method: "greedy" takes the draft's most probable tokens, "probabilistic" draws them at the request's
    temperature, siblings without replacement. use_heterogeneous_vocab: the draft may have another tokenizer, and drafts
    what both models have a token for. Raises ConfigError.
    """

    speculative_token_tree: TokenTree | None = field(default=None, converter=optional(TokenTree.parse))
    use_heterogeneous_vocab: bool = field(default=False, validator=flag)

    @property
    def default_num_speculative_tokens(self) -> int:
        return len(self.speculative_token_tree.paths) if self.speculative_token_tree else DEFAULT_LENGTH

    def shape(self, num_speculative_tokens: int) -> TokenTree:
        return self.speculative_token_tree or TokenTree.chain(num_speculative_tokens)

    def checked_max_model_len(self, draft_len: int, target_len: int) -> int:
        """How far the draft goes. Raises ConfigError if that is further than one of the two models can."""
        if self.max_model_len is None:
            return min(draft_len, target_len)
        for whose, longest in (("the draft model", draft_len), ("the target", target_len)):
            if self.max_model_len > longest:
                raise ConfigError(
                    f"speculative_config has max_model_len={self.max_model_len}, but {whose} takes {longest} tokens at "
                    f"most: lower it, or leave it out"
                )
        return self.max_model_len
