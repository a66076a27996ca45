"""Selects the verifier for a step's draft, and runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen

from specdec_core.config.sampling import SamplingParams
from specdec_core.config.speculative import AUTO, SpeculativeConfig
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import RandomSource, Verdict, Verifier, VerifierSpec
from specdec_core.engine.parts import first_row_of, join, part_of, parts_of
from specdec_core.engine.plugin_errors import building, in_step
from specdec_core.engine.runner import Computed
from specdec_core.engine.scheduler import Schedule
from specdec_core.engine.step_memory import rows_at_once
from specdec_core.errors import ConfigError, PluginError
from specdec_core.ops import REFERENCE
from specdec_core.ops.upload import upload
from specdec_core.plugins import Plugins
from specdec_core.sampling.constraints import ConstrainedRows
from specdec_core.sampling.process import process_logits
from specdec_core.sampling.random import CounterRandom
from specdec_core.verifiers.chosen import draw_path


@frozen
class Decision:
    """The result of verifying a step's draft.

    verifier: the name of the verifier that was used.
    verdict: the accepted draft tokens and the token after them, on the host.
    """

    verifier: str
    verdict: Verdict


@frozen(eq=False)
class StepTrace:
    """The drafts of a step and what became of them, for callers that look at single tokens (`Engine.tracer`).

    request_ids: of the step, in the order of the drafts and the verdict.
    own_drafts: {method: its own draft; None: it has drafted nothing}. Empty if no method was asked.
    draft: what was verified, combined from these.
    verdict: on the host.
    """

    request_ids: Sequence[str]
    own_drafts: Mapping[str, Draft | None]
    draft: Draft
    verdict: Verdict
    target_probs: torch.Tensor  # float [num_rows, vocab]   as `Verification.target_probs` returns them


class Verification:
    """Verifies drafts with the verifier that speculative_config names, or else with a lossless one.

    If speculative_config names none, the verifier depends on the draft:

    - "greedy" (compares with the argmax) if every request is greedy.
    - "chosen" if no draft token was sampled: draws the target's own tokens and accepts the draft tokens that equal
      them.
    - "block" (block verification) for sampled chains and "traversal" (traversal verification) for sampled trees. These
      two accept the most.

    With every verifier, a request without draft tokens gets the target's own tokens, and a greedy request gets the
    argmax, even if the named verifier is lossy. If no verifier is named, a request without sampled draft tokens also
    gets the target's own tokens, so that its output does not depend on other requests' drafts.

    ops: {name of an operation: operation}, those of the target.
    """

    def __init__(
        self, plugins: Plugins, config: SpeculativeConfig | None, ops: Mapping[str, Callable[..., Any]] = REFERENCE
    ) -> None:
        self._plugins, self._ops = plugins, ops
        self._built: dict[str, Verifier] = {}
        self._named: VerifierSpec | None = None
        if config is not None and config.verifier != AUTO:
            self._named = plugins.verifier(config.verifier)
            self._built[config.verifier] = build_verifier(self._named, config.verifier_options, ops)

    def is_lossless(self, params: SamplingParams) -> bool:
        """Whether a request's output has the target's distribution. False only under a lossy verifier, for requests
        that are not greedy and may draft."""
        return not self._is_lossy or params.is_greedy or not params.asks_for_drafts

    @property
    def _is_lossy(self) -> bool:
        return self._named is not None and not self._named.lossless

    def check(self, params: SamplingParams) -> None:
        """Raise ConfigError if the named verifier is for greedy requests only and these parameters are not greedy."""
        if self._named is not None and self._named.greedy_only and not params.is_greedy:
            raise ConfigError(
                f"temperature={params.temperature} does not go with the verifier {self._named.name!r}, which is right "
                f'for greedy requests only: give temperature=0, or leave "verifier" out of speculative_config'
            )

    def decide(self, schedule: Schedule, draft: Draft, computed: Computed) -> Decision:
        """Verify a draft and return the verifier's name and its verdict, on the host. A step with many rows of logits
        is verified in parts, which bounds the memory that this takes."""
        name = self.choose(draft, [request.params for request in schedule.requests])
        parts = parts_of(draft, rows_at_once(computed.logits.shape[1]))
        verdicts = [self._decide(name, part, schedule, draft, computed) for part in parts]
        return Decision(name, _on_host(join(verdicts, [first_row_of(draft, part) for part in parts])))

    def _decide(self, name: str, part: range, schedule: Schedule, draft: Draft, computed: Computed) -> Verdict:
        """Verify the draft of some requests. The verdict's rows count from the first one's root.

        name: the verifier for the whole draft. part: the requests, as indices into the batch.
        """
        chosen = slice(part.start, part.stop)
        requests = schedule.requests[chosen]
        params = [request.params for request in requests]
        logits, roots = computed.logits, computed.batch.root_positions
        if len(part) < draft.batch_size:
            first_row, draft = first_row_of(draft, part), part_of(draft, part)
            logits, roots = logits[first_row : first_row + draft.num_nodes + len(part)], roots[chosen]
            name = self.choose(draft, params)  # the logits of requests that are all greedy are not masked
        noise = CounterRandom([request.seed for request in requests], roots, self._ops["draw"])
        constraints = ConstrainedRows.of(schedule.whole_requests[chosen], draft)
        processed = process_logits(logits, draft.host_layout.row_requests, params, constraints, self._ops)
        greedy = [index for index, each in enumerate(params) if each.is_greedy]
        return self.verify(name, processed, draft, noise, greedy)

    def target_probs(self, schedule: Schedule, draft: Draft, computed: Computed) -> torch.Tensor:
        """float [num_rows, vocab]   the target's distribution after each root and draft token, with all sampling
        parameters applied, as `decide` uses it. At temperature 0, where `decide` uses the argmax only, it is that of
        temperature 1 without truncation."""
        given = [request.params for request in schedule.requests]
        params = [evolve(p, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0) if p.is_greedy else p for p in given]
        rows, constraints = draft.host_layout.row_requests, ConstrainedRows.of(schedule.whole_requests, draft)
        return process_logits(computed.logits, rows, params, constraints, self._ops).softmax(dim=-1)

    def choose(self, draft: Draft, params: Sequence[SamplingParams]) -> str:
        """The name of the verifier for a draft. Raises PluginError if the verifier that speculative_config names takes
        chains only and the draft is a tree."""
        if all(p.is_greedy for p in params):
            return "greedy"
        if not any(draft.num_live_per_request) or (self._named is None and draft.q is None):
            return "chosen"
        if self._named is None:
            return "block" if draft.is_chain else "traversal"
        if self._named.chains_only and not draft.is_chain:
            raise PluginError(
                f'the verifier {self._named.name!r} takes chains only, and the draft is a tree: give "traversal", or '
                f'leave "verifier" out of speculative_config. (A proposer whose drafts are chains sets is_chain)'
            )
        return self._named.name

    def verify(
        self, name: str, logits: torch.Tensor, draft: Draft, random: RandomSource, greedy: Sequence[int] = ()
    ) -> Verdict:
        """Run a verifier. Replaces its verdict by the target's own tokens for requests without draft tokens to verify
        and, if the verifier is lossy, for greedy requests.

        name: the verifier's name.
        logits: [num_rows, vocab], with sampling parameters applied; float32 unless every request is greedy.
        greedy: the indices of the requests at temperature 0, whose logits are -inf except at the argmax.
        """
        if name not in self._built:
            self._built[name] = build_verifier(self._plugins.verifier(name), None, self._ops)
        with in_step(f"verifier {name!r}"):
            verdict = self._built[name].verify(logits, draft, random)
        if name in ("greedy", "chosen"):
            return verdict
        is_plain = self._is_plain(draft)
        if self._is_lossy:
            is_plain[list(greedy)] = True
        return _with_own_tokens(verdict, is_plain, logits, draft, random)

    def _is_plain(self, draft: Draft) -> np.ndarray:
        """Which requests have no draft tokens to verify, and so get the target's own tokens: bool [batch]. If no
        verifier is named, only sampled draft tokens count."""
        layout = draft.host_layout
        decides = layout.is_alive  # bool [num_nodes]
        if self._named is None and draft.q_rows is not None:
            decides = decides & (draft.on_host(draft.q_rows) >= 0)
        is_plain = np.ones(draft.batch_size, dtype=bool)
        is_plain[layout.row_requests[layout.node_rows[decides]]] = False
        return is_plain


def _on_host(verdict: Verdict) -> Verdict:
    """Return a verdict on the host. It is copied there in one transfer."""
    parts = (verdict.token_ids, verdict.rows, verdict.num_accepted.unsqueeze(1))
    if len({part.device for part in parts}) > 1 or verdict.token_ids.device.type == "cpu":
        return verdict.on_host()
    width = verdict.token_ids.shape[1]
    packed = torch.cat([part.to(torch.int64) for part in parts], dim=1).cpu()
    token_ids, rows = packed[:, :width], packed[:, width:-1].to(torch.int32)
    return Verdict(token_ids, rows, packed[:, -1].to(torch.int32))


def _with_own_tokens(
    verdict: Verdict, is_plain: np.ndarray, logits: torch.Tensor, draft: Draft, random: RandomSource
) -> Verdict:
    """Replace the verdict of the requests in `is_plain` (bool [batch]). For these, the target's own token is drawn at
    the root and each accepted draft token, and the draft tokens that equal the drawn tokens are accepted."""
    if not is_plain.any():
        return verdict
    own = draw_path(logits, draft, random, upload(np.flatnonzero(is_plain), logits.device))
    devices = {each.device for each in (verdict.token_ids, verdict.rows, verdict.num_accepted)}
    if devices != {own.token_ids.device}:
        own, verdict = own.on_host(), verdict.on_host()
    of_own = upload(is_plain, own.token_ids.device)
    at = of_own.unsqueeze(1)
    return Verdict(
        token_ids=torch.where(at, own.token_ids, verdict.token_ids),
        rows=torch.where(at, own.rows, verdict.rows),
        num_accepted=torch.where(of_own, own.num_accepted, verdict.num_accepted),
    )


def build_verifier(spec: VerifierSpec, options: object, ops: Mapping[str, Callable[..., Any]]) -> Verifier:
    """Build a verifier. options: an instance of its config class, None if it has none. ops: {name: operation}."""
    with building(f"verifier {spec.name!r}", "be built"):
        wanted = {name: ops[name] for name in spec.ops}
        return spec.build(**wanted) if spec.config is None else spec.build(options, **wanted)
