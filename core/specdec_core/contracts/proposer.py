"""The contract of a proposer: its inputs, what it may ask of the engine, and how a plugin offers one."""

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

    from specdec_core.config.draft_options import DraftModelConfig
    from specdec_core.engine.metrics import Counter, Gauge

PLUGIN_API = 1
"""The version of the contracts in this package. A plugin gives the number of the version that it was written for."""


class RequestView(Protocol):
    """A read-only view of a request, for proposers. `token_ids` grows between steps."""

    @property
    def id(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int:
        """How many of the request's first tokens came from the prefix cache; 0 without prefix caching. The target does
        not compute these tokens, and `observe` never gets them. A draft model's KV cache holds them, too."""

    @property
    def token_ids(self) -> np.ndarray:
        """int64 [num_tokens]   prompt and output so far, including the token to compute next. A view, not a copy."""

    @property
    def prediction(self) -> np.ndarray:
        """int64 [n]   the output that the user expects (`SamplingParams.prediction`); empty if none was given."""


class LevelBudget(Protocol):
    """Decides, while drafts grow, which requests get another level of draft tokens. Growers ask it before each
    level but the first: to drop a token by its value, after it was drawn, would bias sampled drafts."""

    def goes_on(
        self, requests: np.ndarray, rows: np.ndarray, probs: np.ndarray, is_first: np.ndarray, num_nodes: np.ndarray
    ) -> np.ndarray:
        """bool [batch]   the requests that get another level below the one just grown, of n draft tokens. Of each of
        these: requests int64 [n], an index into the batch; rows int64 [n], the parent's index among those tokens of the
        last call whose requests went on, in the first call its request; probs float [n], the draft's probability;
        is_first bool [n], the first of sampled siblings. num_nodes: int64 [batch], the next level's most tokens."""


@frozen(eq=False)
class ProposerBatch:
    """The requests to draft for. The target has computed all tokens of each but the last one, the root of its tree."""

    requests: Sequence[RequestView]
    root_token_ids: torch.Tensor  # int64 [batch]
    root_positions: torch.Tensor  # int64 [batch]
    temperature: torch.Tensor  # float32 [batch]   0: greedy
    max_draft_tokens: tuple[int, ...]  # [batch]   at least 1; never beyond max_tokens or max_model_len
    random: RandomSource
    levels: LevelBudget | None = None  # asked before each level but the first; None: all are wanted, as on a GPU
    may_sample: tuple[bool, ...] = ()  # [batch]   the temperature is above 0, and the user gave no seed; (): of none
    host_temperature: tuple[float, ...] = ()  # [batch]   `temperature` on the host; (): not known there
    most_likely: Callable[..., Any] | None = None  # the operation of this name: see `drafting.most_likely_of`


@frozen(eq=False)
class TopTokens:
    """The target's likeliest next tokens after each node, accepted or not. A node is a request's last token (root) or a
    draft token. Probabilities are the softmax of raw logits, before sampling parameters."""

    requests: torch.Tensor  # int64 [n]   index into the observation's requests, ascending
    positions: torch.Tensor  # int64 [n]
    token_ids: torch.Tensor  # int64 [n]   the root's or node's own token
    parents: torch.Tensor  # int64 [n]   index of the parent among these; -1: it is a root; -2: a dead node, ignore it
    ids: torch.Tensor  # int64 [n, k]   the likeliest first
    logprobs: torch.Tensor  # float32 [n, k]


@frozen(eq=False)
class Observation:
    """Hidden states that a forward pass of the target computed for tokens that are now final, in prefill and decode.

    Request b owns the rows offsets[b]:offsets[b + 1]. The first num_valid[b] of them are valid: the tokens known before
    the forward pass, then the accepted draft tokens. A request's first observation, also after `reset`, begins at
    position `request.num_cached_tokens`; each later one continues after the last valid row. Valid rows may go past a
    stop; the request then finishes. num_valid is 0 if logits were not finite: the request then ends or is reset.
    A request that does not draft may get one late observation with the tokens of many forward passes. A request of
    which some tokens are never observed gets no drafts.

    All tensors are on the engine's device. Reading `host_num_valid` or `host_last_rows` may wait for the device.
    """

    requests: Sequence[RequestView]
    starts: tuple[int, ...]  # [batch]   position of each request's first row
    offsets: tuple[int, ...]  # [batch + 1]
    num_valid: torch.Tensor  # int32 [batch]
    last_rows: torch.Tensor  # int64 [batch]   each request's last valid row; its first row if none is valid
    token_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    features: Mapping[str, torch.Tensor]  # {tap: [num_tokens, width]}   hidden states of the target: see `Plan.taps`
    next_token_ids: torch.Tensor  # int64 [batch]   the token after the last valid one: the next known token (prompt,
    #                               or output being recomputed) if there is one, else the new root
    top_tokens: TopTokens | None = None  # if the plan asks for them; never in a late observation
    _host_num_valid: tuple[int, ...] | None = None  # [batch]

    @cached_property
    def host_num_valid(self) -> tuple[int, ...]:
        """[batch]   `num_valid` as a tuple on the host."""
        return tuple(self.num_valid.tolist()) if self._host_num_valid is None else self._host_num_valid

    @cached_property
    def host_last_rows(self) -> tuple[int, ...]:
        """[batch]   `last_rows` as a tuple on the host."""
        return tuple(first + max(0, n - 1) for first, n in zip(self.offsets, self.host_num_valid, strict=False))

    @cached_property
    def following_token_ids(self) -> torch.Tensor:
        """int64 [num_tokens]   the token that follows each row's token; arbitrary at rows that are not valid."""
        return self.token_ids.roll(-1).index_copy_(0, self.last_rows, self.next_token_ids)


@frozen
class Plan:
    """What a proposer needs from the engine, known before any weights are loaded."""

    taps: tuple[str, ...] = ()  # hidden states to observe. "input.i": those that enter layer i, or with i = num_layers
    #                             those that leave the last one; "final": after the final norm
    kv_layout: KVLayout | None = None  # of the draft's own layers
    scratch_slots: int = 0  # draft KV slots beyond the final ones, counted from the root's
    lookahead: int = 0  # how many later tokens a slot of the kv_layout depends on (EAGLE: 1, the next token)
    weight_bytes: int = 0
    graph_bytes: int = 0  # of CUDA graphs on a GPU, of draft models and heads: see `head_graph_bytes`
    observes: bool = True  # False: `observe` is never called and no features are gathered
    reads_prediction: bool = False  # it drafts only for requests with a `prediction`
    top_tokens: int = 0  # how many of the target's likeliest tokens to observe at each root and node
    output_rows: bool = False  # whether `BuildContext.output_rows` is used: rows of the target's LM head
    max_model_len: int | None = None  # no draft reaches beyond this many tokens of a request
    state: Any = field(default=None, eq=False, repr=False)  # anything; `build` gets it as `BuildContext.state`


class Proposer(Protocol):
    """Drafts tokens for the target to verify. Subclass it: by default all methods but `propose` do nothing.

    The engine calls, for each request in this order:
    - `start` once;
    - any number of `observe` (after each forward pass of the target, prefill chunks included, unless the plan has
      observes=False) and `propose` (before a decode step in which the request may have a draft);
    - `reset` whenever the request is preempted; the target then computes its tokens again, and `observe` gets them
      again, from position `num_cached_tokens` on;
    - `finish` once, after which the engine never mentions the request again.

    Keep state of a request under its id. `close` comes last, once. All methods run in torch's inference mode. An
    exception from any of them aborts the running requests and reaches the caller. A proposer of another class may lack
    `close`, `forget` and `metrics`.
    """

    def start(self, request: RequestView) -> None:
        """Called when the request is scheduled for the first time."""
        return

    def propose(self, batch: ProposerBatch) -> Draft:
        """Return a draft tree per request, possibly empty, with up to `batch.max_draft_tokens[i]` nodes in tree i."""

    def observe(self, observation: Observation) -> None:
        """Receive the target's hidden states of tokens that are now final, and the next token of each request."""
        return

    def reset(self, request: RequestView) -> None:
        """Forget everything that `observe` got for the request: it was preempted and will be computed again."""
        return

    def finish(self, request: RequestView, reason: str) -> None:
        """Forget the request. reason: "stop", "length", "abort" or "error".

        If an interrupt (Ctrl-C) breaks off `start` or `finish`, the engine calls `finish` again before the next step
        and ignores its exceptions: `finish` must also work for a request without state."""
        return

    def close(self) -> None:
        """Save what must outlive the engine, such as a cache file. Called after `finish` for every started request,
        when the engine is closed (`LLM.close`, the end of `with LLM(...)`, `AsyncLLM.shutdown`), garbage-collected, or
        the interpreter exits. In the last two cases an exception becomes a warning. A killed process never calls it."""
        return

    def forget(self) -> None:
        """Forget what earlier requests showed, such as their outputs, as if the engine were new. Called while no
        request runs, by benchmarks that complete the same prompts several times."""
        return

    def metrics(self) -> Sequence[Counter | Gauge]:
        """Return the proposer's own metrics, such as the size of a cache: `get_metrics` and the log have them, their
        names after "spec_decode_METHOD_". Called at any time, also from another thread during a step and after `close`:
        only read numbers that the host has."""
        return ()


class LayerAttention(Protocol):
    """Attention of a draft model's or head's layers over their KV cache, computed by the same code as the target's.

    A forward pass covers the KV-cache slots [start, start + length) of each request. The tokens form a flat batch,
    request after request. From a request's root (its last token) on, `Plan.scratch_slots` slots are scratch: the
    proposer may overwrite them at any time. Stored keys and values are never moved, unless the layout has keeps_nodes.

    `Proposer.observe` may store keys and values for all rows, from slot `starts` on: invalid rows fall on scratch
    slots. Write to all slots before `start + length`, masked ones too. The forward pass reads them all: a masked slot
    has weight 0, but 0 times a NaN in unwritten memory is NaN.
    """

    implementation: str
    """The name to give to transformers' attention modules (`config._attn_implementation`) before `bind`."""

    def bind(self, modules: Sequence[torch.nn.Module]) -> None:
        """Make transformers' attention modules call `attend`. modules: those of all draft layers, in layer order."""

    def fill(self, requests: Sequence[RequestView], num_tokens: Sequence[int]) -> None:
        """Record that the draft layers' KV cache holds the first num_tokens[i] tokens of request i.
        With prefix caching, a later request with the same tokens skips only tokens that were recorded here."""

    def metadata(
        self, requests: Sequence[RequestView], starts: Sequence[int] | torch.Tensor, lengths: Sequence[int]
    ) -> KVMetadata:
        """Block tables and slot mapping of a forward pass over slots [start, start + length) of each request. A length
        may be 0. starts: a sequence on the host, or an int64 tensor on the engine's device. Raises CapacityError if an
        interval ends past the reserved slots."""

    def forwarding(
        self, metadata: KVMetadata, visibility: Visibility, window: int | None = None, rows: Sequence[int] | None = None
    ) -> AbstractContextManager[None]:
        """Return a context manager in which the draft layers run one forward pass with these block tables, slots and
        attention mask. window: sliding window of all layers, in positions including the token's own; a layer with a
        smaller window keeps its own. rows: those of `attend` on the host, so that it need not wait for a GPU; None: not
        known."""

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
        """For layers not given to `bind`: store keys and values, then compute attention with the mask of `forwarding`.

        query: [num_tokens, num_heads, key_dim], after RoPE, as is key [num_tokens, num_kv_heads, key_dim].
        value: [num_tokens, num_kv_heads, value_dim].
        scaling: factor of query times key; None: key_dim ** -0.5.
        rows: int64 [n], the tokens whose outputs are wanted: one of each request, then any padding. Give every layer
            the same tensor. Every request must then have a token in this forward pass. None: all tokens.
        window: a token attends to no position that is `window` or more before its own.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [num_heads], attention sinks: an extra score per head that takes part in the softmax but has no value.
        Returns [num_tokens or n, num_heads, value_dim].
        """

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values as `attend` does, for a layer whose outputs are not needed."""


class CausalLM(Protocol):
    """A causal LM from transformers as a draft model. Its keys and values are in the KV cache of `Plan.kv_layout`."""

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
        """Run a forward pass over int64 token_ids and positions [num_tokens]. rows: int64 [num_rows], the tokens whose
        logits are wanted. window: sliding window of all layers, in positions. Returns logits [num_rows, vocab] and an
        empty mapping."""


class Embedding(Protocol):
    """The target's token embedding, as a callable."""

    def __call__(self, token_ids: torch.Tensor, raw: bool = False) -> torch.Tensor:
        """Return the embeddings [n, hidden] of token_ids int64 [n] in the target's dtype, as they enter its first
        layer, without position embeddings. raw: return rows of the embedding matrix, without the scaling factor of
        families such as Gemma and Granite."""


class OutputHead(Protocol):
    """The target's LM head, as a callable."""

    def __call__(self, hidden: torch.Tensor, raw: bool = False) -> torch.Tensor:
        """Return logits [n, vocab] for hidden states [n, hidden] after the final norm. raw: only multiply by the LM
        head's matrix, without the factors and softcap of families such as Granite, Cohere, MiniCPM and Gemma 2. Raises
        CompatibilityError if the target has no LM head or, unless raw, if its factors and softcap are unknown."""


TensorFunction = Callable[..., "tuple[torch.Tensor, ...]"]
"""A function that `BuildContext.graphed` takes. It gets tensors [n, ...] by position, and may get hashable values by
name. It returns tensors [n, ...] that depend only on these arguments, on weights and, inside of
`LayerAttention.forwarding`, on attention. It leaves nothing behind but keys and values: on a GPU, it is not called for
shapes that have a graph."""


def ungraphed(function: TensorFunction) -> TensorFunction:
    return function


@frozen(eq=False)
class BuildContext:
    """What the engine provides to a proposer's `build`."""

    target: TargetInfo
    num_speculative_tokens: int
    max_num_seqs: int  # most requests of a batch, and most that have started and not finished
    max_num_batched_tokens: int  # most tokens in a forward pass of the target
    device: torch.device
    embed: Embedding
    output_head: OutputHead
    # Token ids int64 [...] -> rows of the LM head [..., hidden]: a row times a hidden state is that token's logit. Only
    # if the plan asks for it; raises CompatibilityError if the target's logits are not such products.
    output_rows: Callable[[torch.Tensor], torch.Tensor]
    attention: LayerAttention | None  # if the plan has a kv_layout
    load_model: Callable[[DraftModelConfig], CausalLM]  # in the target's dtype, its layers bound to `attention`
    speed_up: Callable[[torch.nn.Module], None]  # optimizes a loaded module in place, as the target's own layers are
    state: Any = None  # the plan's: a parsed config, a resolved checkpoint. So nothing is read twice
    # On a GPU, returns a function that computes the same as a CUDA graph: its kernels are launched as one.
    graphed: Callable[[TensorFunction], TensorFunction] = ungraphed


@frozen(eq=False)
class ProposerSpec:
    """Describes a proposer (a way of drafting); returned by the hook `specdec_proposers` before any heavy import.

    name: what users give as `method`.
    config: attrs class of this method's own keys in speculative_config; constructing it validates them.
    build: called with the config and a BuildContext, returns the Proposer. Heavy imports belong here.
    api: the version of the plugin API that the plugin is written for (PLUGIN_API).
    plan: called with the config, TargetInfo and num_speculative_tokens, returns a Plan. Loads no weights.
    requires: modules that must be installed, looked up without importing them.
    num_speculative_tokens: called with the config and the device, returns the default. None: users must give one.
    detect: called with a checkpoint's config and shapes by tensor names, returns whether, or as what ("an EAGLE head"),
        it fits this method.
    train: the TrainingRecipe of this method's draft models; None if it does not train any.
    published: maps target models on the hub to draft models there; shown to users who name no draft model.
    aliases: other engines' names of the method. Users may give them; a warning says the name here.
    advice: called with the config and the speculative_config that users gave, returns a line for the log, or None.
    """

    name: str
    config: type
    build: Callable[[Any, BuildContext], Proposer]
    api: int
    plan: Callable[[Any, TargetInfo, int], Plan] = lambda config, target, num_speculative_tokens: Plan()
    requires: tuple[str, ...] = ()
    num_speculative_tokens: Callable[[Any, torch.device], int] | None = None
    detect: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], bool | str] | None = None
    train: TrainingRecipe | None = None
    published: Mapping[str, str] = field(factory=dict)
    aliases: tuple[str, ...] = ()
    advice: Callable[[Any, Mapping[str, Any]], str | None] | None = None
