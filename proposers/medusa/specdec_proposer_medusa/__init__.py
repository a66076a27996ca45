"""Medusa heads as a specdec plugin: the method `medusa` (Cai et al. 2024).

The engine imports this module to list plugins. So only `plan` and `build` import torch and other heavy packages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_core import BuildContext, Plan, Proposer, ProposerSpec, TargetInfo, hookimpl
from specdec_proposer_medusa.config import MedusaConfig
from specdec_proposer_medusa.recipe import RECIPE

__all__ = ["MedusaConfig", "specdec_proposers"]

PUBLISHED = {
    "lmsys/vicuna-7b-v1.3": "FasterDecoding/medusa-vicuna-7b-v1.3",
    "lmsys/vicuna-13b-v1.3": "FasterDecoding/medusa-vicuna-13b-v1.3",
    "lmsys/vicuna-33b-v1.3": "FasterDecoding/medusa-vicuna-33b-v1.3",
}


def plan(config: MedusaConfig, target: TargetInfo, num_speculative_tokens: int) -> Plan:
    from specdec_core import head_graph_bytes
    from specdec_proposer_medusa.loading import find

    found = find(config, target, num_speculative_tokens)
    return Plan(
        taps=("final",),
        weight_bytes=found.num_weights * target.dtype.itemsize,
        graph_bytes=head_graph_bytes(target.hidden_size, 1 + found.shape.depth, target.dtype),
        max_model_len=config.checked_max_model_len(target.max_model_len),
        state=found,
    )


def build(config: MedusaConfig, context: BuildContext) -> Proposer:
    from specdec_proposer_medusa.loading import load
    from specdec_proposer_medusa.proposer import MedusaProposer

    return MedusaProposer(config, context, context.state.shape, *load(context.state, context.target))


def is_medusa(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return what a checkpoint is if it has Medusa heads, by the names of its tensors, else "".

    shapes: the shape of each of the checkpoint's tensors, by the tensor's name.
    """
    vllms = ("blocks.0.layers.0.", "lm_heads.0.")  # heads may lack blocks
    is_it = any(name.removeprefix("medusa_heads.").startswith(vllms) for name in shapes) or any(
        name.endswith("0.0.linear.weight") for name in shapes
    )
    return "a set of Medusa heads" if is_it else ""


@hookimpl
def specdec_proposers() -> Sequence[ProposerSpec]:
    spec = ProposerSpec(
        name="medusa",
        config=MedusaConfig,
        build=build,
        api=1,
        plan=plan,
        num_speculative_tokens=MedusaConfig.default_num_speculative_tokens,
        detect=is_medusa,
        train=RECIPE,
        published=PUBLISHED,
    )
    return [spec]
