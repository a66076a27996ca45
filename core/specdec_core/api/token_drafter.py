"""Drafts with an installed proposer outside of specdec's engine, from token ids alone: for bridges to other engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from specdec_core.api.arguments import fill_in, parse_speculative
from specdec_core.api.several_methods import one_per_method
from specdec_core.config.fields import shown
from specdec_core.config.speculative import AUTO
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import BuildContext, Observation, Plan, ProposerBatch, RequestView
from specdec_core.contracts.target import TargetInfo
from specdec_core.drafting.paths import likeliest_paths
from specdec_core.engine.build import build_proposer
from specdec_core.engine.design import make_plan
from specdec_core.engine.draft_check import check_draft
from specdec_core.engine.metrics import Counter, Gauge
from specdec_core.engine.named_proposer import NamedProposer
from specdec_core.engine.step_batch import spread
from specdec_core.errors import ConfigError, SpecdecError
from specdec_core.plugins import Plugins
from specdec_core.sampling.random import CounterRandom

CPU = torch.device("cpu")


class TokenRequest:
    """A request as proposers see it (`RequestView`), whose tokens another engine generates.

    prompt_token_ids: the tokens to begin with, one or more.
    prediction: the output that the user expects, for proposers that draft from it.
    """

    seed = num_cached_tokens = 0

    def __init__(self, request_id: str, prompt_token_ids: Sequence[int], prediction: Sequence[int] = ()) -> None:
        self.id, self.prediction = request_id, np.array(prediction, dtype=np.int64)
        self.num_prompt_tokens = len(prompt_token_ids)
        self._buffer = np.array(prompt_token_ids, dtype=np.int64)
        self.token_ids = _read_only(self._buffer)  # int64 [num_tokens]   prompt and output so far
        self.prediction.flags.writeable = False

    def append(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Add tokens of the output."""
        before = len(self.token_ids)
        end = before + len(token_ids)
        if end > len(self._buffer):
            grown = np.empty(2 * end, dtype=np.int64)
            grown[:before] = self.token_ids
            self._buffer = grown
        self._buffer[before:end] = token_ids
        self.token_ids = _read_only(self._buffer[:end])


def _read_only(values: np.ndarray) -> np.ndarray:
    view = values.view()
    view.flags.writeable = False
    return view


class TokenDrafter:
    """Calls an installed proposer and checks its drafts, for an engine other than specdec's.

    All draft tokens are chosen, as at temperature 0. So an engine verifies them losslessly if it draws its own token
    at each position, and accepts a draft token only if it is the drawn one: rule 1 of docs/losslessness.md.

    speculative_config: as `LLM` takes it, with one method.
    target: facts about the model that verifies.
    max_num_seqs: the most requests that have started and not finished.
    plugins: None: those that are installed.

    Public attributes: config, the complete SpeculativeConfig; plan, what the proposer needs.

    Raises the errors of `LLM` for a wrong speculative_config, and ConfigError if the proposer needs more than token ids
    or if an option is for specdec's engine only.
    """

    def __init__(
        self, speculative_config: Any, target: TargetInfo, *, max_num_seqs: int, plugins: Plugins | None = None
    ) -> None:
        plugins = plugins or Plugins.load()
        configs = one_per_method(speculative_config, plugins)
        if len(configs) > 1:
            raise ConfigError(
                f"{len(configs)} methods are combined by LLM only: give one, not {shown(speculative_config)}"
            )
        mapping = fill_in(configs[0], target.model, plugins)
        _refuse_options_of_the_engine(mapping)
        self.config = parse_speculative({**mapping, "adaptive_draft_length": False}, plugins, target.device)
        number, spec = self.config.num_speculative_tokens, plugins.proposer(self.config.method)
        self.plan = make_plan(spec, self.config.options, target, number)
        if needs := needs_of_target(self.plan):
            raise ConfigError(
                f"method {spec.name!r} needs {' and '.join(needs)}, which only specdec's own engine gives: use "
                f"LLM(model, speculative_config={{'method': {spec.name!r}, ...}}), or here a method that drafts from "
                f"token ids alone: {', '.join(_methods_for_tokens(plugins, target)) or 'none is installed'}"
            )
        context = context_without_target(target, number, max_num_seqs, self.plan.state)
        self._proposer = NamedProposer(build_proposer(spec, self.config.options, context), spec.name)
        self._vocab_size = target.vocab_size
        self._num_observed: dict[str, int] = {}  # of each request that has started

    def start(self, request: RequestView) -> None:
        """Begin a request. Its id must be that of no other one that has not finished."""
        self._num_observed[request.id] = 0
        with self._proposer.called() as proposer:
            proposer.start(request)

    def propose(self, requests: Sequence[RequestView], max_draft_tokens: Sequence[int]) -> Draft:
        """Draft for requests that have started. max_draft_tokens: the most draft tokens of each; those with 0 get none.

        Returns a draft on the CPU with a tree, perhaps empty, for each request. Raises PluginError if the proposer
        fails or returns a wrong draft.
        """
        pairs = zip(requests, max_draft_tokens, strict=True)
        limits = [self._limit(request, most) for request, most in pairs]
        drafting = [request for request, most in zip(requests, limits, strict=True) if most]
        if not drafting:
            return Draft.from_chains([[]] * len(requests))
        budgets = tuple(most for most in limits if most)
        # Through numpy, which takes a fraction of the time that torch.tensor takes for a few numbers.
        root_positions = torch.from_numpy(np.array([len(request.token_ids) - 1 for request in drafting]))
        batch = ProposerBatch(
            requests=drafting,
            root_token_ids=torch.from_numpy(np.array([request.token_ids[-1] for request in drafting])),
            root_positions=root_positions,
            temperature=torch.zeros(len(drafting)),
            host_temperature=(0.0,) * len(drafting),
            max_draft_tokens=budgets,
            random=CounterRandom([request.seed for request in drafting], root_positions),
        )
        with self._proposer.called() as proposer:
            if self.plan.observes and (seen := observation_of_tokens(drafting, self._num_observed)):
                proposer.observe(seen)
            draft = proposer.propose(batch)
            check_draft(draft, budgets, self._vocab_size, CPU)
        if self.plan.observes:
            self._num_observed |= {request.id: len(request.token_ids) - 1 for request in drafting}
        return spread(draft, limits)

    def propose_chains(self, requests: Sequence[RequestView], max_draft_tokens: Sequence[int]) -> list[list[int]]:
        """The same for engines that verify no trees: of each tree the path on which most tokens are expected to be
        accepted."""
        return likeliest_paths(self.propose(requests, max_draft_tokens))

    def finish(self, request: RequestView, reason: str) -> None:
        """End a request. reason: "stop", "length", "abort" or "error"."""
        self._num_observed.pop(request.id, None)
        with self._proposer.called() as proposer:
            proposer.finish(request, reason)

    def forget(self) -> None:
        """Let the proposer forget what earlier requests showed. Call it while no request runs."""
        self._proposer.forget()

    def metrics(self) -> list[Counter | Gauge]:
        """The proposer's own metrics."""
        return self._proposer.metrics()

    def close(self) -> None:
        """Save what must outlive the proposer, such as a cache file."""
        self._proposer.close()

    def _limit(self, request: RequestView, most: int) -> int:
        config, longest = self.config, self.plan.max_model_len
        most_requests = config.disable_by_batch_size
        if most_requests is not None and len(self._num_observed) > most_requests:
            return 0
        if self.plan.reads_prediction and not len(request.prediction):
            return 0
        most = min(most, config.num_speculative_tokens)
        return max(0, most if longest is None else min(most, longest - len(request.token_ids)))


def needs_of_target(plan: Plan) -> list[str]:
    """What a proposer needs from the target, in words; empty if token ids are enough."""
    asks = {
        f"features of the target ({', '.join(plan.taps)})": plan.taps,
        "the target's likeliest tokens": plan.top_tokens,
        "rows of the target's output layer": plan.output_rows,
        "a KV group": plan.kv_layout,
        f"{plan.scratch_slots} KV slots": plan.scratch_slots,
    }
    return [what for what, wanted in asks.items() if wanted]


def context_without_target(
    target: TargetInfo, num_speculative_tokens: int, max_num_seqs: int, state: Any
) -> BuildContext:
    """The `BuildContext` of a proposer that reads token ids only: it runs on the CPU, and there is no embedding or LM
    head to share. state: of its plan."""

    def no_target(*_: object, **__: object) -> NoReturn:
        raise ConfigError("there is no target here, nor an embedding or LM head to share: run the method with LLM")

    return BuildContext(
        target=target,
        num_speculative_tokens=num_speculative_tokens,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=target.max_model_len,
        device=CPU,
        embed=no_target,
        output_head=no_target,
        output_rows=no_target,
        attention=None,
        load_model=no_target,
        speed_up=lambda module: None,
        state=state,
    )


def observation_of_tokens(requests: Sequence[RequestView], num_observed: Mapping[str, int]) -> Observation | None:
    """An observation without hidden states: the tokens of each request that are new, without the last one, as the
    engine hands them over. None if there are none. num_observed: {request id: how many tokens are not new}."""
    seen = [request for request in requests if len(request.token_ids) - 1 > num_observed[request.id]]
    if not seen:
        return None
    starts = tuple(num_observed[request.id] for request in seen)
    lengths = [len(request.token_ids) - 1 - start for request, start in zip(seen, starts, strict=True)]
    ends, firsts = np.cumsum(lengths), zip(seen, starts, strict=True)
    return Observation(
        requests=seen,
        starts=starts,
        offsets=(0, *ends.tolist()),
        num_valid=torch.tensor(lengths, dtype=torch.int32),
        last_rows=torch.from_numpy(ends - 1),
        token_ids=torch.from_numpy(np.concatenate([request.token_ids[start:-1] for request, start in firsts])),
        positions=torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]),
        features={},
        next_token_ids=torch.tensor([int(request.token_ids[-1]) for request in seen]),
    )


def _refuse_options_of_the_engine(mapping: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that only specdec's own engine can follow."""
    reasons = {
        "adaptive_draft_length": "it goes by what steps cost in specdec's engine",
        "verifier": "drafts are verified by the draws of the engine that runs the model",
    }
    for key, reason in reasons.items():
        if mapping.get(key) not in (None, False, AUTO):
            raise ConfigError(
                f"{key}={shown(mapping[key])} cannot be used outside of LLM, since {reason}: leave it out"
            )


def _methods_for_tokens(plugins: Plugins, target: TargetInfo) -> list[str]:
    """The installed methods that need nothing of a target if all of their options have their defaults."""
    found = []
    for name in plugins.proposers():
        try:
            spec = plugins.proposer(name)
            if not needs_of_target(make_plan(spec, spec.config(), target, 1)):
                found.append(name)
        except (SpecdecError, TypeError):  # one that is not usable, or that needs options
            continue
    return found
