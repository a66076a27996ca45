"""The contract of a proposer, and how a plugin offers one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from specdec_core.types import Draft, Observation, Plan, ProposerBatch, RequestView, TargetInfo

if TYPE_CHECKING:
    import torch

    from specdec_core.kv_manager import KVManager

PLUGIN_API = 1
"""The version of the contracts in this package. A plugin states, as a literal, the one that it was written for."""


class Proposer(Protocol):
    """Guesses what the target will say next. Subclass it for the methods that have nothing to do.

    For each request the engine calls, in this order: `start` once; then any number of `observe` (after each target
    pass, prefill chunks included, unless the plan says observes=False) and `propose` (before a decode pass whose
    budget allows a draft); `reset` whenever the request is preempted, after which it is prefilled, hence observed,
    from position 0 again; `finish` once, after which the request is never mentioned again. State kept per request is
    kept under its id. All of it runs in torch's inference mode. An exception from any of these aborts the running
    requests and reaches the caller.
    """

    def start(self, request: RequestView) -> None:
        """The request was scheduled for the first time."""
        return

    def propose(self, batch: ProposerBatch) -> Draft:
        """Draft at most `batch.max_draft_tokens[i]` nodes for request i, one tree per request, possibly empty."""
        ...

    def observe(self, observation: Observation) -> None:
        """See the features of the tokens that the last pass made final, and the token that follows them."""
        return

    def reset(self, request: RequestView) -> None:
        """Forget what was observed of the request: it was preempted and starts over."""
        return

    def finish(self, request: RequestView, reason: str) -> None:
        """Forget the request. reason: "stop", "length", "abort" or "error"."""
        return


@frozen(eq=False)
class BuildContext:
    """What the engine lends a proposer that it builds."""

    target: TargetInfo
    num_speculative_tokens: int
    device: torch.device
    # The target's own modules: what a family scales or caps outside of them (Gemma, Granite, Cohere) is not applied.
    embed: Callable[[torch.Tensor], torch.Tensor]  # int64 [n] -> [n, hidden]
    output_head: Callable[[torch.Tensor], torch.Tensor]  # [n, hidden] after the final norm -> logits [n, vocab]
    kv_manager: KVManager
    kv_group: int | None  # this proposer's group, if its plan has a kv_layout


@frozen(eq=False)
class ProposerSpec:
    """A proposer as data: returned by the hook `specdec_proposers`, before anything heavy is imported.

    config: attrs class of this method's own keys in speculative_config; constructing it validates them.
    build: (config, context) -> Proposer. Heavy imports belong here.
    api: the plugin API that the plugin is written for: see PLUGIN_API.
    plan: (config, target, num_speculative_tokens) -> Plan, without loading weights.
    requires: modules that must be installed, looked up without importing them.
    detect: (checkpoint config, {tensor name: shape}) -> bool, for a draft checkpoint given without a method.
    train: an optional training recipe.
    """

    name: str
    config: type
    build: Callable[[Any, BuildContext], Proposer]
    api: int
    plan: Callable[[Any, TargetInfo, int], Plan] = lambda config, target, num_speculative_tokens: Plan()
    requires: tuple[str, ...] = ()
    detect: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], bool] | None = None
    train: object | None = None
