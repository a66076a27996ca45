"""EAGLE as a specdec plugin: the methods `eagle` (EAGLE-1 and -2) and `eagle3`.

The engine imports this module to list plugins. So only `plan` and `build` import torch and other heavy packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from specdec_core import BuildContext, Plan, Proposer, ProposerSpec, TargetInfo, hookimpl
from specdec_proposer_eagle import published, recipes
from specdec_proposer_eagle.config import EagleConfig

__all__ = ["EagleConfig", "specdec_proposers"]


def plan(config: EagleConfig, target: TargetInfo, num_speculative_tokens: int, *, is_eagle3: bool) -> Plan:
    from specdec_core import KVLayout, head_graph_bytes
    from specdec_proposer_eagle.loading import find

    config = config.on(target.device)
    config.check(num_speculative_tokens)
    found = find(config, target, is_eagle3=is_eagle3)
    head, size = found.head, found.head.layer.head_dim
    num_angles = 2 * size * (target.max_model_len + config.depth(num_speculative_tokens))  # in the proposer's tables
    return Plan(
        taps=head.taps,
        kv_layout=KVLayout(head.num_layers, head.layer.num_key_value_heads, size, size, target.dtype),
        lookahead=1,
        scratch_slots=config.scratch_slots(num_speculative_tokens),
        weight_bytes=(found.num_weights + num_angles) * target.dtype.itemsize,
        graph_bytes=head_graph_bytes(head.layer.hidden_size, 3, target.dtype),
        output_rows=config.context_tokens(has_all=head.has_all_tokens, is_aligned=head.is_aligned) > 0,
        max_model_len=config.checked_max_model_len(target.max_model_len),
        state=found,
    )


def build(config: EagleConfig, context: BuildContext) -> Proposer:
    from specdec_proposer_eagle.loading import load
    from specdec_proposer_eagle.proposer import EagleProposer

    found = context.state
    return EagleProposer(config.on(context.device), context, found.head, *load(found, context.target))


@hookimpl
def specdec_proposers() -> Sequence[ProposerSpec]:
    return [
        ProposerSpec(
            name=name,
            config=EagleConfig,
            build=build,
            api=1,
            plan=partial(plan, is_eagle3=is_eagle3),
            num_speculative_tokens=EagleConfig.default_num_speculative_tokens,
            detect=published.is_eagle3 if is_eagle3 else published.is_eagle,
            published=published.EAGLE3 if is_eagle3 else published.EAGLE,
            train=recipe,
            advice=EagleConfig.advice,
        )
        for name, is_eagle3, recipe in (("eagle", False, recipes.EAGLE), ("eagle3", True, recipes.EAGLE3))
    ]
