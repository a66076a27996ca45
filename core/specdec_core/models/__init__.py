"""Models from transformers as the engine runs them: loading, attention through the paged cache, feature taps."""

from specdec_core.models.model import Model

__all__ = ["Model"]
