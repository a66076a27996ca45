"""A SpeculativeConfig made of keywords means what a dict with the same keys means. A config that an LLM completed has
every key, a hash and an answer to use_eagle."""

from __future__ import annotations

import copy
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specdec_core import LLM, ConfigError, Engine, EngineConfig, PluginError, Plugins, SamplingParams, SpeculativeConfig
from specdec_core.api.arguments import dry_run, prepare
from specdec_model_tiny import model_path

NGRAM: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 3}
GIVEN: tuple[dict[str, Any], ...] = (
    NGRAM,
    {"method": "[ngram]", "num_speculative_tokens": 3},
    {"method": "suffix", "suffix_decoding_max_cached_requests": 7},
    {"method": "eagle", "disable_by_batch_size": 4},
    {"method": "eagle3", "draft_sample_method": "probabilistic", "verifier": "block"},
    {"method": "draft_model", "verifier": "typical", "posterior_threshold": 0.2},
    {"model": str(Path(model_path(), "drafts", "eagle")), "speculative_token_tree": [(0,), (1,), (0, 0)]},
)
HEAD = Path(model_path(), "drafts", "eagle")


def completed(speculative_config: Any) -> SpeculativeConfig:
    """The config that an LLM would complete, without loading weights."""
    found = prepare("tiny", speculative_config=speculative_config, skip_tokenizer_init=True).speculative
    assert found is not None
    return found


@pytest.mark.parametrize("keys", GIVEN, ids=str)
def test_keywords_mean_what_the_dict_means(keys: dict[str, Any]) -> None:
    expected, found = completed(keys), completed(SpeculativeConfig(**keys))
    assert found == expected
    assert found.compute_hash() == expected.compute_hash()
    again = completed(found)
    assert (again, again.compute_hash()) == (expected, expected.compute_hash()), "complete ones can be given, too"


def test_a_key_that_is_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, as_mapping = completed(NGRAM), SpeculativeConfig.as_mapping

    def losing(self: SpeculativeConfig) -> dict[str, Any]:
        return {key: value for key, value in as_mapping(self).items() if key != "prompt_lookup_max"}

    monkeypatch.setattr(SpeculativeConfig, "as_mapping", losing)
    found = completed(SpeculativeConfig(**NGRAM))
    assert found != expected
    assert found.compute_hash() != expected.compute_hash()


def test_an_engine_of_keywords_is_that_of_the_dict() -> None:
    params, found = SamplingParams(temperature=0, max_tokens=24), []
    for config in (NGRAM, SpeculativeConfig(**NGRAM)):
        with LLM("tiny", max_model_len=256, speculative_config=config) as llm:
            (output,) = llm.generate("x = [1, 2, 1, 2, 1, 2, 1,", params)
            assert llm.speculative_config is not None
            found.append((llm.speculative_config.compute_hash(), output.outputs[0].token_ids, output.speculation))
    assert found[0] == found[1]
    assert found[0][2].num_drafts > 0
    with LLM("tiny", max_model_len=256) as llm:
        assert llm.speculative_config is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({**NGRAM, "prompt_lookup_maxx": 3}, "no key 'prompt_lookup_maxx': did you mean 'prompt_lookup_max'"),
        ({**NGRAM, "eagle_topk": 3}, "no key 'eagle_topk'"),
        ({"num_speculative_tokens": 3}, "names no method"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens=0 is too small"),
        ({**NGRAM, "prompt_lookup_max": 0}, "prompt_lookup_max=0 is too small"),
    ],
    ids=str,
)
def test_wrong_keys_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        completed(SpeculativeConfig(**keys))


def test_the_name_of_a_method_is_enough() -> None:
    given: tuple[Any, ...] = ("ngram", {"method": "ngram"})
    by_name, by_dict = (dry_run("tiny", speculative_config=config).speculative for config in given)
    assert by_name is not None
    assert by_dict is not None
    assert by_name.compute_hash() == by_dict.compute_hash()
    with pytest.raises(PluginError, match=r"'ngramm'.*Did you mean 'ngram'"):
        dry_run("tiny", speculative_config="ngramm")


def test_every_key_is_an_attribute() -> None:
    given = SpeculativeConfig(**NGRAM)
    assert (given.method, given.num_speculative_tokens, given.prompt_lookup_max) == ("ngram", 3, 4)
    with pytest.raises(AttributeError, match=r"no key 'prompt_lookup_min': it has .*prompt_lookup_max"):
        _ = given.prompt_lookup_min  # left out
    found = completed({"method": "eagle"})
    assert not hasattr(found, "prompt_lookup_max")
    assert (found.model, found.quantization, found.draft_tensor_parallel_size) == (str(HEAD), None, 1)
    assert found.options.eagle_topk is found.eagle_topk
    for each in (given, found):
        assert copy.deepcopy(each) == copy.copy(each) == pickle.loads(pickle.dumps(each)) == each


@pytest.mark.parametrize(
    ("method", "answer"),
    [("ngram", False), ("suffix", False), ("draft_model", False), ("eagle", True), ("eagle3", True)],
)
def test_use_eagle(method: str, answer: bool) -> None:
    """The answer is that of the plan: hidden states of the target are read, and there is a KV cache."""
    keys = NGRAM if method == "ngram" else {"method": method}
    assert completed(keys).use_eagle() is answer
    (planned,) = dry_run("tiny", skip_tokenizer_init=True, speculative_config=keys).methods
    assert answer == bool(planned.plan.taps and planned.plan.kv_layout)


def test_use_eagle_of_heads_without_a_model() -> None:
    plugins = Plugins.load()
    answers = {}
    for name in ("mtp", "medusa", "mlp_speculator"):
        config = SpeculativeConfig.from_mapping(
            {"method": name, "num_speculative_tokens": 1, "model": "some/head"}, plugins.proposer(name).config
        )
        answers[name] = config.use_eagle()
    assert answers == {"mtp": True, "medusa": False, "mlp_speculator": False}


def test_what_is_not_complete_is_not_answered() -> None:
    config = SpeculativeConfig(**NGRAM)
    for ask in (config.compute_hash, config.use_eagle):
        with pytest.raises(ConfigError, match=r"is of a complete config, .* ask llm.speculative_config"):
            ask()
    with pytest.raises(ConfigError, match="an Engine takes a complete SpeculativeConfig"):
        Engine.build(EngineConfig(model=model_path(), max_model_len=64), Plugins.load(), config)


def test_the_hash_of_a_head_is_of_its_weights(tmp_path: Path) -> None:
    head = shutil.copytree(HEAD, tmp_path / "copy")
    shipped, copied = completed({"method": "eagle"}), completed({"method": "eagle", "model": head})
    assert shipped.model != copied.model
    assert shipped.compute_hash() == copied.compute_hash()
    (file,) = head.glob("*.safetensors")
    weights = load_file(file)
    name = max(weights, key=lambda name: weights[name].numel())
    weights[name].view(-1)[0] += 1
    save_file(weights, file)
    assert completed({"method": "eagle", "model": head}).compute_hash() != shipped.compute_hash()


def test_a_method_without_a_default_needs_a_number() -> None:
    with pytest.raises(ConfigError, match="of method 'mine' has no num_speculative_tokens: give the number of tokens"):
        SpeculativeConfig.from_mapping({"method": "mine"}, EngineConfig)
