"""One kit class for each proposer, correct or broken; test_conformance.py runs this module in a process of its own."""

from __future__ import annotations

from types import MappingProxyType

import broken_proposers

from specdec_testing import ProposerConformance
from specdec_testing.conformance.kit import kit_tests


class TestRecent(ProposerConformance):
    method = "recent"
    options = MappingProxyType({"recent_max_chain": 4})
    modules = ("example_proposer",)


GOOD = ("branching", "sampling", "fading", "selecting", "feeling", "addressing", "attending")
for method in GOOD:
    name = f"Test{method.title()}"
    attributes = {"__module__": __name__, "method": method, "modules": ("good_proposers",)}
    globals()[name] = type(name, (ProposerConformance,), attributes)

for case in broken_proposers.CASES:
    name = f"TestBroken_{case.method}"
    others = {test: "shown by another case" for test in kit_tests() if test != case.fails.partition("[")[0]}
    attributes = {
        "__module__": __name__,
        "method": case.method,
        "options": case.options,
        "modules": (case.module,),
        "skips": others if case.is_variant else {},
    }
    globals()[name] = type(name, (ProposerConformance,), attributes)
