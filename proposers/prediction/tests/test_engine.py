"""Predicted outputs in the engine: right and wrong predictions, with and without other methods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec_core import LLM, ConfigError, DraftTree, SamplingParams
from specdec_proposer_prediction import specdec_proposers
from specdec_testing import SimpleRequest, tiny_target
from specdec_testing.drive import batch_of

PROMPT = {"prompt_token_ids": [5, 9, 5, 2, 7, 11, 13]}
SETTINGS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_kv_blocks": 160, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def params(prediction: Any = None, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 40, "ignore_eos": True, "prediction": prediction, **more})


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    config = {"method": "prediction", "num_speculative_tokens": 8}
    with LLM(folder, speculative_config=config, **SETTINGS) as made:
        yield made


def complete(llm: LLM, sampling: SamplingParams) -> tuple[list[int], Any]:
    (output,) = llm.generate(PROMPT, sampling, use_tqdm=False)
    return output.outputs[0].token_ids, output.speculation


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_a_right_prediction_is_accepted_and_a_wrong_one_changes_nothing(llm: LLM, sampling: dict[str, Any]) -> None:
    expected, without = complete(llm, params(**sampling))
    assert without.num_draft_tokens == 0
    output, drafts = complete(llm, params(expected, **sampling))
    assert output == expected
    assert (drafts.num_drafts, drafts.num_accepted, drafts.num_draft_tokens) == (
        5,
        34,
        34,
    )  # 1 from the prompt, 39 by 9
    for wrong in ([46, 47] * 20, expected[10:], [*expected[:10], 46, *expected[10:]], [*expected[:10], *expected[12:]]):
        output, drafts = complete(llm, params(wrong, **sampling))
        assert output == expected
        assert drafts.num_draft_tokens > drafts.num_accepted
    assert drafts.num_accepted > 20, "the draft finds the way back after two tokens that the prediction lacks"


def test_drafts_are_trees_where_the_output_has_left_the_prediction() -> None:
    (spec,) = specdec_proposers()
    (request,) = [SimpleRequest("a", [1, 10, 11, 50], 1, prediction=[10, 11, 12, 13, 14])]
    proposer = spec.build(spec.config(), Context())  # type: ignore[arg-type, misc]
    draft = proposer.propose(batch_of([request], [5], temperature=0.0))
    assert draft.tree(0) == DraftTree([13, 14, 12, 13, 14], [-1, 0, -1, 2, 3])
    assert draft.scores is not None
    assert draft.scores[0] > draft.scores[2], "a replaced token is likelier than an inserted one"
    assert proposer.propose(batch_of([request], [1], temperature=0.0)).tree(0) == DraftTree([13], [-1])


class Context:
    device = "cpu"


def test_requests_without_a_prediction_are_drafted_by_the_others(folder: Path) -> None:
    config = {"method": ["prediction", {"method": "ngram", "prompt_lookup_min": 1}]}
    with LLM(folder, speculative_config=config, **SETTINGS) as both:
        prompts = [{"prompt_token_ids": [3, 1, 4, 1, 5] * 4}] * 2
        (plain,) = both.generate(prompts[:1], params(num_speculative_tokens=0), use_tqdm=False)
        outputs = both.generate(prompts, [params(), params(plain.outputs[0].token_ids)], use_tqdm=False)
        assert [each.outputs[0].token_ids for each in outputs] == [plain.outputs[0].token_ids] * 2


def test_refused(folder: Path, llm: LLM) -> None:
    with LLM(folder, **SETTINGS) as plain, pytest.raises(ConfigError, match="none of the engine's methods"):
        plain.generate(PROMPT, params([1, 2]))
    config = {"method": ["prediction", "ngram"]}
    with LLM(folder, speculative_config=config, **SETTINGS) as both, pytest.raises(ConfigError, match="may draft"):
        both.generate(PROMPT, params([1, 2], speculative_methods=["ngram"]))
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        llm.generate(PROMPT, params("text"))
    with pytest.raises(ConfigError, match=r"prediction with token ids .*100000.* not in the vocabulary"):
        llm.generate(PROMPT, params([100000]))
    with pytest.raises(ConfigError, match="prediction=3 must be a text or a list of token ids"):
        params(3)


def test_text_is_tokenized() -> None:
    with LLM("tiny", dtype="float32", speculative_config={"method": "prediction", "num_speculative_tokens": 8}) as llm:
        sampling = {"temperature": 0, "max_tokens": 24}
        (expected,) = llm.generate("def mean(values):\n", SamplingParams(**sampling), use_tqdm=False)
        text = expected.outputs[0].text
        (found,) = llm.generate("def mean(values):\n", SamplingParams(**sampling, prediction=text), use_tqdm=False)
        assert found.outputs[0].text == text
        assert found.speculation.num_accepted > 12
        with pytest.raises(ConfigError, match=r"prediction=.* has half of a character"):
            llm.generate("x", SamplingParams(prediction="\ud800"))
