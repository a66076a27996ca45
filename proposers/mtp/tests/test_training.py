"""Tests of the training recipe: its steps are those of drafting, its loss is the formula's, a module learns, and the
proposer loads what is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from head_training import losses_of, trained, training_target as saved_target
from mtp_training import LENGTH, Case, made
from safetensors.torch import load_file
from tiny_mtp import BY_NAME, llama_with_modules, of_the_module

from specdec_core import Checkpoint, CompatibilityError, ConfigError, TrainingBatch, load_training_target
from specdec_proposer_mtp import is_mtp_module, trainee as training
from specdec_proposer_mtp.config import MTPConfig
from specdec_proposer_mtp.loading import find, load
from specdec_proposer_mtp.module import MTPModule
from specdec_proposer_mtp.recipe import RECIPE, MTPOptions

STEPS, TOLERANCE = 4, 1e-4
Patch = pytest.MonkeyPatch


@torch.no_grad()
def gap(name: str) -> float:
    """Return the largest difference of a logit of an unrolled step from the reference's, which drafts."""
    case = made(name, num_steps=STEPS)
    steps = [case.target.output_head(output) for output in case.trainee.unrolled(case.batch)]
    assert len(steps) == STEPS
    chains = case.chains(STEPS)
    assert len(chains) == 2 * sum(min(STEPS, n) for n in range(1, LENGTH))
    return max(float((steps[step][text, slot] - row).abs().max()) for (text, slot, step), row in chains.items())


@pytest.mark.parametrize("name", BY_NAME)
def test_training_is_drafting(name: str) -> None:
    assert gap(name) < TOLERANCE


def features_do_not_recur(patch: Patch) -> None:
    unroll = training.unroll

    def changed(run: Any, embed: Any, token_ids: Any, features: Any, num_steps: int) -> Any:
        first = features.flatten(0, 1)
        return unroll(lambda embedded, _, at: run(embedded, first, at), embed, token_ids, features, num_steps)

    patch.setattr(training, "unroll", changed)


def another_hidden_state_recurs(patch: Patch) -> None:
    drafting = MTPModule.drafting

    def changed(self: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        normed, recurs = drafting(self, *args)
        return normed, self.norm(recurs) if recurs is not normed else 2 * recurs + 1

    patch.setattr(MTPModule, "drafting", changed)


def steps_see_no_earlier_ones(patch: Patch) -> None:
    attend = training.SlotAttention._attend_own
    patch.setattr(
        training.SlotAttention,
        "_attend_own",
        lambda self, query, steps: attend(self, query, [steps[0], steps[-1]]),
    )


def steps_stay_at_their_first_position(patch: Patch) -> None:
    forward, first = MTPModule.forward, []

    def changed(self: Any, embedded: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, rows: Any) -> Any:
        first.append(positions)
        return forward(self, embedded, features, first[0], rows)

    patch.setattr(MTPModule, "forward", changed)


UNROLLED_WRONG = [
    features_do_not_recur,
    another_hidden_state_recurs,
    steps_see_no_earlier_ones,
    steps_stay_at_their_first_position,
]


@pytest.mark.parametrize("mistake", UNROLLED_WRONG, ids=lambda mistake: mistake.__name__)
@pytest.mark.parametrize("name", ["llama", "mimo"])
def test_other_steps_than_those_of_drafting_are_noticed(name: str, mistake: Any, monkeypatch: Patch) -> None:
    mistake(monkeypatch)
    assert gap(name) > 100 * TOLERANCE


def test_another_embedding_at_position_0_is_noticed(monkeypatch: Patch) -> None:
    family = training.family_of("mimo", "mimo")
    monkeypatch.setattr(training, "family_of", lambda *_: evolve(family, zero_first=False))
    assert gap("mimo") > 100 * TOLERANCE


@torch.no_grad()
def by_the_formula(case: Case, options: MTPOptions) -> float:
    """Compute the loss from the reference's logits, one position after another: the mean over the tokens that count of
    the cross entropy with the target's probabilities, and over the steps with the weights decay^k, whose sum is 1."""
    batch = case.batch
    wanted = (batch.features["final"].double() @ case.target.output_head.weight.double().T).softmax(-1)
    losses: list[list[float]] = [[] for _ in range(options.num_steps)]
    for (text, slot, step), logits in case.chains(options.num_steps).items():
        predicted = slot + 2 + step
        if predicted < batch.token_ids.shape[1] and batch.counts[text, predicted]:
            losses[step].append(-float(wanted[text, predicted - 1] @ logits.log_softmax(-1)))
    weights = [options.decay**step for step in range(options.num_steps)]
    means = [sum(each) / max(1, len(each)) for each in losses]
    return sum(weight / sum(weights) * mean for weight, mean in zip(weights, means, strict=True))


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_steps": 1}),
    ("mimo", {"num_steps": 2, "decay": 0.9}),
    ("glm4_moe", {"num_steps": 4, "decay": 0.3}),
    ("ernie4_5_moe", {}),
]


def off_the_formula(name: str, options: dict[str, Any]) -> float:
    case = made(name, **options)
    return abs(float(case.trainee(case.batch)[0].detach()) - by_the_formula(case, MTPOptions(**options)))


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_the_loss_is_the_formulas(name: str, options: dict[str, Any]) -> None:
    assert off_the_formula(name, options) < TOLERANCE


def the_wanted_token_is_the_one_before(patch: Patch) -> None:
    loss = training.soft_cross_entropy
    patch.setattr(training, "soft_cross_entropy", lambda logits, wanted: loss(logits, wanted.roll(1, 1)))


def all_tokens_count(patch: Patch) -> None:
    weight = training.step_weight
    patch.setattr(training, "step_weight", lambda counts, step: weight(counts | True, step))


def texts_that_are_drafted_count(patch: Patch) -> None:
    """The mask is that of the embedded token, not of the predicted one."""
    weight = training.step_weight
    patch.setattr(training, "step_weight", lambda counts, step: weight(counts.roll(1, 1), step))


def the_weights_have_another_sum(patch: Patch) -> None:
    patch.setattr(training, "sum", lambda weights: 1.0, raising=False)


def all_steps_weigh_the_same(patch: Patch) -> None:
    forward = training.MTPTrainee.forward

    def changed(self: Any, batch: TrainingBatch) -> Any:
        self._options = evolve(self._options, decay=1.0)
        return forward(self, batch)

    patch.setattr(training.MTPTrainee, "forward", changed)


MISTAKES = [
    the_wanted_token_is_the_one_before,
    all_tokens_count,
    texts_that_are_drafted_count,
    the_weights_have_another_sum,
    all_steps_weigh_the_same,
    features_do_not_recur,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_in_the_loss_are_noticed(mistake: Any, monkeypatch: Patch) -> None:
    mistake(monkeypatch)
    assert off_the_formula("llama", {}) > 1e-2


@pytest.mark.parametrize("name", ["llama", pytest.param("glm4_moe", marks=pytest.mark.nightly)])
def test_the_loss_falls(name: str) -> None:
    case = made(name, is_new=True)
    final = case.batch.features["final"]
    with torch.no_grad():  # the entropy of the target's distribution is the least possible loss
        wanted = case.target.output_head(final).softmax(-1)
    entropy = float(torch.special.entr(wanted).sum(-1).mean())
    first, *_, last = (loss - entropy for loss in losses_of(case.trainee, case.batch, 40))
    assert last < 0.3 * first


def test_what_is_trained_for_a_quantized_target_is_not_quantized(tmp_path: Path) -> None:
    case = made("llama")
    config = case.target.config
    config.quantization_config, config._name_or_path = {"quant_method": "torchao"}, str(tmp_path)
    trainee = RECIPE.make(MTPOptions(), case.target, torch.ones(config.vocab_size, dtype=torch.int64))
    trainee.save(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    find(MTPConfig(model=tmp_path), case.target.info, 1)
    assert "_name_or_path" not in json.loads((tmp_path / "config.json").read_text()), "a folder of this machine"
    assert is_mtp_module(json.loads((tmp_path / "config.json").read_text()), Checkpoint(str(tmp_path)).shapes)


@pytest.mark.parametrize("name", BY_NAME)
@torch.no_grad()
def test_what_is_saved_is_what_the_proposer_loads(name: str, tmp_path: Path) -> None:
    case = made(name)
    case.trainee.save(tmp_path)
    published = of_the_module(name, case.config, case.weights)
    stored = load_file(tmp_path / "model.safetensors")
    assert {key: each.shape for key, each in stored.items()} == {key: each.shape for key, each in published.items()}
    for key, each in published.items():
        assert torch.equal(stored[key], each.float()), key
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["num_nextn_predict_layers"]) == (name, 1)
    (module,) = load(find(MTPConfig(model=tmp_path), case.target.info, 3), case.target.info, "eager")
    before, after = case.trainee.module.state_dict(), module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_module_is_trained_further(name: str, tmp_path: Path) -> None:
    case, new = made(name), made(name, is_new=True).trainee
    case.trainee.save(tmp_path)
    assert not equal_modules(case.trainee, new)
    assert new.load(str(tmp_path)) == {}
    assert equal_modules(case.trainee, new)
    (tmp_path / "again").mkdir()
    new.save(tmp_path / "again")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / file).read_bytes()
    torch.testing.assert_close(new(case.batch)[0], case.trainee(case.batch)[0])
    assert all(parameter.requires_grad for parameter in new.parameters())


def equal_modules(one: Any, other: Any) -> bool:
    before, after = one.module.state_dict(), other.module.state_dict()
    return before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_the_targets_own_module_is_trained_further(tmp_path: Path) -> None:
    target = load_training_target(str(llama_with_modules(tmp_path)), "float32", "cpu")
    trainee = RECIPE.make(MTPOptions(), target, torch.ones(48))
    trainee.load(str(tmp_path))
    (tmp_path / "saved").mkdir()
    trainee.save(tmp_path / "saved")
    options = (MTPConfig(), MTPConfig(model=tmp_path / "saved"))
    own, saved = (load(find(each, target.info, 1), target.info, "eager")[0].state_dict() for each in options)
    assert own.keys() == saved.keys()
    assert all(torch.equal(own[key], saved[key]) for key in own)


def test_several_modules_are_no_start(tmp_path: Path) -> None:
    target = load_training_target(str(llama_with_modules(tmp_path, 2)), "float32", "cpu")
    trainee = RECIPE.make(MTPOptions(), target, torch.ones(48))
    with pytest.raises(CompatibilityError, match="has 2 MTP modules, and training is for one"):
        trainee.load(str(tmp_path))


def test_a_module_of_another_family_is_refused(tmp_path: Path) -> None:
    case, other = made("llama"), made("mimo")
    other.trainee.save(tmp_path)
    with pytest.raises(CompatibilityError, match=r"is of the family mimo, and the target's family is llama"):
        case.trainee.load(str(tmp_path))


@pytest.mark.parametrize("name", BY_NAME)
def test_a_new_module_begins_with_what_the_target_has(name: str) -> None:
    case = made(name, is_new=True)
    module, target = case.trainee.module, case.target.model
    assert torch.equal(module.norm.weight, target.base_model.norm.weight)
    assert module.embed is None or torch.equal(module.embed.weight, target.get_input_embeddings().weight)
    assert (module.embed is None) == (name != "longcat_flash")


@pytest.mark.nightly
def test_modules_learn_their_target(tmp_path: Path) -> None:
    first, last = trained("mtp", saved_target(tmp_path / "target"), tmp_path)
    assert last["held_out_loss"] < 0.9 * first["held_out_loss"]
    assert last["acceptance_length"]["greedy"] > first["acceptance_length"]["greedy"] + 0.2


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_texts_may_be_shorter_than_a_draft(length: int) -> None:
    case = made("llama", num_steps=4)
    batch = case.batch
    features = {tap: each[:, :length] for tap, each in batch.features.items()}
    short = TrainingBatch(batch.token_ids[:, :length], batch.counts[:, :length] | True, features)
    loss, metrics = case.trainee(short)
    loss.backward()
    assert len(metrics) == 2 * length
    assert (float(loss.detach()) > 0) == (length > 2)
    assert float(loss.detach()) == pytest.approx(by_the_formula(evolve(case, batch=short), MTPOptions(num_steps=4)))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_steps": 0}, "num_steps=0"), ({"num_steps": 65}, "num_steps=65"), ({"decay": 0.0}, "decay=0")],
)
def test_wrong_options_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MTPOptions(**options)


def test_a_target_of_an_unknown_family_is_refused() -> None:
    target = made("llama").target
    other = evolve(target, info=evolve(target.info, model_type="qwen3"))
    for call in (
        lambda: RECIPE.taps(MTPOptions(), other.info),
        lambda: RECIPE.make(MTPOptions(), other, torch.ones(1)),
    ):
        with pytest.raises(
            CompatibilityError, match="'tiny' is of type 'qwen3', and multi-token prediction is known for"
        ):
            call()
