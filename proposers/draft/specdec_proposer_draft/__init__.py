"""Draft models as a specdec plugin: the method `draft_model` drafts with a smaller causal language model.

The engine imports this module to list plugins. So only `plan` and `build` import torch and other heavy packages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_core import BuildContext, Plan, Proposer, ProposerSpec, TargetInfo, hookimpl
from specdec_proposer_draft.config import DraftConfig
from specdec_proposer_draft.recipe import RECIPE

__all__ = ["DraftConfig", "specdec_proposers"]


def plan(config: DraftConfig, target: TargetInfo, num_speculative_tokens: int) -> Plan:
    from specdec_core import outline_draft
    from specdec_proposer_draft.vocabulary import shared_vocabulary

    config.check(num_speculative_tokens)
    draft = outline_draft(config, target)
    return Plan(
        kv_layout=draft.kv_layout,
        # The root's slot and one for each node that is forwarded: a level may exceed the rest of a request's budget.
        scratch_slots=1 + config.shape(num_speculative_tokens).num_inner,
        weight_bytes=draft.weight_bytes,
        graph_bytes=draft.graph_bytes,
        max_model_len=config.checked_max_model_len(target.max_model_len, draft.info.max_model_len),
        state=shared_vocabulary(config, draft.info, target),
    )


def build(config: DraftConfig, context: BuildContext) -> Proposer:
    from specdec_proposer_draft.proposer import DraftModelProposer

    return DraftModelProposer(config, context)


def is_causal_lm(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return what a checkpoint is if it is a whole causal language model, not a draft head, else "". In a whole model,
    the name of the embedding's tensor has a prefix, as in `model.embed_tokens.weight`. In a draft head, the name is
    `embed_tokens.weight`.

    shapes: the shape of each of the checkpoint's tensors, by the tensor's name.
    """
    is_it = any(name.endswith("embed_tokens.weight") and name != "embed_tokens.weight" for name in shapes)
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else "language model"
    return f"a complete {name}" if is_it else ""


@hookimpl
def specdec_proposers() -> Sequence[ProposerSpec]:
    spec = ProposerSpec(
        name="draft_model",
        config=DraftConfig,
        build=build,
        api=1,
        plan=plan,
        num_speculative_tokens=DraftConfig.default_num_speculative_tokens,
        detect=is_causal_lm,
        train=RECIPE,
    )
    return [spec]
