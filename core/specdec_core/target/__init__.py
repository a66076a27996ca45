"""The served model: loading, attention through the paged cache, feature taps."""

from specdec_core.target.model import Target

__all__ = ["Target"]
