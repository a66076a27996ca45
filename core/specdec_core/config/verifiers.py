"""Options of verifiers. Reading a configuration imports this module, which therefore does not import torch."""

from __future__ import annotations

from attrs import frozen

from specdec_core.config.fields import number, option


@frozen(kw_only=True)
class TypicalConfig:
    """Options of typical acceptance (Cai et al. 2024), with the thresholds of Medusa as defaults. A draft token is
    accepted if its target probability is above min(posterior_threshold, posterior_alpha * exp(-entropy of the target's
    distribution))."""

    posterior_threshold: float = option(
        number(0.0, 1.0),
        "A draft token to which the target gives more than this probability is accepted.",
        default=0.09,
    )
    posterior_alpha: float = option(
        number(0.0, 1.0),
        "A draft token is also accepted if the target gives it more than this number times exp(-entropy), with the "
        "entropy of the target's distribution.",
        default=0.3,
    )
