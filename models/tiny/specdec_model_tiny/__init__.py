"""A tiny language model of Python code, as a directory that transformers can load."""

from __future__ import annotations

from pathlib import Path

__all__ = ["model_path"]


def model_path() -> Path:
    """The directory with the configuration, the weights and the tokenizer.

    Pass it to ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained``.
    """
    return Path(__file__).parent / "weights"
