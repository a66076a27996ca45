"""The options of the method `draft_model`."""

from __future__ import annotations

from attrs import field, frozen
from attrs.converters import optional

from specdec_core import DraftModelConfig, DraftSamplingConfig, DraftStopConfig, TokenTree, flag

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
