"""Training that starts from the weights of a trained draft: fine-tuning, and further stages of training."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from attrs import define
from safetensors.torch import load_file, save_file

from specdec_core import CompatibilityError, ConfigError, Plugins, ProposerSpec, TrainingBatch, load_training_target
from specdec_testing import tiny_target
from specdec_train import run as running
from specdec_train.run import train
from specdec_train.settings import Settings

VOCAB_SIZE = 48
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle": {"bias": False, "intermediate_size": 24},
    "eagle3": {"ttt_steps": 2, "num_layers": 2, "draft_vocab_size": 40},
    "mlp_speculator": {"n_predict": 2, "tie_weights": True, "inner_dim": 20},
    "medusa": {"num_heads": 2, "truncated_vocab_size": 40},
    "mtp": {"num_steps": 2},
    "draft_model": {"hidden_size": 16, "num_heads": 2, "num_layers": 1},
}
FURTHER: dict[str, dict[str, Any]] = {
    "eagle": {"bias": False},
    "eagle3": {"ttt_steps": 2, "num_layers": 2},
    "mlp_speculator": {"n_predict": 2, "tie_weights": True},
    "medusa": {"num_heads": 2},
    "mtp": {"num_steps": 2},
    "draft_model": {},
}
"""The options of a run that starts from a draft with OPTIONS: sizes that have no default are left out."""
CHEAP = ("eagle3", "mlp_speculator")
SOME = [name if name in CHEAP else pytest.param(name, marks=pytest.mark.nightly) for name in OPTIONS]


@pytest.fixture(scope="module", autouse=True)
def _fast():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "can_draw", lambda: False)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and random texts, in which half of the tokens are rare."""
    folder = tmp_path_factory.mktemp("given")
    tiny_target(folder / "target", initializer_range=0.5, num_hidden_layers=2)
    random = np.random.default_rng(0)
    np.save(
        folder / "texts.npy", np.minimum(random.integers(0, VOCAB_SIZE, (60, 16)), random.integers(0, 96, (60, 16)))
    )
    return folder


@pytest.fixture(scope="module")
def specs() -> dict[str, ProposerSpec]:
    plugins = Plugins.load()
    return {name: plugins.proposer(name) for name in OPTIONS}


def run(spec: ProposerSpec, folder: Path, out: Path, options: dict[str, Any], **given: Any) -> None:
    assert spec.train is not None
    base = {"target": str(folder / "target"), "data": (folder / "texts.npy",), "out": out, "dtype": "float32"}
    base |= {"length": 16, "steps": 6, "lr": 1e-2, "log_every": 1, "evaluate_every": 0, "eval_prompts": 0}
    train(spec, Settings(**{**base, **given}), spec.train.options(**options))


@pytest.fixture(scope="module")
def heads(specs, folder, tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that trains a draft of a method, once, and returns its folder."""
    made: dict[str, Path] = {}

    def head(method: str) -> Path:
        if method not in made:
            made[method] = tmp_path_factory.mktemp("heads") / method
            run(specs[method], folder, made[method], OPTIONS[method])
        return made[method]

    return head


def killed_in(spec: ProposerSpec, num_steps: int) -> ProposerSpec:
    """Return the method's ProposerSpec with a recipe whose run is interrupted in the training step after `num_steps`
    steps."""
    done = 0

    def count(module: torch.nn.Module, *_: Any) -> None:
        nonlocal done
        done += module.training
        if done > num_steps:
            raise KeyboardInterrupt

    return hooked(spec, lambda trainee: trainee.register_forward_hook(count))


def hooked(spec: ProposerSpec, hook: Callable[[torch.nn.Module], Any]) -> ProposerSpec:
    """Return the method's ProposerSpec with a recipe whose trainees are given to `hook` first."""

    def make(*given: Any) -> torch.nn.Module:
        trainee: torch.nn.Module = spec.train.make(*given)
        hook(trainee)
        return trainee

    return attrs.evolve(spec, train=attrs.evolve(spec.train, make=make))


@define
class FirstStep:
    """The batch of a run's first training step, its loss, and the state of torch's generator before it."""

    batch: TrainingBatch | None = None
    loss: float = 0.0
    generator: torch.Tensor | None = None


def watched(spec: ProposerSpec, seen: FirstStep) -> ProposerSpec:
    """Return the method's ProposerSpec with a recipe whose trainee records its first training step."""

    def before(module: torch.nn.Module, given: Any) -> None:
        if module.training and seen.batch is None:
            seen.generator = torch.get_rng_state()

    def after(module: torch.nn.Module, given: Any, result: Any) -> None:
        if module.training and seen.batch is None:
            seen.batch, seen.loss = given[0], float(result[0].detach())

    def hook(trainee: torch.nn.Module) -> None:
        trainee.register_forward_pre_hook(before)
        trainee.register_forward_hook(after)

    return hooked(spec, hook)


def loss_of_head(spec: ProposerSpec, method: str, folder: Path, head: Path, seen: FirstStep) -> float:
    """Compute the loss of a trained draft on the batch of a first step, from the state that its run has saved."""
    target = load_training_target(str(folder / "target"), "float32", "cpu")
    trainee = spec.train.make(spec.train.options(**OPTIONS[method]), target, torch.arange(VOCAB_SIZE))
    trainee.load_state_dict(torch.load(head / "state.pt", weights_only=True)["trainee"])
    torch.set_rng_state(seen.generator)
    loss, _ = trainee.train()(seen.batch)
    return float(loss.detach())


def gap(method: str, specs: Any, folder: Path, head: Path, out: Path, start: str | None) -> float:
    """Return the difference between the first loss of a run and that of a trained draft on the same batch."""
    seen = FirstStep()
    options = FURTHER[method] if start else OPTIONS[method]
    run(watched(specs[method], seen), folder, out, options, steps=1, seed=7, start=start)
    return abs(seen.loss - loss_of_head(specs[method], method, folder, head, seen))


@pytest.mark.parametrize("method", SOME)
def test_a_run_starts_with_the_loss_of_its_start(method, specs, folder, heads, tmp_path):
    head = heads(method)
    assert gap(method, specs, folder, head, tmp_path / "further", str(head)) < 1e-5
    assert gap(method, specs, folder, head, tmp_path / "new", None) > 1e-2


def weights_are_not_taken_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(running, "start_from", lambda *_: None)


def a_tensor_is_left_out(patch: pytest.MonkeyPatch) -> None:
    start_from = running.start_from

    def changed(model: str, trainee: torch.nn.Module, *others: Any) -> None:
        start_from(model, trainee, *others)
        torch.nn.init.zeros_([*trainee.parameters()][-1])

    patch.setattr(running, "start_from", changed)


@pytest.mark.parametrize("mistake", [weights_are_not_taken_over, a_tensor_is_left_out], ids=lambda each: each.__name__)
def test_a_start_that_is_not_taken_over_is_noticed(mistake, specs, folder, heads, tmp_path, monkeypatch):
    mistake(monkeypatch)
    monkeypatch.setitem(FURTHER, "mlp_speculator", OPTIONS["mlp_speculator"])
    head = heads("mlp_speculator")
    assert gap("mlp_speculator", specs, folder, head, tmp_path / "out", str(head)) > 1e-3


@pytest.mark.parametrize(
    "method", [name if name == "eagle3" else pytest.param(name, marks=pytest.mark.nightly) for name in OPTIONS]
)
def test_a_run_with_a_start_that_was_killed_ends_the_same(method, specs, folder, heads, tmp_path):
    """The start may be gone when the run is resumed, unless the run was killed before it saved anything."""
    start = shutil.copytree(heads(method), tmp_path / "start")
    given = {"steps": 6, "save_every": 3, "start": str(start), "seed": 7}
    run(specs[method], folder, tmp_path / "whole", FURTHER[method], **given)
    for num_steps, resume in ((1, False), (4, True)):
        with pytest.raises(KeyboardInterrupt):
            run(killed_in(specs[method], num_steps), folder, tmp_path / "out", FURTHER[method], **given, resume=resume)
    assert torch.load(tmp_path / "out" / "state.pt", weights_only=True)["checked"]["start"] == str(start)
    shutil.rmtree(start)
    run(specs[method], folder, tmp_path / "out", FURTHER[method], **given, resume=True)
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert whole.keys() == resumed.keys()
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), name
    with pytest.raises(ConfigError, match="had other settings: start was"):
        run(specs[method], folder, tmp_path / "out", OPTIONS[method], **given | {"start": None}, resume=True)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("mlp_speculator", {}, "has n_predict=2, tie_weights=True, and this run n_predict=3, tie_weights=False: give"),
        (
            "mlp_speculator",
            {"inner_dim": 32} | FURTHER["mlp_speculator"],
            "has inner_dim=20, and this run inner_dim=32",
        ),
        ("eagle3", {}, "has num_layers=2, and this run num_layers=1: give num_layers=2, or start from another"),
        (
            "eagle3",
            {"num_layers": 2, "draft_vocab_size": 30},
            "has draft_vocab_size=40, and this run draft_vocab_size=30",
        ),
        ("eagle3", {"num_layers": 2, "aux_layers": (0,)}, "reads .* layers 0,1, and .* are 0: give aux_layers=0,1"),
        ("draft_model", {"num_layers": 3, "num_heads": 2}, "has num_layers=1, and this run num_layers=3"),
        ("draft_model", {"from_layers": 1}, "from_layers=1 copies the target's layers"),
        (
            "mlp_speculator",
            {"n_predict": 2, "inner_dim": 16, "init_from_target": True},
            "has .*init_from_target=False, and this run .*init_from_target=True",
        ),
        pytest.param("eagle", {}, "has bias=False, and this run bias=True", marks=pytest.mark.nightly),
        pytest.param(
            "eagle", {"bias": False, "intermediate_size": 9}, "intermediate_size=24", marks=pytest.mark.nightly
        ),
        pytest.param("medusa", {}, "has num_heads=2, and this run num_heads=5", marks=pytest.mark.nightly),
        pytest.param(
            "medusa", {"num_heads": 2, "truncated_vocab_size": 48}, "truncated_vocab_size=40", marks=pytest.mark.nightly
        ),
    ],
    ids=str,
)
def test_a_start_of_other_sizes_is_refused(method, options, message, specs, folder, heads, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run(specs[method], folder, tmp_path / "out", options, start=str(heads(method)))


def test_a_start_is_refused_before_texts_are_generated(specs, folder, heads, tmp_path):
    with pytest.raises(ConfigError, match="has n_predict=2"):
        run(specs["mlp_speculator"], folder, tmp_path / "out", {}, start=str(heads("mlp_speculator")), generate=4)
    assert not (tmp_path / "out" / "generated.jsonl").exists()


@pytest.mark.parametrize("method", SOME)
def test_a_start_for_another_target_is_refused(method, specs, folder, heads, tmp_path):
    other = tiny_target(tmp_path / "target", hidden_size=64, vocab_size=50, num_hidden_layers=2)
    with pytest.raises(CompatibilityError, match=r"another target|the target 50|not fit this target"):
        run(specs[method], folder, tmp_path / "out", FURTHER[method], start=str(heads(method)), target=str(other))


@pytest.mark.parametrize("method", SOME)
def test_a_start_that_lacks_a_tensor_is_refused(method, specs, folder, heads, tmp_path):
    start = shutil.copytree(heads(method), tmp_path / "start")
    tensors = load_file(start / "model.safetensors")
    name = next(
        name for name in sorted(tensors) if name.endswith("proj.weight") or "proj.0" in name or "blocks.1" in name
    )
    del tensors[name]
    save_file(tensors, start / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((CompatibilityError, ConfigError), match=r"missing|does not hold|no MTP module"):
        run(specs[method], folder, tmp_path / "out", FURTHER[method], start=str(start))


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("eagle3", "draft_model", "this is a complete LlamaForCausalLM: use method 'draft_model', not 'eagle3'"),
        ("mlp_speculator", "eagle3", "this is an EAGLE-3 head: use method 'eagle3', not 'mlp_speculator'"),
        ("draft_model", "eagle3", "this is an EAGLE-3 head: use method 'eagle3', not 'draft_model'"),
        pytest.param("eagle", "eagle3", "this is an EAGLE-3 head", marks=pytest.mark.nightly),
        pytest.param("medusa", "mlp_speculator", "this is an MLP speculator", marks=pytest.mark.nightly),
        pytest.param("mtp", "eagle3", "this is an EAGLE-3 head", marks=pytest.mark.nightly),
    ],
)
def test_a_start_of_another_method_is_refused(method, given, message, specs, folder, heads, tmp_path):
    with pytest.raises(CompatibilityError, match=message):
        run(specs[method], folder, tmp_path / "out", FURTHER[method], start=str(heads(given)))


@pytest.mark.parametrize("method", SOME)
def test_a_start_that_is_not_there_is_refused(method, specs, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for start in ("empty", "no-such"):
        with pytest.raises(ConfigError, match=start):
            run(specs[method], folder, tmp_path / f"out-{start}", FURTHER[method], start=str(tmp_path / start))


def test_a_recipe_that_cannot_load_says_so(specs, folder, heads, tmp_path):
    class WithoutLoad(torch.nn.Module):
        """As a recipe's trainee was before drafts could be trained further."""

        def __init__(self, trainee: torch.nn.Module) -> None:
            super().__init__()
            self.trainee = trainee

        def forward(self, batch: TrainingBatch) -> Any:
            return self.trainee(batch)

    spec = specs["mlp_speculator"]
    recipe = attrs.evolve(spec.train, make=lambda *given: WithoutLoad(spec.train.make(*given)))
    with pytest.raises(ConfigError, match="makes new weights only"):
        run(attrs.evolve(spec, train=recipe), folder, tmp_path / "out", {}, start=str(heads("mlp_speculator")))
