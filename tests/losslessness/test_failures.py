"""A request or step that fails affects nothing else: not the outputs of other requests, not the free blocks, not later
calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import random_tree
import reference
from tiny_models import save_tiny_model

POISON = 7
"""The token whose embedding is NaN in the poisoned model."""


def greedy_params(max_tokens: int = 12) -> Any:
    from specdec_core import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def test_a_prompt_that_is_refused_takes_nothing_with_it(tiny_models: dict, make_llm: Any, generate: Any) -> None:
    """An invalid prompt anywhere in a list raises an error. No other prompt stays queued, and the next call works."""
    from specdec_core import ConfigError, SamplingParams

    llm = make_llm(tiny_models["llama"], "random_tree")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    expected = generate(llm, [[1, 2, 3]], params)[0].token_ids
    all_free = llm.engine.kv.num_free_blocks
    for prompts in ([[200], [1, 2, 3]], [[1, 2, 3], [200]], [[1, 2, 3], [4, 5], []]):
        with pytest.raises(ConfigError):
            generate(llm, prompts, params)
        assert not llm.engine.has_unfinished
        assert llm.engine.kv.num_free_blocks == all_free
    assert generate(llm, [[1, 2, 3]], params)[0].token_ids == expected


def test_a_request_that_cannot_ever_fit_is_refused(tiny_models: dict, make_llm: Any, generate: Any) -> None:
    from specdec_core import CapacityError

    llm = make_llm(tiny_models["llama"], "random_tree", num_kv_blocks=4, block_size=4, max_model_len=16)
    expected = generate(llm, [[1, 2, 3]], greedy_params(4))[0].token_ids
    with pytest.raises(CapacityError):
        generate(llm, [list(range(30))], greedy_params(4))
    assert not llm.engine.has_unfinished
    assert llm.engine.kv.num_free_blocks == 4
    assert generate(llm, [[1, 2, 3]], greedy_params(4))[0].token_ids == expected


def test_a_request_that_just_fits_is_not_preempted_for_ever(tiny_models: dict, make_llm: Any, generate: Any) -> None:
    """Requests that each need the whole KV cache run one after another, instead of preempting each other forever."""
    plain = make_llm(tiny_models["llama"], None)
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5], [1, 1, 2, 2, 3]]
    expected = [output.token_ids for output in generate(plain, prompts, greedy_params(11))]
    random_tree.TRUTH.update(zip(map(tuple, prompts), expected, strict=True))
    for method in (None, "random_tree"):
        llm = make_llm(tiny_models["llama"], method, num_kv_blocks=4, block_size=4, max_model_len=16)
        assert [output.token_ids for output in generate(llm, prompts, greedy_params(11))] == expected


def test_a_proposer_that_raises_is_named_and_the_engine_stays_usable(
    tiny_models: dict, make_llm: Any, generate: Any
) -> None:
    from specdec_core import PluginError

    expected = [o.token_ids for o in generate(make_llm(tiny_models["llama"], None), [[1, 2], [3, 4]], greedy_params())]
    llm = make_llm(tiny_models["llama"], "random_tree", options={"fails_at_length": 21})
    all_free = llm.engine.kv.num_free_blocks
    for _ in range(2):
        with pytest.raises(PluginError, match="random_tree"):
            generate(llm, [[1, 2], list(range(20)), [3, 4]], greedy_params())
        assert not llm.engine.has_unfinished
        assert llm.engine.kv.num_free_blocks == all_free
        llm.engine.kv.check_integrity()
        assert [output.token_ids for output in generate(llm, [[1, 2], [3, 4]], greedy_params())] == expected


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import load_file, save_file

    folder = save_tiny_model("llama", tmp_path_factory.mktemp("poisoned"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def healthy_prompts(tiny_models: dict) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and their greedy outputs, all without the token POISON."""
    model = reference.load(tiny_models["llama"])
    prompts = reference.prompts(200, [3, 9, 20, 33, 1, 17, 40, 6], seed=3)
    outputs = [reference.greedy(model, prompt, 12).token_ids for prompt in prompts]
    healthy = [(p, o) for p, o in zip(prompts, outputs, strict=True) if POISON not in p + o]
    assert len(healthy) > 4
    return [p for p, _ in healthy], [o for _, o in healthy]


@pytest.mark.parametrize("method", [None, "random_tree"], ids=str)
def test_logits_that_are_not_finite_fail_their_own_request_only(
    method: str | None, poisoned: Path, healthy_prompts: tuple, make_llm: Any, generate: Any
) -> None:
    """NaN logits of one request do not change the outputs of other requests, even of those that reuse its KV blocks."""
    prompts, expected = healthy_prompts
    random_tree.TRUTH.update(zip(map(tuple, prompts), expected, strict=True))
    llm = make_llm(poisoned, method, num_kv_blocks=48, block_size=4)
    poison = [1, 2, POISON, *range(60)]
    for _ in range(2):
        outputs = generate(llm, [poison, *prompts, poison], greedy_params())
        assert [output.token_ids for output in outputs[1:-1]] == expected
        for output in (outputs[0], outputs[-1]):
            assert (output.finish_reason, output.token_ids) == ("error", [])
    llm.engine.kv.check_integrity()
    assert llm.engine.kv.num_free_blocks == 48


def test_a_draft_node_that_is_not_finite_and_not_accepted_does_no_harm(
    poisoned: Path, healthy_prompts: tuple, make_llm: Any, generate: Any
) -> None:
    prompts, expected = healthy_prompts
    random_tree.TRUTH.update(zip(map(tuple, prompts), expected, strict=True))
    llm = make_llm(poisoned, "random_tree", options={"salt": POISON})
    outputs = generate(llm, prompts, greedy_params())
    assert [output.finish_reason for output in outputs] == ["length"] * len(prompts)
    assert [output.token_ids for output in outputs] == expected


def test_the_comparison_notices_a_compaction_that_moves_nothing(
    tiny_models: dict, healthy_prompts: tuple, make_llm: Any, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: if the keys and values of accepted draft tokens are not moved, outputs differ."""
    prompts, expected = healthy_prompts
    random_tree.TRUTH.update(zip(map(tuple, prompts), expected, strict=True))
    llm = make_llm(tiny_models["llama"], "random_tree")
    caches = [cache for layer in range(3) for cache in llm.engine.kv.cache(0, layer)]
    compact = llm.engine.kv.compact

    def compact_without_moving(*args: Any) -> None:
        before = [cache.clone() for cache in caches]
        compact(*args)
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)

    monkeypatch.setattr(llm.engine.kv, "compact", compact_without_moving)
    assert [output.token_ids for output in generate(llm, prompts, greedy_params())] != expected
