"""The pieces of a streamed output make up its whole text, however the request ends. The end is reported exactly
once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch

from specdec_core import (
    LLM,
    Draft,
    Piece,
    PluginError,
    Plugins,
    Proposer,
    ProposerSpec,
    Request,
    SamplingParams,
    StreamOutput,
)
from specdec_core.engine.detokenizer import OutputText

PROMPT = "def area(width, height):\n"
STOP = "this string never comes"
HOLDS_BACK = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, stop=[STOP])


@attrs.frozen
class NoOptions:
    pass


class Failing(Proposer):
    """A proposer that drafts nothing.

    fails_in: names of the methods that raise an error: "propose", "finish".
    """

    fails_in: frozenset[str] = frozenset()

    def propose(self, batch: Any) -> Draft:
        self._maybe_fail("propose")
        return Draft.from_chains([[]] * len(batch.requests))

    def finish(self, request: Any, reason: str) -> None:
        self._maybe_fail("finish")

    def _maybe_fail(self, name: str) -> None:
        if name in self.fails_in:
            raise ValueError(f"{name} fails")


class PluginsWithFailing:
    def __init__(self) -> None:
        self._installed = Plugins.load()

    def proposer(self, name: str) -> ProposerSpec:
        return ProposerSpec("failing", NoOptions, build=lambda config, context: Failing(), api=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._installed, name)


class Reader:
    """A listener (callback) of one request that collects the streamed text, token ids and finish reasons."""

    def __init__(self) -> None:
        self.text, self.reasons, self.token_ids = "", [], []
        self.request: Any = None

    def __call__(self, request: Request, pieces: Sequence[Piece]) -> None:
        output = StreamOutput.of(0, 0, request, pieces)
        self.text += output.text
        self.token_ids += [piece.token_id for piece in output.pieces]
        self.request = request
        if output.finish_reason is not None:
            self.reasons.append(output.finish_reason)

    def check(self, reason: str) -> None:
        assert self.reasons == [reason]
        assert self.text == self.request.text.text
        assert self.token_ids == self.request.output_token_ids


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        "tiny",
        dtype="float32",
        max_model_len=128,
        plugins=PluginsWithFailing(),  # type: ignore[arg-type]
        speculative_config={"method": "failing", "num_speculative_tokens": 2},
    )


@pytest.fixture(autouse=True)
def nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, "fails_in", frozenset())


def submit(llm: LLM, params: SamplingParams) -> tuple[str, Reader]:
    reader = Reader()
    return llm.engine.add_request(llm.get_tokenizer()(PROMPT).input_ids, params, reader, is_streamed=True), reader


def held_back(reader: Reader) -> bool:
    """Return whether some generated text has not been streamed yet, for example because it may be the start of a stop
    string."""
    return len(reader.text) < len(reader.request.text.text)


def test_an_error(llm: LLM) -> None:
    num_prompt_tokens = len(llm.get_tokenizer()(PROMPT).input_ids)

    def fail_late(logits: torch.Tensor, token_ids: Any) -> torch.Tensor:
        if len(token_ids) > num_prompt_tokens + 8:
            raise ValueError("late")
        return logits

    params = attrs.evolve(HOLDS_BACK, logits_processors=[fail_late])
    whole = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    outputs = list(llm.stream(PROMPT, params))
    assert (whole.finish_reason, outputs[-1].finish_reason) == ("error", "error")
    assert "".join(output.text for output in outputs) == whole.text
    assert len("".join(piece.text for output in outputs for piece in output.pieces)) < len(whole.text)


def test_an_unfinished_character(llm: LLM) -> None:
    """If a request fails after the first byte of a multi-byte character, its text ends with a replacement character."""
    num_prompt_tokens = len(llm.get_tokenizer()(PROMPT).input_ids)
    first, *others = llm.get_tokenizer()("🐍").input_ids
    assert others, "the tokenizer has bytes"

    def write_it(logits: torch.Tensor, token_ids: Any) -> torch.Tensor:
        if len(token_ids) > num_prompt_tokens:
            raise ValueError("late")
        return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor([first]), 0.0)

    _, reader = submit(llm, SamplingParams(temperature=0.0, logits_processors=[write_it]))
    while llm.engine.has_unfinished:
        llm.engine.step()
    reader.check("error")
    assert reader.text == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    "params", [{}, {"stop": ["(", "return"]}, {"stop": ["\n"]}, {"stop_token_ids": range(40)}], ids=str
)
def test_an_end_of_its_own(llm: LLM, params: dict) -> None:
    _, reader = submit(llm, SamplingParams(temperature=0.0, max_tokens=40, **params))
    while llm.engine.has_unfinished:
        llm.engine.step()
    reader.check(reader.reasons[0])


def test_a_cancellation(llm: LLM) -> None:
    request_id, reader = submit(llm, HOLDS_BACK)
    for _ in range(9):
        llm.engine.step()
    assert held_back(reader)
    llm.engine.cancel(request_id)
    reader.check("abort")


def test_a_step_that_fails(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a failed step aborts requests, their listeners (callbacks) get the rest of the text in the next step."""
    readers = [submit(llm, HOLDS_BACK)[1] for _ in range(2)]
    for _ in range(9):
        llm.engine.step()
    assert all(map(held_back, readers))
    monkeypatch.setattr(Failing, "fails_in", frozenset({"propose"}))
    with pytest.raises(PluginError):
        llm.engine.step()
    llm.engine.step()
    for reader in readers:
        reader.check("abort")


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_step_that_fails_after_all_had_their_tokens(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, ends_first: bool
) -> None:
    """If a step fails while one of its two requests is being finished, the last tokens and the finish reasons of both
    requests are still reported."""
    readers = [
        submit(llm, attrs.evolve(HOLDS_BACK, max_tokens=most))[1] for most in ((12, 64) if ends_first else (64, 12))
    ]
    monkeypatch.setattr(Failing, "fails_in", frozenset({"finish"}))
    with pytest.raises(PluginError):  # noqa: PT012
        while llm.engine.has_unfinished:
            llm.engine.step()
    assert not llm.engine.has_unfinished
    llm.engine.step()
    readers[ends_first].check("abort")
    readers[not ends_first].check("length")
    assert [len(reader.token_ids) for reader in readers] == [12, 12]


def test_the_streams_of_an_aborted_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams share a step that fails. The stream that ran the step raises; the other yields the text
    generated so far, and ends."""
    params = attrs.evolve(HOLDS_BACK, max_tokens=60)
    whole = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
    first, second = llm.stream(PROMPT, params), llm.stream(PROMPT, params)
    texts = [next(first).text, next(second).text]
    for _ in range(9):
        texts[1] += next(second).text
    monkeypatch.setattr(Failing, "fails_in", frozenset({"propose"}))
    with pytest.raises(PluginError):
        for _ in first:
            pass
    rest = list(second)
    assert [output.finish_reason for output in rest].count("abort") == 1
    text = texts[1] + "".join(output.text for output in rest)
    assert text
    assert whole.startswith(text)
    assert len(rest[-1].rest) == len(STOP) - 1


@pytest.mark.parametrize("ends_by", ["length", "cancel"])
def test_text_that_cannot_be_decoded_ends_its_request(ends_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("tiny", speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    params = SamplingParams(temperature=0, max_tokens=4)
    expected = llm.generate("import os", params, use_tqdm=False)[0].outputs[0].text
    num_free, engine = llm.engine.kv.num_free_blocks, llm.engine

    def failing(self: Any, *args: Any) -> str:
        raise ValueError("an id that the tokenizer does not know")

    request_id = engine.add_request(llm.get_tokenizer()("import os").input_ids, params)
    engine.step()
    monkeypatch.setattr(OutputText, "_decode", failing)

    def end() -> None:
        if ends_by == "cancel":
            engine.cancel(request_id)
        for _ in range(params.max_tokens):
            engine.step()

    with pytest.raises(ValueError, match="does not know"):
        end()
    assert not engine.has_unfinished
    engine.cancel()
    monkeypatch.undo()
    assert engine.kv.num_free_blocks == num_free
    assert llm.generate("import os", params, use_tqdm=False)[0].outputs[0].text == expected
