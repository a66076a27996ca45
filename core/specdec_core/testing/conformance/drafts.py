"""What a draft must look like: `specdec_core.types.Draft`."""

from __future__ import annotations

from specdec_core.testing.conformance import rules, workload
from specdec_core.testing.conformance.bench import Bench
from specdec_core.testing.conformance.histories import after_any_history, ask, for_any_history
from specdec_core.testing.conformance.recording import Proposal
from specdec_core.testing.conformance.rules import Rule


def hold(bench: Bench, rule: Rule) -> None:
    """Apply a rule to all that was drafted in the engine, and after any history if the proposer is model-free."""

    def check(proposal: Proposal) -> None:
        __tracebackhide__ = True
        faults = list(rule(proposal))
        assert not faults, f"{faults[0]}\n\nThis was asked: {proposal.asked}\nThis came back: {proposal.draft}"

    for proposal in bench.proposals:
        check(proposal)
    if any(fault for proposal in after_any_history(bench) for fault in rule(proposal)):
        for_any_history(bench, check)  # once more, for the simplest one


class DraftChecks:
    """One rule each. A draft may be empty for any request: the engine then decodes it plainly."""

    def test_drafts_something(self, specdec_bench: Bench) -> None:
        """Not a rule, but without drafts the other tests would say nothing.

        The prompts repeat themselves. Choose options with which it drafts, or num_speculative_tokens.
        """
        assert any(proposal.draft.num_nodes for proposal in specdec_bench.proposals), (
            f"it drafted nothing in {len(specdec_bench.proposals)} calls of propose, after prompts that repeat "
            f"themselves: give options with which it does"
        )

    def test_tensors(self, specdec_bench: Bench) -> None:
        """`propose` returns a Draft with a tree per request: dtypes, shapes, offsets and devices as its fields say."""
        hold(specdec_bench, rules.tensors)

    def test_budgets(self, specdec_bench: Bench) -> None:
        """Request i has at most max_draft_tokens[i] nodes, whatever the others may have: more have no KV slots."""
        hold(specdec_bench, rules.budgets)

    def test_vocabulary(self, specdec_bench: Bench) -> None:
        """Draft tokens are tokens of the target."""
        hold(specdec_bench, rules.vocabulary)

    def test_parents_come_first(self, specdec_bench: Bench) -> None:
        """A node's parent stands before it, in the same request's tree."""
        hold(specdec_bench, rules.parents)

    def test_max_depth(self, specdec_bench: Bench) -> None:
        """No node lies deeper than max_depth: verification goes no deeper than it."""
        hold(specdec_bench, rules.max_depth)

    def test_is_chain(self, specdec_bench: Bench) -> None:
        """is_chain is set for chains only: the engine then leaves out what trees need."""
        hold(specdec_bench, rules.chain)

    def test_scores(self, specdec_bench: Bench) -> None:
        """Scores, where there are any, are probabilities."""
        hold(specdec_bench, rules.scores)

    def test_sampled_siblings_come_first(self, specdec_bench: Bench) -> None:
        """Among siblings, those that were sampled stand before those that were chosen."""
        hold(specdec_bench, rules.sampled_first)

    def test_q_rows(self, specdec_bench: Bench) -> None:
        """q_rows names rows of q, one for each set of sampled siblings, and -1 for chosen nodes."""
        hold(specdec_bench, rules.q_rows)

    def test_q(self, specdec_bench: Bench) -> None:
        """Rows of q are distributions."""
        hold(specdec_bench, rules.q)

    def test_q_to_target(self, specdec_bench: Bench) -> None:
        """A draft vocabulary of its own is mapped into the target's, one to one."""
        hold(specdec_bench, rules.q_to_target)

    def test_sampled_tokens_are_possible(self, specdec_bench: Bench) -> None:
        """A sampled token has a positive probability in its row of q: acceptance divides by it."""
        hold(specdec_bench, rules.sampled_tokens)

    def test_one_token_contexts(self, specdec_bench: Bench) -> None:
        """A prompt may be a single token. Draft nothing where there is nothing to go by."""
        specdec_bench.run(workload.one_token())
        if specdec_bench.is_model_free:
            ask(specdec_bench, [[5], [1, 2]], [2, 1], 0.0)

    def test_long_contexts(self, specdec_bench: Bench) -> None:
        """A request may be as long as the target allows. Keep no buffer that is shorter."""
        specdec_bench.run(workload.long())
        if specdec_bench.is_model_free:
            ask(specdec_bench, [[3, 1, 4, 1, 5] * 4000], [specdec_bench.subject.num_speculative_tokens], 0.0)
