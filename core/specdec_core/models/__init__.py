"""Models from transformers as the engine runs them: loading, attention over the paged KV cache, taps for hidden
states."""

from specdec_core.models.quiet import importing_quietly

with importing_quietly():
    from specdec_core.models.model import Model

__all__ = ["Model"]
