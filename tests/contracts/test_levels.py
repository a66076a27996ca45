"""Draft trees grown level by level over the engine's KV cache: dead (padding) entries of a level change no output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, field, frozen

from specdec_core import (
    LLM,
    Draft,
    DraftPass,
    DraftSlots,
    KVLayout,
    Level,
    Observation,
    Plan,
    Plugins,
    Proposer,
    ProposerBatch,
    ProposerSpec,
    SamplingParams,
    StaticTree,
    TokenTree,
    grow,
)
from specdec_core.drafting import static
from specdec_core.ops.attention_plan import Segment
from specdec_core.plugins.operations import OfferedOps

Patch = pytest.MonkeyPatch
HEADS, DIM, VOCAB = 2, 8, 48
SHAPE = TokenTree.parse("[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)]")
PROMPTS = [[3, 5, 7, 5, 7, 5], [11, 2], [13, *range(30)], [4]]


def vectors(of: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Return queries, keys or values [n, HEADS, DIM] that depend only on the token ids [n].

    of: 0 for queries, 1 for keys, 2 for values.
    """
    places = torch.arange(HEADS * DIM)
    return torch.sin(1.7 * of + 0.37 * (token_ids[:, None] + 1) * (places + 1)).view(-1, HEADS, DIM)


def logits_after(history: list[int]) -> torch.Tensor:
    """Return random logits [VOCAB] that depend only on the history (token ids).

    After a third of all histories only one token has a probability above 0, so its siblings in the tree are dead
    (padding).
    """
    generator = torch.Generator().manual_seed(hash(tuple(history)) % 2**31)
    logits = torch.randn(VOCAB, generator=generator)
    is_only = hash((*history, 1)) % 3 == 0
    return logits.masked_fill(torch.arange(VOCAB) != int(logits.argmax()), -torch.inf) if is_only else logits


@frozen
class Config:
    faults: list[str] = field(factory=list)
    num_dead: list[int] = field(factory=list)  # of each level, for requests that have nodes there
    window: int | None = None  # of the layer
    pass_window: int | None = None  # of all layers of a forward pass


class Levels(Proposer):
    """A proposer whose draft logits depend only on the request's tokens. It also runs the draft tokens through one
    attention layer, and checks the outputs."""

    def __init__(self, config: Config, context: Any) -> None:
        self.config, self.attention = config, context.attention

    def observe(self, observation: Observation) -> None:
        passed = DraftPass.over_tokens(
            self.attention,
            observation.requests,
            observation.starts,
            np.diff(observation.offsets).tolist(),
            observation.token_ids,
            observation.positions,
        )
        self._attend(passed)

    def _attend(self, passed: DraftPass) -> torch.Tensor:
        query, key, value = (vectors(kind, passed.token_ids) for kind in range(3))
        with self.attention.forwarding(passed.metadata, passed.visibility, window=self.config.pass_window):
            return self.attention.attend(0, query, key, value, window=self.config.window)

    def propose(self, batch: ProposerBatch) -> Draft:
        texts = [request.token_ids.tolist() for request in batch.requests]
        slots = DraftSlots(self.attention, batch, [len(text) for text in texts])
        histories = texts
        roots = [len(text) - 1 for text in texts]
        tokens = torch.tensor([text[-1] for text in texts])
        passed = DraftPass.over_tokens(
            self.attention, batch.requests, roots, [1] * len(texts), tokens, torch.tensor(roots)
        )
        self._check(self._attend(passed), histories)

        def forward(level: Level) -> torch.Tensor:
            nonlocal histories
            is_alive = np.ones(len(level.rows), bool) if level.is_alive is None else level.is_alive.numpy()
            by_request = is_alive.reshape(-1, level.width)
            self.config.num_dead.append(int((~by_request)[by_request.any(axis=1)].sum()))
            histories = [
                [*histories[row], token] if alive else []
                for row, token, alive in zip(level.rows.tolist(), level.token_ids.tolist(), is_alive, strict=True)
            ]
            self._check(self._attend(DraftPass.over_level(slots, level)), histories)
            return torch.stack([logits_after(history) for history in histories])

        tree = StaticTree(batch, SHAPE, "probabilistic")
        return grow(tree, torch.stack([logits_after(text) for text in texts]), forward)

    def _check(self, outputs: torch.Tensor, histories: list[list[int]]) -> None:
        """Compare attention outputs with a direct computation, and record a message for each difference.

        outputs: [n, HEADS, DIM].
        histories: for each output, the token ids up to its own token; empty for a dead (padding) entry, which
            is skipped.
        """
        window = min((n for n in (self.config.window, self.config.pass_window) if n), default=0)
        for found, history in zip(outputs, histories, strict=True):
            if not history:
                continue
            query, key, value = (vectors(kind, torch.tensor(history[-window:])) for kind in range(3))
            weights = ((key * query[-1]).sum(-1) * DIM**-0.5).softmax(0)
            if not torch.allclose(found, (weights[:, :, None] * value).sum(0), atol=1e-4):
                self.config.faults.append(f"the output after {history}")


class WithLevels:
    """Stands in for `Plugins`: the installed plugins and the proposer `Levels`.

    has_kernels: True: attention comes from the installed plugins' operations; False: from core's reference operations.
    """

    def __init__(self, has_kernels: bool) -> None:
        self._installed, self._has_kernels = Plugins.load(), has_kernels

    def ops(self, device_type: str) -> Any:
        return self._installed.ops(device_type) if self._has_kernels else OfferedOps(())

    def proposer(self, name: str) -> Any:
        layout = KVLayout(1, HEADS, DIM, DIM, torch.float32)
        plan = lambda config, info, num_speculative_tokens: Plan(  # noqa: E731
            kv_layout=layout, scratch_slots=1 + SHAPE.num_inner
        )
        return ProposerSpec("levels", Config, build=Levels, api=1, plan=plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._installed, name)


@pytest.fixture(autouse=True)
def _blank_cache(never_written_is_nan: None) -> None:
    """Fill new KV caches with NaN in all tests of this module."""


def run(target: Any, *, has_kernels: bool = False, **options: Any) -> Config:
    config = Config()
    given = {"faults": config.faults, "num_dead": config.num_dead, "num_speculative_tokens": len(SHAPE.paths)}
    plugins: Any = WithLevels(has_kernels)
    settings: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "max_num_batched_tokens": 64}
    speculative_config = {"method": "levels", "verifier": "chosen", **given, **options}
    with LLM(
        target, plugins=plugins, skip_tokenizer_init=True, speculative_config=speculative_config, **settings
    ) as llm:
        params = [
            SamplingParams(temperature=0.8 * (i != 1), seed=i, max_tokens=8, num_speculative_tokens=[None, 8, 3, 5][i])
            for i in range(len(PROMPTS))
        ]
        llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return config


@pytest.mark.parametrize("has_kernels", [False, True])
@pytest.mark.parametrize("of_fixed_size", [False, True])
def test_nodes_see_their_history(of_fixed_size: bool, has_kernels: bool, target: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(static, "may_shrink", lambda device: not of_fixed_size)
    config = run(target, has_kernels=has_kernels)
    assert not config.faults
    assert sum(config.num_dead) >= 10


@pytest.mark.parametrize("has_kernels", [False, True])
@pytest.mark.parametrize(("window", "pass_window"), [(1, None), (2, None), (None, 3), (6, 2), (3, 5)])
def test_windows_count_ancestors(
    window: int | None, pass_window: int | None, has_kernels: bool, target: Any, monkeypatch: Patch
) -> None:
    """A sliding window in a draft tree skips the KV-cache slots of other branches."""
    assert not run(target, has_kernels=has_kernels, window=window, pass_window=pass_window).faults


def dead_entries_are_stored_nowhere(patch: Patch) -> None:
    """A deliberate fault: keys and values of dead (padding) entries are not written, but attention still reads their
    slots."""
    over_level = DraftPass.over_level.__func__  # type: ignore[attr-defined]

    def unstored(cls: Any, slots: DraftSlots, level: Level) -> DraftPass:
        passed: DraftPass = over_level(cls, slots, level)
        if level.is_alive is not None:
            passed.metadata.slot_mapping[~level.is_alive] = -1
        return passed

    patch.setattr(DraftPass, "over_level", classmethod(unstored))


def dead_entries_come_first(patch: Patch) -> None:
    """A deliberate fault: dead (padding) entries come first in a tree level instead of last."""
    level_of = StaticTree._level

    def reversed_(self: Any, *args: Any) -> Level:
        level = level_of(self, *args)
        if level.is_alive is None:
            return level
        order = torch.arange(len(level.rows)).view(-1, level.width).flip(1).flatten()
        names = ("rows", "token_ids", "ancestors", "is_alive")
        self._above = type(self._above)(*(each[order] for each in self._above))
        return evolve(level, **{name: getattr(level, name)[order] for name in names})

    patch.setattr(StaticTree, "_level", reversed_)


def levels_begin_where_the_last_ended(patch: Patch) -> None:
    """A deliberate fault: dead (padding) entries are counted as draft tokens, so the next tree level begins at a later
    slot."""
    level_of = StaticTree._level

    def counted(self: Any, *args: Any) -> Level:
        before = self._totals
        level = level_of(self, *args)
        self._totals = before + level.width
        return level

    patch.setattr(StaticTree, "_level", counted)


def windows_count_slots(segment: Segment, window: int | None) -> torch.Tensor:
    places = torch.arange(segment.is_visible.shape[-1])
    last = torch.where(segment.is_visible, places, -1).amax(-1, keepdim=True)
    return segment.is_visible & (places > last - (window or 10**6))


def windows_are_one_wider(segment: Segment, window: int | None) -> torch.Tensor:
    seen = segment.is_visible.cumsum(-1)
    return segment.is_visible & (seen >= seen[..., -1:] - (window or 10**6))


@pytest.mark.parametrize("visible", [windows_count_slots, windows_are_one_wider], ids=lambda fault: fault.__name__)
def test_wrong_windows_are_noticed(visible: Any, target: Any, monkeypatch: Patch) -> None:
    mask = Segment.mask

    def wrong(self: Segment, groups: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        return mask(evolve(self, is_visible=visible(self, window), masks={}), groups, None, dtype)

    monkeypatch.setattr(Segment, "mask", wrong)
    assert run(target, window=3).faults


@pytest.mark.parametrize(
    "fault",
    [dead_entries_are_stored_nowhere, dead_entries_come_first, levels_begin_where_the_last_ended],
    ids=lambda fault: fault.__name__,
)
def test_faults_are_noticed(fault: Callable[[Patch], None], target: Any, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    assert run(target).faults
