"""For every test of the conformance kit, proposers that fail it and no other."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import attrs
from attrs import define, field, frozen, validators
from example_proposer import RecentConfig, RecentProposer, build, plan
from good_proposers import Branching, Feeling, Sampling, offer, plan_features

from specdec_core import Draft, Plan, hookimpl

SPECS = []


@frozen
class Case:
    method: str
    fails: str  # the test, with its parameter if only one of them is to fail
    module: str = __name__
    options: Mapping[str, Any] = field(factory=dict)
    is_variant: bool = False  # of the case before: that it passes the other tests need not be shown again


CASES = [
    Case("nobody", "test_is_offered"),
    Case("foreign", "test_api_number", "broken_api"),
    Case("heavy", "test_entry_module_is_light", "broken_heavy"),
]


def breaks(test, *, is_variant=False, **spec):
    """Offer the decorated class under its own name, as a proposer that fails this test."""

    def register(cls):
        name = cls.__name__.lower()
        SPECS.append(offer(name, cls, **spec))
        CASES.append(Case(name, test, is_variant=is_variant))
        return cls

    return register


def recent(test, options=None, *, is_variant=False, **spec):
    """Likewise `example_proposer`, with something else about its spec."""

    def register(value):
        key, name = ("config", value.__name__.lower()) if isinstance(value, type) else ("plan", value.__name__)
        SPECS.append(offer(name, build, **{"config": RecentConfig, "plan": plan, key: value} | spec))
        CASES.append(Case(name, test, options=options or {}, is_variant=is_variant))
        return value

    return register


class Recent(RecentProposer):
    """Without options."""

    def __init__(self, config, context):
        super().__init__(RecentConfig(), context.device)
        self.context = context


# What a plugin says of itself


@recent("test_required_modules_are_installed", requires=("no_such_module_anywhere",))
def needy(config, target, num_speculative_tokens):
    return Plan(observes=False)


@recent("test_defaults_are_allowed", options={"recent_max_chain": 8})
@frozen
class BadDefault:
    recent_max_chain: int = field(default=0, validator=validators.ge(1))


@recent("test_unknown_options_are_refused")
@define(init=False)
class Swallowing:
    recent_max_chain: int = 8

    def __init__(self, recent_max_chain=8, **ignored):
        self.recent_max_chain = recent_max_chain


@recent("test_options_are_its_own")
@frozen
class Hiding:
    recent_max_chain: int = 8
    disable_by_batch_size: int | None = None


@recent("test_plan_is_pure")
def loading(config, target, num_speculative_tokens):
    import torch

    return Plan(observes=False, weight_bytes=torch.zeros(target.vocab_size, target.hidden_size).nbytes)


TIMES = count()


@recent("test_plan_is_pure", is_variant=True)
def counting(config, target, num_speculative_tokens):
    return Plan(observes=False, weight_bytes=next(TIMES))


# What a draft looks like


@breaks("test_drafts_something")
class Silent(Recent):
    def chain(self, request, most):
        return []


@breaks("test_tensors")
class Wide(Branching):
    def propose(self, batch):
        draft = super().propose(batch)
        return attrs.evolve(draft, parents=draft.parents.long())


@breaks("test_tensors", is_variant=True)
class Missing(Recent):
    def propose(self, batch):
        return Draft.from_chains([self.chain(batch.requests[0], batch.max_draft_tokens[0])])


@breaks("test_budgets")
class Greedy(Recent):
    def chain(self, request, most):
        return super().chain(request, most + 1)


@breaks("test_budgets", is_variant=True)
class Levelling(Recent):
    """It gives all requests the largest budget."""

    def propose(self, batch):
        budgets = [max(batch.max_draft_tokens)] * len(batch.requests)
        return super().propose(attrs.evolve(batch, max_draft_tokens=budgets))


@breaks("test_vocabulary")
class Outlandish(Recent):
    def chain(self, request, most):
        chain = super().chain(request, most)
        return [*chain[:-1], self.context.target.vocab_size] if chain else []


@breaks("test_parents_come_first")
class Backward(Branching):
    def propose(self, batch):
        draft = super().propose(batch)
        parents = draft.parents.clone()
        parents[:1] = draft.num_nodes - 1
        return attrs.evolve(draft, parents=parents)


@breaks("test_max_depth")
class Shallow(Branching):
    def propose(self, batch):
        draft = super().propose(batch)
        return attrs.evolve(draft, max_depth=min(draft.max_depth, 1))


@breaks("test_is_chain")
class Straight(Branching):
    def propose(self, batch):
        return attrs.evolve(super().propose(batch), is_chain=True)


@breaks("test_scores")
class Scored(Branching):
    def propose(self, batch):
        import torch

        draft = super().propose(batch)
        return attrs.evolve(draft, scores=torch.full((draft.num_nodes,), -0.7))


@breaks("test_sampled_siblings_come_first")
class Unordered(Sampling):
    """The second child of the root was drawn, and the first is said to be chosen."""

    def propose(self, batch):
        draft = super().propose(batch)
        rows = draft.q_rows.clone()
        for start, end in zip(draft.offsets, draft.offsets[1:], strict=False):
            if end - start == 2:
                rows[start] = -1
        return attrs.evolve(draft, q_rows=rows)


@breaks("test_q_rows")
class Rowless(Sampling):
    def propose(self, batch):
        draft = super().propose(batch)
        return attrs.evolve(draft, q_rows=draft.q_rows + (draft.q_rows >= 0).int() * 1000)


@breaks("test_q")
class Logits(Sampling):
    def propose(self, batch):
        draft = super().propose(batch)
        return attrs.evolve(draft, q=draft.q.log())


@breaks("test_q_to_target")
class Doubled(Sampling):
    def propose(self, batch):
        draft = super().propose(batch)
        mapping = draft.q_to_target.clone()
        mapping[-1] = mapping[0]
        return attrs.evolve(draft, q_to_target=mapping)


@breaks("test_sampled_tokens_are_possible")
class Unmapped(Sampling):
    """It gives q over another order of the vocabulary than q_to_target says."""

    def propose(self, batch):
        import torch

        draft = super().propose(batch)
        best = torch.nn.functional.one_hot(draft.q.argmin(-1), self.NUM_TOKENS).float() if len(draft.q) else draft.q
        return attrs.evolve(draft, q=best)


@breaks("test_one_token_contexts")
class Impatient(Recent):
    def chain(self, request, most):
        assert len(request.token_ids) > 2
        return super().chain(request, most)


@breaks("test_long_contexts")
class Brief(Recent):
    def chain(self, request, most):
        assert len(request.token_ids) < 256
        return super().chain(request, most)


# Chance


MOODS = count()


@breaks("test_same_tokens_same_draft")
class Moody(Recent):
    """What it drafts depends on how many of its kind were built before it."""

    def __init__(self, config, context):
        super().__init__(config, context)
        self.mood = next(MOODS) % context.target.vocab_size

    def chain(self, request, most):
        return [self.mood]


@breaks("test_batch_does_not_matter")
class Placed(Recent):
    """It drafts more for the first request than for others."""

    def propose(self, batch):
        budgets = [most if i == 0 else 1 for i, most in enumerate(batch.max_draft_tokens)]
        return super().propose(attrs.evolve(batch, max_draft_tokens=budgets))


@breaks("test_sampled_nodes_exist_whatever_they_are")
class Choosy(Sampling):
    """It drops what it drew if that is unlikely."""

    def propose(self, batch):
        import torch

        draft = super().propose(batch)
        is_unlikely = [
            row >= 0 and draft.q[row, self.from_target[token]] < 0.2
            for row, token in zip(draft.q_rows.tolist(), draft.token_ids.tolist(), strict=True)
        ]
        return attrs.evolve(draft, parents=torch.where(torch.tensor(is_unlikely, dtype=torch.bool), -2, draft.parents))


@breaks("test_sampled_tokens_follow_q")
class Stubborn(Sampling):
    def draw(self, batch, request, node, probs):
        return int(probs.argmax())


@breaks("test_sampled_tokens_follow_q", is_variant=True)
class Heated(Sampling):
    """It gives q before temperature."""

    def propose(self, batch):
        import torch

        draft = super().propose(batch)
        powers = draft.q ** batch.temperature.max().clamp(min=0.1)
        return attrs.evolve(draft, q=powers / powers.sum(-1, keepdim=True) if len(powers) else torch.empty_like(powers))


# The life of a request


@breaks("test_draft_after_preemption", plan=plan_features)
class Nostalgic(Feeling):
    def reset(self, request):
        pass


@breaks("test_reused_ids")
class Suspicious(Recent):
    """It drafts nothing for an id that it has seen before."""

    def __init__(self, config, context):
        super().__init__(config, context)
        self.known = set()

    def start(self, request):
        super().start(request)
        self.num_read[request.id] = 1 if hash(request.id) not in self.known else 10**9

    def chain(self, request, most):
        return super().chain(request, most) if self.num_read[request.id] < 10**9 else []

    def finish(self, request, reason):
        super().finish(request, reason)
        self.known.add(hash(request.id))


@breaks("test_finish_at_any_moment")
class Unprepared(Recent):
    """It makes what it keeps of a request when it first drafts, and counts on that."""

    def start(self, request):
        pass

    def chain(self, request, most):
        if request.id not in self.followers:
            super().start(request)
        return super().chain(request, most)


@breaks("test_close")
class Unsaved(Recent):
    """It takes for granted that there was a request."""

    def start(self, request):
        super().start(request)
        self.was_used = True

    def close(self):
        assert self.was_used


@breaks("test_nothing_is_kept_after_finish")
class Hoarding(Recent):
    def finish(self, request, reason):
        super().finish(request, reason)
        self.num_read[request.id] = 1


@breaks("test_nothing_is_kept_after_finish", is_variant=True)
class Loyal(Recent):
    """It keeps the requests themselves."""

    def __init__(self, config, context):
        super().__init__(config, context)
        self.ended = []

    def finish(self, request, reason):
        super().finish(request, reason)
        self.ended = [*self.ended[-4:], request]


@breaks("test_nothing_is_kept_after_finish", is_variant=True)
class Learning(Recent):
    """It keeps all tokens."""

    def __init__(self, config, context):
        super().__init__(config, context)
        self.text = []

    def finish(self, request, reason):
        super().finish(request, reason)
        self.text += request.token_ids.tolist()


@breaks("test_arguments_are_not_changed")
class Cooling(Sampling):
    def propose(self, batch):
        draft = super().propose(batch)
        batch.temperature.mul_(0.5)
        return draft


@breaks("test_arguments_are_not_changed", plan=plan_features, is_variant=True)
class Scaling(Feeling):
    def observe(self, observation):
        observation.features["final"].mul_(2)
        super().observe(observation)


# The output


def scribble(context):
    """Change the target's own weights, as a draft that is tied to them might."""
    weight = context.embed.__self__._model.get_input_embeddings().weight
    weight.copy_(weight.roll(1, 0))


@breaks("test_output_is_the_targets")
class Scribbling(Recent):
    def propose(self, batch):
        scribble(self.context)
        return super().propose(batch)


@breaks("test_output_is_the_targets[preempted]", is_variant=True)
class Spiteful(Recent):
    def reset(self, request):
        scribble(self.context)


@hookimpl
def specdec_proposers():
    return SPECS
