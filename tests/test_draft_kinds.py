"""A draft checkpoint that is given to another method is refused with an error that begins with what the checkpoint is,
before weights are loaded. The methods of vLLM have a package each, which errors and documents name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file

from specdec_core import LLM, CompatibilityError, ConfigError, PluginError, Plugins
from specdec_core.api.arguments import dry_run
from specdec_core.engine import draft_kind
from specdec_core.models.weights import load_weights
from specdec_core.plugins.offers import Offers
from specdec_model_tiny import model_path

DOCS = Path(__file__).parents[1] / "docs"
SHIPPED = Path(model_path(), "drafts")
KINDS = {
    "eagle": "this is an EAGLE head: use method 'eagle'",
    "eagle3": "this is an EAGLE-3 head: use method 'eagle3'",
    "draft_model": "this is a complete LlamaForCausalLM: use method 'draft_model'",
    "medusa": "this is a set of Medusa heads: use method 'medusa'",
    "mlp_speculator": "this is an MLP speculator: use method 'mlp_speculator'",
}
TENSORS = {
    "medusa": ("0.0.linear.weight", "0.0.linear.bias", "0.1.weight"),
    "mlp_speculator": ("speculator.emb.0.weight", "speculator.proj.0.weight", "speculator.head.0.weight"),
    "unknown": ("decoder.weight",),
}


def write(folder: Path, kind: str, **config: Any) -> Path:
    """Write a checkpoint with the names of such a head's tensors."""
    folder.mkdir()
    save_file({name: torch.zeros(4, 4) for name in TENSORS[kind]}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    made = {kind: write(folder / kind, kind) for kind in ("medusa", "mlp_speculator")}
    return {**{kind: SHIPPED / kind for kind in ("eagle", "eagle3", "draft_model")}, **made}


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load()


def refused(method: str, model: Path, plugins: Plugins) -> str:
    """Return the error of a dry run, which loads no weights."""
    with pytest.raises(CompatibilityError) as caught:
        dry_run("tiny", speculative_config={"method": method, "model": str(model)}, plugins=plugins)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_begins_with_what_it_is(kind: str, checkpoints: dict[str, Path], plugins: Plugins) -> None:
    for method in KINDS.keys() - {kind}:
        error = refused(method, checkpoints[kind], plugins)
        draft = f"for the draft {str(checkpoints[kind])!r}, if no tensors are missing from it"
        assert error == f"{KINDS[kind]}, not {method!r}, {draft}"


def test_a_method_that_recognizes_nothing_adds_its_reason(
    checkpoints: dict[str, Path], plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, proposer = evolve(plugins.proposer("mtp"), detect=None), Plugins.proposer
    monkeypatch.setattr(Plugins, "proposer", lambda self, name: spec if name == "mtp" else proposer(self, name))
    error = refused("mtp", checkpoints["eagle"], plugins)
    assert error.startswith(f"{KINDS['eagle']}, not 'mtp'")
    assert "'mtp' refused it: the checkpoint" in error
    assert "has no MTP module" in error


def test_a_whole_model_is_no_other_kind_for_a_method_that_reads_whole_models(
    checkpoints: dict[str, Path], plugins: Plugins
) -> None:
    assert refused("mtp", checkpoints["eagle"], plugins).startswith(KINDS["eagle"])
    error = refused("mtp", checkpoints["draft_model"], plugins)
    assert "was trained for another target: hidden_size is 192, and this target's is 256" in error
    assert "draft_model'" not in error.replace(str(checkpoints["draft_model"]), "")


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "draft_model"])
def test_the_right_kind_is_not_refused(kind: str, checkpoints: dict[str, Path], plugins: Plugins) -> None:
    config = {"method": kind, "model": str(checkpoints[kind])}
    assert dry_run("tiny", speculative_config=config, plugins=plugins).speculative is not None


def test_what_no_method_recognizes_is_left_to_the_users_method(tmp_path: Path, plugins: Plugins) -> None:
    folder = write(tmp_path / "unknown", "unknown", model_type="llama")
    assert not refused("medusa", folder, plugins).startswith("this is")


def test_a_broken_checkpoint_keeps_its_own_error(tmp_path: Path, plugins: Plugins) -> None:
    folder = write(tmp_path / "broken", "medusa")
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="cannot be read"):
        dry_run("tiny", speculative_config={"method": "eagle", "model": str(folder)}, plugins=plugins)


def test_a_target_that_lost_its_own_weights_may_be_incomplete(tmp_path: Path) -> None:
    """Only its MTP module is left."""
    folder = shutil.copytree(model_path(), tmp_path / "target")
    save_file({}, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CompatibilityError, match=r"is an MTP module.* its files are incomplete: .*missing_keys"):
        LLM(str(folder))


def test_a_head_is_not_found_out_after_the_target_is_loaded(
    monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, Path], plugins: Plugins
) -> None:
    config = {"method": "draft_model", "model": str(checkpoints["eagle"])}
    loads: list[Any] = []

    def load(*args: Any, **keywords: Any) -> Any:
        loads.append(args)
        return load_weights(*args, **keywords)

    monkeypatch.setattr("specdec_core.models.model.load_weights", load)
    with pytest.raises(CompatibilityError, match=r"^this is an EAGLE head"):
        LLM("tiny", speculative_config=config, plugins=plugins)
    assert not loads
    monkeypatch.setattr("specdec_core.api.arguments.refuse_other_kind", lambda *draft: None)  # as if not there yet
    with pytest.raises(CompatibilityError, match=r"^this is an EAGLE head"):
        LLM("tiny", speculative_config=config, plugins=plugins)
    assert len(loads) == 2, "the target, then the draft, whose error is explained"


def test_a_fault_in_the_comparison_is_noticed(
    monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, Path], plugins: Plugins
) -> None:
    """Negative control: without the comparison of kinds (`_other_kind`), the error is the loader's own, about a size,
    and does not say what the checkpoint is."""
    monkeypatch.setattr(draft_kind, "_other_kind", lambda *draft: None)
    assert refused("eagle", checkpoints["draft_model"], plugins).startswith("the hidden_size of the draft head")


def test_an_unknown_checkpoint_is_named_by_its_model_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plugins: Plugins
) -> None:
    folder = write(tmp_path / "unknown", "unknown", model_type="mystery")
    with pytest.raises(PluginError, match=r"whose model_type is 'mystery'\. Name one .* or install its plugin"):
        dry_run("tiny", speculative_config={"model": str(folder)}, plugins=plugins)
    (folder / "config.json").write_text('{"model_type": "mlp_speculator"}')
    with pytest.raises(PluginError, match=r"The installed method 'mlp_speculator' does not, either"):
        dry_run("tiny", speculative_config={"model": str(folder)}, plugins=plugins)
    with pytest.raises(PluginError, match=r"'mlp_speculator'\. Name one .* or install specdec-proposer-mlp\."):
        dry_run("tiny", speculative_config={"model": str(folder)}, plugins=Plugins.load(disable=["mlp_speculator"]))
    (folder / "config.json").write_text('{"speculators_model_type": "dflash"}')
    with pytest.raises(PluginError, match="model_type is 'dflash'"):
        dry_run("tiny", speculative_config={"model": str(folder)}, plugins=plugins)


def table() -> dict[str, str]:
    """Return the documents' table of vLLM's methods: {method: what its second column says}."""
    text = (DOCS / "configuration.md").read_text(encoding="utf-8").partition("| `method` | package |")[2]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|$", text.partition("\n\n")[0], re.MULTILINE)
    return {name: said for names, said in rows for name in re.findall(r"`(\w+)`", names)}


OLD_NAMES_OF_MTP = [f"{name}_mtp" for name in ("deepseek", "mimo", "glm4_moe", "ernie", "qwen3_next", "longcat_flash")]
VLLMS = ["ngram", "medusa", "mlp_speculator", "draft_model", "suffix", "eagle", "eagle3", "mtp", *OLD_NAMES_OF_MTP]
VLLMS.append("pangu_ultra_moe_mtp")


@pytest.mark.parametrize("method", VLLMS)
def test_each_method_of_vllm_has_its_package(method: str) -> None:
    """With no plugin installed, the error names the package in the documents' table."""
    with pytest.raises(PluginError) as caught:
        bare(Plugins.load).proposer(method)
    (package,) = re.findall(r"install (specdec-proposer-\w+)", str(caught.value))
    assert str(caught.value).startswith(f"proposer {method!r} is not installed: install {package}.")
    assert package in table()[method]
    assert ("not built" in table()[method]) == (method == "pangu_ultra_moe_mtp")


def bare(load: Callable[[], Plugins]) -> Plugins:
    """Return the plugins of an environment in which specdec-core is installed alone."""
    plugins = load()
    plugins._offers = Offers([plugin for plugin in plugins._plugins if plugin.builtin])
    return plugins


def test_the_table_has_no_other_methods() -> None:
    assert sorted(table()) == sorted(VLLMS)


def test_other_names_are_unknown_still() -> None:
    plugins = bare(Plugins.load)
    with pytest.raises(PluginError, match=r"unknown proposer 'medussa'\. Did you mean 'medusa'\?"):
        plugins.proposer("medussa")
    with pytest.raises(PluginError, match=r"unknown proposer 'mlp'\. Did you mean 'mlp_speculator'\?"):
        plugins.proposer("mlp")
    with pytest.raises(PluginError, match="unknown verifier 'eagle'"):
        plugins.verifier("eagle")
    with pytest.raises(PluginError, match="kv_manager 'prefix' is not installed: install specdec-kv-prefix"):
        plugins.kv_manager("prefix")
    with pytest.raises(ConfigError, match="no plugin with a grammar is usable: install specdec-grammar"):
        plugins.grammar()
