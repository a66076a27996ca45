"""Proposers that fail exactly one test of the conformance kit, at least one for each test."""

from __future__ import annotations

from broken_proposers import chance, claims, drafts, life, observations, output  # noqa: F401  they register themselves
from broken_proposers.case import CASES as CASES, SPECS, Case as Case
from specdec_core import hookimpl


@hookimpl
def specdec_proposers():
    return SPECS
