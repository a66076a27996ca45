"""Verifiers with a deliberate fault, each with the test of the conformance kit that must fail for it, and a sound
one."""

from __future__ import annotations

from functools import partial

from broken_proposers import Case

from specdec_core import DEAD, Stream, Verdict, VerifierSpec, hookimpl

VERIFIERS = []
CASES = [
    Case("nobody", ("test_verifier_is_offered",), __name__),
    Case("heavy", ("test_verifier_module_is_light",), "heavy_plugin"),
]


def breaks(test):
    def register(cls):
        VERIFIERS.append(cls)
        CASES.append(Case(cls.__name__.lower(), (test,), __name__, is_variant=True))
        return cls

    return register


class Walking:
    """Walks down each request's tree. At every node it draws the target's token and goes to the child that has it."""

    def verify(self, logits, draft, random):
        import torch

        paths = [self.path(b, logits, draft.tree(b), draft.offsets[b] + b, random) for b in range(draft.batch_size)]
        width = draft.max_depth + 1
        return Verdict(
            torch.tensor([[*tokens, *[-1] * (width - len(tokens))] for tokens, _ in paths]),
            torch.tensor([[*rows, *rows[-1:] * (width - len(rows))] for _, rows in paths], dtype=torch.int32),
            torch.tensor([max(len(tokens) - 1, 0) for tokens, _ in paths], dtype=torch.int32),
        )

    def path(self, request, logits, tree, root_row, random):
        node, tokens, rows = -1, [], []
        while True:
            row = logits[root_row + 1 + node]
            rows.append(root_row + 1 + node)
            if self.is_bad(row):
                return [], rows
            children = [i for i, parent in enumerate(tree.parents) if self.is_child(parent, node)]
            token, child = self.step(row.softmax(-1), children, tree, partial(self.draw, random, request, len(tokens)))
            tokens.append(token)
            if child is None:
                return tokens, rows
            node = child

    def is_bad(self, row):
        return not row.max().isfinite()

    def is_child(self, parent, node):
        return parent == node

    def draw(self, random, request, depth, probs):
        import torch

        return int(random.target_token(probs[None], torch.tensor([request]), torch.tensor([depth])))

    def step(self, probs, children, tree, draw):
        token = draw(probs)
        return token, next((child for child in children if tree.token_ids[child] == token), None)


@breaks("test_verdict")
class Wide(Walking):
    def verify(self, logits, draft, random):
        verdict = super().verify(logits, draft, random)
        return Verdict(verdict.token_ids, verdict.rows.long(), verdict.num_accepted)


@breaks("test_verdict")
class Counting(Walking):
    """Counts the bonus token as accepted."""

    def verify(self, logits, draft, random):
        verdict = super().verify(logits, draft, random)
        return Verdict(verdict.token_ids, verdict.rows, verdict.num_accepted + 1)


@breaks("test_verdict")
class Shifted(Walking):
    """Gives for each token the row that it has, and not the one that decided it."""

    def verify(self, logits, draft, random):
        verdict = super().verify(logits, draft, random)
        return Verdict(verdict.token_ids, verdict.rows.roll(-1, dims=1), verdict.num_accepted)


@breaks("test_verdict_without_draft")
class Roomy(Walking):
    def verify(self, logits, draft, random):
        import torch

        verdict = super().verify(logits, draft, random)
        if draft.max_depth:
            return verdict
        return Verdict(torch.nn.functional.pad(verdict.token_ids, (0, 1), value=-1), verdict.rows, verdict.num_accepted)


@breaks("test_verify_changes_no_argument")
class Scratching(Walking):
    def verify(self, logits, draft, random):
        return super().verify(logits.sub_(logits.amax(-1, keepdim=True)), draft, random)


@breaks("test_same_draws_same_verdict")
class Moody(Walking):
    def draw(self, random, request, depth, probs):
        return int(probs.multinomial(1))


@breaks("test_alone_as_in_a_batch")
class Placed(Walking):
    """Takes the noise of the request before."""

    def draw(self, random, request, depth, probs):
        return super().draw(random, max(request - 1, 0), depth, probs)


@breaks("test_joint_distribution")
class Sharing(Walking):
    """All requests share the noise of the first."""

    def draw(self, random, request, depth, probs):
        return super().draw(random, 0, depth, probs)


@breaks("test_not_finite_logits")
class Blind(Walking):
    def is_bad(self, row):
        return False

    def step(self, probs, children, tree, draw):
        return super().step(probs.nan_to_num(0.1), children, tree, draw)


@breaks("test_no_draw_decides_failure")
class Chancy(Walking):
    """Accepts a draft token by a coin, and fails if the path then meets a row that is not finite."""

    def draw(self, random, request, depth, probs):
        import torch

        return int(random.categorical(probs[None], Stream.ACCEPT, torch.tensor([request]), torch.tensor([depth])))


@breaks("test_dead_nodes_do_not_count")
class Reviving(Walking):
    """Takes dead nodes for children of the root."""

    def is_child(self, parent, node):
        return parent == node or (parent == DEAD and node == -1)


@breaks("test_output_has_the_targets_distribution")
class Reusing(Walking):
    """Uses the root's draw at every depth."""

    def draw(self, random, request, depth, probs):
        return super().draw(random, request, 0, probs)


@breaks("test_output_has_the_targets_distribution")
class Trusting(Walking):
    """Accepts any child whose token has a probability above 0.05, without a draw."""

    def step(self, probs, children, tree, draw):
        for child in children:
            if probs[tree.token_ids[child]] > 0.05:
                return tree.token_ids[child], child
        return super().step(probs, children, tree, draw)


@breaks("test_output_has_the_targets_distribution")
class Hasty(Walking):
    """Emits the likeliest token after a rejection."""

    def step(self, probs, children, tree, draw):
        token, child = super().step(probs, children, tree, draw)
        return (int(probs.argmax()), None) if child is None and children else (token, child)


@breaks("test_in_the_engine")
class Failing(Walking):
    """Cannot verify more than two tokens at once on top of each other."""

    def verify(self, logits, draft, random):
        if logits.shape[-1] > 40 and draft.max_depth > 1:
            raise RuntimeError("too deep")
        return super().verify(logits, draft, random)


@hookimpl
def specdec_verifiers():
    return [VerifierSpec(name=cls.__name__.lower(), build=cls, api=1) for cls in (Walking, *VERIFIERS)]
