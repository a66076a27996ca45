"""Times the same prompts with plain and with speculative decoding, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from attrs import frozen

from specdec_core.cli.options import TRY, ModelOptions
from specdec_core.config.fields import shown
from specdec_core.config.sampling import SamplingParams
from specdec_core.contracts.report import StepReport
from specdec_core.engine.metrics import DraftCounts, Totals
from specdec_core.errors import SpecdecError
from specdec_core.plugins import Plugins
from specdec_core.plugins.discovery import Plugin
from specdec_tools.latencies import Latencies
from specdec_tools.repetition import loop_start, ngram_counts
from specdec_tools.step_costs import Decoding, StepCosts

if TYPE_CHECKING:
    from specdec_core.api.llm import LLM

SAME_TOKENS = frozenset({"", "greedy", "chosen"})
"""Verifiers that give the tokens of plain decoding with the same seed; "" is that of a step without drafts."""


class ListeningPlugins(Plugins):
    """The installed plugins, with a callback that adds the report of every engine step to the list `reports`, and the
    time of `perf_counter` to `report_times`."""

    def __init__(self, plugins: Sequence[Plugin], models: Sequence[Plugin] = ()) -> None:
        super().__init__(plugins, models)
        self.reports: list[StepReport] = []
        self.report_times: list[float] = []

    @property
    def step_finished(self) -> Callable[[StepReport], None]:
        notify = super().step_finished

        def record(report: StepReport) -> None:
            self.reports.append(report)
            self.report_times.append(perf_counter())
            if notify is not None:
                notify(report)

        return record


@frozen
class Run:
    """One timed run of a batch of prompts.

    seconds: from submission to the last token.
    token_ids: the output tokens of each completion.
    reports: the reports of all engine steps.
    request_ids: the request id of each completion, under which the reports list its tokens.
    report_times_s: the seconds from submission to each report.
    """

    seconds: float
    token_ids: tuple[tuple[int, ...], ...]
    reports: tuple[StepReport, ...]
    request_ids: tuple[str, ...]
    report_times_s: tuple[float, ...]

    def drafts_before(self, ends: Sequence[int]) -> DraftCounts:
        """Count the drafts and accepted draft tokens within the first ends[i] output tokens of each completion i.

        A draft counts if all tokens that its verification emitted, the recovered or bonus token included, are within
        this range. Draft tokens are not counted: the result's num_draft_tokens is 0.
        """
        limits = dict(zip(self.request_ids, ends, strict=True))
        num_emitted = dict.fromkeys(limits, 0)
        counts = DraftCounts()
        for report in self.reports:
            for request_id, num_tokens in report.output_per_request.items():
                num_emitted[request_id] += num_tokens
                is_drafted = request_id in report.accepted_per_request
                if is_drafted and num_emitted[request_id] <= limits[request_id]:
                    counts.add(0, report.accepted_per_request[request_id])
        return counts


@frozen(eq=False)
class TimedModel:
    """An `LLM` whose plugins record a report of every engine step."""

    llm: LLM
    plugins: ListeningPlugins

    @classmethod
    def load(cls, options: ModelOptions) -> TimedModel:
        plugins = ListeningPlugins.load(disable=options.disable)
        return cls(options.load(plugins), plugins)

    def run(self, prompts: Sequence[str], params: SamplingParams) -> Run:
        """Complete the prompts in one batch and time it. Raises SpecdecError if the model's logits were not finite."""
        self.plugins.reports.clear()
        self.plugins.report_times.clear()
        started = perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = perf_counter() - started
        for output in outputs:
            if output.outputs[0].finish_reason == "error":
                raise SpecdecError(
                    f"the model's logits were not finite after the prompt {shown(output.prompt, 60)}: {TRY}"
                )
        token_ids = tuple(tuple(output.outputs[0].token_ids) for output in outputs)
        return Run(
            seconds,
            token_ids,
            tuple(self.plugins.reports),
            tuple(output.request_id for output in outputs),
            tuple(time - started for time in self.plugins.report_times),
        )


@frozen
class Comparison:
    """Several runs of the same batch of prompts, plain and speculative.

    title: name of the batch.
    plain, speculative: the runs without and with speculation.
    """

    title: str
    plain: tuple[Run, ...]
    speculative: tuple[Run, ...]

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
    models: tuple[TimedModel, TimedModel],
    params: SamplingParams,
    num_runs: int,
) -> Comparison:
    """Run a batch with the plain and the speculative model in turn, so that other load on the machine affects both.

    title: name of the batch.
    models: the plain and the speculative model.
    num_runs: number of runs of each model.
    """
    runs = [tuple(model.run(prompts, params) for model in models) for _ in range(num_runs)]
    plain, speculative = zip(*runs, strict=True)
    return Comparison(title, plain, speculative)


def first_difference(outputs: Sequence[Sequence[int]]) -> int | None:
    """Return the first index at which not all outputs have the same token; None if the outputs are equal.

    outputs: token ids of each output.
    """
    return next((i for i, tokens in enumerate(zip_longest(*outputs)) if len(set(tokens)) > 1), None)


def _differences(runs: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    found = [first_difference(completions) for completions in zip(*runs, strict=True)]
    return [index for index in found if index is not None]


@frozen
class Figures:
    """The results of one or several comparisons of plain with speculative runs.

    num_tokens: output tokens of one run with speculation.
    num_plain_tokens: output tokens of one run without speculation; the number may differ if drafts are sampled.
    plain_s, speculative_s: sums of the batches' median seconds, prefill included.
    drafts: counts of drafts and accepted draft tokens in all speculative runs.
    drafting_share: share of the speculative runs' seconds that was spent on drafting.
    decoding_speed_up: speed-up without the time of prefill. In a step that has prefill, the forward pass and drafting
        do not count. None if the plain or the speculative runs have only such steps.
    efficiency: decoding_speed_up divided by the best possible speed-up, which is tokens per forward pass * T_plain /
        (T_draft + T_verify). T_plain is the time of a plain forward pass. T_draft and T_verify are the times of
        drafting and of the target's forward pass in a speculative step. None if decoding_speed_up is None.
    costs: these times in plain forward passes. None if decoding_speed_up is None.
    plain_latencies, latencies: how long completions took without and with speculation.
    is_identical: whether all runs generated the same tokens.
    num_unlooped: output tokens of one run with speculation, up to where each completion begins to repeat itself.
    unlooped: like `drafts`, but only of drafts before a completion begins to repeat itself.
    distinct_ngrams: share of n-grams that are distinct within their completion; None if all completions are too short
        to have an n-gram.
    """

    num_tokens: int
    num_plain_tokens: int
    plain_s: float
    speculative_s: float
    drafts: DraftCounts
    drafting_share: float
    decoding_speed_up: float | None
    efficiency: float | None
    costs: StepCosts | None
    plain_latencies: Latencies
    latencies: Latencies
    is_identical: bool
    num_unlooped: int
    unlooped: DraftCounts
    distinct_ngrams: float | None

    @property
    def speed_up(self) -> float:
        """Seconds per output token without speculation, divided by those with speculation."""
        return (self.plain_s / self.num_plain_tokens) / (self.speculative_s / self.num_tokens)

    def cells(self) -> tuple[str, ...]:
        """Cells of a table row: tokens, tokens/s plain and speculative, speed-up and acceptance length."""
        return (
            str(self.num_tokens),
            f"{self.num_plain_tokens / self.plain_s:.1f}",
            f"{self.num_tokens / self.speculative_s:.1f}",
            f"{self.speed_up:.2f}x",
            f"{self.drafts.acceptance_length:.2f}" if self.drafts.num_drafts else "no drafts",
        )

    @classmethod
    def of(cls, *comparisons: Comparison) -> Figures:
        plain = [run for comparison in comparisons for run in comparison.plain]
        speculative = [run for comparison in comparisons for run in comparison.speculative]
        totals = Totals()
        for run in speculative:
            for report in run.reports:
                totals.add(report, step_s=0.0)
        decoding, its_decoding = _decoding(plain), _decoding(speculative)
        has_decoding = decoding.num_passes and its_decoding.num_passes
        costs = StepCosts.of(decoding, its_decoding) if has_decoding else None
        completions = [tokens for c in comparisons for tokens in c.speculative[-1].token_ids]
        num_distinct, num_ngrams = map(sum, zip((0, 0), *map(ngram_counts, completions), strict=True))
        return cls(
            num_tokens=sum(map(len, completions)),
            num_plain_tokens=sum(len(tokens) for c in comparisons for tokens in c.plain[-1].token_ids),
            plain_s=sum(median(run.seconds for run in c.plain) for c in comparisons),
            speculative_s=sum(median(run.seconds for run in c.speculative) for c in comparisons),
            drafts=totals.drafts,
            drafting_share=totals.draft_s / sum(run.seconds for run in speculative),
            decoding_speed_up=decoding.token_s / its_decoding.token_s if has_decoding else None,
            efficiency=decoding.token_s / its_decoding.token_s / costs.speed_up if costs else None,
            costs=costs,
            plain_latencies=Latencies.of(plain),
            latencies=Latencies.of(speculative),
            is_identical=all(c.first_difference is None for c in comparisons),
            num_unlooped=sum(map(loop_start, completions)),
            unlooped=sum((run.drafts_before([*map(loop_start, run.token_ids)]) for run in speculative), DraftCounts()),
            distinct_ngrams=num_distinct / num_ngrams if num_ngrams else None,
        )


def _decoding(runs: Sequence[Run]) -> Decoding:
    return Decoding.of(
        [report for run in runs for report in run.reports],
        sum(run.seconds for run in runs),
        sum(len(tokens) for run in runs for tokens in run.token_ids),
    )
