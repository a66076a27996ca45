"""The target's forward pass of one step: a schedule and a draft in, logits and hidden states out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.kv import KVManager
from specdec_core.engine.logprobs import TokenTexts, add_prompt_logprobs, prompt_parts, rows_of
from specdec_core.engine.recurrent import RequestStates
from specdec_core.engine.scheduler import Schedule
from specdec_core.engine.step_batch import StepBatch
from specdec_core.models import Model
from specdec_core.models.graphed import ForwardGraphs


@frozen(eq=False)
class Computed:
    """The results of one forward pass of the target.

    features: hidden states by tap. A tap names the point in the model where hidden states are taken.
    """

    batch: StepBatch
    logits: torch.Tensor  # [num_rows, vocab]   of roots and nodes
    features: Mapping[str, torch.Tensor]  # {tap: [num_tokens, width]}


class Runner:
    """Builds the input tensors of a step and runs the target. Nothing else in the engine calls the target.

    states: of the target's recurrent layers. None: it has none.
    """

    def __init__(
        self, target: Model, kv: KVManager, token_texts: TokenTexts, states: RequestStates | None = None
    ) -> None:
        self._target, self._kv, self._token_texts, self._states = target, kv, token_texts, states

    @property
    def device(self) -> torch.device:
        return self._target.info.device

    @property
    def vocab_size(self) -> int:
        return self._target.info.vocab_size

    @property
    def graphs(self) -> ForwardGraphs | None:
        return self._target.graphs

    def run(self, schedule: Schedule, draft: Draft) -> Computed:
        """Run the target's forward pass over the scheduled tokens and the draft tokens. Prompt logprobs are added to
        the requests that ask for them, and are no part of the result."""
        num_padded = self._target.attention.padded(sum(schedule.num_known) + draft.num_nodes)
        batch = StepBatch.of(schedule, draft, num_padded, self._target.info.device)
        metadata = self._kv.metadata(schedule.request_ids, batch.starts, batch.lengths)
        parts = prompt_parts(schedule, batch) if schedule.num_prefill_tokens else []
        rows = torch.cat([batch.rows, rows_of(parts, batch.rows.device)]) if parts else batch.rows
        states = None if self._states is None else self._states.plan(schedule, batch, draft)
        logits, features = self._target.forward(
            batch.token_ids, batch.positions, metadata, batch.visibility, rows, states=states
        )
        if parts:
            logits, of_prompts = logits[: len(batch.rows)], logits[len(batch.rows) :]
            add_prompt_logprobs(parts, of_prompts, self._token_texts)
        return Computed(batch, logits, features)
