"""Steps of decoding, timed at a constant batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from attrs import define, evolve

from on_gpu.timing import synchronize
from specdec_core import Engine, SamplingParams, StepReport
from specdec_core.engine import step_report


@define
class Decoded:
    """What an engine did in its timed steps."""

    seconds: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0  # of output
    num_drafts: int = 0  # one for each request and step that had a draft
    num_accepted: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0  # of the forward pass and verification
    num_passes: int = 0  # of the target that might replay a CUDA graph
    num_replayed: int = 0  # of these

    def add(self, report: StepReport) -> None:
        self.num_steps += 1
        self.num_tokens += report.num_output_tokens
        self.num_drafts += len(report.accepted_per_request)
        self.num_accepted += report.num_accepted
        self.draft_s += report.draft_s
        self.target_s += report.target_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def ms_per_step(self) -> float:
        return 1e3 * self.seconds / self.num_steps

    @property
    def graph_share(self) -> float | None:
        return round(self.num_replayed / self.num_passes, 4) if self.num_passes else None

    @property
    def acceptance_length(self) -> float:
        return 1 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0


def prefill(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[str]:
    """Submit a request for each prompt and run engine steps until all prompts are prefilled.

    prompts: token ids of each prompt.
    Returns the ids of the requests.
    """
    request_ids = [engine.add_request(token_ids, params) for token_ids in prompts]
    num_ready = 0
    while num_ready < len(request_ids):
        report = engine.step()
        if report.num_preempted:
            engine.cancel(*request_ids)
            raise RuntimeError(f"the KV cache does not hold {len(prompts)} requests of {len(prompts[0])} tokens")
        if not all(map(engine.is_unfinished, request_ids)):
            raise RuntimeError("a request ended in its prefill: its logits were not finite")
        num_ready = report.num_decode_requests if not report.num_prefill_tokens else 0
    synchronize()
    return request_ids


def decode(
    engine: Engine,
    groups: Sequence[Sequence[Sequence[int]]],
    params: SamplingParams,
    num_steps: int,
    num_warm: int = 0,
    found: Decoded | None = None,
) -> Decoded:
    """Decode each group of prompts as one batch for some steps, and break it off.

    groups: batches of prompts, each prompt as token ids.
    num_warm: steps of each batch that are not timed, beside those of the prefill.
    found: where to add the results.
    """
    found = found or Decoded()
    params = evolve(params, max_tokens=_most_tokens(engine, groups), ignore_eos=True)
    for prompts in groups:
        request_ids = prefill(engine, prompts, params)
        for _ in range(num_warm):
            engine.step()
        synchronize()
        num_passes, num_replayed = _passes(engine)
        started = perf_counter()
        reports = [engine.step() for _ in range(num_steps)]
        synchronize()
        found.seconds += perf_counter() - started
        found.num_passes += _passes(engine)[0] - num_passes
        found.num_replayed += _passes(engine)[1] - num_replayed
        for report in reports:
            if report.num_decode_requests < len(prompts):
                raise RuntimeError(
                    f"only {report.num_decode_requests} of {len(prompts)} requests were decoded in a step"
                )
            found.add(report)
        engine.cancel(*request_ids)
    return found


def _most_tokens(engine: Engine, groups: Sequence[Sequence[Sequence[int]]]) -> int:
    """None of the requests ends before it is broken off."""
    longest = max(len(token_ids) for prompts in groups for token_ids in prompts)
    return engine.target.info.max_model_len - longest


@contextmanager
def parts_alone() -> Iterator[None]:
    """Within this context, the times in a StepReport are those of the device: each part waits for what it launched."""
    original = step_report.perf_counter

    def after_all_work() -> float:
        synchronize()
        return perf_counter()

    step_report.perf_counter = after_all_work
    try:
        yield
    finally:
        step_report.perf_counter = original


def _passes(engine: Engine) -> tuple[int, int]:
    """How many forward passes of the target there were, and how many of these replayed a CUDA graph."""
    graphs = engine.target.graphs
    return (0, 0) if graphs is None else (graphs.graphs.num_calls, graphs.graphs.num_replayed)


def batches(prompts: Sequence[Sequence[int]], size: int) -> list[Sequence[Sequence[int]]]:
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]
