"""Which verifier decides on a step's draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_core.config import AUTO, SpeculativeConfig
from specdec_core.errors import ConfigError, PluginError
from specdec_core.plugins import Plugins
from specdec_core.sampling_params import SamplingParams
from specdec_core.types import Draft, RandomSource, Verdict
from specdec_core.verifier import Verifier, VerifierSpec


class Verification:
    """The verifier that speculative_config names or, if it names none, a lossless one that fits each draft: the argmax
    where every request is greedy; the target's own tokens (rule 1) where every node is chosen; block verification for
    sampled chains and traversal for sampled trees, the rules that accept the most.

    Whatever is named, a step without any draft is decided by the target's own tokens, since there is nothing to verify,
    and one of greedy requests by the argmax, on which all rules agree.
    """

    def __init__(self, plugins: Plugins, config: SpeculativeConfig | None) -> None:
        self._plugins = plugins
        self._built: dict[str, Verifier] = {}
        self._named: VerifierSpec | None = None
        if config is not None and config.verifier != AUTO:
            self._named = plugins.verifier(config.verifier)
            self._built[config.verifier] = _build(self._named, config.verifier_options)

    @property
    def is_lossless(self) -> bool:
        return self._named is None or self._named.lossless

    def check(self, params: SamplingParams) -> None:
        """Raise ConfigError if the verifier that was named cannot serve a request."""
        if self._named is not None and self._named.greedy_only and not params.is_greedy:
            raise ConfigError(
                f"temperature={params.temperature} does not go with the verifier {self._named.name!r}, which is right "
                f'for greedy requests only: give temperature=0, or leave "verifier" out of speculative_config'
            )

    def choose(self, draft: Draft, params: Sequence[SamplingParams]) -> str:
        """The name of the verifier for a draft."""
        if all(p.is_greedy for p in params):
            return "greedy"
        if draft.num_nodes == 0 or (self._named is None and draft.q is None):
            return "chosen"
        if self._named is None:
            return "block" if draft.is_chain else "traversal"
        if self._named.chains_only and not draft.is_chain:
            raise PluginError(
                f'the verifier {self._named.name!r} takes chains, and the draft is none: give "traversal", or leave '
                f'"verifier" out of speculative_config. (A proposer whose drafts are chains sets is_chain)'
            )
        return self._named.name

    def verify(self, name: str, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        if name not in self._built:
            self._built[name] = _build(self._plugins.verifier(name), None)
        return self._built[name].verify(logits, draft, random)


def _build(spec: VerifierSpec, options: object) -> Verifier:
    return spec.build() if spec.config is None else spec.build(options)
