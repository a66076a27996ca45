"""Runs a proposer for one decode step on lists of token ids, without a target model or an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from specdec_core.api.token_drafter import context_without_target, needs_of_target, observation_of_tokens
from specdec_core.config.fields import unknown_key
from specdec_core.contracts.draft import Draft, DraftTree
from specdec_core.contracts.proposer import Plan, Proposer, ProposerBatch, ProposerSpec
from specdec_core.contracts.target import TargetInfo
from specdec_core.engine.named_proposer import NamedProposer
from specdec_core.errors import ConfigError
from specdec_core.plugins import Plugins
from specdec_core.sampling.random import CounterRandom

CPU = torch.device("cpu")

NO_TARGET = TargetInfo(
    model="none",
    model_type="none",
    vocab_size=32_000,
    hidden_size=64,
    num_layers=2,
    max_model_len=2**20,
    dtype=torch.float32,
    device=CPU,
)
"""The TargetInfo that proposers get when they run without a target model."""

MAX_NUM_SEQS = 256


def _frozen_int64(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    array = np.array(token_ids, dtype=np.int64)
    array.setflags(write=False)
    return array


@attrs.frozen(eq=False)
class SimpleRequest:
    """A request as a proposer sees it (`RequestView`), made without an engine. Its token_ids are a read-only copy of
    those given."""

    id: str
    token_ids: np.ndarray = attrs.field(converter=_frozen_int64)  # int64 [num_tokens]   the last one is the root
    num_prompt_tokens: int = attrs.field()
    seed: int = 0
    num_cached_tokens: int = 0
    prediction: np.ndarray = attrs.field(default=(), converter=_frozen_int64)  # int64 [n]

    @num_prompt_tokens.default
    def _all_but_the_root(self) -> int:
        return max(len(self.token_ids) - 1, 1)


def propose(
    method: str,
    contexts: Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int = 5,
    temperature: float = 0.0,
    seed: int = 0,
    **speculative_config: Any,
) -> list[DraftTree]:
    """Run an installed proposer that needs no model once on a batch of contexts, and return its drafts.

    contexts: the token ids of each context. The last token is the root of the draft tree, which continues the context.
    num_speculative_tokens: the largest number of draft tokens for each context.
    temperature: the sampling temperature of all contexts; 0 is greedy.
    seed: context i is drafted with the seed `seed + i`.
    speculative_config: the method's own options.

    Returns one tree of draft tokens per context, empty if the proposer drafts nothing. Raises PluginError if no such
    method is installed, and ConfigError if an option is unknown or refused, if a context is empty, or if the method
    needs a target model (for hidden states or KV-cache slots).
    """
    if num_speculative_tokens < 1:
        raise ConfigError(f"num_speculative_tokens={num_speculative_tokens} must be >= 1")
    for i, context in enumerate(contexts):
        if len(context) == 0:
            raise ConfigError(f"contexts[{i}] is empty: a context holds at least one token, the root")
    spec = Plugins.load().proposer(method)
    options = _options(spec, speculative_config)
    plan = spec.plan(options, NO_TARGET, num_speculative_tokens)
    _refuse_what_needs_a_target(method, plan)
    proposer = spec.build(options, context_without_target(NO_TARGET, num_speculative_tokens, MAX_NUM_SEQS, plan.state))

    requests = [SimpleRequest(f"request-{i}", context, seed=seed + i) for i, context in enumerate(contexts)]
    batch = batch_of(requests, [num_speculative_tokens] * len(requests), temperature=temperature)
    try:
        draft = one_step(proposer, batch, observes=plan.observes)
    finally:
        NamedProposer(proposer, method).close()
    return [draft.tree(i) for i in range(len(requests))]


def batch_of(
    requests: Sequence[SimpleRequest], max_draft_tokens: Sequence[int], *, temperature: float
) -> ProposerBatch:
    """Build the batch that the engine would pass to `propose`. max_draft_tokens: the largest number of draft tokens for
    each request. temperature: the sampling temperature of all requests."""
    root_positions = torch.tensor([len(request.token_ids) - 1 for request in requests], dtype=torch.int64)
    return ProposerBatch(
        requests=requests,
        root_token_ids=torch.tensor([request.token_ids[-1] for request in requests], dtype=torch.int64),
        root_positions=root_positions,
        temperature=torch.full((len(requests),), temperature, dtype=torch.float32),
        max_draft_tokens=tuple(max_draft_tokens),
        random=CounterRandom([request.seed for request in requests], root_positions),
    )


@torch.inference_mode()
def one_step(proposer: Proposer, batch: ProposerBatch, *, observes: bool) -> Draft:
    """Call `start`, `observe`, `propose` and `finish` once for a batch, as the engine does for a prefill and one decode
    step. Returns the draft.

    observes: whether to call `observe`, as the proposer declares in `Plan.observes`.
    """
    for request in batch.requests:
        proposer.start(request)
    if observes and (seen := observation_of_tokens(batch.requests, dict.fromkeys((r.id for r in batch.requests), 0))):
        proposer.observe(seen)
    draft = proposer.propose(batch)
    for request in batch.requests:
        proposer.finish(request, "length")
    return draft


def _options(spec: ProposerSpec, options: dict[str, Any]) -> Any:
    known = {attribute.name for attribute in attrs.fields(spec.config)}
    for name in options:
        if name not in known:
            raise unknown_key(name, known, f"method {spec.name!r}")
    return spec.config(**options)


def _refuse_what_needs_a_target(method: str, plan: Plan) -> None:
    if needs := needs_of_target(plan):
        raise ConfigError(
            f"method {method!r} needs {' and '.join(needs)}, so it cannot draft from token lists alone: run it with "
            f"LLM(model, speculative_config={{'method': {method!r}}})"
        )
