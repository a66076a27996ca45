"""Measures one step: the times of its phases, and its counts."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from attrs import define, field

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.report import StepReport
from specdec_core.engine.request import Piece, Request
from specdec_core.engine.scheduler import Schedule


@define
class Emitted:
    """What a step emitted, by request id.

    pieces: output tokens with their text.
    accepted: the number of accepted draft tokens, for requests that had live (not padding) draft tokens.
    failed: for each request whose logits were not finite, whether it had a draft, even one of padding alone.
    """

    pieces: dict[str, Sequence[Piece]] = field(factory=dict)
    accepted: dict[str, int] = field(factory=dict)
    failed: dict[str, bool] = field(factory=dict)

    def add(self, request: Request, pieces: Sequence[Piece], num_draft_tokens: int) -> None:
        self.pieces[request.id] = pieces
        if num_draft_tokens:
            self.accepted[request.id] = sum(piece.is_draft for piece in pieces)
            request.counts.add(num_draft_tokens, self.accepted[request.id])


class StepTimer:
    """Measures the time that a step spends on drafting (draft_s), in the target's forward pass (forward_s) and on
    verification (verify_s). It starts when it is created."""

    def __init__(self) -> None:
        self.draft_s = self.forward_s = self.verify_s = 0.0
        self._last = perf_counter()

    def end_drafting(self) -> None:
        """Add the time since the previous phase ended to the time of drafting."""
        self.draft_s += self._lap()

    def end_forward_pass(self) -> None:
        """Add the time since the previous phase ended to the time of the target's forward pass. On a GPU that is the
        time of launching it: verification waits for it."""
        self.forward_s += self._lap()

    def end_verification(self) -> None:
        """Add the time since the previous phase ended to the time of verification."""
        self.verify_s += self._lap()

    def report(self, schedule: Schedule, draft: Draft, verifier: str, emitted: Emitted) -> StepReport:
        num_draft_tokens = sum(draft.num_live_per_request)
        outputs = {request_id: len(pieces) for request_id, pieces in emitted.pieces.items()}
        return StepReport(
            num_prefill_tokens=schedule.num_prefill_tokens,
            num_decode_requests=schedule.num_decode_requests,
            num_output_tokens=sum(outputs.values()),
            num_draft_tokens=num_draft_tokens,
            num_nodes=draft.num_nodes,
            num_accepted=sum(emitted.accepted.values()),
            draft_s=self.draft_s,
            target_s=self.forward_s + self.verify_s,
            verify_s=self.verify_s,
            num_preempted=len(schedule.preempted),
            num_cached_tokens=schedule.num_cached_tokens,
            accepted_per_request=emitted.accepted,
            output_per_request=outputs,
            verifier=verifier if num_draft_tokens else "",
        )

    def _lap(self) -> float:
        before, self._last = self._last, perf_counter()
        return self._last - before
