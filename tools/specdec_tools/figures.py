"""The figures of `spec-decode bench` and `demo`, computed from comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from attrs import frozen

from specdec_core.engine.metrics import DraftCounts, Totals
from specdec_tools.acceptance import by_context, by_group
from specdec_tools.compare import Comparison, Run
from specdec_tools.latencies import Latencies
from specdec_tools.repetition import loop_start, ngram_counts
from specdec_tools.step_costs import Decoding, StepCosts


@frozen
class Figures:
    """The results of one or several comparisons of plain with speculative runs.

    num_tokens: output tokens of one run with speculation.
    num_plain_tokens: output tokens of one run without speculation; the number may differ if drafts are sampled.
    plain_s, speculative_s: sums of the batches' median seconds, prefill included.
    drafts: counts of drafts and accepted draft tokens in all speculative runs.
    contexts, groups: the same by context length and by group of the prompts, without the number of draft tokens.
    drafting_share: share of the speculative runs' seconds that was spent on drafting. Seconds in which there was no
        request do not count.
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
    num_plain_preempted, num_preempted: how often a request lost its KV blocks to another one, in all runs.
    is_open: whether requests arrived at a given rate, so that speed-ups are of what a user waits for.
    distinct_ngrams: share of n-grams that are distinct within their completion; None if all completions are too short
        to have an n-gram.
    """

    num_tokens: int
    num_plain_tokens: int
    plain_s: float
    speculative_s: float
    drafts: DraftCounts
    contexts: Mapping[int, DraftCounts]
    groups: Mapping[str, DraftCounts]
    drafting_share: float
    decoding_speed_up: float | None
    efficiency: float | None
    costs: StepCosts | None
    plain_latencies: Latencies
    latencies: Latencies
    is_identical: bool
    num_unlooped: int
    unlooped: DraftCounts
    num_plain_preempted: int
    num_preempted: int
    is_open: bool
    distinct_ngrams: float | None

    @property
    def speed_up(self) -> float:
        """Seconds per output token without speculation, divided by those with speculation."""
        return self.tokens_per_s / self.plain_tokens_per_s

    @property
    def plain_tokens_per_s(self) -> float:
        """Output tokens per second of all requests together, without speculation."""
        return self.num_plain_tokens / self.plain_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.speculative_s

    @property
    def user_speed_up(self) -> float:
        """Tokens per second of a user with speculation, divided by those without speculation."""
        return self.latencies.user_tokens_per_s / self.plain_latencies.user_tokens_per_s

    @property
    def felt_speed_up(self) -> float:
        """The speed-up that says whether speculation pays: that of all requests together or, where their rate is given,
        that of a user."""
        return self.user_speed_up if self.is_open else self.speed_up

    def cells(self) -> tuple[str, ...]:
        """Cells of a table row: tokens, tokens/s plain and speculative, speed-up and acceptance length."""
        return (
            str(self.num_tokens),
            f"{self.plain_tokens_per_s:.1f}",
            f"{self.tokens_per_s:.1f}",
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
            plain_s=sum(_usual_s(c.plain) for c in comparisons),
            speculative_s=sum(_usual_s(c.speculative) for c in comparisons),
            drafts=totals.drafts,
            contexts=by_context(speculative),
            groups=by_group(comparisons),
            drafting_share=totals.draft_s / sum(run.seconds - run.idle_s for run in speculative),
            decoding_speed_up=decoding.token_s / its_decoding.token_s if has_decoding else None,
            efficiency=decoding.token_s / its_decoding.token_s / costs.speed_up if costs else None,
            costs=costs,
            plain_latencies=Latencies.of(plain),
            latencies=Latencies.of(speculative),
            is_identical=all(c.first_difference is None for c in comparisons),
            num_unlooped=sum(map(loop_start, completions)),
            unlooped=sum((run.drafts_before([*map(loop_start, run.token_ids)]) for run in speculative), DraftCounts()),
            num_plain_preempted=sum(report.num_preempted for run in plain for report in run.reports),
            num_preempted=totals.num_preempted,
            is_open=any(c.is_open for c in comparisons),
            distinct_ngrams=num_distinct / num_ngrams if num_ngrams else None,
        )


def _usual_s(runs: Sequence[Run]) -> float:
    """The seconds of the last run's tokens at the median speed of all runs: above temperature 0 lengths differ."""
    numbers = [sum(map(len, run.token_ids)) for run in runs]
    if not all(numbers):
        return median(run.seconds for run in runs)
    return numbers[-1] / median(number / run.seconds for number, run in zip(numbers, runs, strict=True))


def _decoding(runs: Sequence[Run]) -> Decoding:
    return Decoding.of(
        [report for run in runs for report in run.reports],
        sum(run.seconds - run.idle_s for run in runs),
        sum(len(tokens) for run in runs for tokens in run.token_ids),
    )
