"""Families of models: each runs as transformers runs it, or is refused by name; each one's features matter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import random_tree
import reference
from families import FAMILIES, REFUSED, save_family

from specdec_core import LLM, CompatibilityError, SamplingParams
from specdec_core.target.attention import CacheSite

NUM_TOKENS = 16
LENGTHS = [1, 9, 20, 33]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, save_family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(family: tuple[str, Path]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and transformers' greedy continuations."""
    model = reference.load(family[1])
    prompts = reference.prompts(120, LENGTHS, seed=2)
    found = [reference.greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    assert min(r.margin for r in found) > 2e-5, "a near tie: choose other prompts"
    return prompts, [r.token_ids for r in found]


@pytest.mark.parametrize("method", [None, "ngram", "random_tree"], ids=str)
def test_greedy_output_equals_the_reference(
    family: tuple, method: str | None, expected: tuple, make_llm: Any, generate: Any
) -> None:
    prompts, outputs = expected
    random_tree.TRUTH.update(zip(map(tuple, prompts), outputs, strict=True))
    llm = make_llm(family[1], method, max_num_batched_tokens=7)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    assert [output.token_ids for output in generate(llm, prompts, params)] == outputs


def test_sampled_output_is_the_same_with_drafts(family: tuple, expected: tuple, make_llm: Any, generate: Any) -> None:
    prompts, _ = expected
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True) for i in range(len(prompts))
    ]
    plain = [output.token_ids for output in generate(make_llm(family[1], None), prompts, params)]
    random_tree.TRUTH.update(zip(map(tuple, prompts), plain, strict=True))
    llm = make_llm(family[1], "random_tree")
    assert [output.token_ids for output in generate(llm, prompts, params)] == plain


FEATURES: dict[str, Callable[[Any], Any]] = {
    "sliding_window": lambda window: None,
    "softcap": lambda cap: None,
    "s_aux": lambda sinks: None,
}


@pytest.mark.parametrize("feature", FEATURES)
def test_its_features_matter(
    family: tuple, feature: str, expected: tuple, make_llm: Any, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without a feature that the family uses, the output is another."""
    attend = CacheSite.attend
    used = []

    def without(self: Any, module: Any, query: Any, key: Any, value: Any, scaling: float, features: Any) -> Any:
        used.append(features.get(feature) is not None)
        return attend(self, module, query, key, value, scaling, {**features, feature: None})

    monkeypatch.setattr(CacheSite, "attend", without)
    prompts, outputs = expected
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    found = [output.token_ids for output in generate(make_llm(family[1], None), prompts, params)]
    assert (found != outputs) == any(used)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_faithfully_is_refused(name: str, tmp_path: Path) -> None:
    folder = save_family(name, tmp_path)
    with pytest.raises(CompatibilityError, match=REFUSED[name]):
        LLM(str(folder), skip_tokenizer_init=True)
