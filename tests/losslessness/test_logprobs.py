"""logprobs and prompt_logprobs of outputs equal those that transformers computes for the target, with and without
speculation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import random_tree
import reference
import torch

from specdec_core import Logprob, SamplingParams

pytestmark = pytest.mark.parametrize("model_dir", ["llama", "embedded"], indirect=True, scope="session")
METHODS = [None, "ngram", "random_tree"]
TOLERANCE = 2e-4  # the random model has large weights, which magnify rounding


@pytest.fixture(scope="module")
def engines(model_dir: Any, make_llm: Any) -> dict[str | None, Any]:
    options = {"ngram": {"prompt_lookup_min": 1}}
    return {method: make_llm(model_dir, method, options=options.get(str(method))) for method in METHODS}


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return reference.prompts(200, [4, 9, 17, 1, 30, 2], seed=11)


def differ(temperature: float = 0.8, **asked: Any) -> list[SamplingParams]:
    """Return sampling parameters for six prompts, with different numbers of logprobs. Temperature, top_k and
    frequency_penalty are set, but must not affect the logprobs."""
    params = SamplingParams(temperature=temperature, max_tokens=12, top_k=50, frequency_penalty=0.6, **asked)
    numbers = [0, 1, 3, -1, 5, None]
    each = [attrs.evolve(params, seed=i, logprobs=number) for i, number in enumerate(numbers)]
    each[3] = attrs.evolve(each[3], max_tokens=3)  # all of a vocabulary takes its time
    return [attrs.evolve(p, prompt_logprobs=number) for p, number in zip(each, [3, -1, 0, 1, 2, None], strict=True)]


def check(position: dict[int, Logprob], token_id: int, number: int, logits: torch.Tensor) -> None:
    """Compare the logprobs of one position with logits [vocab].

    token_id: the token at that position.
    number: how many logprobs were requested; -1: all.
    """
    logprobs = logits.log_softmax(-1)
    number = len(logits) if number < 0 else number
    best = logprobs.topk(number)
    assert next(iter(position)) == token_id
    assert len(position) in (number, number + 1)
    assert {position[token_id].rank, *range(1, number + 1)} == {each.rank for each in position.values()}
    own = position[token_id]
    # Rounding may swap tokens that are as good as equal.
    assert (logprobs > own.logprob + TOLERANCE).sum() < own.rank <= (logprobs > own.logprob - TOLERANCE).sum()
    for token, each in list(position.items())[:: 1 + len(position) // 20]:
        assert each.logprob == pytest.approx(float(logprobs[token]), abs=TOLERANCE)
        if each.rank <= number:
            assert each.logprob == pytest.approx(float(best.values[each.rank - 1]), abs=TOLERANCE)


def check_all(target: Any, texts: Sequence[list[int]], params: Sequence[SamplingParams], outputs: list[Any]) -> None:
    for prompt, asked, output in zip(texts, params, outputs, strict=True):
        completion = output.outputs[0]
        logits = reference.logits(target, prompt + completion.token_ids)
        if asked.logprobs is None:
            assert (completion.logprobs, completion.cumulative_logprob, output.prompt_logprobs) == (None, None, None)
            continue
        assert len(completion.logprobs) == len(completion.token_ids) > 0
        for i, (position, token) in enumerate(zip(completion.logprobs, completion.token_ids, strict=True)):
            check(position, token, asked.logprobs, logits[len(prompt) + i - 1])
        total = sum(p[token].logprob for p, token in zip(completion.logprobs, completion.token_ids, strict=True))
        assert completion.cumulative_logprob == pytest.approx(total)
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for i in range(1, len(prompt)):
            check(output.prompt_logprobs[i], prompt[i], asked.prompt_logprobs, logits[i - 1])


def run(llm: Any, texts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Any]:
    return llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_they_are_those_of_transformers(temperature: float, engines: dict, target: Any, texts: list) -> None:
    params = differ(temperature)
    plain = run(engines[None], texts, params)
    check_all(target, texts, params, plain)
    random_tree.TRUTH.update(zip(map(tuple, texts), [each.outputs[0].token_ids for each in plain], strict=True))
    for method in ("ngram", "random_tree"):
        outputs = run(engines[method], texts, params)
        assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in plain]
        check_all(target, texts, params, outputs)
    assert outputs[1].speculation.num_accepted > 0


@pytest.mark.parametrize("method", [None, "random_tree"], ids=str)
def test_prompts_in_chunks_and_requests_that_start_over(
    method: str | None, model_dir: Any, target: Any, texts: list, make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_num_batched_tokens": 11, "block_size": 4, "num_kv_blocks": 11, "max_model_len": 44}
    llm = make_llm(model_dir, method, **settings)
    preempted = []
    preempt = llm.engine._scheduler.preempt
    monkeypatch.setattr(llm.engine._scheduler, "preempt", lambda r: preempted.append(r.num_prompt_tokens) or preempt(r))
    params = differ()
    check_all(target, texts, params, run(llm, texts, params))
    assert max(preempted) > 1


def test_streams_have_them(engines: dict, texts: list) -> None:
    params = [attrs.evolve(each, n=2) if each.seed == 1 else each for each in differ()]
    prompts = [{"prompt_token_ids": text} for text in texts]
    whole = run(engines[None], texts, params)
    assert whole[1].outputs[1].logprobs != whole[1].outputs[0].logprobs
    for method in (None, "ngram"):
        pieces: dict[tuple[int, int], list] = {}
        of_prompts: dict[int, list] = {}
        for part in engines[method].stream(prompts, params):
            pieces.setdefault((part.prompt_index, part.index), []).extend(part.pieces)
            if part.prompt_logprobs is not None:
                assert part.prompt_index not in of_prompts
                of_prompts[part.prompt_index] = part.prompt_logprobs
        for i, output in enumerate(whole):
            for completion in output.outputs:
                streamed = pieces[i, completion.index]
                assert [piece.token_id for piece in streamed] == completion.token_ids
                for j, piece in enumerate(streamed):
                    assert (piece.logprobs is None) == (completion.logprobs is None)
                    if piece.logprobs is not None:
                        expected = completion.logprobs[j][piece.token_id].logprob
                        assert piece.logprobs[piece.token_id].logprob == pytest.approx(expected, abs=TOLERANCE)
            assert len(of_prompts.get(i, [])) == len(output.prompt_logprobs or [])


def test_what_is_cut_off_has_none(engines: dict, texts: list) -> None:
    """If a stop token lies inside an accepted draft, the draft tokens after it have no logprobs."""
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=1)
    (plain,) = run(engines[None], texts[:1], [params])
    truth = plain.outputs[0].token_ids
    random_tree.TRUTH[tuple(texts[0])] = truth
    stopping = attrs.evolve(params, stop_token_ids=[truth[7]])
    (cut,) = run(engines["random_tree"], texts[:1], [stopping])
    num_left = truth.index(truth[7]) + 1
    assert cut.outputs[0].token_ids == truth[:num_left]
    assert len(cut.outputs[0].logprobs) == num_left


def test_rows_of_other_nodes_would_be_noticed(
    engines: dict, target: Any, texts: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec_core.engine import engine

    right = engine.output_logprobs

    def roots_only(requests: Any, verdict: Any, *rest: Any) -> Any:
        return right(requests, attrs.evolve(verdict, rows=verdict.rows[:, :1].expand_as(verdict.rows)), *rest)

    params = differ()
    plain = run(engines[None], texts, params)
    random_tree.TRUTH.update(zip(map(tuple, texts), [each.outputs[0].token_ids for each in plain], strict=True))
    monkeypatch.setattr(engine, "output_logprobs", roots_only)
    with pytest.raises(AssertionError):
        check_all(target, texts, params, run(engines["random_tree"], texts, params))


def test_tokens_are_decoded_unless_no_text_is_wanted(model_dir: Any, make_llm: Any) -> None:
    if "llama" in str(model_dir):
        pytest.skip("it has no tokenizer")
    llm = make_llm(model_dir, None, skip_tokenizer_init=False)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=0)
    (output,) = llm.generate("def mean(values):", params)
    texts = [
        position[token].decoded_token
        for position, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
    ]
    assert "".join(texts) == output.outputs[0].text
    assert output.prompt_logprobs[1][output.prompt_token_ids[1]].decoded_token == " mean"
    (output,) = llm.generate("def mean(values):", attrs.evolve(params, detokenize=False))
    assert {each.decoded_token for position in output.outputs[0].logprobs for each in position.values()} == {None}
