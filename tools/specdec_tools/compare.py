"""Times the same prompts with plain and with speculative decoding, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from attrs import frozen

from specdec_core.cli.options import TRY, ModelOptions
from specdec_core.config.fields import shown
from specdec_core.config.sampling import SamplingParams
from specdec_core.contracts.proposer import ProposerSpec
from specdec_core.contracts.report import StepReport
from specdec_core.engine.metrics import DraftCounts
from specdec_core.errors import SpecdecError
from specdec_core.plugins import Plugins
from specdec_core.plugins.discovery import Plugin
from specdec_tools.loads import Load, Rate, serve
from specdec_tools.synthetic import METHOD, KnownOutputs, spec

if TYPE_CHECKING:
    from specdec_core.api.llm import LLM

SAME_TOKENS = frozenset({"", "greedy", "chosen"})
"""Verifiers that give the tokens of plain decoding with the same seed; "" is that of a step without drafts."""


class ListeningPlugins(Plugins):
    """The installed plugins, with a callback that adds the report of every engine step to the list `reports`, and the
    time of `perf_counter` to `report_times`. `own` has proposers that no plugin offers, by name."""

    def __init__(self, plugins: Sequence[Plugin], models: Sequence[Plugin] = ()) -> None:
        super().__init__(plugins, models)
        self.reports: list[StepReport] = []
        self.report_times: list[float] = []
        self.own: dict[str, ProposerSpec] = {}

    def proposer(self, name: str) -> ProposerSpec:
        return self.own[name] if name in self.own else super().proposer(name)

    def proposers(self) -> list[str]:
        return [*super().proposers(), *self.own]

    @property
    def step_finished(self) -> Callable[[StepReport], None]:
        notify = super().step_finished

        def record(report: StepReport) -> None:
            self.reports.append(report)
            self.report_times.append(perf_counter())
            if notify is not None:
                notify(report)

        return record


class Drafted(NamedTuple):
    """A verified draft.

    completion: the index of its completion.
    start, end: how many tokens the completion had before and after.
    """

    completion: int
    start: int
    end: int
    num_accepted: int


@frozen
class Run:
    """One timed run of several prompts.

    seconds: from submission, or from the start of a load, to the last token.
    token_ids: the output tokens of each completion.
    reports: the reports of all engine steps.
    request_ids: the request id of each completion, under which the reports list its tokens.
    report_times_s: the seconds from the start to each report.
    prompt_token_ids: the prompt of each completion; empty if the prompts are not known.
    arrivals_s: the seconds from the start to the arrival of each request; empty if all were submitted at the start.
    idle_s: the part of `seconds` in which no request was unfinished.
    """

    seconds: float
    token_ids: tuple[tuple[int, ...], ...]
    reports: tuple[StepReport, ...]
    request_ids: tuple[str, ...]
    report_times_s: tuple[float, ...]
    prompt_token_ids: tuple[tuple[int, ...], ...] = ()
    arrivals_s: tuple[float, ...] = ()
    idle_s: float = 0.0

    def drafts(self) -> Iterator[Drafted]:
        """Yield all verified drafts, step by step."""
        num_emitted = dict.fromkeys(self.request_ids, 0)
        indices = {request_id: index for index, request_id in enumerate(self.request_ids)}
        for report in self.reports:
            for request_id, num_tokens in report.output_per_request.items():
                start = num_emitted[request_id]
                num_emitted[request_id] += num_tokens
                if request_id in report.accepted_per_request:
                    num_accepted = report.accepted_per_request[request_id]
                    yield Drafted(indices[request_id], start, start + num_tokens, num_accepted)

    def drafts_before(self, ends: Sequence[int]) -> DraftCounts:
        """Count the drafts and accepted draft tokens within the first ends[i] output tokens of each completion i.

        A draft counts if all tokens that its verification emitted, the recovered or bonus token included, are within
        this range. Draft tokens are not counted: the result's num_draft_tokens is 0.
        """
        counts = DraftCounts()
        for draft in self.drafts():
            if draft.end <= ends[draft.completion]:
                counts.add(0, draft.num_accepted)
        return counts


@frozen(eq=False)
class TimedModel:
    """An `LLM` whose plugins record a report of every engine step.

    known: what plain decoding generates, for the proposer `synthetic`; None: another proposer, or none.
    """

    llm: LLM
    plugins: ListeningPlugins
    known: KnownOutputs | None = None

    @classmethod
    def load(cls, options: ModelOptions, *, is_synthetic: bool = False) -> TimedModel:
        """Load the model. is_synthetic: offer the proposer `synthetic`."""
        plugins = ListeningPlugins.load(disable=options.disable)
        known = KnownOutputs() if is_synthetic else None
        if known is not None:
            plugins.own[METHOD] = spec(known)
        return cls(options.load(plugins), plugins, known)

    def remember(self, plain: Run) -> None:
        """Let the proposer `synthetic` know a run of plain decoding; other proposers learn nothing."""
        if self.known is not None:
            self.known.remember(plain.prompt_token_ids, plain.token_ids)

    def run(self, prompts: Sequence[str], params: SamplingParams, load: Load | None = None) -> Run:
        """Complete the prompts and time it. Raises SpecdecError if the model's logits were not finite.

        load: how the requests arrive. None: they are submitted together.

        Before, the proposers forget earlier runs: they would find the outputs of the same prompts.
        """
        self.llm.engine.forget()
        self.plugins.reports.clear()
        self.plugins.report_times.clear()
        return self._batch(prompts, params) if load is None else self._serve(prompts, params, load)

    def _batch(self, prompts: Sequence[str], params: SamplingParams) -> Run:
        started = perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = perf_counter() - started
        for output in outputs:
            _refuse_failure(output.outputs[0].finish_reason, str(output.prompt))
        return Run(
            seconds,
            tuple(tuple(output.outputs[0].token_ids) for output in outputs),
            tuple(self.plugins.reports),
            tuple(output.request_id for output in outputs),
            tuple(time - started for time in self.plugins.report_times),
            tuple(tuple(output.prompt_token_ids) for output in outputs),
        )

    def _serve(self, prompts: Sequence[str], params: SamplingParams, load: Load) -> Run:
        from specdec_core.api.prompts import PromptReader  # imports transformers, which listing plugins must not

        token_ids = [prompt.token_ids for prompt in PromptReader(self.llm.get_tokenizer()).read(prompts)]
        served = serve(self.llm.engine, token_ids, params, load)
        for prompt, request in zip(prompts, served.requests, strict=True):
            _refuse_failure(request.finish_reason, prompt)
        return Run(
            served.seconds,
            tuple(tuple(request.output_token_ids) for request in served.requests),
            tuple(self.plugins.reports),
            tuple(request.id for request in served.requests),
            tuple(time - served.started for time in self.plugins.report_times),
            tuple(map(tuple, token_ids)),
            served.arrivals_s,
            served.idle_s,
        )


def _refuse_failure(finish_reason: str | None, prompt: str) -> None:
    if finish_reason == "error":
        raise SpecdecError(f"the model's logits were not finite after the prompt {shown(prompt, 60)}: {TRY}")


@frozen
class Comparison:
    """Several runs of the same prompts, plain and speculative.

    title: name of the batch, or of the load.
    plain, speculative: the runs without and with speculation.
    groups: the group of each prompt; empty if it is not known.
    is_open: whether requests arrived at a given rate. The seconds of a run then depend on the rate.
    """

    title: str
    plain: tuple[Run, ...]
    speculative: tuple[Run, ...]
    groups: tuple[str, ...] = ()
    is_open: bool = False

    @property
    def may_differ(self) -> bool:
        """Whether a verifier was used that may choose other tokens than plain decoding with the same seed: rejection
        sampling and its like, or a lossy one."""
        reports = [report for run in self.speculative for report in run.reports]
        return any(report.verifier not in SAME_TOKENS for report in reports)

    @property
    def first_difference(self) -> int | None:
        """The first output position at which the runs differ in any completion; None if all outputs are equal."""
        return min(_differences([run.token_ids for run in (*self.plain, *self.speculative)]), default=None)


def load_both(options: ModelOptions) -> tuple[TimedModel, TimedModel]:
    """Load the model twice. Returns the model without speculation, then the model with speculation."""
    return TimedModel.load(options.with_keywords(speculative_config=None)), TimedModel.load(options)


def compare(
    title: str,
    prompts: Sequence[str],
    models: Sequence[TimedModel],
    params: SamplingParams,
    num_runs: int,
    *,
    load: Load | None = None,
    groups: tuple[str, ...] = (),
) -> tuple[Comparison, ...]:
    """Run the same prompts with all models in turn, so that other load on the machine affects all of them. Returns a
    comparison with the plain model for each of the others.

    title: name of the batch, or of the load.
    models: the plain model, then one or more with speculation.
    num_runs: number of runs of each model.
    load: how the requests arrive. None: they are submitted together.
    groups: the group of each prompt.
    """
    rounds = []
    for _ in range(num_runs):
        plain = models[0].run(prompts, params, load)
        for model in models[1:]:
            model.remember(plain)
        rounds.append((plain, *(model.run(prompts, params, load) for model in models[1:])))
    plain_runs, *others = zip(*rounds, strict=True)
    return tuple(Comparison(title, plain_runs, runs, groups, isinstance(load, Rate)) for runs in others)


def first_difference(outputs: Sequence[Sequence[int]]) -> int | None:
    """Return the first index at which not all outputs have the same token; None if the outputs are equal.

    outputs: token ids of each output.
    """
    return next((i for i, tokens in enumerate(zip_longest(*outputs)) if len(set(tokens)) > 1), None)


def _differences(runs: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    found = [first_difference(completions) for completions in zip(*runs, strict=True)]
    return [index for index in found if index is not None]
