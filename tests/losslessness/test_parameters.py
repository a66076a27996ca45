"""With each sampling parameter, speculative outputs equal those of plain decoding, token for token. Each parameter also
has an effect.

Half of the requests are greedy. Drafts are n-gram chains, or random trees around the right continuation with dead
(padding) nodes and duplicate siblings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import parameter_cases
import pytest
import random_tree
import reference
from attrs import evolve
from tiny_models import save_tiny_model
from wrong_histories import (
    a_sibling_is_counted,
    ancestors_are_missing,
    the_root_is_missing,
    the_row_s_own_node_is_missing,
)

from specdec_core import SamplingParams

NUM_TOKENS = 20
POISON = 7


def save_word_tokenizer(folder: Path, vocab_size: int) -> None:
    """Save a tokenizer in which the token with id 5 is the word "t5", and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {f"t{token}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "embedded":
        from specdec_model_tiny import model_path

        return Path(model_path())
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("llama_with_words"))
    save_word_tokenizer(folder, 200)
    return folder


@pytest.fixture(scope="module")
def engines(model: Path, make_llm: Any) -> dict[str | None, Any]:
    options = {"ngram": {"prompt_lookup_min": 1}, "random_tree": {"correct": 0.8}}
    return {
        method: make_llm(model, method, skip_tokenizer_init=False, options=options.get(str(method)))
        for method in (None, "ngram", "random_tree")
    }


def both(**asked: Any) -> list[SamplingParams]:
    """Return sampling parameters for eight prompts, alternately greedy and sampled."""
    return [SamplingParams(max_tokens=NUM_TOKENS, seed=i, temperature=(0.0, 0.8)[i % 2], **asked) for i in range(8)]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Eight prompts (token ids) that are valid in the vocabularies of both models."""
    return reference.prompts(200, [4, 9, 17, 30, 12, 25, 1, 40], seed=11)


@pytest.fixture(scope="module")
def unasked(engines: dict, texts: list, generate: Any) -> list[list[int]]:
    """Outputs of plain decoding without the parameters under test."""
    return tokens(generate(engines[None], texts, both()))


@pytest.fixture(scope="module")
def cases(engines: dict, unasked: list) -> dict[str, parameter_cases.Case]:
    return parameter_cases.cases(unasked, engines[None].get_tokenizer())


def tokens(outputs: list[Any]) -> list[list[int]]:
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}, [output.error for output in outputs]
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    "model", ["llama", pytest.param("embedded", marks=pytest.mark.nightly)], indirect=True, scope="module"
)
@pytest.mark.parametrize("name", parameter_cases.NAMES)
def test_output_equals_that_without_speculation(
    name: str, engines: dict, texts: list, cases: dict, unasked: list, generate: Any, counter: Any
) -> None:
    case, plain, speculating = cases[name], engines[None], engines["random_tree"]
    params = both(**case.asked)
    expected = tokens(generate(plain, texts, params))
    without = tokens(generate(plain, texts, both(**case.without))) if case.without else unasked
    assert expected[1::2] != without[1::2], f"{name} changes nothing"
    assert (expected[::2] != without[::2]) == case.changes_greedy

    random_tree.TRUTH.update(zip(map(tuple, texts), expected, strict=True))
    accepted, drafted = counter(speculating, "num_accepted_tokens"), counter(speculating, "num_draft_tokens")
    assert tokens(generate(speculating, texts, params)) == expected
    accepted = counter(speculating, "num_accepted_tokens") - accepted
    assert counter(speculating, "num_draft_tokens") - drafted > accepted > 10
    assert tokens(generate(engines["ngram"], texts, params)) == expected
    for i in (2, 3):
        assert tokens(generate(speculating, texts[i : i + 1], params[i])) == expected[i : i + 1]


@pytest.mark.parametrize("model", ["llama"], indirect=True, scope="module")
@pytest.mark.parametrize("name", ["frequency_penalty", "logits_processors"])
@pytest.mark.parametrize(
    "mutation",
    [a_sibling_is_counted, ancestors_are_missing, the_root_is_missing, the_row_s_own_node_is_missing],
    ids=lambda mutation: mutation.__name__,
)
def test_a_wrong_history_is_noticed(
    mutation: Callable[..., None], name: str, engines: dict, texts: list, cases: dict, generate: Any
) -> None:
    params = both(**cases[name].asked)
    expected = tokens(generate(engines[None], texts, params))
    random_tree.TRUTH.update(zip(map(tuple, texts), expected, strict=True))
    assert tokens(generate(engines["random_tree"], texts, params)) == expected
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        found = generate(engines["random_tree"], texts, params)
        assert [output.token_ids for output in found] != expected


@pytest.mark.parametrize("model", ["llama"], indirect=True, scope="module")
@pytest.mark.parametrize("method", [None, "random_tree"])
def test_logits_that_are_not_finite_fail_their_own_request(
    method: str | None, model: Path, tmp_path: Path, texts: list, cases: dict, make_llm: Any, generate: Any
) -> None:
    """With every sampling parameter, NaN logits end their own request with an error, even if a parameter masks some of
    the NaN values. Other requests continue."""
    from safetensors.torch import load_file, save_file

    folder = copytree(model, tmp_path / "poisoned")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    llm = make_llm(folder, method, skip_tokenizer_init=False)
    healthy = [prompt for prompt in texts if POISON not in prompt][:2]
    for case in cases.values():
        asked = {**case.asked, "logit_bias": {**(case.asked.get("logit_bias") or {}), POISON: -100.0}}
        params = [evolve(each, max_tokens=max(4, each.min_tokens)) for each in both(**asked)[:4]]
        outputs = generate(llm, [[1, POISON, 3], healthy[0], healthy[1], [1, POISON, 3]], params)
        assert [output.finish_reason == "error" for output in outputs] == [True, False, False, True]
        assert "the target's logits were not finite" in outputs[0].error
        assert {outputs[1].error, outputs[2].error} == {None}
    llm.engine.kv.check_integrity()
    assert llm.engine.kv.num_free_blocks == 256


@pytest.mark.parametrize("model", ["llama"], indirect=True, scope="module")
@pytest.mark.parametrize("method", [None, "random_tree"])
def test_parameters_that_leave_no_token_fail_their_own_request(
    method: str | None, engines: dict, texts: list, generate: Any
) -> None:
    """A request ends with an error once its parameters leave no possible token, or a logits processor raises. It keeps
    the tokens generated before."""

    def give_up(logits: Any, token_ids: Any) -> Any:
        if len(token_ids) == len(texts[2]) + 5:
            raise RuntimeError("enough")
        return logits

    allowed = [3, 5]
    stuck = SamplingParams(temperature=0, allowed_token_ids=allowed, bad_words=["t3 t3", "t3 t5", "t5 t3", "t5 t5"])
    raising = SamplingParams(temperature=0, max_tokens=12, logits_processors=[give_up])
    plain = SamplingParams(temperature=0.8, seed=1, max_tokens=12)
    expected = generate(engines[None], texts[1:4], plain)
    random_tree.TRUTH.update({tuple(text): output.token_ids for text, output in zip(texts[1:4], expected, strict=True)})
    first, second, third = generate(engines[method], texts[1:4], [stuck, raising, plain])
    assert (first.finish_reason, len(first.token_ids)) == ("error", 1)
    assert first.token_ids[0] in allowed
    assert first.error == (
        "the target's logits were not finite, or the sampling parameters left no token possible: check the model's "
        "weights, or try dtype='float32', or allow more tokens"
    )
    assert (second.finish_reason, len(second.token_ids)) == ("error", 5)
    assert second.error.endswith("give_up raised RuntimeError: enough")
    assert third == expected[2]


@pytest.mark.parametrize("model", ["llama"], indirect=True, scope="module")
@pytest.mark.parametrize("method", [None, "random_tree"])
def test_min_tokens_puts_off_the_end_of_sequence(
    method: str | None, tmp_path: Path, texts: list, unasked: list, make_llm: Any, generate: Any
) -> None:
    eos = unasked[0][3]
    llm = make_llm(save_tiny_model("llama", tmp_path, eos_token_id=eos), method)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    random_tree.TRUTH[tuple(texts[0])] = unasked[0]
    (ended,) = generate(llm, texts[:1], params)
    assert ended.token_ids == unasked[0][: unasked[0].index(eos) + 1]
    for min_tokens in (4, 12):
        (longer,) = generate(llm, texts[:1], evolve(params, min_tokens=min_tokens))
        assert len(longer.token_ids) > min_tokens
        assert eos not in longer.token_ids[:min_tokens]
    (ignoring,) = generate(llm, texts[:1], evolve(params, min_tokens=12, ignore_eos=True))
    assert ignoring.token_ids == unasked[0]


@pytest.mark.parametrize("model", ["llama"], indirect=True, scope="module")
@pytest.mark.parametrize("method", [None, "random_tree"])
def test_a_prompt_in_chunks_is_not_processed_before_its_end(
    method: str | None, model: Path, engines: dict, texts: list, make_llm: Any, generate: Any
) -> None:
    """Logits processors are called only for tokens to be generated: not for earlier chunks of a prompt, nor for tokens
    that a preempted request recomputes.

    Each call gets the whole prompt.
    """
    asked: list[tuple[int, ...]] = []

    def listen(logits: Any, token_ids: Any) -> Any:
        asked.append(tuple(token_ids.tolist()))
        return parameter_cases.lean_on_history(logits, token_ids)

    params = [evolve(each, logits_processors=[listen]) for each in both()]
    expected = tokens(generate(engines[None], texts, params))
    random_tree.TRUTH.update(zip(map(tuple, texts), expected, strict=True))
    asked.clear()
    settings = {"max_num_batched_tokens": 7, "block_size": 4, "num_kv_blocks": 15, "max_model_len": 60}
    assert tokens(generate(make_llm(model, method, **settings), texts, params)) == expected
    histories = {(*text, *output[:n]) for text, output in zip(texts, expected, strict=True) for n in range(NUM_TOKENS)}
    if method is None:
        assert sorted(asked) == sorted(histories)
    else:
        assert histories <= set(asked)
        assert all(any(history[: len(text)] == tuple(text) for text in texts) for history in asked)
