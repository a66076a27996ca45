"""What a decoding step costs with and without drafts, and how many tokens it gives."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from specdec_core.contracts.report import StepReport
from specdec_core.engine.metrics import DraftCounts, Totals


@frozen
class Decoding:
    """Decoding times of several runs, without prefill.

    In a step that has prefill, the times of the forward pass and of drafting do not count. The output tokens of such a
    step do count in `token_s`.
    """

    token_s: float  # all seconds per output token
    draft_s: float
    target_s: float  # of the target's forward passes
    num_passes: int  # forward passes of the target
    tokens_per_pass: float  # per request
    draft_tokens_per_pass: float  # per request
    tokens_per_forward_pass: float  # of all requests of the batch
    drafts: DraftCounts
    drafted_share: float  # of the requests' forward passes that had a draft

    @classmethod
    def of(cls, reports: Sequence[StepReport], seconds: float, num_tokens: int) -> Decoding:
        """Add up steps.

        reports: those of all steps of the runs.
        seconds: the sum of the runs' seconds.
        num_tokens: the number of output tokens of the runs.
        """
        passes = [report for report in reports if report.num_decode_requests and not report.num_prefill_tokens]
        prefill_s = sum(report.draft_s + report.target_s for report in reports if report.num_prefill_tokens)
        num_requests = max(1, sum(report.num_decode_requests for report in passes))
        drafts = Totals()
        for report in passes:
            drafts.add(report, step_s=0.0)
        return cls(
            token_s=(seconds - prefill_s) / num_tokens,
            draft_s=sum(report.draft_s for report in passes),
            target_s=sum(report.target_s for report in passes),
            num_passes=len(passes),
            tokens_per_pass=sum(report.num_output_tokens for report in passes) / num_requests,
            draft_tokens_per_pass=sum(report.num_draft_tokens for report in passes) / num_requests,
            tokens_per_forward_pass=sum(report.num_output_tokens for report in passes) / max(1, len(passes)),
            drafts=drafts.drafts,
            drafted_share=drafts.drafts.num_drafts / num_requests,
        )


@frozen
class StepCosts:
    """The costs of a decoding step with drafts, in forward passes of plain decoding with the same batch size, and what
    speed-up they allow.

    block_efficiency: output tokens per forward pass and request, steps without drafts included.
    drafting: cost of drafting.
    verification: cost of the target's forward pass over the root and the draft tokens, and of accepting or rejecting
        them.
    draft_token: cost of drafting divided by the draft tokens of a request, which the literature calls c; None if
        nothing was drafted.
    tokens_per_forward_pass: output tokens of all requests of the batch per forward pass.
    drafted_share: share of the forward passes, counted once for each request, in which a request had a draft.
    acceptance_length: 1 + accepted draft tokens, the mean over drafts.
    draft_len: draft tokens of a draft, the mean over drafts; 0 if nothing was drafted.
    """

    block_efficiency: float
    drafting: float
    verification: float
    draft_token: float | None
    tokens_per_forward_pass: float
    drafted_share: float
    acceptance_length: float
    draft_len: float

    @classmethod
    def of(cls, plain: Decoding, speculative: Decoding) -> StepCosts:
        plain_s = plain.target_s / plain.num_passes
        drafting = speculative.draft_s / speculative.num_passes / plain_s
        num_draft_tokens, drafts = speculative.draft_tokens_per_pass, speculative.drafts
        return cls(
            block_efficiency=speculative.tokens_per_pass,
            drafting=drafting,
            verification=speculative.target_s / speculative.num_passes / plain_s,
            draft_token=drafting / num_draft_tokens if num_draft_tokens else None,
            tokens_per_forward_pass=speculative.tokens_per_forward_pass,
            drafted_share=speculative.drafted_share,
            acceptance_length=drafts.acceptance_length,
            draft_len=drafts.num_draft_tokens / drafts.num_drafts if drafts.num_drafts else 0.0,
        )

    @property
    def token(self) -> float:
        """The cost of an output token. Drafts pay where it is below 1, if forward passes and drafting take most of the
        time."""
        return (self.drafting + self.verification) / self.block_efficiency

    @property
    def speed_up(self) -> float:
        """The speed-up of decoding if only forward passes and drafting took time."""
        return 1 / self.token

    @property
    def memory_bound_speed_up(self) -> float:
        """The speed-up if verification cost no more than a plain forward pass: block efficiency / (1 + drafting), over
        all steps."""
        return self.block_efficiency / (1 + self.drafting)

    @property
    def memory_bound_speed_up_of_drafts(self) -> float | None:
        """The same of steps that have a draft: tau / (c * k + 1), with acceptance length tau, cost c of a draft token
        and k draft tokens in a draft. None if nothing was drafted."""
        if self.draft_token is None:
            return None
        return self.acceptance_length / (self.draft_token * self.draft_len + 1)
