"""The configuration of an MLP speculator, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from specdec_core import CompatibilityError, TargetInfo, shown
from specdec_proposer_mlp.config import MOST_HEADS

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "emb_dim": 4096,
    "inner_dim": 0,
    "n_predict": 3,
    "top_k_tokens_per_head": [5, 4, 3],
    "tie_weights": False,
    "scale_input": False,
}
"""What a key means that config.json leaves out, as in the published class (fms-extras, modeling_mlp_speculator.py)."""


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
        found = {key: config.get(key, default) for key, default in DEFAULTS.items()}
        if "method" in config and config["method"] != "mlp":
            raise CompatibilityError(
                f"the speculator is of another kind, method={shown(config['method'])}: only MLP speculators are "
                f"supported. Use one of those"
            )
        for key in ("vocab_size", "emb_dim"):
            if type(found[key]) is not int or found[key] < 1:
                raise _invalid(key, found[key], "a whole number from 1")
        if type(found["n_predict"]) is not int or not 1 <= found["n_predict"] <= MOST_HEADS:
            raise _invalid("n_predict", found["n_predict"], f"a whole number from 1 to {MOST_HEADS}")
        if type(found["inner_dim"]) is not int or found["inner_dim"] < 0:
            raise _invalid("inner_dim", found["inner_dim"], "a whole number, 0 for emb_dim")
        for key in ("tie_weights", "scale_input"):
            if type(found[key]) is not bool:
                raise _invalid(key, found[key], "true or false")
        top_k = found["top_k_tokens_per_head"]
        if not isinstance(top_k, list) or not all(type(k) is int and k >= 1 for k in top_k):
            raise _invalid("top_k_tokens_per_head", top_k, "a list of whole numbers from 1")
        return cls(
            **found | {"inner_dim": found["inner_dim"] or found["emb_dim"], "top_k_tokens_per_head": tuple(top_k)}
        )

    def check_target(self, target: TargetInfo, config: Mapping[str, Any]) -> None:
        """Raise CompatibilityError if the speculator was trained for a target of other sizes. config: the content of
        the config.json that was read."""
        pairs = {"emb_dim": (self.emb_dim, target.hidden_size), "vocab_size": (self.vocab_size, target.vocab_size)}
        for key, (its, wanted) in pairs.items():
            if its != wanted and key not in config:
                raise CompatibilityError(
                    f"the MLP speculator's config.json has no {key}, which means {its}, and this target's is {wanted}: "
                    f"download or save it again, or use one that was trained for {target.model!r}"
                )
            if its != wanted:
                raise CompatibilityError(
                    f"the MLP speculator was trained for another target: its {key} is {its}, and this target's is "
                    f"{wanted}. Use one that was trained for {target.model!r}"
                )


def _invalid(key: str, value: object, wanted: str) -> CompatibilityError:
    return CompatibilityError(
        f"{key} in the MLP speculator's config.json is {shown(value)}, and should be {wanted}: download or save it "
        f"again"
    )
