"""Attention in a proposer's own layers: sliding windows, softcaps, sinks, and outputs for selected query rows only.

Also tested: `store`, which writes keys and values without computing attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, field, frozen

from specdec_core import (
    LLM,
    Draft,
    KVLayout,
    Observation,
    Plan,
    Plugins,
    Proposer,
    ProposerSpec,
    SamplingParams,
    SpecdecError,
    Visibility,
)
from specdec_core.models.attention import PagedAttention
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_core.plugins.operations import OfferedOps

Patch = pytest.MonkeyPatch
HEADS, KV_HEADS, DIM, NUM_LAYERS = 4, 2, 8, 3
PROMPTS = [[3, 5, 7, 5, 7, 5], [11, 2], [13, *range(30)]]
ASKED: list[dict[str, Any]] = [
    {},
    {"window": 3},
    {"window": 1},
    {"softcap": 0.7},
    {"sinks": True, "window": 4},
]


def vectors(of: int, token_ids: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return queries, keys or values [n, num_heads, DIM] that depend only on the token ids [n].

    of: 0 for queries, 1 for keys, 2 for values.
    """
    places = torch.arange(num_heads * DIM, device=token_ids.device)
    return torch.sin(1.7 * of + 0.37 * (token_ids[:, None] + 1) * (places + 1)).view(-1, num_heads, DIM)


def expected(history: torch.Tensor, window: int | None = None, softcap: float | None = None, sinks: Any = None) -> Any:
    """Compute attention at the last token of a history directly from its definition. Returns [HEADS, DIM].

    history: token ids [n].
    """
    query = vectors(0, history[-1:], HEADS)[0]
    key, value = (vectors(kind, history, KV_HEADS).repeat_interleave(HEADS // KV_HEADS, 1) for kind in (1, 2))
    scores = (key * query).sum(-1) * DIM**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if window is not None:
        scores[: max(0, len(history) - window)] = -torch.inf
    if sinks is not None:
        scores = torch.cat([scores, torch.arange(HEADS).float()[None]])
    return (scores.softmax(0)[: len(history), :, None] * value).sum(0)


@frozen
class Config:
    faults: list[str] = field(factory=list)
    starts_are_tensors: bool = False


class Layered(Proposer):
    """A proposer that drafts nothing and checks attention outputs.

    Its queries, keys and values are functions of the token id, so every output can be computed without a KV cache.
    """

    def __init__(self, config: Config, context: Any) -> None:
        self.config, self.attention, self.device = config, context.attention, context.device

    def observe(self, observation: Observation) -> None:
        """Write keys and values to all layers. Then check the attention output at each request's last token, once for
        each set of attention features in ASKED."""
        token_ids, positions = observation.token_ids, observation.positions
        lengths = np.diff(observation.offsets).tolist()
        starts: Any = torch.tensor(observation.starts) if self.config.starts_are_tensors else observation.starts
        metadata = self.attention.metadata(observation.requests, starts, lengths)
        rows = torch.nn.functional.pad(observation.last_rows, (0, 1))
        query = vectors(0, token_ids, HEADS)
        key, value = (vectors(kind, token_ids, KV_HEADS) for kind in (1, 2))
        with self.attention.forwarding(metadata, Visibility(positions, positions + 1)):
            for layer in range(NUM_LAYERS):
                self.attention.store(layer, key, value)
            for i, asked in enumerate(ASKED):
                self._check(observation, query, key, value, rows, i % NUM_LAYERS, **asked)

    def _check(
        self,
        observation: Observation,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: torch.Tensor,
        layer: int,
        sinks: bool = False,
        **asked: Any,
    ) -> None:
        given = {**asked, "sinks": torch.arange(HEADS).float() if sinks else None}
        whole = self.attention.attend(layer, query, key, value, **given)
        some = self.attention.attend(layer, query, key, value, rows=rows, **given)
        for b, (request, row) in enumerate(zip(observation.requests, observation.host_last_rows, strict=True)):
            position = observation.starts[b] + row - observation.offsets[b]
            history = torch.from_numpy(request.token_ids[: position + 1].copy())
            right = expected(history, **{**asked, "sinks": sinks or None})
            for what, found in (("all", whole[row]), ("rows", some[b])):
                if not torch.allclose(found, right, atol=1e-4):
                    self.config.faults.append(f"{what} of {asked}, layer {layer}")

    def propose(self, batch: Any) -> Draft:
        return Draft.from_chains([[]] * len(batch.requests), self.device)


class WithLayers:
    """Stands in for `Plugins`: the installed plugins and the proposer `Layered`.

    has_kernels: True: attention comes from the installed plugins' operations; False: from core's reference operations.
    """

    def __init__(self, has_kernels: bool) -> None:
        self._installed, self._has_kernels = Plugins.load(), has_kernels

    def ops(self, device_type: str) -> Any:
        return self._installed.ops(device_type) if self._has_kernels else OfferedOps(())

    def proposer(self, name: str) -> Any:
        layout = KVLayout(NUM_LAYERS, KV_HEADS, DIM, DIM, torch.float32)
        plan = lambda config, info, num_speculative_tokens: Plan(kv_layout=layout)  # noqa: E731
        return ProposerSpec("layered", Config, build=Layered, api=1, plan=plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._installed, name)


@pytest.fixture(autouse=True)
def _blank_cache(never_written_is_nan: None) -> None:
    """Fill new KV caches with NaN in all tests of this module."""


def faults(target: Any, *, has_kernels: bool = False, **options: Any) -> list[str]:
    found: list[str] = []
    config = {"method": "layered", "num_speculative_tokens": 1, "faults": found, **options}
    plugins: Any = WithLayers(has_kernels)
    settings: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "max_num_batched_tokens": 20}
    with LLM(target, plugins=plugins, skip_tokenizer_init=True, speculative_config=config, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=6)
        llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return found


@pytest.mark.parametrize("has_kernels", [False, True])
@pytest.mark.parametrize("starts_are_tensors", [False, True])
def test_outputs_are_those_written_out(starts_are_tensors: bool, has_kernels: bool, target: Any) -> None:
    assert not faults(target, has_kernels=has_kernels, starts_are_tensors=starts_are_tensors)


def test_rows_are_laid_out_once_in_a_forward_pass(target: Any, monkeypatch: Patch) -> None:
    of_rows, made = AttentionPlan.of_rows, []
    monkeypatch.setattr(AttentionPlan, "of_rows", lambda self, *rows: made.append(rows) or of_rows(self, *rows))
    passes = []
    observe = Layered.observe
    monkeypatch.setattr(Layered, "observe", lambda self, seen: passes.append(seen) or observe(self, seen))
    assert not faults(target)
    assert len(made) == len(passes) > 0


def test_outside_of_a_forward_pass_there_is_nowhere_to_store() -> None:
    attention: Any = PagedAttention(None, [(0, 0)], {}, None)  # type: ignore[arg-type]
    for call in (attention.store, lambda *args: attention.attend(args[0], args[1], *args[1:])):
        with pytest.raises(SpecdecError, match="outside of `with attention"):
            call(0, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))


def nothing_is_stored(patch: Patch) -> None:
    patch.setattr(PagedAttention, "_store", lambda self, layer, key, value: self.kv.cache(*self.places[layer]))


def rows_see_what_their_requests_first_token_does(patch: Patch) -> None:
    of_rows = AttentionPlan.of_rows

    def first_rows(self: AttentionPlan, *rows: Any) -> AttentionPlan:
        lengths = np.array(self.metadata.lengths)
        return of_rows(self, torch.from_numpy(np.append(lengths.cumsum() - lengths, 0)))

    patch.setattr(AttentionPlan, "of_rows", first_rows)


def rows_of_an_earlier_pass_are_taken(patch: Patch) -> None:
    made: list[AttentionPlan] = []

    def first(self: AttentionPlan, *rows: Any) -> AttentionPlan:
        made.append(of_rows(self, *rows))
        return made[0] if len(made[0].metadata.lengths) == len(self.metadata.lengths) else made[-1]

    of_rows = AttentionPlan.of_rows
    patch.setattr(AttentionPlan, "of_rows", first)


def _attend(patch: Patch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    attend = PagedAttention.attend
    patch.setattr(PagedAttention, "attend", lambda self, *args, **named: attend(self, *args, **change(named)))


def windows_are_one_wider(patch: Patch) -> None:
    _attend(patch, lambda named: {**named, "window": named["window"] + 1} if named.get("window") else named)


def caps_are_forgotten(patch: Patch) -> None:
    _attend(patch, lambda named: {**named, "softcap": None})


def sinks_are_forgotten(patch: Patch) -> None:
    _attend(patch, lambda named: {**named, "sinks": None})


def starts_are_one_late(patch: Patch) -> None:
    forwarding = PagedAttention.forwarding

    @contextmanager
    def late(self: Any, metadata: Any, visibility: Any, **more: Any) -> Iterator[None]:
        if self.places[0][0]:
            metadata = evolve(metadata, slot_mapping=metadata.slot_mapping + 1)
        with forwarding(self, metadata, visibility, **more):
            yield

    patch.setattr(PagedAttention, "forwarding", late)


@pytest.mark.parametrize(
    "fault",
    [
        nothing_is_stored,
        rows_see_what_their_requests_first_token_does,
        rows_of_an_earlier_pass_are_taken,
        windows_are_one_wider,
        caps_are_forgotten,
        sinks_are_forgotten,
        starts_are_one_late,
    ],
    ids=lambda fault: fault.__name__,
)
def test_faults_are_noticed(fault: Callable[[Patch], None], target: Any, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    assert faults(target)
