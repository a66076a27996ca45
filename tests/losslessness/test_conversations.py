"""Conversations on an engine with prefix caching. Each turn's prompt is the prompt and output of the turn before, and a
question, so most of it is found in the cache. Each method of drafting generates what plain decoding generates without a
cache, and its drafts are as if nothing were cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from attrs import define, evolve, frozen
from nightly import IS_NIGHTLY

from specdec_core import LLM, SamplingParams, StepReport
from specdec_kv_prefix.manager import PrefixKVManager

BLOCK_SIZE, NUM_DRAFT_TOKENS, MAX_MODEL_LEN = 4, 4, 320
NUM_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE + 10
"""Too few for all conversations at once: requests are preempted, and cached blocks evicted."""
NUM_CONVERSATIONS, NUM_TURNS = (24, 5) if IS_NIGHTLY else (8, 3)
BY_DAY, BY_NIGHT = ("eagle3", "draft_model", "mtp"), ("ngram", "suffix", "eagle", "mlp_speculator", "medusa")
METHODS = [*BY_DAY, *(pytest.param(name, marks=pytest.mark.nightly) for name in BY_NIGHT)]
SYSTEM = '"""Small functions over lists of numbers."""\n\nfrom math import sqrt\n\n\n'
QUESTIONS = ("def mean(values):\n", "def variance(values, mean):\n", "class Point:\n    def ", "for name in ", "\n\n")
Make = Callable[..., LLM]


@frozen
class Turn:
    """One request of a conversation. expected: the output of plain decoding. num_kept: after how many output tokens the
    request is cancelled; None: it runs to its end."""

    prompt: list[int]
    params: SamplingParams
    expected: list[int]
    num_kept: int | None = None


@define
class Figures:
    """Counters of one run over all conversations."""

    num_cached: int = 0
    num_preempted: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    num_cancelled: int = 0

    def add(self, report: StepReport) -> None:
        self.num_cached += report.num_cached_tokens
        self.num_preempted += report.num_preempted
        self.num_accepted += report.num_accepted
        self.num_rejected += report.num_draft_tokens - report.num_accepted


@pytest.fixture
def make() -> Iterator[Make]:
    opened: list[LLM] = []

    def build(method: str | None, kv_manager: str, **settings: Any) -> LLM:
        drafting = {"method": method, "num_speculative_tokens": NUM_DRAFT_TOKENS} if method else None
        settings = {"dtype": "float32", "block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN, **settings}
        opened.append(LLM("tiny", kv_manager=kv_manager, speculative_config=drafting, **settings))
        return opened[-1]

    yield build
    for llm in opened:
        llm.close()


@pytest.fixture(scope="module")
def conversations() -> list[list[Turn]]:
    rng = np.random.default_rng(7)
    with LLM("tiny", dtype="float32", max_model_len=MAX_MODEL_LEN) as plain:
        return [_converse(plain, rng) for _ in range(NUM_CONVERSATIONS)]


def _converse(plain: LLM, rng: np.random.Generator) -> list[Turn]:
    tokenizer, text = plain.get_tokenizer(), SYSTEM
    token_ids, turns = [*tokenizer.encode(text)], []
    for _ in range(NUM_TURNS):
        token_ids = [*token_ids, *tokenizer.encode(str(rng.choice(QUESTIONS)))]
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.8])),
            seed=int(rng.integers(1000)),
            max_tokens=int(rng.integers(8, 40)),
            num_speculative_tokens=None,
            prompt_logprobs=0 if rng.random() < 0.1 else None,
        )
        expected = outputs_of(plain, token_ids, params)
        num_kept = int(rng.integers(1, 8)) if rng.random() < 0.2 else None
        turns.append(Turn(token_ids, params, expected, num_kept))
        token_ids = [*token_ids, *expected]
    return turns


def outputs_of(llm: LLM, token_ids: Sequence[int], params: SamplingParams) -> list[int]:
    return [*llm.generate({"prompt_token_ids": [*token_ids]}, params, use_tqdm=False)[0].outputs[0].token_ids]


def run(llm: LLM, conversations: Sequence[Sequence[Turn]], seed: int) -> Figures:
    """Run all conversations at once, each turn by turn, and check the outputs. Every fourth request drafts nothing."""
    engine, rng, figures = llm.engine, np.random.default_rng(seed), Figures()
    waiting = [list(conversation) for conversation in conversations]
    busy: dict[int, str] = {}

    def start(index: int) -> None:
        turn, token_ids = waiting[index].pop(0), []  # type: ignore[var-annotated]
        is_off = engine.num_speculative_tokens and rng.random() < 0.25
        params = evolve(turn.params, num_speculative_tokens=0) if is_off else turn.params

        def listen(request: Any, pieces: Any) -> None:
            token_ids.extend(piece.token_id for piece in pieces)
            if request.finish_reason is None and turn.num_kept is not None and len(token_ids) >= turn.num_kept:
                engine.cancel(request.id)  # calls this function for the end
            elif request.finish_reason is not None:
                figures.num_cancelled += request.finish_reason == "abort"
                assert token_ids == turn.expected[: len(token_ids)], (index, len(turn.prompt))
                assert request.finish_reason == "abort" or len(token_ids) == len(turn.expected)
                del busy[index]

        busy[index] = engine.add_request(turn.prompt, params, listen)

    while any(waiting) or busy:
        for index in range(len(waiting)):
            if index not in busy and waiting[index] and rng.random() < 0.5:
                start(index)
        figures.add(engine.step())
        engine.kv.check_integrity()
    return figures


@pytest.mark.parametrize("method", [None, *METHODS])
def test_output_is_that_of_plain_decoding_without_a_cache(
    make: Make, conversations: list[list[Turn]], method: str | None
) -> None:
    llm = make(method, "prefix", num_kv_blocks=NUM_BLOCKS)
    figures = run(llm, conversations, seed=3)
    assert min(figures.num_cached, figures.num_preempted, figures.num_cancelled) > 0, figures
    assert method is None or min(figures.num_accepted, figures.num_rejected) > 0, figures
    assert not llm.engine.has_unfinished
    assert llm.engine.kv.num_free_blocks == NUM_BLOCKS


def turn_by_turn(
    llm: LLM, conversation: Sequence[Turn], patch: pytest.MonkeyPatch
) -> tuple[list[list[int]], list[int]]:
    """Run a conversation alone. Returns each step's draft tokens, and how many prompt tokens each turn found cached."""
    engine, drafts, num_cached = llm.engine, [], []
    propose = engine._speculation.propose

    def record(schedule: Any) -> Any:
        drafts.append((draft := propose(schedule)).token_ids.tolist())
        return draft

    with patch.context() as patching:
        patching.setattr(engine._speculation, "propose", record)
        for turn in conversation:
            ended: list[Any] = []
            params = evolve(turn.params, prompt_logprobs=None)
            engine.add_request(turn.prompt, params, lambda request, pieces, ended=ended: ended.append(request))
            while engine.has_unfinished:
                engine.step()
            num_cached.append(ended[-1].num_cached_tokens)
    return drafts, num_cached


@pytest.mark.parametrize("method", METHODS)
def test_drafts_and_hits_are_those_of_a_cold_and_of_a_plain_engine(
    monkeypatch: pytest.MonkeyPatch, make: Make, conversations: list[list[Turn]], method: str
) -> None:
    """After a hit, a proposer drafts what it drafts without a cache. A request that drafts finds the blocks that a
    plain one finds, but for those with the last tokens of the earlier turn, which the draft may not have seen."""
    warm, cold, plain = make(method, "prefix"), make(method, "paged"), make(None, "prefix")
    for conversation in conversations:
        drafts, num_cached = turn_by_turn(warm, conversation, monkeypatch)
        assert turn_by_turn(cold, conversation, monkeypatch) == (drafts, [0] * NUM_TURNS)
        _, expected = turn_by_turn(plain, conversation, monkeypatch)
        assert num_cached[0] == expected[0]
        for earlier, hits, plain_hits in zip(conversation, num_cached[1:], expected[1:], strict=False):
            if len(earlier.expected) == 1:
                continue  # the request ended before it could draft: a draft model has seen nothing of it
            num_final = len(earlier.prompt) + len(earlier.expected) - 1
            # A draft model has not seen what its last draft added, nor a last token for which it did not draft.
            at_least = (num_final - 2 - NUM_DRAFT_TOKENS) // BLOCK_SIZE * BLOCK_SIZE
            assert hits == plain_hits or at_least <= hits < plain_hits


def _forget_lookahead(patch: pytest.MonkeyPatch) -> None:
    """A head's block is found whatever token follows it."""
    add_group = PrefixKVManager.add_group
    patch.setattr(
        PrefixKVManager, "add_group", lambda self, layout, owner="target", lookahead=0: add_group(self, layout, owner)
    )


def _fill_too_much(patch: pytest.MonkeyPatch) -> None:
    """Slots count as filled that a draft model has not written yet."""
    fill = PrefixKVManager.fill
    patch.setattr(
        PrefixKVManager, "fill", lambda self, group, ids, numbers: fill(self, group, ids, [n + 64 for n in numbers])
    )


@pytest.mark.parametrize(("method", "fault"), [("eagle3", _forget_lookahead), ("draft_model", _fill_too_much)])
def test_faults_of_the_cache_change_drafts(
    monkeypatch: pytest.MonkeyPatch,
    make: Make,
    conversations: list[list[Turn]],
    method: str,
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    fault(monkeypatch)
    warm, cold = make(method, "prefix"), make(method, "paged")
    found, expected = ([turn_by_turn(llm, each, monkeypatch)[0] for each in conversations] for llm in (warm, cold))
    assert found != expected
