"""MLP speculators as a specdec plugin: the method `mlp_speculator` (Wertheimer et al. 2024).

The engine imports this module to list plugins. So only `plan` and `build` import torch and other heavy packages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_core import BuildContext, Plan, Proposer, ProposerSpec, TargetInfo, hookimpl
from specdec_proposer_mlp.config import MLPSpeculatorConfig
from specdec_proposer_mlp.recipe import RECIPE

__all__ = ["MLPSpeculatorConfig", "specdec_proposers"]

PUBLISHED = {
    "meta-llama/Meta-Llama-3-8B-Instruct": "ibm-ai-platform/llama3-8b-accelerator",
    "meta-llama/Meta-Llama-3-70B-Instruct": "ibm-ai-platform/llama3-70b-accelerator",
    "meta-llama/Llama-2-13b-chat-hf": "ibm-ai-platform/llama-13b-accelerator",
    "meta-llama/Llama-2-70b-chat-hf": "ibm-ai-platform/llama2-70b-accelerator",
    "ibm-granite/granite-7b-instruct": "ibm-granite/granite-7b-instruct-accelerator",
    "ibm-granite/granite-34b-code-instruct-8k": "ibm-granite/granite-34b-code-instruct-accelerator",
}


def plan(config: MLPSpeculatorConfig, target: TargetInfo, num_speculative_tokens: int) -> Plan:
    from specdec_core import head_graph_bytes
    from specdec_proposer_mlp.loading import find

    found = find(config, target, num_speculative_tokens)
    return Plan(
        taps=("final",),
        weight_bytes=found.num_weights * target.dtype.itemsize,
        graph_bytes=head_graph_bytes(max(found.head.inner_dim, target.hidden_size), 3, target.dtype),
        max_model_len=config.checked_max_model_len(target.max_model_len),
        state=found,
    )


def build(config: MLPSpeculatorConfig, context: BuildContext) -> Proposer:
    from specdec_proposer_mlp.loading import load
    from specdec_proposer_mlp.proposer import MLPSpeculatorProposer

    return MLPSpeculatorProposer(config, context, load(context.state, context.target), context.state.head)


def is_mlp_speculator(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return what a checkpoint is if it is an MLP speculator, by the names of its tensors, else "".

    shapes: the shape of each of the checkpoint's tensors, by the tensor's name.
    """
    is_it = "speculator.proj.0.weight" in shapes and "speculator.emb.0.weight" in shapes
    return "an MLP speculator" if is_it else ""


@hookimpl
def specdec_proposers() -> Sequence[ProposerSpec]:
    spec = ProposerSpec(
        name="mlp_speculator",
        config=MLPSpeculatorConfig,
        build=build,
        api=1,
        plan=plan,
        num_speculative_tokens=MLPSpeculatorConfig.default_num_speculative_tokens,
        detect=is_mlp_speculator,
        train=RECIPE,
        published=PUBLISHED,
    )
    return [spec]
