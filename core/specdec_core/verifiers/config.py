"""Options of verifiers, without torch: they are read when a configuration is."""

from __future__ import annotations

from attrs import field, frozen

from specdec_core.validators import number


@frozen(kw_only=True)
class TypicalConfig:
    """A node is accepted if the target gives its token more than min(posterior_threshold, posterior_alpha *
    exp(-entropy)). Medusa's own settings are the defaults."""

    posterior_threshold: float = field(default=0.09, validator=number(0.0, 1.0))
    posterior_alpha: float = field(default=0.3, validator=number(0.0, 1.0))
