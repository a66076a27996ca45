"""The figures of comparisons, from hand-made runs."""

from __future__ import annotations

import attrs
import pytest

from specdec_core import DraftCounts
from specdec_core.contracts.report import StepReport
from specdec_tools.compare import Comparison, Run
from specdec_tools.figures import Figures


def timed_run(seconds, reports, token_ids=((1, 2),)):
    return Run(seconds, token_ids, tuple(reports), tuple("rs"[: len(token_ids)]), tuple(range(1, len(reports) + 1)))


def test_figures():
    """The best possible speed-up is 2: a plain step takes 1 s for 1 token, a speculative step 2 s for 4 tokens."""
    prefill = StepReport(num_prefill_tokens=9, target_s=3.0)
    plain_pass = StepReport(num_decode_requests=1, num_output_tokens=1, target_s=1.0)
    pass_ = StepReport(num_decode_requests=1, num_draft_tokens=5, num_accepted=3, num_output_tokens=4, draft_s=1.0,
                       target_s=1.0, accepted_per_request={"r": 3})  # fmt: skip
    comparison = Comparison(
        "title",
        plain=tuple(timed_run(seconds, [prefill, *[plain_pass] * 8]) for seconds in (11.0, 11.0, 90.0)),
        speculative=tuple(timed_run(8.0, [prefill, pass_, pass_]) for _ in range(3)),
    )
    figures = Figures.of(comparison)
    assert (figures.plain_s, figures.speculative_s, figures.num_tokens) == (11.0, 8.0, 2)
    assert figures.drafts.acceptance_rate_per_pos == [1.0, 1.0, 1.0]
    assert (figures.drafts.acceptance_length, figures.drafting_share) == (4.0, 2 / 8)
    even = Figures.of(Comparison("t", plain=comparison.plain[:1], speculative=comparison.speculative[:1]))
    assert even.decoding_speed_up == pytest.approx((11 - 3) / (8 - 3))
    assert even.efficiency == pytest.approx((11 - 3) / (8 - 3) / 2)
    assert Figures.of(comparison, comparison).plain_s == 22.0


def test_figures_of_a_given_rate():
    """Requests arrive over 10 s, so all tokens take as long with and without speculation. A user waits half as long.
    Seconds without any request count neither as decoding nor in the share of drafting."""
    step = StepReport(num_decode_requests=1, num_output_tokens=2, output_per_request={"r": 2}, draft_s=1.0,
                      target_s=1.0)  # fmt: skip
    plain, drafted = (
        attrs.evolve(timed_run(10.0, [step]), arrivals_s=(5.0,), report_times_s=(5 + waited,), idle_s=idle_s)
        for waited, idle_s in ((4.0, 6.0), (2.0, 8.0))
    )
    figures = Figures.of(Comparison("t", (plain,), (drafted,), is_open=True))
    assert (figures.speed_up, figures.tokens_per_s) == (1.0, 0.2)
    assert (figures.latencies.user_tokens_per_s, figures.plain_latencies.user_tokens_per_s) == (1.0, 0.5)
    assert (figures.user_speed_up, figures.felt_speed_up) == (2.0, 2.0)
    assert (figures.decoding_speed_up, figures.drafting_share) == (2.0, 0.5)
    assert Figures.of(Comparison("t", (plain,), (drafted,))).felt_speed_up == 1.0


def looping_run():
    """Make a run of two requests: the output of one loops from its second token on, the other has no loop."""
    steps = [
        ({"r": 1, "s": 2}, {}),
        ({"r": 3, "s": 2}, {"r": 2, "s": 1}),  # the loop begins here
        ({"s": 4}, {"s": 3}),
        ({"r": 30, "s": 1}, {"r": 29}),  # s has no draft
        ({"s": 1}, {"s": 0}),
    ]
    reports = [StepReport(output_per_request=output, accepted_per_request=accepted) for output, accepted in steps]
    return timed_run(1.0, reports, ((5,) * 34, tuple(range(10))))


@pytest.mark.parametrize(
    ("ends", "accepted"), [((1, 10), [1, 3, 0]), ((4, 7), [2, 1]), ((3, 8), [1, 3]), ((34, 0), [2, 29]), ((0, 0), [])]
)
def test_drafts_before_some_token(ends, accepted):
    expected = DraftCounts()
    for num_accepted in accepted:
        expected.add(0, num_accepted)
    assert looping_run().drafts_before(ends) == expected


def test_figures_of_unlooped_text():
    run = looping_run()
    figures = Figures.of(Comparison("t", (run,), (run, run)))
    assert (figures.num_tokens, figures.num_unlooped) == (44, 11)
    assert (figures.unlooped.num_drafts, figures.unlooped.num_accepted) == (6, 8)
    assert figures.distinct_ngrams == (1 + 7) / (31 + 7)
    short = timed_run(1.0, [], ((1, 2, 3), ()))
    assert Figures.of(Comparison("t", (short,), (short,))).distinct_ngrams is None


def test_outputs_of_other_lengths_are_compared_by_the_token():
    """Speed-ups compare seconds per token: half of the tokens in a quarter of the time is twice as fast."""
    passes = [StepReport(num_decode_requests=1, num_output_tokens=1, target_s=1.0)]
    plain, speculative = timed_run(8.0, passes, ((1,) * 8,)), timed_run(2.0, passes, ((1,) * 4,))
    figures = Figures.of(Comparison("t", (plain,), (speculative,)))
    assert (figures.num_plain_tokens, figures.num_tokens) == (8, 4)
    assert (figures.speed_up, figures.efficiency) == (2.0, 2.0)
    assert figures.cells()[1:4] == ("1.0", "2.0", "2.00x")


def test_runs_of_other_lengths_count_by_their_speed():
    """The last run is short. With the median of all seconds, it would have a token per second."""
    passes = [StepReport(num_decode_requests=1, num_output_tokens=1, target_s=1.0)]
    runs = (*[timed_run(1.0, passes, ((1,) * 10,))] * 2, timed_run(0.1, passes, ((1,),)))
    figures = Figures.of(Comparison("t", runs, runs))
    assert (figures.plain_tokens_per_s, figures.tokens_per_s) == (10.0, 10.0)


def test_efficiency_needs_passes():
    run = timed_run(1.0, [StepReport(num_prefill_tokens=9, target_s=1.0)])
    figures = Figures.of(Comparison("t", (run,), (run,)))
    assert figures.efficiency is None
    assert figures.decoding_speed_up is None


def test_the_first_difference_of_any_completion():
    plain = timed_run(1.0, [], ((1, 2, 3), (4, 5)))
    assert Comparison("t", (plain,), (plain,)).first_difference is None
    assert Comparison("t", (plain,), (timed_run(1.0, [], ((1, 2, 9), (4,))),)).first_difference == 1
