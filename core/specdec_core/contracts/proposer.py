"""The contract of a proposer: what it sees, what it asks of the engine, and how a plugin offers one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.kv import KVLayout, KVMetadata, Visibility
from specdec_core.contracts.target import TargetInfo
from specdec_core.contracts.training import TrainingRecipe
from specdec_core.contracts.verifier import RandomSource

if TYPE_CHECKING:
    import numpy as np
    import torch

    from specdec_core.config.speculative import DraftModelConfig

PLUGIN_API = 1
"""The version of the contracts in this package. A plugin states, as a literal, the one that it was written for."""


class RequestView(Protocol):
    """What a proposer sees of a request. `token_ids` grows between steps; nothing here may be written to."""

    @property
    def id(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int:
        """How many tokens were found in the cache when it was admitted: they are not computed, hence not observed. The
        draft's own group of the KV cache holds them. 0 without prefix caching."""

    @property
    def token_ids(self) -> np.ndarray:
        """int64 [num_tokens]   prompt and output so far, the root included, without a copy."""


@frozen
class StepCosts:
    """Seconds: a pass of the target over n tokens takes target_s + n * token_s."""

    target_s: float
    token_s: float


@frozen(eq=False)
class ProposerBatch:
    """The requests to draft for: those whose root alone is pending and whose budget is at least one node."""

    requests: Sequence[RequestView]
    root_token_ids: torch.Tensor  # int64 [batch]
    root_positions: torch.Tensor  # int64 [batch]
    temperature: torch.Tensor  # float32 [batch]   0: greedy
    max_draft_tokens: tuple[int, ...]  # [batch]   at least 1; never beyond max_tokens or max_model_len
    random: RandomSource
    costs: StepCosts | None = None  # measured in the engine's first steps; None: not yet, or by nobody


@frozen(eq=False)
class TopTokens:
    """The target's most likely tokens after every root and node of a forward pass, accepted or not. Probabilities are
    those of the logits as the target gave them, before temperature and all other sampling parameters."""

    requests: torch.Tensor  # int64 [n]   index into the observation's requests, ascending
    positions: torch.Tensor  # int64 [n]
    token_ids: torch.Tensor  # int64 [n]   the root's or node's own token
    parents: torch.Tensor  # int64 [n]   which of these is the parent; -1: it is a root; -2: a dead node, of no use
    ids: torch.Tensor  # int64 [n, k]   the likeliest first
    logprobs: torch.Tensor  # float32 [n, k]


@frozen(eq=False)
class Observation:
    """What one forward pass of the target computed for tokens that are now final, in prefill and in decoding.

    Request b owns the rows offsets[b]:offsets[b + 1], of which the first num_valid[b] count: the tokens known before
    the pass and then the accepted nodes. They follow, without a gap, what was observed of the request, beginning at
    `request.num_cached_tokens` when it is admitted, and again after `reset`; they may run past a stop, after which the
    request finishes. num_valid is 0 where the pass was no use: logits were not finite, and the request ends or is
    reset.

    A request that does not draft may be observed late: then one observation has the tokens of many passes. A proposer
    that never sees some of a request's tokens is not asked to draft for it.

    All tensors are on the device that the engine runs on. `host_num_valid` and `host_last_rows` are copies on the host;
    the engine hands over the first where it has the numbers there, and elsewhere they are fetched when asked for.
    """

    requests: Sequence[RequestView]
    starts: tuple[int, ...]  # [batch]   position of each request's first row
    offsets: tuple[int, ...]  # [batch + 1]
    num_valid: torch.Tensor  # int32 [batch]
    last_rows: torch.Tensor  # int64 [batch]   each request's last row that counts; its first one where none does
    token_ids: torch.Tensor  # int64 [num_tokens]   the tokens whose features these are
    positions: torch.Tensor  # int64 [num_tokens]
    features: Mapping[str, torch.Tensor]  # {tap: [num_tokens, width]}
    next_token_ids: torch.Tensor  # int64 [batch]   the token after the last valid one: the next known token (prompt,
    #                               or output being recomputed) if there is one, else the new root
    top_tokens: TopTokens | None = None  # if the plan asks for them; never in a late observation
    _host_num_valid: tuple[int, ...] | None = None  # [batch]

    @cached_property
    def host_num_valid(self) -> tuple[int, ...]:
        """[batch]   num_valid on the host."""
        return tuple(self.num_valid.tolist()) if self._host_num_valid is None else self._host_num_valid

    @cached_property
    def host_last_rows(self) -> tuple[int, ...]:
        """[batch]   last_rows on the host."""
        return tuple(first + max(0, n - 1) for first, n in zip(self.offsets, self.host_num_valid, strict=False))

    @cached_property
    def following_token_ids(self) -> torch.Tensor:
        """int64 [num_tokens]   the token after each row's; arbitrary at rows that do not count."""
        return self.token_ids.roll(-1).index_copy_(0, self.last_rows, self.next_token_ids)


@frozen
class Plan:
    """What a proposer asks of the engine, known before any weights are loaded."""

    taps: tuple[str, ...] = ()  # "input.i": residual stream before layer i, or after the last; "final": normed
    kv_layout: KVLayout | None = None
    scratch_slots: int = 0  # draft KV slots beyond the final ones, counted from the root's
    lookahead: int = 0  # how many later tokens a slot of the kv_layout depends on (EAGLE: 1, the next token)
    weight_bytes: int = 0
    observes: bool = True  # False: `observe` is never called and no features are gathered
    top_tokens: int = 0  # how many of the target's likeliest tokens to observe at each root and node
    output_rows: bool = False  # whether rows of the target's output layer are asked for (`BuildContext.output_rows`)
    max_model_len: int | None = None  # no drafts beyond so many tokens of a request: as far as the draft reaches
    state: Any = field(default=None, eq=False, repr=False)  # what was found, for `build`, as `BuildContext.state`


class Proposer(Protocol):
    """Drafts the tokens that the target may generate next. Subclass it for the methods that have nothing to do.

    For each request the engine calls, in this order: `start` once; then any number of `observe` (after each target
    pass, prefill chunks included, unless the plan says observes=False) and `propose` (before a decode pass whose
    budget allows a draft); `reset` whenever the request is preempted, after which it is prefilled, hence observed,
    again from position `num_cached_tokens` on; `finish` once, after which the request is never mentioned again. State
    kept per request is kept under its id. Last of all comes `close`, once. All of it runs in torch's inference mode. An
    exception from any of these aborts the running requests and reaches the caller.
    """

    def start(self, request: RequestView) -> None:
        """The request was scheduled for the first time."""
        return

    def propose(self, batch: ProposerBatch) -> Draft:
        """Draft at most `batch.max_draft_tokens[i]` nodes for request i, one tree per request, possibly empty."""

    def observe(self, observation: Observation) -> None:
        """See the features of the tokens that the last pass made final, and the token that follows them."""
        return

    def reset(self, request: RequestView) -> None:
        """Forget what was observed of the request: it was preempted and starts over."""
        return

    def finish(self, request: RequestView, reason: str) -> None:
        """Forget the request. reason: "stop", "length", "abort" or "error".

        If an interrupt (KeyboardInterrupt, from Ctrl-C) breaks off this call, it comes again before the next step, and
        what it raises then is ignored; one that breaks off `start` is followed by it, too. So it is best to free what
        the request has, rather than to expect it.
        """
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

    def padded(self, num_tokens: int) -> int: ...

    def fill(self, requests: Sequence[RequestView], num_tokens: Sequence[int]) -> None:
        """Say that the group holds what the draft's layers computed for the first num_tokens[i] tokens of request i.
        What is not said here is computed again by a later request with the same text, prefix caching or not."""

    def metadata(
        self, requests: Sequence[RequestView], starts: Sequence[int] | torch.Tensor, lengths: Sequence[int]
    ) -> KVMetadata:
        """Where the tokens of a forward pass lie: starts and lengths [batch] of the intervals, which may be empty.

        starts: on the host, or a tensor, int64, on the engine's device. Raises CapacityError past the reserved slots.
        """

    def forwarding(
        self, metadata: KVMetadata, visibility: Visibility, *, window: int | None = None
    ) -> AbstractContextManager[None]:
        """The forward pass that layers run in while the context is open. window: in every layer, a token sees no
        position that is `window` or more before its own; a layer with a smaller window of its own keeps that."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None = None,
        *,
        rows: torch.Tensor | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store keys and values, and attend to what the pass's visibility shows. For layers that are not bound.

        query: [num_tokens, num_heads, key_dim], rotated already, as is key [num_tokens, num_kv_heads, key_dim].
        value: [num_tokens, num_kv_heads, value_dim].
        scaling: of query times key; None: key_dim ** -0.5.
        rows: int64 [n], the tokens whose outputs are wanted: one of each request, then any that are padding. Give every
            layer the same tensor. No request may be without tokens in this pass then. None: all tokens.
        window: a token sees no position that is `window` or more before its own.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [num_heads], a score for each head that takes its share of the attention weights and has no value.

        Returns [num_tokens or n, num_heads, value_dim].
        """

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values as `attend` does, for a layer whose outputs nobody needs."""


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
        *,
        window: int | None = None,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """One pass over int64 token_ids and positions [num_tokens], padded to `LayerAttention.padded`. window: see
        `LayerAttention.forwarding`. Returns the logits [num_rows, vocab] of some rows, int64 [num_rows], and no
        features."""


class Embedding(Protocol):
    """The target's embedding, as a function."""

    def __call__(self, token_ids: torch.Tensor, raw: bool = False) -> torch.Tensor:
        """token_ids int64 [n] -> [n, hidden], in the target's dtype: what enters its first layer, less positions that
        are added to it. raw: the rows of its table as they are, without the factor of families that have one, such as
        Gemma and Granite."""


class OutputHead(Protocol):
    """The target's LM head, as a function."""

    def __call__(self, hidden: torch.Tensor, raw: bool = False) -> torch.Tensor:
        """hidden [n, hidden], after the final norm -> logits [n, vocab]. raw: what the LM head's matrix makes of them,
        without the factors and the cap that families such as Granite, Cohere, MiniCPM and Gemma 2 add.

        Raises CompatibilityError where the target has no LM head, or unless raw, where it is not known what its family
        adds.
        """


@frozen(eq=False)
class BuildContext:
    """What the engine lends a proposer that it builds."""

    target: TargetInfo
    num_speculative_tokens: int
    max_num_seqs: int  # most requests of a batch, and most that have started and not finished
    max_num_batched_tokens: int  # most tokens of a pass of the target
    device: torch.device
    embed: Embedding
    output_head: OutputHead
    # int64 [...] -> [..., hidden]: a row times what output_head takes is that token's logit. If the plan asks for them;
    # raises CompatibilityError where the target's logits are something else.
    output_rows: Callable[[torch.Tensor], torch.Tensor]
    attention: LayerAttention | None  # if the plan has a kv_layout
    load_model: Callable[[DraftModelConfig], CausalLM]  # in the target's dtype; its layers are bound to that attention
    speed_up: Callable[[torch.nn.Module], None]  # in place, a module for inference that is loaded: as is done with the
    #                                              target's own layers
    state: Any = None  # the plan's: a parsed config, a resolved checkpoint. So nothing is read twice


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
