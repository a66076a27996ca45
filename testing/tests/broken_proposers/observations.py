"""Faulty proposers that mishandle late hidden states, or tokens found in the prefix cache."""

from __future__ import annotations

from functools import partial

import attrs
from attending_proposer import Attending, plan_attending
from good_proposers import Feeling, plan_features

from broken_proposers.case import breaks


@breaks("test_output_is_the_targets[cached]", plan=plan_features)
class Presuming(Feeling):
    """Assumes that the hidden states begin at a request's first token, even if the request's prefix was found in the
    prefix cache."""

    def begin(self, request):
        return 0

    def observe(self, observation):
        for request, start in zip(observation.requests, observation.starts, strict=True):
            assert start == self.begin(request) + self.sums[request.id][1]
        super().observe(observation)


@breaks("test_output_is_the_targets[cached]", plan=plan_features, is_variant=True)
class Remembering(Presuming):
    """Reads num_cached_tokens only once per request, although it may change after a preemption."""

    def __init__(self, config, context):
        super().__init__(config, context)
        self.begins = {}

    def begin(self, request):
        return self.begins.setdefault(request.id, request.num_cached_tokens)

    def finish(self, request, reason):
        super().finish(request, reason)
        self.begins.pop(request.id, None)


class Tallying(Attending):
    """Keeps for each request the number of tokens whose keys and values are stored. Subclasses store keys and values
    and update this number."""

    def __init__(self, config, context):
        super().__init__(config, context)
        self.ends = {}

    def start(self, request):
        self.ends[request.id] = 0

    def reset(self, request):
        self.ends[request.id] = 0

    def finish(self, request, reason):
        del self.ends[request.id]


@breaks("test_draft_after_cached_prefix", plan=plan_attending)
class Rewriting(Tallying):
    """Stores keys and values from the request's first KV-cache slot on, even if the first slots hold a prefix from the
    prefix cache."""

    def observe(self, observation):
        starts = tuple(self.ends[request.id] for request in observation.requests)
        super().observe(attrs.evolve(observation, starts=starts))
        for request, num_valid in zip(observation.requests, observation.host_num_valid, strict=True):
            self.ends[request.id] += num_valid


@breaks("test_fill", plan=plan_attending)
class Boasting(Tallying):
    """Reports tokens as stored with `attention.fill` when it observes them, but stores their keys and values only when
    it drafts."""

    def observe(self, observation):
        self.fill(observation)

    def propose(self, batch):
        import torch

        for request in batch.requests:
            start, end = max(self.ends[request.id], request.num_cached_tokens), len(request.token_ids) - 1
            tokens = torch.tensor(request.token_ids[start:])
            self.store([request], [start], [end - start], tokens[:-1], tokens[1:], torch.arange(start, end))
            self.ends[request.id] = end
        return super().propose(batch)


@breaks("test_lookahead", plan=partial(plan_attending, lookahead=0))
class Shortsighted(Attending):
    """Declares Plan.lookahead=0, although its keys and values of a token also depend on the next token."""


class Hasty(Feeling):
    """Assumes that `observe` is called after every forward pass.

    After its first draft for a request, it expects each observation to begin at the request's last token.
    """

    def __init__(self, config, context):
        super().__init__(config, context)
        self.drafted = set()

    def propose(self, batch):
        self.drafted.update(request.id for request in batch.requests)
        return super().propose(batch)

    def reset(self, request):
        super().reset(request)
        self.drafted.discard(request.id)

    def finish(self, request, reason):
        super().finish(request, reason)
        self.drafted.discard(request.id)

    def num_behind(self, observation, i):
        request = observation.requests[i]
        return len(request.token_ids) - 1 - observation.starts[i] if request.id in self.drafted else 0


@breaks("test_draft_after_late_observations", plan=plan_features)
class Forgetful(Hasty):
    """Skips hidden states of tokens before the request's last one, as if `observe` had got them already."""

    def new_rows(self, observation, i):
        rows = super().new_rows(observation, i)
        return slice(rows.start + self.num_behind(observation, i), rows.stop)


@breaks("test_output_is_the_targets[late]", plan=plan_features, is_variant=True)
class Startled(Hasty):
    def new_rows(self, observation, i):
        assert not self.num_behind(observation, i)
        return super().new_rows(observation, i)
