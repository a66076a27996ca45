"""A plugin whose module imports torch, as test_verifier_module_is_light must notice."""

from __future__ import annotations

import broken_verifiers
import torch  # noqa: F401

from specdec_core import VerifierSpec, hookimpl


@hookimpl
def specdec_verifiers():
    return [VerifierSpec(name="heavy", build=broken_verifiers.Walking, api=1)]
