"""Builds the parts of an engine from checked options. A dry run stops before weights are loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from specdec_core.budget.budget import Budget
from specdec_core.budget.cost_curve import CostCurve
from specdec_core.config.draft_options import DraftModelConfig
from specdec_core.config.engine import EngineConfig
from specdec_core.config.fields import shown
from specdec_core.contracts.kv import KVContext, KVManager
from specdec_core.contracts.proposer import BuildContext, Plan, Proposer, ProposerSpec, ungraphed
from specdec_core.contracts.target import TargetInfo
from specdec_core.engine.design import BUILDING, Design, Method, Speculating, explaining, make_design
from specdec_core.engine.draft_kind import explain_target_kind
from specdec_core.engine.draft_limits import DraftLimit
from specdec_core.engine.drafter import Drafter
from specdec_core.engine.grammars import Grammars
from specdec_core.engine.logprobs import TokenTexts
from specdec_core.engine.loss_watch import LossWatch
from specdec_core.engine.measuring import measure_steps
from specdec_core.engine.memory import explaining_lack_of_memory
from specdec_core.engine.named_proposer import NamedProposer
from specdec_core.engine.plugin_errors import building
from specdec_core.engine.recurrent import RequestStates
from specdec_core.engine.rehearsal import Branches, LentProposer, rehearse
from specdec_core.engine.runner import Runner
from specdec_core.engine.scheduler import Scheduler
from specdec_core.engine.speculation import Speculation
from specdec_core.engine.stateful_kv import StatefulKVManager
from specdec_core.engine.step_memory import STORED_BYTES
from specdec_core.engine.verification import Verification
from specdec_core.engine.warm_up import warm_up
from specdec_core.errors import PluginError
from specdec_core.kv.states import StateStore
from specdec_core.models import Model
from specdec_core.models.attention import PagedAttention
from specdec_core.models.graph_ahead import Expected, capture_ahead
from specdec_core.models.graphed import GraphedFunction
from specdec_core.models.graphs import Pool
from specdec_core.models.load import ModelSource, find_device
from specdec_core.models.meta_load import NeedsWeightsError, Outline, outline
from specdec_core.models.model import speed_up
from specdec_core.ops.padding import Padding
from specdec_core.plugins import Plugins
from specdec_core.ranks.sharing import Alone, Sharing, sharing

if TYPE_CHECKING:
    from specdec_core.engine.engine import Engine

CALLS = ("start", "propose", "observe", "reset", "finish")
"""The methods that every proposer must have. One that does not subclass Proposer may lack `close` and `metrics`."""


@frozen(eq=False)
class Parts:
    """The parts of an `Engine`, as `build_parts` returns them. longest_step_s: as `Engine` has it."""

    config: EngineConfig
    tokenizer: Any
    grammars: Grammars
    target: Model
    kv: KVManager
    runner: Runner
    speculation: Speculation
    scheduler: Scheduler
    verification: Verification
    token_texts: TokenTexts
    num_speculative_tokens: int
    num_kv_blocks: int
    sharing: Sharing  # with other ranks
    longest_step_s: float = 0.0


@frozen(eq=False)
class BuiltMethod:
    """A drafting method, its proposer, and the KV cache's group of the draft's own layers (None: it has none)."""

    method: Method
    proposer: NamedProposer
    group: int | None


def build_parts(
    config: EngineConfig,
    plugins: Plugins,
    speculative: Speculating,
    tokenizer: Any,
    engine_of: Callable[[Parts], Engine],
) -> Parts:
    """Load the target, allocate the KV cache, build the proposers, and measure steps.

    speculative: the options of one drafting method or of several; None: plain decoding.
    engine_of: makes the engine that rehearses, on a GPU.

    Raises the errors of `dry_run`, before weights are loaded, and those that only loading weights can cause, or the
    first steps.
    """
    with BUILDING:
        source = ModelSource.of_target(config, find_device(config.device))
        try:
            expected = outline(source)
            if expected.may_be_smaller:
                expected = evolve(expected, weight_bytes=0)  # refuse only what is certain not to fit
            design = make_design(config, plugins, speculative, tokenizer, expected)
        except NeedsWeightsError:
            design = None
        with sharing(config, source.device, plugins) as shared:
            return _built(config, plugins, speculative, tokenizer, source, design, shared, engine_of)


def _built(
    config: EngineConfig,
    plugins: Plugins,
    speculative: Speculating,
    tokenizer: Any,
    source: ModelSource,
    design: Design | None,
    shared: Sharing,
    engine_of: Callable[[Parts], Engine],
) -> Parts:
    """Build the parts. design: None if it is known only once the target's weights are loaded."""
    with explain_target_kind(config.model, config.revision, plugins):
        target = shared.load(source)
    known = None if design is None else design.target.activation_bytes
    loaded = Outline(target.info, target.kv_groups, weight_bytes=0, activation_bytes=known)
    if design is None or design.target.kv_groups != loaded.kv_groups:
        design = make_design(config, plugins, speculative, tokenizer, loaded)
    else:
        design = design.after_loading(loaded)
    device = target.info.device
    with building(f"KV manager {design.kv_spec.name!r}", "be built"):
        context = KVContext(design.memory.num_blocks, config.block_size, device, design.ops["compact"])
        kv = shared.build_kv(design.kv_spec, design.kv_options, context)
        groups = [kv.add_group(layout) for layout in target.kv_groups.layouts]
    places = [(groups[kind], layer) for kind, layer in target.kv_groups.places]
    attention = PagedAttention(kv, places, design.ops, Padding.of(device))
    kept, states = target.kv_groups.states, None
    store = None if kept is None else StateStore(kept, config.max_num_seqs, device)
    target.attach(attention, design.ops, design.plan, store)
    if target.recurrent is not None:
        states = RequestStates(target.recurrent, device)
        kv = StatefulKVManager(kv, states)
    token_texts, verification = TokenTexts(tokenizer), Verification(plugins, design.speculative, design.ops)
    runner = Runner(target, kv, token_texts, states)
    built = []
    to_capture = [(target, _expected(design, 1 + design.num_speculative_tokens))]
    for method in design.methods:
        group = of_draft = None
        if method.plan.kv_layout is not None:
            name, layout, lookahead = method.spec.name, method.plan.kv_layout, method.plan.lookahead
            with building(f"KV manager {design.kv_spec.name!r}", "allocate a draft's cache"):
                group = shared.add_group(kv, layout, name, lookahead, is_split=method.is_split)
            of_draft = attention.of_group(group, layout.num_layers, method.ops)
        models: list[Model] = []
        given = _build_context(method, design, target, of_draft, shared, models)
        with explaining(method.config, method.spec, plugins):
            proposer = build_proposer(method.spec, method.config.options, given)
        # Each forward pass of a draft model has a level of the drafts, or a root and the accepted token before it.
        expected = _expected(design, 2, getattr(method.config.options, "draft_window", None))
        to_capture += [(model, expected) for model in models]
        built.append(BuiltMethod(method, NamedProposer(proposer, method.spec.name), group))
    speculation = Speculation([_drafter(each, design) for each in built], device)
    parts = Parts(
        config=config,
        tokenizer=tokenizer,
        grammars=Grammars(plugins, tokenizer, target.info, target.eos_token_ids),
        target=target,
        kv=kv,
        runner=runner,
        speculation=speculation,
        scheduler=_scheduler(design, kv, speculation),
        verification=verification,
        token_texts=token_texts,
        num_speculative_tokens=design.num_speculative_tokens,
        num_kv_blocks=design.memory.num_blocks,
        sharing=shared,
    )
    with ExitStack() as failing, explaining_lack_of_memory(design.memory, config):
        failing.callback(speculation.abandon)
        if device.type != "cpu":
            for model, expected in to_capture:
                capture_ahead(model, expected)
            _rehearse(parts, design, built, engine_of)
        measured = _measured(parts, design, built)
        failing.pop_all()
    return measured


def _expected(design: Design, tokens_of_each: int, window: int | None = None) -> Expected:
    """What forward passes to capture before the first request. tokens_of_each: the most tokens of a request."""
    config, max_model_len = design.config, design.target.info.max_model_len
    num_tokens, num_blocks = config.max_num_seqs * tokens_of_each, design.memory.num_blocks
    return Expected(num_tokens, max_model_len, num_blocks, config.block_size, window)


def _rehearse(parts: Parts, design: Design, built: Sequence[BuiltMethod], engine_of: Callable[[Parts], Engine]) -> None:
    """Lend the parts to an engine that completes a few requests, without budgets."""
    device, branches = parts.runner.device, None
    lent = [
        evolve(each, proposer=LentProposer(each.proposer.proposer, each.proposer.name))
        for each in built
        if each.method.plan.taps or each.method.plan.kv_layout is not None
    ]
    drafters = [_drafter(each, design) for each in lent]
    if design.methods:
        branches = Branches(device)
        drafters.insert(
            0,
            Drafter(
                LentProposer(branches, branches.name),
                Plan(observes=False),
                num_speculative_tokens=design.num_speculative_tokens,
                group=None,
                max_tokens=sys.maxsize,
                most_each=sys.maxsize,
                vocab_size=design.target.info.vocab_size,
                device=device,
                ops=design.ops,
            ),
        )
    speculation = Speculation(drafters, device)
    scheduler = _scheduler(design, parts.kv, speculation)
    own = evolve(parts, tokenizer=None, speculation=speculation, scheduler=scheduler, sharing=Alone())
    with closing(engine_of(own)) as engine:
        rehearse(engine, branches, tuple(each.proposer.name for each in lent))


def _measured(parts: Parts, design: Design, built: Sequence[BuiltMethod]) -> Parts:
    """Measure steps, and let budgets, or the warning if drafting is a loss, go by the times."""
    config, device = parts.config, parts.runner.device
    token_s = warm_up(parts.target, design.memory.num_blocks, config.block_size)
    curve = _cost_curve(design, parts.runner, parts.verification, parts.kv)
    drafters = [_drafter(each, design, _budget(each.method, design, curve)) for each in built]
    speculation = Speculation(drafters, device, curve, _loss_watch(design, curve))
    return evolve(
        parts,
        speculation=speculation,
        scheduler=_scheduler(design, parts.kv, speculation),
        longest_step_s=token_s * config.max_num_batched_tokens,
    )


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


def _budget(method: Method, design: Design, curve: CostCurve | None) -> Budget | None:
    if curve is None:
        return None
    number, layout = method.config.num_speculative_tokens, method.plan.kv_layout
    in_place = layout is not None and layout.keeps_nodes
    return Budget(curve, design.config.max_num_seqs, number, in_place=in_place, observes=method.plan.observes)


def _drafter(built: BuiltMethod, design: Design, budget: Budget | None = None) -> Drafter:
    """Make the `Drafter` that calls a method's proposer."""
    method, target = built.method, design.target.info
    max_tokens, most_each = _most_stored(method.plan, target, design.config)
    return Drafter(
        built.proposer,
        method.plan,
        num_speculative_tokens=method.config.num_speculative_tokens,
        group=built.group,
        max_tokens=max_tokens,
        most_each=most_each,
        vocab_size=target.vocab_size,
        device=target.device,
        ops=method.ops,
        budget=budget,
    )


def _most_stored(plan: Plan, target: TargetInfo, config: EngineConfig) -> tuple[int, int]:
    """How many tokens' hidden states may be stored for a proposer that sees them late, of all requests and of each.
    Without hidden states, tokens are only counted."""
    if not plan.taps:
        return sys.maxsize, sys.maxsize
    bytes_per_token = len(plan.taps) * target.hidden_size * target.dtype.itemsize
    most_each = config.max_num_batched_tokens
    return max(most_each, STORED_BYTES // bytes_per_token), most_each


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


def _build_context(
    method: Method,
    design: Design,
    target: Model,
    attention: PagedAttention | None,
    shared: Sharing,
    models: list[Model],
) -> BuildContext:
    """models: gets the draft models that the proposer loads."""

    def load_model(config: DraftModelConfig) -> Model:
        if attention is None:
            raise PluginError("a draft model needs a group in the KV cache: its plan must have a kv_layout")
        source = evolve(ModelSource.of_draft(config, design.target.info), enforce_eager=method.is_eager)
        model = shared.load(source, method.spec.name)
        model.attach(attention, method.ops)
        models.append(model)
        return model

    device, graphed = design.target.info.device, ungraphed
    if device.type == "cuda" and not method.is_eager and design.config.tensor_parallel_size == 1:
        what, longest = f"the draft head of {method.spec.name!r}", design.target.info.max_model_len
        graphed = partial(GraphedFunction, attention=attention, what=what, pool=Pool(), max_model_len=longest)
    return BuildContext(
        target=design.target.info,
        num_speculative_tokens=method.config.num_speculative_tokens,
        max_num_seqs=design.config.max_num_seqs,
        max_num_batched_tokens=design.config.max_num_batched_tokens,
        device=device,
        embed=target.embed,
        output_head=target.output_head,
        output_rows=target.output_rows,
        attention=attention,
        load_model=load_model,
        speed_up=partial(speed_up, ops=method.ops, attention=attention),
        state=method.plan.state,
        graphed=graphed,
    )
