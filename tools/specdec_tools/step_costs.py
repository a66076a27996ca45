"""What a decoding step costs with and without drafts, and how many tokens it gives."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from specdec_core.contracts.report import StepReport


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
        return cls(
            token_s=(seconds - prefill_s) / num_tokens,
            draft_s=sum(report.draft_s for report in passes),
            target_s=sum(report.target_s for report in passes),
            num_passes=len(passes),
            tokens_per_pass=sum(report.num_output_tokens for report in passes) / num_requests,
            draft_tokens_per_pass=sum(report.num_draft_tokens for report in passes) / num_requests,
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
    """

    block_efficiency: float
    drafting: float
    verification: float
    draft_token: float | None

    @classmethod
    def of(cls, plain: Decoding, speculative: Decoding) -> StepCosts:
        plain_s = plain.target_s / plain.num_passes
        drafting = speculative.draft_s / speculative.num_passes / plain_s
        num_draft_tokens = speculative.draft_tokens_per_pass
        return cls(
            block_efficiency=speculative.tokens_per_pass,
            drafting=drafting,
            verification=speculative.target_s / speculative.num_passes / plain_s,
            draft_token=drafting / num_draft_tokens if num_draft_tokens else None,
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
        """The speed-up if verification cost no more than a plain forward pass: tau / (c * k + 1), with block efficiency
        tau, cost c of a draft token and k draft tokens in a step."""
        return self.block_efficiency / (1 + self.drafting)
