"""Plugins whose ProposerSpec is faulty, for instance its options, its required modules or its plan."""

from __future__ import annotations

from itertools import count

from attrs import define, field, frozen, validators

from broken_proposers.case import recent
from specdec_core import Plan


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
