"""Registers proposers with a deliberate fault, each with the test of the conformance kit that must fail for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen
from example_proposer import RecentConfig, RecentProposer, build, plan
from good_proposers import offer

SPECS = []


@frozen
class Case:
    method: str
    fails: tuple[str, ...]  # the test, or with their parameters, those of its variants that are to fail
    module: str = __package__
    options: Mapping[str, Any] = field(factory=dict)
    is_variant: bool = False  # of the case before: the other tests need not run again

    @property
    def test(self) -> str:
        return self.fails[0].partition("[")[0]


CASES = [
    Case("nobody", ("test_is_offered",)),
    Case("foreign", ("test_api_number",), "broken_api"),
    Case("heavy", ("test_entry_module_is_light",), "broken_heavy"),
]


def breaks(*tests, is_variant=False, **spec):
    """Return a decorator that registers a proposer class under the class's name in lower case.

    tests: the kit test that must fail for the class, or "TEST[PARAMETER]" for each parameter with which the test must
        fail.
    is_variant: whether the class breaks the same rule as the class registered before it. Only the kit test of that rule
        is then run.
    spec: arguments of `offer`, which makes the class's ProposerSpec.
    """

    def register(cls):
        name = cls.__name__.lower()
        SPECS.append(offer(name, cls, **spec))
        CASES.append(Case(name, tests, is_variant=is_variant))
        return cls

    return register


def recent(test, options=None, *, is_variant=False, **spec):
    """Return a decorator for a config class or a `plan` function. The decorator registers the proposer of
    `example_proposer` with a ProposerSpec whose `config` or `plan` is the decorated object.

    test: the kit test that must fail.
    options: the method's options.
    is_variant: whether the same rule is broken as in the decorator call before. Only the kit test of that rule is then
        run.
    spec: further fields of the ProposerSpec.
    """

    def register(value):
        key, name = ("config", value.__name__.lower()) if isinstance(value, type) else ("plan", value.__name__)
        SPECS.append(offer(name, build, **{"config": RecentConfig, "plan": plan, key: value} | spec))
        CASES.append(Case(name, (test,), options=options or {}, is_variant=is_variant))
        return value

    return register


class Recent(RecentProposer):
    """The proposer of `example_proposer` with its default options, as a base class for faulty proposers."""

    def __init__(self, config, context):
        super().__init__(RecentConfig(), context.device)
        self.context = context
