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
    first_token_s, inter_token_s, whole_request_s: as `StepReport` has them.
    """

    pieces: dict[str, Sequence[Piece]] = field(factory=dict)
    accepted: dict[str, int] = field(factory=dict)
    failed: dict[str, bool] = field(factory=dict)
    first_token_s: list[float] = field(factory=list)
    inter_token_s: list[float] = field(factory=list)
    whole_request_s: list[float] = field(factory=list)
    _now: float = field(factory=perf_counter)

    def add(self, request: Request, pieces: Sequence[Piece], num_draft_tokens: int) -> None:
        self.pieces[request.id] = pieces
        if num_draft_tokens:
            self.accepted[request.id] = sum(piece.is_draft for piece in pieces)
            request.counts.add(num_draft_tokens, self.accepted[request.id])
        times = self.first_token_s if request.last_token_s is None else self.inter_token_s
        times.append(self._now - (request.last_token_s or request.arrived_s))
        request.last_token_s = self._now
        if request.finish_reason is not None:
            self.whole_request_s.append(self._now - request.arrived_s)


class StepTimer:
    """Measures the time that a step spends on drafting (draft_s), in the target's forward pass (forward_s), on
    verification (verify_s) and on the rest (other_s). It starts when it is created.

    On a GPU, drafting is the time until a draft that was made there is known, else that of launching it. The forward
    pass is launched; verification waits for it.
    """

    def __init__(self) -> None:
        self.draft_s = self.forward_s = self.verify_s = self.other_s = 0.0
        self._last = perf_counter()

    def end_drafting(self) -> None:
        """Add the time since the previous phase ended to the time of drafting."""
        self.draft_s += self._lap()

    def end_forward_pass(self) -> None:
        """Add the time since the previous phase ended to the time of the target's forward pass."""
        self.forward_s += self._lap()

    def end_verification(self) -> None:
        """Add the time since the previous phase ended to the time of verification."""
        self.verify_s += self._lap()

    def end_other(self) -> None:
        """Add the time since the previous phase ended to the time of the rest."""
        self.other_s += self._lap()

    def leave_out(self) -> None:
        """Add the time since the previous phase ended to none."""
        self._lap()

    def report(self, schedule: Schedule, draft: Draft, verifier: str, emitted: Emitted) -> StepReport:
        self.end_other()
        num_draft_tokens = sum(draft.num_live_per_request)
        outputs = {request_id: len(pieces) for request_id, pieces in emitted.pieces.items()}
        return StepReport(
            num_prefill_tokens=schedule.num_prefill_tokens,
            num_prompt_tokens=schedule.num_prompt_tokens,
            num_decode_requests=schedule.num_decode_requests,
            num_output_tokens=sum(outputs.values()),
            num_draft_tokens=num_draft_tokens,
            num_nodes=draft.num_nodes,
            num_accepted=sum(emitted.accepted.values()),
            draft_s=self.draft_s,
            target_s=self.forward_s + self.verify_s,
            verify_s=self.verify_s,
            other_s=self.other_s,
            num_preempted=len(schedule.preempted),
            num_queried_tokens=schedule.num_queried_tokens,
            num_cached_tokens=schedule.num_cached_tokens,
            accepted_per_request=emitted.accepted,
            output_per_request=outputs,
            first_token_s=emitted.first_token_s,
            inter_token_s=emitted.inter_token_s,
            whole_request_s=emitted.whole_request_s,
            verifier=verifier if num_draft_tokens else "",
        )

    def _lap(self) -> float:
        before, self._last = self._last, perf_counter()
        return self._last - before
