"""Records everything that a proposer drafts in an engine, and the calls that the proposer gets."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs
import torch
from attrs import define, field, frozen
from probe_draft import PROBE

from specdec_core import Draft, Observation, Plugins, Proposer, ProposerBatch, RequestView
from specdec_core.plugins.operations import OfferedOps


@frozen(eq=False)
class Drafted:
    """One recorded draft tree, and all data that it may depend on."""

    request_id: str
    seed: int
    temperature: float
    history: list[int]
    max_draft_tokens: int
    was_reset: bool  # the request had been preempted before
    token_ids: list[int]
    parents: list[int]
    q: list[torch.Tensor | None]


@define(eq=False)
class Journal:
    drafts: list[Drafted] = field(factory=list)
    num_in_batch: Counter[int] = field(factory=Counter)
    num_chunks: int = 0  # of prompts, beyond the first of each
    num_reset: Counter[str] = field(factory=Counter)
    reasons: Counter[str] = field(factory=Counter)


class Recorder(Proposer):
    """Wraps a proposer. It records the drafts, and asserts that the engine calls the proposer in torch's inference
    mode."""

    def __init__(self, proposer: Proposer, journal: Journal, vocab_size: int) -> None:
        self.proposer, self.journal, self._vocab_size = proposer, journal, vocab_size

    def start(self, request: RequestView) -> None:
        assert torch.is_inference_mode_enabled()
        self.proposer.start(request)

    def observe(self, observation: Observation) -> None:
        assert torch.is_inference_mode_enabled()
        for request, start in zip(observation.requests, observation.starts, strict=True):
            self.journal.num_chunks += request.num_cached_tokens < start < request.num_prompt_tokens
        self.proposer.observe(observation)

    def reset(self, request: RequestView) -> None:
        assert torch.is_inference_mode_enabled()
        self.journal.num_reset[request.id] += 1
        self.proposer.reset(request)

    def finish(self, request: RequestView, reason: str) -> None:
        assert torch.is_inference_mode_enabled()
        self.journal.reasons[reason] += 1
        self.proposer.finish(request, reason)

    def propose(self, batch: ProposerBatch) -> Draft:
        assert torch.is_inference_mode_enabled()
        draft = self.proposer.propose(batch)
        self.journal.num_in_batch[len(batch.requests)] += 1
        for i, request in enumerate(batch.requests):
            nodes = slice(draft.offsets[i], draft.offsets[i + 1])
            rows = [-1] * len(draft.token_ids[nodes]) if draft.q_rows is None else draft.q_rows[nodes].tolist()
            temperature = float(batch.temperature[i])
            assert temperature == 0 or temperature > 1e-5, "so low is greedy, which a proposer is told by 0"
            drafted = Drafted(
                request.id,
                request.seed,
                temperature,
                request.token_ids.tolist(),
                batch.max_draft_tokens[i],
                request.id in self.journal.num_reset,
                *draft.tree(i),
                [self._q(draft, row) for row in rows],
            )
            self.journal.drafts.append(drafted)
        return draft

    def _q(self, draft: Draft, row: int) -> torch.Tensor | None:
        """Return a row of q, over the target's vocabulary if the row has token ids of its own."""
        if draft.q is None or row < 0 or draft.q_ids is None:
            return None if draft.q is None or row < 0 else draft.q[row]
        return draft.q.new_zeros(self._vocab_size).scatter_(0, draft.q_ids[row], draft.q[row])


class RecordingPlugins:
    """Stands in for `Plugins`: the installed plugins and the proposer of probe_draft.py. Each proposer is wrapped in a
    Recorder."""

    def __init__(self, journal: Journal) -> None:
        self._installed, self._journal = Plugins.load(), journal

    def proposer(self, name: str) -> Any:
        spec = PROBE if name == PROBE.name else self._installed.proposer(name)
        return attrs.evolve(spec, build=self._recorded(spec.build))

    def _recorded(self, build: Any) -> Any:
        return lambda config, context: Recorder(build(config, context), self._journal, context.target.vocab_size)

    def ops(self, device_type: str) -> OfferedOps:
        return OfferedOps(())  # core's own, whatever is installed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._installed, name)
