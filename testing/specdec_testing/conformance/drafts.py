"""Rules for a draft: `specdec_core.contracts.draft.Draft`."""

from __future__ import annotations

from specdec_testing.conformance import faults as rules, workload
from specdec_testing.conformance.faults import Rule
from specdec_testing.conformance.histories import after_any_history, ask, for_any_history
from specdec_testing.conformance.recording import Proposal
from specdec_testing.conformance.situations import Situations


def hold(situations: Situations, rule: Rule) -> None:
    """Check a rule on all drafts made in the engine, and on drafts after arbitrary histories if the proposer is
    model-free."""

    def check(proposal: Proposal) -> None:
        __tracebackhide__ = True
        faults = list(rule(proposal))
        assert not faults, f"{faults[0]}\n\nThis was asked: {proposal.asked}\nThis came back: {proposal.draft}"

    for proposal in situations.proposals:
        check(proposal)
    if any(fault for proposal in after_any_history(situations) for fault in rule(proposal)):
        for_any_history(situations, check)  # once more, for the simplest one


class DraftChecks:
    """One test per rule. A draft may always be empty for a request, which is then decoded without a draft."""

    def test_drafts_something(self, specdec_situations: Situations) -> None:
        """The proposer drafts in at least one situation; otherwise the other tests would prove nothing.

        The prompts repeat themselves. Choose options, or num_speculative_tokens, with which the proposer drafts.
        """
        assert any(map(rules.has_draft, specdec_situations.proposals)), (
            f"it drafted nothing in {len(specdec_situations.proposals)} calls of propose, after prompts that repeat "
            f"themselves: give options with which it does"
        )

    def test_tensors(self, specdec_situations: Situations) -> None:
        """`propose` returns a Draft with a tree per request, with the dtypes, shapes, offsets and devices given at its
        fields."""
        hold(specdec_situations, rules.tensors)

    def test_budgets(self, specdec_situations: Situations) -> None:
        """Request i has at most max_draft_tokens[i] nodes. Further nodes would have no KV slots."""
        hold(specdec_situations, rules.budgets)

    def test_vocabulary(self, specdec_situations: Situations) -> None:
        """Draft tokens are tokens of the target."""
        hold(specdec_situations, rules.vocabulary)

    def test_parents_come_first(self, specdec_situations: Situations) -> None:
        """A node's parent stands before it, in the same request's tree."""
        hold(specdec_situations, rules.parents)

    def test_max_depth(self, specdec_situations: Situations) -> None:
        """No node is deeper than max_depth, where verification stops."""
        hold(specdec_situations, rules.max_depth)

    def test_is_chain(self, specdec_situations: Situations) -> None:
        """is_chain is set only for chains, with dead nodes last: the engine then skips work that only trees need."""
        hold(specdec_situations, rules.chain)

    def test_host_copies(self, specdec_situations: Situations) -> None:
        """Host copies of a draft's tensors equal the tensors on the device, since the engine reads either."""
        hold(specdec_situations, rules.host_copies)

    def test_scores(self, specdec_situations: Situations) -> None:
        """Scores are probabilities, if there are any."""
        hold(specdec_situations, rules.scores)

    def test_sampled_siblings_come_first(self, specdec_situations: Situations) -> None:
        """Among siblings, sampled nodes come before chosen ones."""
        hold(specdec_situations, rules.sampled_first)

    def test_q_rows(self, specdec_situations: Situations) -> None:
        """q_rows has rows of `q`, one for each set of sampled siblings, and -1 for chosen nodes."""
        hold(specdec_situations, rules.q_rows)

    def test_q(self, specdec_situations: Situations) -> None:
        """Rows of `q` are distributions."""
        hold(specdec_situations, rules.q)

    def test_q_to_target(self, specdec_situations: Situations) -> None:
        """q_to_target maps the draft's vocabulary one to one into the target's."""
        hold(specdec_situations, rules.q_to_target)

    def test_q_ids(self, specdec_situations: Situations) -> None:
        """If q_ids names the tokens of each row of `q`, no token is twice in a row, and there is no q_to_target."""
        hold(specdec_situations, rules.q_ids)

    def test_sampled_tokens_are_possible(self, specdec_situations: Situations) -> None:
        """A sampled token has a positive probability in its row of `q`, since the acceptance rule divides by it."""
        hold(specdec_situations, rules.sampled_tokens)

    def test_one_token_contexts(self, specdec_situations: Situations) -> None:
        """A prompt may be a single token. Return an empty draft if there is nothing to draft from."""
        specdec_situations.run(workload.one_token())
        if specdec_situations.is_model_free:
            ask(specdec_situations, [[5], [1, 2]], [2, 1], 0.0)

    def test_long_contexts(self, specdec_situations: Situations) -> None:
        """A request may be as long as the target allows. Do not keep shorter buffers."""
        specdec_situations.run(workload.long())
        if specdec_situations.is_model_free:
            ask(specdec_situations, [[3, 1, 4, 1, 5] * 4000], [specdec_situations.subject.num_speculative_tokens], 0.0)
