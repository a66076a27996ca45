"""Whole training runs on a tiny random target model: learning, resuming after a kill, and errors."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from specdec_core import (
    LLM,
    CompatibilityError,
    ConfigError,
    PluginError,
    Plugins,
    ProposerSpec,
    SamplingParams,
    TrainingRecipe,
    cli,
    load_training_target,
)
from specdec_testing import tiny_target
from specdec_train.commands import command_of
from specdec_train.features import features_of
from specdec_train.run import train
from specdec_train.settings import Settings

BASE = {"dtype": "float32", "length": 32, "batch": 8, "eval_tokens": 40}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target model and training texts that the target generated."""
    folder = tmp_path_factory.mktemp("given")
    target = tiny_target(folder / "target", initializer_range=0.5, num_hidden_layers=1)
    starts = np.random.default_rng(0).integers(0, 48, (200, 2)).tolist()
    params = SamplingParams(temperature=1, max_tokens=30, seed=0)
    with LLM(target, dtype="float32", skip_tokenizer_init=True, num_kv_blocks=512) as llm:
        outputs = llm.generate([{"prompt_token_ids": start} for start in starts], params, use_tqdm=False)
    said = [[*start, *output.outputs[0].token_ids] for start, output in zip(starts, outputs, strict=True)]
    np.save(folder / "said.npy", np.array(said))
    return folder


@pytest.fixture(scope="module")
def specs() -> dict[str, ProposerSpec]:
    plugins = Plugins.load()
    return {name: plugins.proposer(name) for name in ("eagle", "eagle3", "draft_model")}


def run(spec: ProposerSpec, folder: Path, out: Path, *, options: dict[str, Any] | None = None, **given: Any) -> None:
    assert spec.train is not None
    settings = Settings(
        **{**BASE, "target": str(folder / "target"), "data": (folder / "said.npy",), "out": out, **given}
    )
    train(spec, settings, spec.train.options(**options or {}))


def log(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("eagle3", {"ttt_steps": 3, "draft_vocab_size": 40}),
        pytest.param("eagle", {"token_weight": 1.0}, marks=pytest.mark.nightly),
        ("draft_model", {"hidden_size": 32, "num_heads": 2, "num_layers": 1}),
    ],
)
def test_a_draft_learns_its_target(method, options, specs, folder, tmp_path):
    out = tmp_path / "out"
    run(specs[method], folder, out, options=options, steps=150, lr=1e-2, evaluate_every=0)
    measured = [line for line in log(out) if "held_out_loss" in line]
    first, last = measured
    assert last["held_out_loss"] < 0.9 * first["held_out_loss"]
    for name, gain in (("greedy", 0.3), ("temperature_1", 0.05)):
        assert last["acceptance_length"][name] > first["acceptance_length"][name] + gain, measured
    assert (out / "curves.png").stat().st_size > 1000

    speculative = {"method": method, "model": str(out), "num_speculative_tokens": 4}
    prompts, params = [{"prompt_token_ids": [3, 5, 7]}], SamplingParams(temperature=0, max_tokens=20)
    outputs = []
    for config in (None, speculative):
        with LLM(folder / "target", dtype="float32", skip_tokenizer_init=True, num_kv_blocks=128,
                 speculative_config=config) as llm:  # fmt: skip
            outputs += llm.generate(prompts, params, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def killed_in(spec: ProposerSpec, num_steps: int) -> ProposerSpec:
    """Return the method's ProposerSpec with a changed training recipe: the run is interrupted (KeyboardInterrupt) in
    the training step after `num_steps` steps."""

    def make(*given: Any) -> torch.nn.Module:
        trainee = spec.train.make(*given)
        done = 0

        def count(module: torch.nn.Module, *_: Any) -> None:
            nonlocal done
            done += module.training
            if done > num_steps:
                raise KeyboardInterrupt

        trainee.register_forward_hook(count)
        return trainee

    recipe = attrs.evolve(spec.train, make=make)
    assert isinstance(recipe, TrainingRecipe)
    return attrs.evolve(spec, train=recipe)


@pytest.mark.parametrize(
    ("method", "killed_after"), [("eagle", 8), pytest.param("draft_model", 3, marks=pytest.mark.nightly)]
)
def test_a_run_that_was_killed_ends_the_same(method, killed_after, specs, folder, tmp_path, capsys):
    given = {"steps": 12, "save_every": 5, "evaluate_every": 6, "log_every": 1, "eval_prompts": 2, "eval_tokens": 8}
    run(specs[method], folder, tmp_path / "whole", **given)
    with pytest.raises(KeyboardInterrupt):
        run(killed_in(specs[method], killed_after), folder, tmp_path / "out", **given)
    then = "--resume continues after step 5" if killed_after > 5 else "nothing was saved yet"
    assert f"interrupted in step {killed_after + 1} of 12: {then}" in capsys.readouterr().out
    with (tmp_path / "out" / "log.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # killed while writing
    (tmp_path / "out" / "state.pt.partial").write_bytes(b"half")
    run(specs[method], folder, tmp_path / "out", **given, resume=True)
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert whole.keys() == resumed.keys()
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), name
    assert log(tmp_path / "whole") == log(tmp_path / "out")


class Interrupting:
    """Is interrupted while it is deleted, where Python discards exceptions."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interruptible():
    """A shell starts background jobs with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("is_training", [True, False], ids=["in a step", "in the first evaluation"])
def test_an_interrupt_that_python_discards_is_not_lost(
    is_training, specs, folder, tmp_path, monkeypatch, capsys, interruptible
):
    discarded = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: discarded.append(lost.exc_type))

    def make(*given: Any) -> torch.nn.Module:
        trainee = specs["eagle"].train.make(*given)
        trainee.register_forward_hook(
            lambda module, *_: Interrupting() and None if module.training == is_training else None
        )
        return trainee

    spec = attrs.evolve(specs["eagle"], train=attrs.evolve(specs["eagle"].train, make=make))
    with pytest.raises(KeyboardInterrupt):
        run(spec, folder, tmp_path / "out", steps=3, eval_prompts=0)
    assert discarded == [KeyboardInterrupt]
    assert f"interrupted in step {2 if is_training else 1} of 3: nothing was saved yet" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_features_that_are_kept_are_the_same(specs, folder, tmp_path):
    given = {"steps": 6, "eval_prompts": 0, "log_every": 1}
    kept = tmp_path / "features"
    run(specs["eagle3"], folder, tmp_path / "anew", **given)
    run(specs["eagle3"], folder, tmp_path / "kept", **given, features=kept)
    for one, other in zip(log(tmp_path / "anew"), log(tmp_path / "kept"), strict=True):
        assert one["step"] == other["step"]
        assert one.get("loss", 0) == pytest.approx(other.get("loss", 0), abs=1e-3)
    (shard,) = kept.glob("*.safetensors")
    before = load_file(shard)
    shard.unlink()  # as if the run was killed before writing it
    run(specs["eagle3"], folder, tmp_path / "again", **given, features=kept)
    for tap, tensor in load_file(shard).items():
        assert torch.equal(tensor, before[tap]), tap
    with pytest.raises(ConfigError, match="was computed with other taps"):
        run(specs["eagle"], folder, tmp_path / "other", **given, features=kept)


def test_windows_have_the_hidden_states_of_whole_texts(specs, folder, tmp_path):
    seen, recipe = [], specs["eagle"].train

    def make(*args: Any) -> Any:
        trainee = recipe.make(*args)
        trainee.register_forward_pre_hook(lambda module, given: seen.append(given[0]) if module.training else None)
        return trainee

    spec = attrs.evolve(specs["eagle"], train=attrs.evolve(recipe, make=make))
    texts = np.load(folder / "said.npy")[:40]
    np.save(tmp_path / "texts.npy", texts)
    data = {"data": (tmp_path / "texts.npy",), "held_out": (folder / "said.npy",)}
    given = {"steps": 20, "eval_prompts": 0, "evaluate_every": 0, "length": 32, "window": 8, "batch": 8}
    run(spec, folder, tmp_path / "out", **data, **given, features=tmp_path / "features")

    target = load_training_target(str(folder / "target"), "float32", None)
    whole = features_of(target, torch.from_numpy(texts).long(), ("final",))["final"]
    place = {tuple(text[i : i + 8]): (row, i) for row, text in enumerate(texts.tolist()) for i in range(0, 32, 8)}
    windows = [window for batch in seen for window in zip(batch.token_ids, batch.features["final"], strict=True)]
    found = [place[tuple(token_ids.tolist())] for token_ids, _ in windows]
    assert sorted(set(found)) == sorted(place.values())  # in an epoch, every window once
    assert len({row for row, _ in found[:8]}) > 4, "a batch is of many texts"
    for (row, start), (_, features) in zip(found, windows, strict=True):
        torch.testing.assert_close(features, whole[row, start : start + 8], atol=1e-5, rtol=0)


def test_the_target_says_the_data(specs, folder, tmp_path):
    given = {"steps": 2, "generate": 20, "prompt_len": 3, "eval_prompts": 0}
    out = tmp_path / "out"
    run(specs["eagle"], folder, out, **given)
    lines = (out / "generated.jsonl").read_text().splitlines()[1:]
    said = np.load(folder / "said.npy")
    assert len(lines) == len(said)
    for line, text in zip(map(json.loads, lines), said.tolist(), strict=True):
        assert (line[0], len(line[1])) == (text[:3], 20)
    run(specs["eagle"], folder, out, **{**given, "steps": 3}, resume=True)
    with pytest.raises(ConfigError, match=r"generated with other settings"):
        run(specs["eagle"], folder, out, **{**given, "generate": 21}, resume=True)


def test_the_checkpoint_of_a_finished_run_is_written_again(specs, folder, tmp_path):
    given = {"steps": 1, "eval_prompts": 0}
    run(specs["eagle"], folder, tmp_path / "first", **given)
    for out, start in ((tmp_path / "first", None), (tmp_path / "second", str(tmp_path / "first"))):
        run(specs["eagle"], folder, out, **given, start=start, resume=out.exists())
        weights = out / "model.safetensors"
        before = load_file(weights)
        weights.unlink()
        run(specs["eagle"], folder, out, **given, start=start, resume=True)
        assert all(torch.equal(before[name], tensor) for name, tensor in load_file(weights).items())


class TestWhatIsWrongIsExplained:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"data": (Path("no/such"),)}, "does not exist"),
            ({"data": (Path("no/such"),), "target": "no/such/model"}, "data 'no/such' does not exist"),
            ({"held_out": (Path("no/such"),), "target": "no/such/model"}, "data 'no/such' does not exist"),
            ({"target": "no/such/model"}, "cannot be read"),
            ({"length": 600}, "length=600, but the target takes 512"),
            ({"generate": 500}, "a prompt has 32 tokens, and with generate=500 it may have 12"),
            ({"steps": 0}, "steps=0"),
            ({"device": "abacus"}, "device='abacus'"),
            ({"device": "cuda:7"}, "device='cuda:7'"),
        ],
    )
    def test_settings(self, given, message, specs, folder, tmp_path):
        with pytest.raises(ConfigError, match=message):
            run(specs["eagle"], folder, tmp_path / "out", **given)

    def test_data_of_another_tokenizer(self, specs, folder, tmp_path):
        np.save(tmp_path / "other.npy", np.full((4, 20), 48))
        with pytest.raises(ConfigError, match="the token id 48, and the target has 48 tokens"):
            run(specs["eagle"], folder, tmp_path / "out", data=(tmp_path / "other.npy",))

    def test_text_without_a_tokenizer(self, specs, folder, tmp_path):
        (tmp_path / "some.txt").write_text("some words")
        with pytest.raises(ConfigError, match="the target has no tokenizer"):
            run(specs["eagle"], folder, tmp_path / "out", data=(tmp_path / "some.txt",))

    def test_a_folder_in_use(self, specs, folder, tmp_path):
        (tmp_path / "mine").write_text("")
        with pytest.raises(ConfigError, match="is not empty: pass --resume"):
            run(specs["eagle"], folder, tmp_path)

    def test_a_run_of_other_settings(self, specs, folder, tmp_path):
        given = {"steps": 1, "eval_prompts": 0}
        run(specs["eagle"], folder, tmp_path / "out", **given)
        with pytest.raises(ConfigError, match="batch was 8"):
            run(specs["eagle"], folder, tmp_path / "out", **given, batch=4, resume=True)
        with pytest.raises(ConfigError, match="bias was True"):
            run(specs["eagle"], folder, tmp_path / "out", **given, options={"bias": False}, resume=True)

    @pytest.mark.parametrize("option", ["out", "features"])
    def test_a_folder_that_cannot_be_made(self, option, specs, folder, tmp_path):
        (tmp_path / "file").touch()
        given = {"out": tmp_path / "out", option: tmp_path / "file" / "folder"}
        message = f"^--{option} '.*' cannot be written to: Not a directory. Name a folder in which you may write$"
        with pytest.raises(ConfigError, match=message):
            run(specs["eagle"], folder, **given, steps=1, eval_prompts=0)

    def test_a_run_of_other_texts(self, specs, folder, tmp_path):
        data = tmp_path / "said.npy"
        shutil.copy(folder / "said.npy", data)
        given = {"steps": 1, "eval_prompts": 0, "data": (data,)}
        run(specs["eagle"], folder, tmp_path / "out", **given)
        np.save(data, np.load(data)[:100])
        with pytest.raises(ConfigError, match=r"had other settings: the texts were others\. Give the same ones"):
            run(specs["eagle"], folder, tmp_path / "out", **given, resume=True)

    def test_a_run_of_another_method(self, specs, folder, tmp_path):
        given = {"steps": 1, "eval_prompts": 0}
        run(specs["eagle"], folder, tmp_path / "out", **given)
        message = (
            "^the run in '.*' trains 'eagle', and this command 'eagle3': resume it with `spec-decode train eagle`,"
        )
        with pytest.raises(ConfigError, match=message):
            run(specs["eagle3"], folder, tmp_path / "out", **given, resume=True)

    def test_windows_without_stored_hidden_states(self, specs, folder, tmp_path):
        with pytest.raises(ConfigError, match=r"^window=8 takes stored hidden states: give --features FOLDER, too$"):
            run(specs["eagle"], folder, tmp_path / "out", window=8)

    def test_one_folder_for_both(self, specs, folder, tmp_path):
        with pytest.raises(ConfigError, match=r"^--features and --out are the same folder, .*: name another for one$"):
            run(specs["eagle"], folder, tmp_path / "out", features=tmp_path / "out")

    def test_a_run_that_is_not_there(self, specs, folder, tmp_path):
        with pytest.raises(ConfigError, match="does not exist: name the folder of the run, or leave --resume out"):
            run(specs["eagle"], folder, tmp_path / "out", steps=1, resume=True)
        assert not (tmp_path / "out").exists()

    def test_a_run_of_weights_that_have_changed(self, specs, folder, tmp_path):
        target, given = tmp_path / "target", {"steps": 1, "eval_prompts": 0, "target": str(tmp_path / "target")}
        tiny_target(target)
        for features in (None, tmp_path / "features"):
            run(specs["eagle"], folder, tmp_path / f"out-{features is None}", features=features, **given)
        shutil.rmtree(target)
        tiny_target(target, seed=1)
        with pytest.raises(ConfigError, match=r"had other settings: the target's weights were others\. Give"):
            run(specs["eagle"], folder, tmp_path / "out-True", **given, resume=True)
        with pytest.raises(ConfigError, match="was computed with other weights"):
            run(specs["eagle"], folder, tmp_path / "new", features=tmp_path / "features", **given)

    def test_a_target_that_lacks_weights(self, specs, folder, tmp_path):
        target = tiny_target(tmp_path / "target")
        tensors = load_file(target / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CompatibilityError, match=r"does not hold this model's weights: .*model.norm.weight"):
            run(specs["eagle"], folder, tmp_path / "out", target=str(target))

    def test_a_gradient_that_is_not_finite(self, specs, folder, tmp_path):
        """If the loss is finite but its gradient is not, an error is raised and no weights are saved."""

        def make(*given: Any) -> torch.nn.Module:
            trainee = specs["eagle"].train.make(*given)
            trainee.register_forward_hook(lambda *_: (next(trainee.parameters()).mul(0).sum().sqrt(), {}))
            return trainee

        recipe = attrs.evolve(specs["eagle"].train, make=make)
        with pytest.raises(ConfigError, match="the gradient's norm is nan in step 0: lower --lr"):
            run(attrs.evolve(specs["eagle"], train=recipe), folder, tmp_path / "out", steps=1, eval_prompts=0)
        assert not (tmp_path / "out" / "model.safetensors").exists()

    def test_an_option_that_every_run_has(self, specs):
        recipe = attrs.evolve(specs["eagle"].train, options=attrs.make_class("Options", ["seed", "width"]))
        with pytest.raises(PluginError, match="'eagle' has the options seed, which every run has"):
            command_of(attrs.evolve(specs["eagle"], train=recipe))

    def test_a_head_of_another_target(self, specs, folder, tmp_path):
        run(specs["eagle3"], folder, tmp_path / "out", steps=1, eval_prompts=0)
        other = tiny_target(tmp_path / "target", hidden_size=64)
        with pytest.raises(CompatibilityError, match="another target"):
            LLM(other, skip_tokenizer_init=True, num_kv_blocks=64,
                speculative_config={"method": "eagle3", "model": str(tmp_path / "out")})  # fmt: skip


def test_the_command_has_the_recipes_options(specs, folder, tmp_path, capsys):
    command = command_of(specs["eagle3"])
    command.main(
        [
            *("--target", str(folder / "target"), "--data", str(folder / "said.npy"), "--out", str(tmp_path / "out")),
            *("--steps", "1", "--eval-prompts", "0", "--draft-vocab-size", "30", "--aux-layers", "0"),
            *("--length", "16", "--dtype", "float32"),
        ],
        standalone_mode=False,
    )
    out = str(tmp_path / "out")
    last = capsys.readouterr().out.splitlines()[-1]
    use = {"method": "eagle3", "model": out}
    assert last == f"the draft is in {out!r}: LLM({str(folder / 'target')!r}, speculative_config={use})"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["draft_vocab_size"], config["eagle_aux_hidden_state_layer_ids"]) == (30, [0])


def test_the_command_lists_what_can_be_trained_beside_plugins_of_other_kinds():
    """Plugins without a method name, such as specdec-kernels, which offers operations, do not break the list of
    methods."""
    listed = CliRunner().invoke(cli.main, ["train", "--help"], catch_exceptions=False)
    assert listed.exit_code == 0
    assert {"draft_model", "eagle", "eagle3"} <= set(listed.output.split())
    assert "ngram" not in listed.output.split()
