"""Everything that `LLM` does before it loads weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from specdec_core import ops
from specdec_core.config import EngineConfig, SpeculativeConfig
from specdec_core.engine.memory import MemoryPlan, plan_memory
from specdec_core.engine.speculation import PLAIN, planned
from specdec_core.frontend import prepare
from specdec_core.target.load import find_device
from specdec_core.target.outline import Outline, outline
from specdec_core.types import Plan


@frozen(eq=False)
class DryRun:
    """What an engine would be made of."""

    config: EngineConfig
    speculative: SpeculativeConfig | None
    target: Outline
    plan: Plan  # the proposer's
    memory: MemoryPlan


def dry_run(model: str | Path, **keywords: Any) -> DryRun:
    """The keywords are those of `LLM`, and so are the errors, but for those that only the weights can cause."""
    prepared = prepare(model, **keywords)
    config, speculative = prepared.config, prepared.speculative
    device = find_device(config.device)
    target = outline(
        config.model,
        device=device,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
        code_revision=config.code_revision,
        quantization=config.quantization,
    )
    info = evolve(target.info, trust_remote_code=config.trust_remote_code, tokenizer=prepared.tokenizer)
    if speculative is None:
        plan = planned(PLAIN, None, info, 0)
    else:
        spec = prepared.plugins.proposer(speculative.method)
        plan = planned(spec, speculative.options, info, speculative.num_speculative_tokens)
    ops.resolve(prepared.plugins.ops(device.type))  # for its errors, as two plugins may replace one operation
    memory = plan_memory(
        config,
        target.kv_layout,
        plan,
        max_model_len=target.info.max_model_len,
        device=device,
        target_weight_bytes=target.weight_bytes,
    )
    return DryRun(config, speculative, target, plan, memory)
