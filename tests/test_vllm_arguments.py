"""Values that vLLM's own defaults have are accepted and change nothing. Others are refused with the reason."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from attrs import NOTHING, fields, fields_dict

from specdec_core import LLM, ConfigError, EngineConfig, Plugins, SamplingParams, SpeculativeConfig
from specdec_core.api import arguments, vllm_arguments
from specdec_core.api.arguments import fill_in, prepare
from specdec_core.api.old_vllm_arguments import OLD_KEYS
from specdec_core.api.vllm_arguments import without_vllm_arguments, without_vllm_keys
from specdec_core.api.vllm_table import ENGINE, OPTIONS, SPECULATION, Foreign
from specdec_core.config.draft_options import DraftModelConfig
from specdec_core.config.file import KEYS
from specdec_model_tiny import model_path

PORTED = {
    "pipeline_parallel_size": 1,
    "enable_prefix_caching": False,
    "load_format": "auto",
    "enable_chunked_prefill": True,
    "swap_space": 4,
    "kv_cache_dtype": "auto",
    "hf_overrides": {},
    "device": "auto",
    "block_size": None,
    "max_num_seqs": None,
    "generation_config": None,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load()


def test_a_ported_script_runs_with_one_warning() -> None:
    with pytest.warns(UserWarning, match="leave out what changes nothing here") as caught:
        llm = LLM("tiny", dtype="float32", max_model_len=64, num_kv_blocks=8, **PORTED)
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message).startswith(
        "pipeline_parallel_size=1, enable_prefix_caching=False, load_format='auto', "
    )
    assert all(f"{key}=" in str(warning.message) for key in PORTED)
    params = SamplingParams(temperature=0, max_tokens=4)
    assert len(llm.generate("def f(x):\n", params, use_tqdm=False)[0].outputs[0].token_ids) == 4


def check_ported_options() -> None:
    own = {"dtype": "float32", "max_model_len": 64}
    with pytest.warns(UserWarning, match="leave out"):
        ported = prepare("tiny", **own, **PORTED)
    assert ported.config == EngineConfig(model=str(model_path()), **own)


def test_what_is_left_out_changes_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    check_ported_options()
    monkeypatch.setattr(vllm_arguments, "OPTIONS", {**OPTIONS, "max_model_len": Foreign((64,), "")})
    with pytest.raises(AssertionError):
        check_ported_options()


def test_values_that_change_nothing() -> None:
    defaults = {key: fields_dict(EngineConfig)[key].default for key in OPTIONS}
    for key, argument in {**ENGINE, **OPTIONS}.items():
        for value in (each for each in (None, *argument.neutral) if each is not defaults.get(key, "none")):
            with pytest.warns(UserWarning, match=f"^{key}=.*: leave out what changes nothing here$") as caught:
                assert without_vllm_arguments({"dtype": "auto", key: value}) == {"dtype": "auto"}
            assert len(caught) == 1
    assert without_vllm_arguments(defaults) == defaults  # without a warning


def test_other_values_are_refused_with_the_reason() -> None:
    for key, argument in ENGINE.items():
        for value in ("something else", 3.5, {"a": 1}, object()):
            with pytest.raises(ConfigError, match=rf"^{key}=.* is not supported: .*\. Leave it out") as caught:
                without_vllm_arguments({key: value})
            assert argument.reason in str(caught.value)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2, .* in each process.* specdec-vllm .* or give 1"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend='ray', .* give 'mp'"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching=True, .* choose one as kv_manager"),
        ({"enable_prefix_caching": False, "kv_manager": "prefix"}, "beside kv_manager='prefix'.* the one or the other"),
        ({"num_gpu_blocks_override": 64}, "num_kv_blocks sets the number of blocks"),
        ({"swap_space": 16}, r"preempted are computed again\. Leave it out, or give 0 or 4"),
        ({"generation_config": "auto"}, "give 'vllm'"),
        ({"block_size": 0}, "block_size=0 is too small"),
        ({"device": "tpu"}, "device='tpu' is not available here"),
        ({"speculative_config": {**NGRAM, "parallel_drafting": True}}, "speculative_config has parallel_drafting=True"),
        ({"speculative_config": {**NGRAM, "posterior_alpha": 0.2}}, "verifier names the acceptance rule"),
        ({"speculative_config": {**NGRAM, "nosuch": None}}, "no key 'nosuch'"),
    ],
    ids=str,
)
def test_what_asks_for_something_else(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare("tiny", **keywords)


def test_no_argument_of_vllm_is_an_option_of_this_engine(plugins: Plugins) -> None:
    own = {attribute.name for attribute in fields(EngineConfig)}
    assert not ENGINE.keys() & (own | KEYS | OLD_KEYS)
    assert OPTIONS.keys() <= own
    for key, argument in OPTIONS.items():
        assert fields_dict(EngineConfig)[key].default not in (NOTHING, *argument.neutral)
    methods = [fields_dict(plugins.proposer(name).config).keys() for name in plugins.proposers()]
    assert not SPECULATION.keys() & SpeculativeConfig.core_keys().union(fields_dict(DraftModelConfig), *methods)


def optional_keys(plugins: Plugins) -> set[str]:
    methods = [fields_dict(plugins.proposer(name).config).keys() for name in plugins.proposers()]
    return SpeculativeConfig.core_keys().union(fields_dict(DraftModelConfig), SPECULATION, *methods) - {"method"}


def check_none_is_left_out(plugins: Plugins, method: str, folder: Path) -> None:
    """Check that None for a key means the same as leaving it out: each key alone, and all at once."""
    given = {"method": method, "num_speculative_tokens": 3}
    if method in ("medusa", "mlp_speculator"):
        given["model"] = str(folder)
    keys = optional_keys(plugins) - given.keys()
    assert {"model", "draft_tensor_parallel_size", "prompt_lookup_max", "moe_backend", "disable_by_batch_size"} <= {
        *keys,
        *given,
    }
    expected = fill_in(given, "tiny", plugins)
    for nones in ([key] for key in keys):
        assert fill_in({**given, **dict.fromkeys(nones)}, "tiny", plugins) == expected
    assert fill_in({**given, **dict.fromkeys(keys)}, "tiny", plugins) == expected


METHODS = ["draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "ngram", "prediction", "suffix"]


@pytest.mark.parametrize("method", METHODS)
def test_none_means_left_out(plugins: Plugins, method: str, tmp_path: Path) -> None:
    check_none_is_left_out(plugins, method, tmp_path)


def test_a_none_that_stays_is_noticed(plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "without_vllm_keys", lambda mapping, known: dict(mapping))
    for method in METHODS:
        with pytest.raises(AssertionError):
            check_none_is_left_out(plugins, method, tmp_path)


def test_every_method_is_among_them(plugins: Plugins) -> None:
    assert plugins.proposers() == METHODS


@pytest.mark.parametrize(
    "config",
    [
        {"method": "draft_model", "draft_tensor_parallel_size": None},
        {"method": "ngram", "model": None, "num_speculative_tokens": 3, "quantization": None},
        {"method": "ngram", "num_speculative_tokens": 3, "verifier": "typical", "posterior_threshold": None},
    ],
    ids=str,
)
def test_options_left_out_with_none_have_their_defaults(config: dict[str, Any]) -> None:
    plain = {key: value for key, value in config.items() if value is not None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = prepare("tiny", speculative_config=config).speculative
    assert found == prepare("tiny", speculative_config=plain).speculative


def test_keys_of_vllm_in_a_speculative_config() -> None:
    idle = {"rejection_sample_method": "standard", "parallel_drafting": False, "moe_backend": None}
    with pytest.warns(UserWarning, match="speculative_config: rejection_sample_method='standard', parallel_") as caught:
        found = prepare("tiny", speculative_config={**NGRAM, **idle}).speculative
    assert len(caught) == 1
    assert found == prepare("tiny", speculative_config=NGRAM).speculative


def test_a_key_that_a_method_has_is_not_vllms() -> None:
    mapping = {"method": "mine", "moe_backend": "fast", "posterior_alpha": None}
    kept = {"method": "mine", "moe_backend": "fast"}
    assert without_vllm_keys(mapping, lambda: {"method", "moe_backend"}) == kept


@pytest.mark.parametrize("model", ["ngram", "[ngram]", "suffix", "[suffix]", "eagle"])
@pytest.mark.parametrize("has_method", [False, True])
def test_the_name_of_a_method_as_model(plugins: Plugins, model: str, has_method: bool) -> None:
    method = model.strip("[]")
    given = {"model": model, "num_speculative_tokens": 3, **({"method": method} if has_method else {})}
    assert fill_in(given, "tiny", plugins) == fill_in({"method": method, "num_speculative_tokens": 3}, "tiny", plugins)


def test_a_method_that_is_not_asked_for_is_noticed(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_names_method", lambda name, plugins: False)
    with pytest.raises(ConfigError, match="the model hub cannot be reached"):
        fill_in({"model": "ngram"}, "tiny", plugins)


def test_two_methods_of_which_one_is_given_as_model(plugins: Plugins) -> None:
    with pytest.raises(ConfigError, match="names two methods, 'eagle' and 'ngram': leave one out"):
        fill_in({"method": "eagle", "model": "ngram"}, "tiny", plugins)


def test_the_name_of_any_proposer_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Core has no list of names: a plugin's own is known once it is loaded, and an alias of it, too."""
    source = """if True:
        from attrs import frozen
        from specdec_core import ProposerSpec, hookimpl

        @frozen
        class Config:
            depth: int = 3

        @hookimpl
        def specdec_proposers():
            return [ProposerSpec("plain_guess", Config, print, 1, aliases=("old_guess",))]
    """
    (tmp_path / "plain_guess_plugin.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    plugins = Plugins.load(modules=["plain_guess_plugin"])
    assert fill_in({"model": "plain_guess", "depth": None}, "tiny", plugins) == {"method": "plain_guess"}
    with pytest.warns(UserWarning, match="'old_guess' is called 'plain_guess' here"):
        assert fill_in({"model": "old_guess"}, "tiny", plugins) == {"method": "plain_guess"}
    with pytest.raises(
        ConfigError, match=r"It is no method, either: unknown proposer 'plain_gues'\. Did you mean 'plain_gu"
    ):
        fill_in({"model": "plain_gues"}, "tiny", plugins)


def test_a_folder_comes_before_a_method(plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ngram").mkdir()
    with pytest.raises(ConfigError, match=r"there is no config.json in 'ngram': give a folder or repository"):
        fill_in({"model": "ngram"}, "tiny", plugins)
    assert fill_in({"model": "[ngram]"}, "tiny", plugins) == {"method": "ngram"}
    assert fill_in({"method": "eagle", "model": "ngram"}, "tiny", plugins)["model"] == "ngram"


def test_a_method_that_is_disabled_says_so() -> None:
    with pytest.raises(ConfigError, match=r"It is no method, either: plugin 'ngram' .* is disabled by"):
        fill_in({"model": "ngram"}, "tiny", Plugins.load(disable="ngram"))
