"""Decides what an engine consists of before any weights are loaded: drafting methods, KV manager and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Integral
from threading import RLock
from typing import Any

from attrs import evolve, fields_dict, frozen

from specdec_core import ops
from specdec_core.config.draft_options import DraftModelConfig
from specdec_core.config.engine import EngineConfig
from specdec_core.config.fields import refuse_unknown, shown
from specdec_core.config.speculative import SpeculativeConfig
from specdec_core.contracts.kv import KVManagerSpec
from specdec_core.contracts.ops import OpsContext
from specdec_core.contracts.proposer import Plan, ProposerSpec
from specdec_core.contracts.target import TargetInfo
from specdec_core.engine.draft_kind import explain_draft_kind
from specdec_core.engine.memory import MemoryPlan, plan_memory
from specdec_core.engine.plugin_errors import building
from specdec_core.errors import ConfigError
from specdec_core.models.graph_memory import attention_graph_bytes
from specdec_core.models.load import ModelSource, find_device
from specdec_core.models.meta_load import Outline, outline
from specdec_core.plugins import Plugins
from specdec_core.plugins.operations import OfferedOps

BUILDING = RLock()
"""Held while an engine is designed or built. Transformers and torch set defaults of the whole process while they build
a model, such as its dtype and device, so that two threads would get each other's."""
Speculating = SpeculativeConfig | tuple[SpeculativeConfig, ...] | None
"""One method of drafting, several at once, or none."""


@frozen(eq=False)
class Method:
    """One of an engine's drafting methods: the user's options, the spec that builds the method's proposer, and the
    plan, which states what the proposer needs from the engine."""

    config: SpeculativeConfig
    spec: ProposerSpec
    plan: Plan
    ops: Mapping[str, Callable[..., Any]]  # for the proposer's own layers and modules
    is_eager: bool  # whether a draft model or head has no CUDA graphs on a GPU

    @property
    def has_model(self) -> bool:
        """Whether it drafts with a draft model or head."""
        return self.plan.observes or self.plan.kv_layout is not None

    @property
    def is_split(self) -> bool:
        """Whether ranks share each layer of its draft model."""
        options = self.config.options
        return isinstance(options, DraftModelConfig) and options.draft_tensor_parallel_size > 1


@frozen(eq=False)
class Design:
    """What is decided before memory is allocated: the options, the drafting methods, the memory plan and the KV
    manager.

    methods: the drafting methods, those without a model first: they are cheap, and others draft only where these are
        not expected to do as well. Empty for plain decoding.
    plan: what all proposers together need from the engine.
    """

    config: EngineConfig
    target: Outline
    methods: tuple[Method, ...]
    plan: Plan
    memory: MemoryPlan
    kv_spec: KVManagerSpec
    kv_options: Any
    ops: Mapping[str, Callable[..., Any]]  # the target's

    def after_loading(self, target: Outline) -> Design:
        """Plan the memory again by what is free after the target's weights are loaded."""
        was = self.memory
        sizes = was.bytes_per_block, was.draft_kv_bytes_per_token
        memory = plan_memory(self.config, target, self.plan, *sizes, self.num_speculative_tokens)
        return evolve(self, memory=memory)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        return self.methods[0].config if self.methods else None

    @property
    def num_speculative_tokens(self) -> int:
        return most_draft_tokens(self.methods)


def most_draft_tokens(methods: Sequence[Method]) -> int:
    """Of a request in a step."""
    return max((method.config.num_speculative_tokens for method in methods), default=0)


def dry_run(config: EngineConfig, plugins: Plugins, speculative: Speculating = None, tokenizer: Any = None) -> Design:
    """Do everything of `build` that needs no weights, and return the `Design`. Raises the errors of `build`, except
    those that only loading weights can cause, and NeedsWeightsError if the target's structure needs weights."""
    with BUILDING:
        target = outline(ModelSource.of_target(config, find_device(config.device)))
        return make_design(config, plugins, speculative, tokenizer, target)


def make_design(
    config: EngineConfig, plugins: Plugins, speculative: Speculating, tokenizer: Any, target: Outline
) -> Design:
    """Make the plans of the drafting methods and plan the memory.

    target: the target's structure. Its weight_bytes counts only weights that are not loaded yet.
    """
    target = evolve(target, info=evolve(target.info, tokenizer=tokenizer))
    configs = (
        [] if speculative is None else [speculative] if isinstance(speculative, SpeculativeConfig) else speculative
    )
    offered = plugins.ops(target.info.device.type)
    methods = tuple(
        sorted((_method(each, config, plugins, target, offered) for each in configs), key=lambda each: each.has_model)
    )
    _check_together(methods)
    plan = unite([method.plan for method in methods])
    kv_spec, kv_options = _kv_manager(config, plugins)
    layouts = [*target.kv_groups.layouts, *(m.plan.kv_layout for m in methods if m.plan.kv_layout is not None)]
    with building(f"KV manager {kv_spec.name!r}", "say how large a block is"):
        bytes_per_block = kv_spec.bytes_per_block(kv_options, layouts, config.block_size)
        if not isinstance(bytes_per_block, Integral) or bytes_per_block < 1:
            raise TypeError(
                f"bytes_per_block returned {shown(bytes_per_block)}: give a whole number of bytes, 1 or more"
            )
    draft_kv_bytes = sum(layout.bytes_per_token for layout in layouts[len(target.kv_groups.layouts) :])
    num_draft_tokens = most_draft_tokens(methods)
    memory = plan_memory(config, target, plan, bytes_per_block, draft_kv_bytes, num_draft_tokens)
    contexts = _contexts(target)
    of_caches = [evolve(contexts[0], kv_layout=layout) for layout in layouts]  # the draft's, too
    resolved = {**ops.resolve(offered, contexts), "compact": ops.resolve(offered, of_caches)["compact"]}
    return Design(config, target, methods, plan, memory, kv_spec, kv_options, resolved)


def _check_together(methods: Sequence[Method]) -> None:
    """Raise ConfigError if the drafting methods cannot be combined in one engine."""
    for method in methods[1:]:
        for key in ("verifier", "verifier_options", "disable_by_batch_size", "adaptive_draft_length"):
            values = [getattr(each.config, key) for each in (methods[0], method)]
            if values[0] != values[1]:
                raise ConfigError(
                    f"{key}={shown(values[0])} of {methods[0].spec.name!r} and {shown(values[1])} of "
                    f"{method.spec.name!r} differ, and an engine has one: give both methods the same"
                )
    for method in methods:
        layout = method.plan.kv_layout
        if len(methods) > 1 and layout is not None and layout.keeps_nodes:
            raise ConfigError(
                f"{method.spec.name!r} cannot draft beside other methods: its cache keeps draft nodes in the slots of "
                f"its own tree, and the combined tree has others there. Use it alone, or a method that observes"
            )


def _method(
    config: SpeculativeConfig, engine: EngineConfig, plugins: Plugins, target: Outline, offered: OfferedOps
) -> Method:
    if not config.is_complete:
        raise ConfigError(
            f"an Engine takes a complete SpeculativeConfig, and the keys of method {config.method!r} are not checked: "
            f"give it to LLM, or make it with SpeculativeConfig.from_mapping"
        )
    if isinstance(config.options, DraftModelConfig):
        config.options.check_ranks(engine.tensor_parallel_size)
    spec, contexts = plugins.proposer(config.method), _contexts(target)
    with explaining(config, spec, plugins):
        plan = make_plan(spec, config.options, target.info, config.num_speculative_tokens)
    if plan.kv_layout is not None:
        contexts = [evolve(contexts[0], kv_layout=plan.kv_layout)]
    options = config.options
    is_eager = engine.enforce_eager or (isinstance(options, DraftModelConfig) and options.enforce_eager)
    graph_bytes = 0 if is_eager else plan.graph_bytes
    if graph_bytes and plan.kv_layout is not None:
        graph_bytes += attention_graph_bytes(target.info, engine.block_size, config.num_speculative_tokens)
    plan = evolve(plan, graph_bytes=graph_bytes)
    return Method(config, spec, plan, ops.resolve(offered, contexts), is_eager)


def explaining(config: SpeculativeConfig, spec: ProposerSpec, plugins: Plugins) -> AbstractContextManager[None]:
    options = config.options
    return explain_draft_kind(spec, getattr(options, "model", None), getattr(options, "revision", None), plugins)


def _contexts(target: Outline) -> list[OpsContext]:
    return [OpsContext(target.info.device, target.info.dtype, layout) for layout in target.kv_groups.layouts]


def unite(plans: Sequence[Plan]) -> Plan:
    """Combine what several proposers need from the engine (their plans) into one plan. The combined plan has no
    kv_layout and no state, since each proposer keeps its own."""
    if len(plans) == 1:
        return plans[0]
    lengths = [plan.max_model_len for plan in plans]
    return Plan(
        taps=tuple(dict.fromkeys(tap for plan in plans for tap in plan.taps)),
        scratch_slots=max((plan.scratch_slots for plan in plans), default=0),
        weight_bytes=sum(plan.weight_bytes for plan in plans),
        graph_bytes=sum(plan.graph_bytes for plan in plans),
        observes=any(plan.observes for plan in plans),
        top_tokens=max((plan.top_tokens for plan in plans), default=0),
        output_rows=any(plan.output_rows for plan in plans),
        max_model_len=None if None in lengths else max((n for n in lengths if n is not None), default=None),
    )


def _kv_manager(config: EngineConfig, plugins: Plugins) -> tuple[KVManagerSpec, Any]:
    """The spec that builds the KV manager, and the manager's parsed options (None if it has no config class). Raises
    ConfigError or PluginError."""
    spec, given = plugins.kv_manager(config.kv_manager), config.kv_manager_config
    where = f"kv_manager_config of {spec.name!r}"
    refuse_unknown(given, fields_dict(spec.config).keys() if spec.config else set(), where)
    try:
        return spec, spec.config(**given) if spec.config else None
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} is not complete: {error}") from error


def make_plan(spec: ProposerSpec, options: Any, target: TargetInfo, num_speculative_tokens: int) -> Plan:
    """Call `plan` of a proposer's spec, which returns what the proposer needs from the engine, and check the result.
    Raises PluginError if `plan` raises an error or returns anything else than a valid Plan."""
    with building(f"proposer {spec.name!r}", "plan what it needs"):
        plan = spec.plan(options, target, num_speculative_tokens)
        if not isinstance(plan, Plan):
            raise TypeError(f"plan returned {shown(plan)}, not a Plan")
        sizes = {"scratch_slots": plan.scratch_slots, "weight_bytes": plan.weight_bytes}
        sizes |= {"graph_bytes": plan.graph_bytes, "lookahead": plan.lookahead, "top_tokens": plan.top_tokens}
        if plan.max_model_len is not None:
            sizes["max_model_len"] = plan.max_model_len
        for field, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, Integral) or size < 0:
                raise TypeError(f"its plan has {field}={shown(size)}: give a whole number, 0 or more")
    return plan
