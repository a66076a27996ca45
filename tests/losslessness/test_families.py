"""Each model family generates what transformers generates with it, or is refused by name. Each attention feature of a
family affects the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import random_tree
import reference
from families import FAMILIES, UNSUPPORTED, save_family

from specdec_core import LLM, CompatibilityError, Plugins, SamplingParams
from specdec_core.models.attention import CacheSite
from specdec_core.models.decoder_trial import RecordingSite

NUM_TOKENS = 16
LENGTHS = [1, 9, 20, 33]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, save_family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(family: tuple[str, Path]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and transformers' greedy continuation of each."""
    model = reference.load(family[1])
    prompts = reference.prompts(120, LENGTHS, seed=2)
    found = [reference.greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    assert min(r.margin for r in found) > 2e-5, "a near tie: choose other prompts"
    return prompts, [r.token_ids for r in found]


@pytest.mark.parametrize(
    "method", [*(pytest.param(method, marks=pytest.mark.nightly) for method in (None, "ngram")), "random_tree"], ids=str
)
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


FEATURES = ("sliding_window", "softcap", "s_aux")


def test_its_features_matter(
    family: tuple, expected: tuple, make_llm: Any, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: if any one of the family's attention features is left out, the output differs."""
    prompts, outputs = expected
    used: set[str] = set()
    left_out = None

    for site in (CacheSite, RecordingSite):  # layers that are fused, and others

        def without(
            self: Any, module: Any, query: Any, key: Any, value: Any, scaling: float, features: Any, attend=site.attend
        ) -> Any:
            used.update(name for name in FEATURES if features.get(name) is not None)
            return attend(self, module, query, key, value, scaling, {**features, left_out: None})

        monkeypatch.setattr(site, "attend", without)
    generate(make_llm(family[1], None), prompts[:1], SamplingParams(temperature=0.0, max_tokens=1))
    for left_out in sorted(used):
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        found = generate(make_llm(family[1], None), prompts, params)
        assert [output.token_ids for output in found] != outputs, left_out
    windows = family[1].joinpath("config.json").read_text().count('"sliding_window": 5')
    assert ("sliding_window" in used) == bool(windows)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_run_faithfully_is_refused(name: str, tmp_path: Path) -> None:
    folder = save_family(name, tmp_path)
    with pytest.raises(CompatibilityError, match=UNSUPPORTED[name][2]):
        LLM(str(folder), skip_tokenizer_init=True, max_model_len=128)


def test_layers_that_attend_twice_have_no_taps(tmp_path: Path) -> None:
    folder = save_family("longcat_flash", tmp_path)
    with pytest.raises(CompatibilityError, match="list of decoder layers with one attention each, and LongcatFlash"):
        LLM(
            str(folder),
            plugins=Plugins.load(modules=["watching_proposer"]),
            skip_tokenizer_init=True,
            max_model_len=128,
            speculative_config={"method": "watching", "num_speculative_tokens": 1, "taps": ["input.1"], "seen": []},
        )
