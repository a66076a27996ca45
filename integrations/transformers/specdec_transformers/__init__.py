"""specdec's proposers in `generate` of Hugging Face transformers.

from specdec_transformers import speculative

faster = speculative({"method": "suffix", "num_speculative_tokens": 8})
model.generate(**inputs, custom_generate=faster, max_new_tokens=128)
"""

from __future__ import annotations

from specdec_transformers.speculation import Speculation, speculative

__all__ = ["Speculation", "speculative"]
