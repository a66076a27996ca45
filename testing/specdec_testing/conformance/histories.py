"""Drafts that a proposer without a model makes after arbitrary token sequences, outside of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen
from hypothesis import HealthCheck, given, settings, strategies as st

from specdec_testing.conformance.recording import Proposal
from specdec_testing.conformance.situations import Situations
from specdec_testing.drive import SimpleRequest, batch_of, one_step


@frozen
class Question:
    """A batch of requests to draft for.

    histories: the token ids of each request.
    max_draft_tokens: the largest number of draft tokens for each request.
    temperature: the sampling temperature of all requests.
    """

    histories: list[list[int]]
    max_draft_tokens: list[int]
    temperature: float


def questions(vocab_size: int, most: int) -> st.SearchStrategy[Question]:
    few = st.integers(0, 2)
    token = few | st.integers(0, vocab_size - 1) | st.just(vocab_size - 1)
    history = st.lists(few, min_size=3, max_size=40) | st.lists(token, min_size=3, max_size=40)

    def with_budgets(histories: list[list[int]]) -> st.SearchStrategy[Question]:
        budgets = st.lists(st.integers(1, most), min_size=len(histories), max_size=len(histories))
        return st.builds(Question, st.just(histories), budgets, st.sampled_from([0.0, 0.8]))

    return st.lists(history, min_size=1, max_size=4).flatmap(with_budgets)


def for_any_history(situations: Situations, check: Callable[[Proposal], None]) -> None:
    """Generate many batches of token sequences, and call `check` with the proposer's draft for each batch. Every run
    generates the same batches.

    If `check` fails, hypothesis reports the simplest batch for which it fails.
    """
    most = situations.subject.num_speculative_tokens

    @settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(questions(situations.context.target.vocab_size, most))
    def run(question: Question) -> None:
        check(ask(situations, question.histories, question.max_draft_tokens, question.temperature))

    run()


def after_any_history(situations: Situations) -> list[Proposal]:
    """Return the proposer's drafts for the batches of `for_any_history`. The drafts are cached. The list is empty if
    the proposer needs a model."""
    if situations.histories is None:
        situations.histories = []
        if situations.is_model_free:
            for_any_history(situations, situations.histories.append)
    return situations.histories


def ask(
    situations: Situations, histories: Sequence[Sequence[int]], max_draft_tokens: Sequence[int], temperature: float
) -> Proposal:
    """Call the proposer for requests with these token ids (`histories`), as if they had just been prefilled. Returns
    the recorded call of `propose`."""
    requests = [SimpleRequest(f"history-{i}", tokens, seed=i, prediction=tokens) for i, tokens in enumerate(histories)]
    batch = batch_of(requests, max_draft_tokens, temperature=temperature)
    draft = one_step(situations.lone_proposer, batch, observes=situations.plan.observes)
    return Proposal.of(batch, draft, situations.context, set())
