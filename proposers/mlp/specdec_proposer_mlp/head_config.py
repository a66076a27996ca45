"""The configuration of an MLP speculator, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from specdec_core import (
    Check,
    CompatibilityError,
    TargetInfo,
    check_target_sizes,
    config_value,
    flag,
    must,
    shown,
    whole_number,
)
from specdec_proposer_mlp.config import MOST_HEADS

TOP_K = must(
    lambda value: isinstance(value, list) and all(type(k) is int and k >= 1 for k in value),
    "is not a list of whole numbers from 1",
    "a list of whole numbers from 1",
)
KEYS: dict[str, tuple[Check, Any]] = {
    "vocab_size": (whole_number(1), 32000),
    "emb_dim": (whole_number(1), 4096),
    "inner_dim": (whole_number(0), 0),
    "n_predict": (whole_number(1, MOST_HEADS), 3),
    "top_k_tokens_per_head": (TOP_K, [5, 4, 3]),
    "tie_weights": (flag, False),
    "scale_input": (flag, False),
}
"""The keys of config.json, and what one means that is left out, as in the published class (fms-extras,
modeling_mlp_speculator.py)."""


@frozen
class SpeculatorConfig:
    """The architecture of an MLP speculator.

    tie_weights: all heads share one embedding, one norm and one output layer; all but the first share one projection.
    scale_input: the hidden state of the target is normalized first.
    """

    vocab_size: int
    emb_dim: int  # width of the target's hidden states
    inner_dim: int
    n_predict: int  # number of heads
    top_k_tokens_per_head: tuple[int, ...]
    tie_weights: bool
    scale_input: bool

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> SpeculatorConfig:
        """Read the content of a config.json. Raises CompatibilityError if a value is not valid."""
        if "method" in config and config["method"] != "mlp":
            raise CompatibilityError(
                f"the speculator is of another kind, method={shown(config['method'])}: only MLP speculators are "
                f"supported. Use one of those"
            )
        found = {key: config_value(config, key, check, default) for key, (check, default) in KEYS.items()}
        return cls(
            **found
            | {
                "inner_dim": found["inner_dim"] or found["emb_dim"],
                "top_k_tokens_per_head": tuple(found["top_k_tokens_per_head"]),
            }
        )

    def check_target(self, target: TargetInfo, config: Mapping[str, Any]) -> None:
        """Raise CompatibilityError if the speculator was trained for a target of other sizes. config: the content of
        the config.json that was read."""
        sizes = {"emb_dim": (self.emb_dim, target.hidden_size), "vocab_size": (self.vocab_size, target.vocab_size)}
        named = {key if key in config else f"{key}, which config.json lacks,": each for key, each in sizes.items()}
        check_target_sizes(target, named)
