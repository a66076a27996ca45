"""Faulty proposers that mishandle `start`, `reset`, `finish` or `close`, keep data of finished requests, or write to
their arguments."""

from __future__ import annotations

from good_proposers import Feeling, Sampling, plan_features

from broken_proposers.case import Recent, breaks


@breaks("test_draft_after_preemption", plan=plan_features)
class Nostalgic(Feeling):
    def reset(self, request):
        pass


@breaks("test_reused_ids")
class Suspicious(Recent):
    """Drafts nothing for a request if an earlier, finished one had the same id."""

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
    """Creates a request's state at its first draft instead of in `start`. `finish` fails if there is no such state."""

    def start(self, request):
        pass

    def chain(self, request, most):
        if request.id not in self.followers:
            super().start(request)
        return super().chain(request, most)


@breaks("test_close")
class Unsaved(Recent):
    """Fails in `close` if no request was ever started."""

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
    """Keeps the last five request objects after `finish`."""

    def __init__(self, config, context):
        super().__init__(config, context)
        self.ended = []

    def finish(self, request, reason):
        super().finish(request, reason)
        self.ended = [*self.ended[-4:], request]


@breaks("test_nothing_is_kept_after_finish", is_variant=True)
class Learning(Recent):
    """Keeps the tokens of all requests after `finish`."""

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
