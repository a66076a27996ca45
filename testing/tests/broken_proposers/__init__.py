"""Proposers with a deliberate fault. Each fails exactly one test of the conformance kit, and each test of the kit has
at least one proposer that fails it."""

from __future__ import annotations

from broken_proposers import chance, claims, drafts, life, observations, output  # noqa: F401  they register themselves
from broken_proposers.case import CASES as CASES, SPECS, Case as Case
from specdec_core import hookimpl


@hookimpl
def specdec_proposers():
    return SPECS
