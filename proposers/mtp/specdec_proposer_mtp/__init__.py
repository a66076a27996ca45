"""Multi-token prediction (MTP) as a specdec plugin: the method `mtp` (DeepSeek-AI 2024, section 2.2).

The engine imports this module to list plugins. So only `plan` and `build` import torch and other heavy packages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_core import BuildContext, Plan, Proposer, ProposerSpec, TargetInfo, hookimpl
from specdec_proposer_mtp.config import MTPConfig
from specdec_proposer_mtp.families import ALIASES, BY_NAME
from specdec_proposer_mtp.recipe import RECIPE

__all__ = ["MTPConfig", "specdec_proposers"]


def plan(config: MTPConfig, target: TargetInfo, num_speculative_tokens: int) -> Plan:
    from specdec_core import head_graph_bytes
    from specdec_proposer_mtp.loading import find

    found = find(config, target, num_speculative_tokens)
    return Plan(
        taps=(found.family.tap(target.num_layers),),
        kv_layout=found.kv_layout,
        lookahead=found.num_depths,
        scratch_slots=num_speculative_tokens,
        weight_bytes=found.num_weights * target.dtype.itemsize,
        graph_bytes=head_graph_bytes(target.hidden_size, 3, target.dtype, found.num_depths),
        max_model_len=config.checked_max_model_len(target.max_model_len, found.max_model_len),
        state=found,
    )


def build(config: MTPConfig, context: BuildContext) -> Proposer:
    from specdec_proposer_mtp.proposer import MTPProposer
    from specdec_proposer_mtp.several import SeveralModules

    return (MTPProposer if context.state.num_depths == 1 else SeveralModules)(config, context, context.state)


def is_mtp_module(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return what a checkpoint is if it has an MTP module and no other layers, by the names of its tensors, else "". A
    whole model that has a module is a target.

    shapes: the shape of each of the checkpoint's tensors, by the tensor's name.
    """
    family, num_layers = BY_NAME.get(str(config.get("model_type"))), config.get("num_hidden_layers")
    if family is None or type(num_layers) is not int or any(name.startswith("model.layers.0.") for name in shapes):
        return ""
    return "an MTP module" if f"{family.part('proj', num_layers)}.weight" in shapes else ""


@hookimpl
def specdec_proposers() -> Sequence[ProposerSpec]:
    spec = ProposerSpec(
        name="mtp",
        config=MTPConfig,
        build=build,
        api=1,
        plan=plan,
        num_speculative_tokens=MTPConfig.default_num_speculative_tokens,
        detect=is_mtp_module,
        aliases=ALIASES,
        train=RECIPE,
    )
    return [spec]
