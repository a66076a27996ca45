"""A plugin whose module imports torch, as the kits of verifiers and KV managers must notice."""

from __future__ import annotations

import torch  # noqa: F401

from specdec_core import KVManagerSpec, VerifierSpec, hookimpl


def build(*given):
    raise NotImplementedError


@hookimpl
def specdec_verifiers():
    return [VerifierSpec(name="heavy", build=build, api=1)]


@hookimpl
def specdec_kv_managers():
    return [KVManagerSpec(name="heavy", build=build, api=1)]
