"""What a draft must look like: `specdec_core.contracts.draft.Draft`."""

from __future__ import annotations

from specdec_testing.conformance import faults as rules, workload
from specdec_testing.conformance.faults import Rule
from specdec_testing.conformance.histories import after_any_history, ask, for_any_history
from specdec_testing.conformance.recording import Proposal
from specdec_testing.conformance.situations import Situations


def hold(situations: Situations, rule: Rule) -> None:
    """Apply a rule to all that was drafted in the engine, and after any history if the proposer is model-free."""

    def check(proposal: Proposal) -> None:
        __tracebackhide__ = True
        faults = list(rule(proposal))
        assert not faults, f"{faults[0]}\n\nThis was asked: {proposal.asked}\nThis came back: {proposal.draft}"

    for proposal in situations.proposals:
        check(proposal)
    if any(fault for proposal in after_any_history(situations) for fault in rule(proposal)):
        for_any_history(situations, check)  # once more, for the simplest one


class DraftChecks:
    """One rule each. A draft may be empty for any request: the engine then decodes it plainly."""

    def test_drafts_something(self, specdec_situations: Situations) -> None:
        """Not a rule, but without drafts the other tests would say nothing.

        The prompts repeat themselves. Choose options with which it drafts, or num_speculative_tokens.
        """
        assert any(map(rules.has_draft, specdec_situations.proposals)), (
            f"it drafted nothing in {len(specdec_situations.proposals)} calls of propose, after prompts that repeat "
            f"themselves: give options with which it does"
        )

    def test_tensors(self, specdec_situations: Situations) -> None:
        """`propose` returns a Draft with a tree per request: dtypes, shapes, offsets and devices as its fields say."""
        hold(specdec_situations, rules.tensors)

    def test_budgets(self, specdec_situations: Situations) -> None:
        """Request i has at most max_draft_tokens[i] nodes, whatever the others may have: more have no KV slots."""
        hold(specdec_situations, rules.budgets)

    def test_vocabulary(self, specdec_situations: Situations) -> None:
        """Draft tokens are tokens of the target."""
        hold(specdec_situations, rules.vocabulary)

    def test_parents_come_first(self, specdec_situations: Situations) -> None:
        """A node's parent stands before it, in the same request's tree."""
        hold(specdec_situations, rules.parents)

    def test_max_depth(self, specdec_situations: Situations) -> None:
        """No node lies deeper than max_depth: verification goes no deeper than it."""
        hold(specdec_situations, rules.max_depth)

    def test_is_chain(self, specdec_situations: Situations) -> None:
        """is_chain is set for chains only, whose dead nodes come last: the engine then leaves out what trees need."""
        hold(specdec_situations, rules.chain)

    def test_host_copies(self, specdec_situations: Situations) -> None:
        """What the host is to know of a draft on a device is what is there: the engine goes by either."""
        hold(specdec_situations, rules.host_copies)

    def test_scores(self, specdec_situations: Situations) -> None:
        """Scores, where there are any, are probabilities."""
        hold(specdec_situations, rules.scores)

    def test_sampled_siblings_come_first(self, specdec_situations: Situations) -> None:
        """Among siblings, those that were sampled stand before those that were chosen."""
        hold(specdec_situations, rules.sampled_first)

    def test_q_rows(self, specdec_situations: Situations) -> None:
        """q_rows names rows of q, one for each set of sampled siblings, and -1 for chosen nodes."""
        hold(specdec_situations, rules.q_rows)

    def test_q(self, specdec_situations: Situations) -> None:
        """Rows of q are distributions."""
        hold(specdec_situations, rules.q)

    def test_q_to_target(self, specdec_situations: Situations) -> None:
        """A draft vocabulary of its own is mapped into the target's, one to one."""
        hold(specdec_situations, rules.q_to_target)

    def test_q_ids(self, specdec_situations: Situations) -> None:
        """Where q names the tokens of each of its rows, each row names them once, and there is no q_to_target."""
        hold(specdec_situations, rules.q_ids)

    def test_sampled_tokens_are_possible(self, specdec_situations: Situations) -> None:
        """A sampled token has a positive probability in its row of q: acceptance divides by it."""
        hold(specdec_situations, rules.sampled_tokens)

    def test_one_token_contexts(self, specdec_situations: Situations) -> None:
        """A prompt may be a single token. Draft nothing where there is nothing to go by."""
        specdec_situations.run(workload.one_token())
        if specdec_situations.is_model_free:
            ask(specdec_situations, [[5], [1, 2]], [2, 1], 0.0)

    def test_long_contexts(self, specdec_situations: Situations) -> None:
        """A request may be as long as the target allows. Keep no buffer that is shorter."""
        specdec_situations.run(workload.long())
        if specdec_situations.is_model_free:
            ask(specdec_situations, [[3, 1, 4, 1, 5] * 4000], [specdec_situations.subject.num_speculative_tokens], 0.0)
