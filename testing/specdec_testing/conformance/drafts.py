"""Checks of the drafts (`specdec_core.contracts.draft.Draft`) that a proposer's `propose` returns."""

from __future__ import annotations

from specdec_testing.conformance import faults as rules, workload
from specdec_testing.conformance.faults import Rule
from specdec_testing.conformance.histories import after_any_history, ask, for_any_history
from specdec_testing.conformance.recording import Proposal
from specdec_testing.conformance.situations import Situations


def hold(situations: Situations, rule: Rule) -> None:
    """Assert that the drafts of the kit's greedy and sampled runs keep a rule. If the proposer needs no model, its
    drafts for token sequences that hypothesis generates are checked too.

    rule: a function that yields an error message for each violation in a recorded call of `propose`.
    """

    def check(proposal: Proposal) -> None:
        __tracebackhide__ = True
        faults = list(rule(proposal))
        assert not faults, f"{faults[0]}\n\nThis was asked: {proposal.asked}\nThis came back: {proposal.draft}"

    for proposal in situations.proposals:
        check(proposal)
    if any(fault for proposal in after_any_history(situations) for fault in rule(proposal)):
        for_any_history(situations, check)  # once more, for the simplest one


class DraftChecks:
    """One test for each rule of `Draft`. A proposer may always return an empty tree for a request, which is then
    decoded without draft tokens."""

    def test_drafts_something(self, specdec_situations: Situations) -> None:
        """The proposer drafts at least one token in the kit's greedy and sampled runs. Otherwise the other tests would
        prove nothing.

        Most prompts of the kit contain repetitions. If this test fails, choose options or a num_speculative_tokens with
        which the proposer drafts.
        """
        assert any(map(rules.has_draft, specdec_situations.proposals)), (
            f"it drafted nothing in {len(specdec_situations.proposals)} calls of propose, after prompts that repeat "
            f"themselves: give options with which it does"
        )

    def test_tensors(self, specdec_situations: Situations) -> None:
        """`propose` returns a Draft with one tree per request. Its offsets and tensors have the values, dtypes, shapes
        and devices that the fields of Draft specify."""
        hold(specdec_situations, rules.tensors)

    def test_budgets(self, specdec_situations: Situations) -> None:
        """The tree of request i has at most batch.max_draft_tokens[i] nodes, on all branches together and with padding.
        There are no KV-cache slots for more."""
        hold(specdec_situations, rules.budgets)

    def test_vocabulary(self, specdec_situations: Situations) -> None:
        """Every draft token is an id of the target's vocabulary, 0 to target.vocab_size - 1."""
        hold(specdec_situations, rules.vocabulary)

    def test_parents_come_first(self, specdec_situations: Situations) -> None:
        """Each entry of Draft.parents is the index of an earlier node in the same request's tree, or -1 for the root
        (the request's last token) or -2 for a padding node."""
        hold(specdec_situations, rules.parents)

    def test_max_depth(self, specdec_situations: Situations) -> None:
        """Draft.max_depth is the depth of the deepest draft token, or an upper bound on it that does not exceed the
        largest max_draft_tokens. Verification stops at that depth. Children of the root (the request's last token) have
        depth 1."""
        hold(specdec_situations, rules.max_depth)

    def test_is_chain(self, specdec_situations: Situations) -> None:
        """Draft.is_chain is True only if every request's draft is a chain, with padding nodes (parent -2) last. The
        engine then skips work that only trees need."""
        hold(specdec_situations, rules.chain)

    def test_host_copies(self, specdec_situations: Situations) -> None:
        """Draft.host_copies holds CPU copies of some of the draft's tensors. Each copy equals its tensor, because the
        engine may read either."""
        hold(specdec_situations, rules.host_copies)

    def test_scores(self, specdec_situations: Situations) -> None:
        """Draft.scores, if given, are between 0 and 1. A score is the estimated probability that a draft token is
        accepted if its parent is accepted."""
        hold(specdec_situations, rules.scores)

    def test_sampled_siblings_come_first(self, specdec_situations: Situations) -> None:
        """Among the children of a tree node, tokens sampled from a row of `Draft.q` come before tokens that were picked
        deterministically (top-k, n-gram)."""
        hold(specdec_situations, rules.sampled_first)

    def test_q_rows(self, specdec_situations: Situations) -> None:
        """Draft.q_rows gives for each sampled draft token the row of Draft.q that it was sampled from. Sampled siblings
        share one row. Tokens that were picked deterministically have -1."""
        hold(specdec_situations, rules.q_rows)

    def test_q(self, specdec_situations: Situations) -> None:
        """Each row of Draft.q that a draft token was sampled from holds probabilities that sum to 1, not logits."""
        hold(specdec_situations, rules.q)

    def test_q_to_target(self, specdec_situations: Situations) -> None:
        """Draft.q_to_target gives for each column of Draft.q a target token id, no id twice. If a draft has neither
        q_to_target nor q_ids, Draft.q has one column for each token id of the target."""
        hold(specdec_situations, rules.q_to_target)

    def test_q_ids(self, specdec_situations: Situations) -> None:
        """Draft.q_ids gives the target token id of each entry of Draft.q. The ids within one row are all different. A
        draft has q_ids or q_to_target, never both."""
        hold(specdec_situations, rules.q_ids)

    def test_sampled_tokens_are_possible(self, specdec_situations: Situations) -> None:
        """Each sampled draft token has a positive probability in its row of Draft.q, since rejection sampling divides
        by it. Sampled siblings are different tokens, unless Draft.with_replacement is set."""
        hold(specdec_situations, rules.sampled_tokens)

    def test_one_token_contexts(self, specdec_situations: Situations) -> None:
        """`propose` does not fail for a prompt of a single token. A proposer that has nothing to draft from returns an
        empty draft."""
        specdec_situations.run(workload.one_token())
        if specdec_situations.is_model_free:
            ask(specdec_situations, [[5], [1, 2]], [2, 1], 0.0)

    def test_long_contexts(self, specdec_situations: Situations) -> None:
        """`propose` does not fail for a request of the target's maximum length, so the proposer's buffers must hold
        that many tokens. A proposer that needs no model is also called with a request of 20,000 tokens."""
        specdec_situations.run(workload.long())
        if specdec_situations.is_model_free:
            ask(specdec_situations, [[3, 1, 4, 1, 5] * 4000], [specdec_situations.subject.num_speculative_tokens], 0.0)
