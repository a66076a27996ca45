"""Builds the parts of an engine from checked options. A dry run stops before weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from numbers import Integral
from typing import Any

from attrs import evolve, fields_dict, frozen

from specdec_core import ops
from specdec_core.budget.budget import Budget
from specdec_core.budget.cost_curve import CostCurve
from specdec_core.config.draft_options import DraftModelConfig
from specdec_core.config.engine import EngineConfig
from specdec_core.config.fields import refuse_unknown, shown
from specdec_core.config.speculative import SpeculativeConfig
from specdec_core.contracts.kv import KVContext, KVManager, KVManagerSpec
from specdec_core.contracts.ops import OpsContext
from specdec_core.contracts.proposer import BuildContext, Plan, Proposer, ProposerSpec
from specdec_core.contracts.target import TargetInfo
from specdec_core.engine.draft_kind import explain_draft_kind, explain_target_kind
from specdec_core.engine.draft_limits import DraftLimit
from specdec_core.engine.drafter import Drafter
from specdec_core.engine.logprobs import TokenTexts
from specdec_core.engine.loss_watch import LossWatch
from specdec_core.engine.measuring import measure_steps
from specdec_core.engine.memory import MemoryPlan, plan_memory
from specdec_core.engine.named_proposer import NamedProposer
from specdec_core.engine.plugin_errors import building
from specdec_core.engine.runner import Runner
from specdec_core.engine.scheduler import Scheduler
from specdec_core.engine.speculation import Speculation
from specdec_core.engine.verification import Verification
from specdec_core.engine.warm_up import warm_up
from specdec_core.errors import ConfigError, PluginError
from specdec_core.models import Model
from specdec_core.models.attention import PagedAttention
from specdec_core.models.load import ModelSource, find_device
from specdec_core.models.meta_load import NeedsWeightsError, Outline, outline
from specdec_core.models.model import speed_up
from specdec_core.ops.padding import Padding
from specdec_core.plugins import Plugins
from specdec_core.plugins.operations import OfferedOps

CALLS = ("start", "propose", "observe", "reset", "finish")
"""The methods that every proposer must have. One that does not subclass Proposer may lack `close` and `metrics`."""

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

    @property
    def has_model(self) -> bool:
        """Whether it drafts with a draft model or head."""
        return self.plan.observes or self.plan.kv_layout is not None


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
        memory = plan_memory(self.config, target, self.plan, was.bytes_per_block, was.draft_kv_bytes_per_token)
        return evolve(self, memory=memory)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        return self.methods[0].config if self.methods else None

    @property
    def num_speculative_tokens(self) -> int:
        return max((method.config.num_speculative_tokens for method in self.methods), default=0)


@frozen(eq=False)
class Parts:
    """The parts of an `Engine`, as `build` returns them."""

    target: Model
    kv: KVManager
    runner: Runner
    speculation: Speculation
    scheduler: Scheduler
    verification: Verification
    token_texts: TokenTexts
    num_speculative_tokens: int
    num_kv_blocks: int


def build(config: EngineConfig, plugins: Plugins, speculative: Speculating = None, tokenizer: Any = None) -> Parts:
    """Load the target, allocate the KV cache and build the proposers.

    speculative: the options of one drafting method or of several; None: plain decoding.

    Raises the errors of `dry_run`, before weights are loaded, and those that only loading weights can cause.
    """
    source = ModelSource.of_target(config, find_device(config.device))
    try:
        expected = outline(source)
        if expected.may_be_smaller:
            expected = evolve(expected, weight_bytes=0)  # refuse only what is certain not to fit
        design = _design(config, plugins, speculative, tokenizer, expected)
    except NeedsWeightsError:
        design = None
    with explain_target_kind(config.model, config.revision, plugins):
        target = Model(source)
    loaded = Outline(target.info, target.kv_groups, weight_bytes=0)
    if design is None or design.target.kv_groups != loaded.kv_groups:
        design = _design(config, plugins, speculative, tokenizer, loaded)
    else:
        design = design.after_loading(loaded)
    device = target.info.device
    with building(f"KV manager {design.kv_spec.name!r}", "be built"):
        context = KVContext(design.memory.num_blocks, config.block_size, device)
        kv = design.kv_spec.build(design.kv_options, context)
        groups = [kv.add_group(layout) for layout in target.kv_groups.layouts]
    places = [(groups[kind], layer) for kind, layer in target.kv_groups.places]
    attention = PagedAttention(kv, places, design.ops, Padding.of(device))
    target.attach(attention, design.ops, design.plan)
    warm_up(target, design.memory.num_blocks, config.block_size)
    token_texts, verification = TokenTexts(tokenizer), Verification(plugins, design.speculative)
    runner = Runner(target, kv, token_texts)
    curve = _cost_curve(design, runner, verification, kv)
    drafters = []
    for method in design.methods:
        group = of_draft = None
        if method.plan.kv_layout is not None:
            with building(f"KV manager {design.kv_spec.name!r}", "allocate a draft's cache"):
                group = kv.add_group(method.plan.kv_layout, method.spec.name, method.plan.lookahead)
            of_draft = attention.of_group(group, method.plan.kv_layout.num_layers, method.ops)
        with _explaining(method.config, method.spec, plugins):
            drafters.append(_drafter(method, design, target, group, of_draft, curve))
    speculation = Speculation(drafters, device, curve, _loss_watch(design, curve))
    return Parts(
        target=target,
        kv=kv,
        runner=runner,
        speculation=speculation,
        scheduler=_scheduler(design, kv, speculation),
        verification=verification,
        token_texts=token_texts,
        num_speculative_tokens=design.num_speculative_tokens,
        num_kv_blocks=design.memory.num_blocks,
    )


def dry_run(config: EngineConfig, plugins: Plugins, speculative: Speculating = None, tokenizer: Any = None) -> Design:
    """Do everything of `build` that needs no weights, and return the `Design`. Raises the errors of `build`, except
    those that only loading weights can cause, and NeedsWeightsError if the target's structure needs weights."""
    target = outline(ModelSource.of_target(config, find_device(config.device)))
    return _design(config, plugins, speculative, tokenizer, target)


def _design(
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
        sorted((_method(each, plugins, target, offered) for each in configs), key=lambda each: each.has_model)
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
    memory = plan_memory(config, target, plan, bytes_per_block, draft_kv_bytes)
    resolved = ops.resolve(offered, _contexts(target))
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


def _method(config: SpeculativeConfig, plugins: Plugins, target: Outline, offered: OfferedOps) -> Method:
    if not config.is_complete:
        raise ConfigError(
            f"an Engine takes a complete SpeculativeConfig, and the keys of method {config.method!r} are not checked: "
            f"give it to LLM, or make it with SpeculativeConfig.from_mapping"
        )
    spec, contexts = plugins.proposer(config.method), _contexts(target)
    with _explaining(config, spec, plugins):
        plan = make_plan(spec, config.options, target.info, config.num_speculative_tokens)
    if plan.kv_layout is not None:
        contexts = [evolve(contexts[0], kv_layout=plan.kv_layout)]
    return Method(config, spec, plan, ops.resolve(offered, contexts))


def _explaining(config: SpeculativeConfig, spec: ProposerSpec, plugins: Plugins) -> AbstractContextManager[None]:
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
        sizes |= {"lookahead": plan.lookahead, "top_tokens": plan.top_tokens}
        if plan.max_model_len is not None:
            sizes["max_model_len"] = plan.max_model_len
        for field, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, Integral) or size < 0:
                raise TypeError(f"its plan has {field}={shown(size)}: give a whole number, 0 or more")
    return plan


def build_proposer(spec: ProposerSpec, options: Any, context: BuildContext) -> Proposer:
    """Call `build` of a proposer's spec and check the proposer that it returns. Raises PluginError if `build` raises an
    error, or if the proposer lacks a required method (`CALLS`).

    options: an instance of the method's config class.
    """
    with building(f"proposer {spec.name!r}", "be built"):
        proposer = spec.build(options, context)
        missing = [name for name in CALLS if not callable(getattr(proposer, name, None))]
        if missing:
            raise TypeError(f"build returned {shown(proposer)}, which has no {', '.join(missing)}: subclass Proposer")
    return proposer


def _loss_watch(design: Design, curve: CostCurve | None) -> LossWatch | None:
    """What warns if drafting is a loss; None if a budget decides, or if nothing is drafted."""
    if design.speculative is None or curve is not None:
        return None
    return LossWatch(
        f"Leave num_speculative_tokens out, or set adaptive_draft_length=True, so that only what pays is drafted; or "
        f"give another number than {design.num_speculative_tokens}. spec-decode tune finds the best settings for given "
        f"prompts"
    )


def _cost_curve(design: Design, runner: Runner, verification: Verification, kv: KVManager) -> CostCurve | None:
    """Measure what a forward pass of the target costs, if drafts are to go by it."""
    if design.speculative is None or not design.speculative.adaptive_draft_length:
        return None
    config = design.config
    measured = measure_steps(
        runner,
        verification,
        kv,
        max_num_seqs=config.max_num_seqs,
        num_speculative_tokens=design.num_speculative_tokens,
        max_model_len=design.target.info.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    return CostCurve(measured, config.max_num_batched_tokens)


def _drafter(
    method: Method,
    design: Design,
    target: Model,
    group: int | None,
    attention: PagedAttention | None,
    curve: CostCurve | None,
) -> Drafter:
    """Build the proposer of a method, and the `Drafter` that calls it.

    group, attention: the KV cache's group of the draft's own layers, and paged attention over it; None if the method's
        plan has no kv_layout.
    """
    number, layout = method.config.num_speculative_tokens, method.plan.kv_layout
    budget = None
    if curve is not None:
        in_place = layout is not None and layout.keeps_nodes
        budget = Budget(curve, design.config.max_num_seqs, number, in_place=in_place)
    proposer = build_proposer(method.spec, method.config.options, _build_context(method, design, target, attention))
    return Drafter(
        NamedProposer(proposer, method.spec.name),
        method.plan,
        num_speculative_tokens=number,
        group=group,
        max_tokens=design.config.max_num_batched_tokens,
        vocab_size=target.info.vocab_size,
        device=target.info.device,
        budget=budget,
    )


def _scheduler(design: Design, kv: KVManager, speculation: Speculation) -> Scheduler:
    config, speculative = design.config, design.speculative
    most_requests = speculative.disable_by_batch_size if speculative else None
    return Scheduler(
        kv,
        DraftLimit(design.num_speculative_tokens, most_requests, design.plan.max_model_len),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        scratch_slots=design.plan.scratch_slots,
        drafting=speculation,
    )


def _build_context(method: Method, design: Design, target: Model, attention: PagedAttention | None) -> BuildContext:
    def load_model(config: DraftModelConfig) -> Model:
        if attention is None:
            raise PluginError("a draft model needs a group in the KV cache: its plan must have a kv_layout")
        model = Model(ModelSource.of_draft(config, design.target.info))
        model.attach(attention, method.ops)
        return model

    return BuildContext(
        target=design.target.info,
        num_speculative_tokens=method.config.num_speculative_tokens,
        max_num_seqs=design.config.max_num_seqs,
        max_num_batched_tokens=design.config.max_num_batched_tokens,
        device=design.target.info.device,
        embed=target.embed,
        output_head=target.output_head,
        output_rows=target.output_rows,
        attention=attention,
        load_model=load_model,
        speed_up=partial(speed_up, ops=method.ops, attention=attention),
        state=method.plan.state,
    )
