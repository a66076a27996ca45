"""The contract of a proposer, and how a plugin offers one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from specdec_core.config import DraftModelConfig
from specdec_core.training import TrainingRecipe
from specdec_core.types import (
    Draft,
    KVMetadata,
    Observation,
    Plan,
    ProposerBatch,
    RequestView,
    TargetInfo,
    Visibility,
)

if TYPE_CHECKING:
    import torch

PLUGIN_API = 1
"""The version of the contracts in this package. A plugin states, as a literal, the one that it was written for."""


class Proposer(Protocol):
    """Guesses what the target will say next. Subclass it for the methods that have nothing to do.

    For each request the engine calls, in this order: `start` once; then any number of `observe` (after each target
    pass, prefill chunks included, unless the plan says observes=False) and `propose` (before a decode pass whose
    budget allows a draft); `reset` whenever the request is preempted, after which it is prefilled, hence observed,
    from position 0 again; `finish` once, after which the request is never mentioned again. State kept per request is
    kept under its id. Last of all comes `close`, once. All of it runs in torch's inference mode. An exception from any
    of these aborts the running requests and reaches the caller.
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

    def close(self) -> None:
        """Save what is to survive, such as a cache file: the engine is done with this proposer.

        Called when the engine is closed (`LLM.close`, the end of `with LLM(...)`, `AsyncLLM.shutdown`), or else when it
        is dropped or the interpreter exits; after `finish` for every request that was started, and with nothing after
        it. There may have been no request at all. Where nobody is there to hear of it, an exception becomes a warning.
        A process that is killed never calls it. Proposers that do not subclass Proposer may lack it.
        """
        return


class LayerAttention(Protocol):
    """Attention of a draft's own layers, over their group in the KV cache: what the target itself runs on.

    A pass covers some half-open slot intervals [start, start + length) of some requests, interval after interval in
    one flat batch, padded at the end to `padded(num_tokens)`. The slots from a request's root on are scratch, as many
    as the plan asked for: whatever a pass stores there is the draft's to overwrite. Unless the layout keeps nodes,
    nothing that a draft stored is ever moved.

    In `observe`, every row may be stored, from `starts` on: those that do not count fall on scratch. A pass reads all
    slots below the ends of its intervals, seen or not, so none of them may be left unwritten: what is not seen weighs
    0, and 0 times the NaN of unwritten memory is NaN.
    """

    implementation: str
    """The name to give to transformers' attention modules (`config._attn_implementation`) before `bind`."""

    def bind(self, modules: Sequence[torch.nn.Module]) -> None:
        """Route attention modules from transformers, one per layer of the group, through `attend`."""
        ...

    def padded(self, num_tokens: int) -> int: ...

    def metadata(self, requests: Sequence[RequestView], starts: Sequence[int], lengths: Sequence[int]) -> KVMetadata:
        """Where the tokens of a pass lie. Intervals may be empty. Raises CapacityError past the reserved slots."""
        ...

    def forwarding(self, metadata: KVMetadata, visibility: Visibility) -> AbstractContextManager[None]:
        """The pass that layers run in while the context is open."""
        ...

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None = None,
        *,
        rows: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Store key and value [num_tokens, num_kv_heads, ...] and answer query [num_tokens, num_heads, key_dim],
        rotated already: [num_tokens, num_heads, value_dim]. For layers that are not bound. scaling: None for
        key_dim ** -0.5. rows: the tokens that are to have an answer, one of each request and then any that are padding;
        None: all of them."""
        ...


class CausalLM(Protocol):
    """A whole language model as a draft: one from transformers, with its keys and values in the plan's group."""

    @property
    def info(self) -> TargetInfo: ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: KVMetadata,
        visibility: Visibility,
        rows: torch.Tensor,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """One pass over int64 token_ids and positions [num_tokens], padded to `LayerAttention.padded`. Returns the
        logits [num_rows, vocab] of some rows, int64 [num_rows], and no features."""
        ...


@frozen(eq=False)
class BuildContext:
    """What the engine lends a proposer that it builds."""

    target: TargetInfo
    num_speculative_tokens: int
    max_num_seqs: int  # most requests of a batch, and most that have started and not finished
    max_num_batched_tokens: int  # most tokens of a pass of the target
    device: torch.device
    # As the target computes them, with what its family scales or caps outside of the modules (Gemma, Granite, Cohere).
    embed: Callable[[torch.Tensor], torch.Tensor]  # int64 [n] -> [n, hidden]
    output_head: Callable[[torch.Tensor], torch.Tensor]  # [n, hidden] after the final norm -> logits [n, vocab]
    # int64 [...] -> [..., hidden]: a row times what output_head takes is that token's logit. If the plan asks for them;
    # raises CompatibilityError where the target's logits are something else.
    output_rows: Callable[[torch.Tensor], torch.Tensor]
    attention: LayerAttention | None  # if the plan has a kv_layout
    load_model: Callable[[DraftModelConfig], CausalLM]  # in the target's dtype; its layers are bound to that attention
    speed_up: Callable[[torch.nn.Module], None]  # in place, a module for inference that is loaded: as is done with the
    #                                              target's own layers


@frozen(eq=False)
class ProposerSpec:
    """A proposer as data: returned by the hook `specdec_proposers`, before anything heavy is imported.

    config: attrs class of this method's own keys in speculative_config; constructing it validates them.
    build: (config, context) -> Proposer. Heavy imports belong here.
    api: the plugin API that the plugin is written for: see PLUGIN_API.
    plan: (config, target, num_speculative_tokens) -> Plan, without loading weights.
    requires: modules that must be installed, looked up without importing them.
    num_speculative_tokens: (config, device) -> the number where the user gives none; without it, they must give one.
    detect: (checkpoint config, {tensor name: shape}) -> bool, for a draft checkpoint given without a method.
    train: how its drafts are trained, if they are.
    published: {target: the draft that was published for it}, names on the model hub, for the error about a missing one.
    """

    name: str
    config: type
    build: Callable[[Any, BuildContext], Proposer]
    api: int
    plan: Callable[[Any, TargetInfo, int], Plan] = lambda config, target, num_speculative_tokens: Plan()
    requires: tuple[str, ...] = ()
    num_speculative_tokens: Callable[[Any, torch.device], int] | None = None
    detect: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], bool] | None = None
    train: TrainingRecipe | None = None
    published: Mapping[str, str] = field(factory=dict)
