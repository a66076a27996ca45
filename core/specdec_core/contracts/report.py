"""The report that an engine makes of each step: counts and times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import field, frozen


@frozen(eq=False)
class StepReport:
    """Counts and times of one step, for metrics and for plugins with the hook `specdec_step_finished`."""

    num_prefill_tokens: int = 0  # of prompts; of outputs, too, if a grammar forced them or a request was preempted
    num_prompt_tokens: int = 0  # of these, tokens of prompts
    num_decode_requests: int = 0  # requests whose only known token was the root
    num_output_tokens: int = 0
    num_draft_tokens: int = 0  # live nodes
    num_nodes: int = 0  # of the drafts, dead ones included: what the forward pass computed
    num_accepted: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0  # of the forward pass and verification
    verify_s: float = 0.0  # of target_s: of verification; on a GPU also of waiting for the forward pass
    other_s: float = 0.0  # of scheduling, of emitting tokens, and of compacting the KV cache
    num_preempted: int = 0
    num_queried_tokens: int = 0  # of requests that were admitted: looked up in the prefix cache
    num_cached_tokens: int = 0  # of these, found, hence not computed
    accepted_per_request: Mapping[str, int] = field(factory=dict)  # of requests that had a live node
    output_per_request: Mapping[str, int] = field(factory=dict)  # output tokens, of requests that got some
    first_token_s: Sequence[float] = ()  # from arrival on, of requests that got their first tokens
    inter_token_s: Sequence[float] = ()  # since their last tokens, of others that got some
    whole_request_s: Sequence[float] = ()  # from arrival on, of those that ended with these tokens
    verifier: str = ""  # that decided on the drafts; empty if there was none
