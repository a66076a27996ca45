"""Checks of the drafts that `propose` returns: `specdec_core.contracts.draft.Draft`."""

from __future__ import annotations

from specdec_testing.conformance import faults as rules, workload
from specdec_testing.conformance.faults import Rule
from specdec_testing.conformance.histories import after_any_history, ask, for_any_history
from specdec_testing.conformance.recording import Proposal
from specdec_testing.conformance.situations import Situations


def hold(situations: Situations, rule: Rule) -> None:
    """Assert that drafts keep a rule: all that were made in the engine and, if the proposer needs no model, drafts
    after arbitrary token sequences."""

    def check(proposal: Proposal) -> None:
        __tracebackhide__ = True
        faults = list(rule(proposal))
        assert not faults, f"{faults[0]}\n\nThis was asked: {proposal.asked}\nThis came back: {proposal.draft}"

    for proposal in situations.proposals:
        check(proposal)
    if any(fault for proposal in after_any_history(situations) for fault in rule(proposal)):
        for_any_history(situations, check)  # once more, for the simplest one


class DraftChecks:
    """One test per rule for drafts. The tree of a request may always be empty: the request is then decoded without a
    draft."""

    def test_drafts_something(self, specdec_situations: Situations) -> None:
        """The proposer drafts at least one token in the kit's greedy and sampled runs. Otherwise the other tests would
        prove nothing.

        The prompts repeat themselves. Choose options, or num_speculative_tokens, with which the proposer drafts.
        """
        assert any(map(rules.has_draft, specdec_situations.proposals)), (
            f"it drafted nothing in {len(specdec_situations.proposals)} calls of propose, after prompts that repeat "
            f"themselves: give options with which it does"
        )

    def test_tensors(self, specdec_situations: Situations) -> None:
        """`propose` returns a Draft with one tree per request, and with the dtypes, shapes, offsets and devices that
        the fields of Draft specify."""
        hold(specdec_situations, rules.tensors)

    def test_budgets(self, specdec_situations: Situations) -> None:
        """Request i gets at most batch.max_draft_tokens[i] draft tokens. In a tree every node counts. More would have
        no KV-cache slots."""
        hold(specdec_situations, rules.budgets)

    def test_vocabulary(self, specdec_situations: Situations) -> None:
        """Every draft token is an id of the target's vocabulary, 0 to target.vocab_size - 1."""
        hold(specdec_situations, rules.vocabulary)

    def test_parents_come_first(self, specdec_situations: Situations) -> None:
        """The parent of each draft token stands before it in the same request's tree, or is -1 for the root (the
        request's last token) or -2 for padding."""
        hold(specdec_situations, rules.parents)

    def test_max_depth(self, specdec_situations: Situations) -> None:
        """Draft.max_depth is the depth of the deepest draft token, or a bound on it up to the largest max_draft_tokens.
        Verification stops at that depth. Children of the root have depth 1."""
        hold(specdec_situations, rules.max_depth)

    def test_is_chain(self, specdec_situations: Situations) -> None:
        """Draft.is_chain is True only if every request's draft is a chain, with padding nodes (parent -2) last. The
        engine then skips work that only trees need."""
        hold(specdec_situations, rules.chain)

    def test_host_copies(self, specdec_situations: Situations) -> None:
        """Draft.host_copies, the copies of a draft's tensors on the host, equal the tensors, since the engine reads
        either."""
        hold(specdec_situations, rules.host_copies)

    def test_scores(self, specdec_situations: Situations) -> None:
        """Draft.scores, if given, are between 0 and 1: each draft token's estimated chance of acceptance, if its parent
        is accepted."""
        hold(specdec_situations, rules.scores)

    def test_sampled_siblings_come_first(self, specdec_situations: Situations) -> None:
        """Among the children of a node, tokens sampled from `q` come before tokens that were picked deterministically
        (top-k, n-gram)."""
        hold(specdec_situations, rules.sampled_first)

    def test_q_rows(self, specdec_situations: Situations) -> None:
        """Draft.q_rows gives each sampled draft token the row of `q` that it was drawn from, the same for sampled
        siblings. Tokens that were picked deterministically have -1."""
        hold(specdec_situations, rules.q_rows)

    def test_q(self, specdec_situations: Situations) -> None:
        """Each row of Draft.q that a token was sampled from holds probabilities, which sum to 1, and not logits."""
        hold(specdec_situations, rules.q)

    def test_q_to_target(self, specdec_situations: Situations) -> None:
        """Draft.q_to_target maps each column of `q` (a token of the draft's vocabulary) to a target token id of its
        own. Without it and q_ids, `q` has a column for each token of the target."""
        hold(specdec_situations, rules.q_to_target)

    def test_q_ids(self, specdec_situations: Situations) -> None:
        """Draft.q_ids, the target token id of each entry of `q`, names no token twice in a row and excludes
        q_to_target."""
        hold(specdec_situations, rules.q_ids)

    def test_sampled_tokens_are_possible(self, specdec_situations: Situations) -> None:
        """A sampled token has a positive probability in its row of `q`, since the acceptance rule divides by it.
        Sampled siblings differ, unless with_replacement is set."""
        hold(specdec_situations, rules.sampled_tokens)

    def test_one_token_contexts(self, specdec_situations: Situations) -> None:
        """`propose` does not fail for a prompt of a single token. Return an empty draft if there is nothing to draft
        from."""
        specdec_situations.run(workload.one_token())
        if specdec_situations.is_model_free:
            ask(specdec_situations, [[5], [1, 2]], [2, 1], 0.0)

    def test_long_contexts(self, specdec_situations: Situations) -> None:
        """`propose` does not fail for a request of the target's maximum length: keep no shorter buffers. A proposer
        that needs no model is also called with 20,000 tokens."""
        specdec_situations.run(workload.long())
        if specdec_situations.is_model_free:
            ask(specdec_situations, [[3, 1, 4, 1, 5] * 4000], [specdec_situations.subject.num_speculative_tokens], 0.0)
