"""Tests of the training recipe: its loss against the formula, learning, and the checkpoint that it saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from head_training import HIDDEN_SIZE, VOCAB_SIZE, losses_of, random_batch, trained, training_target
from medusa_reference import vllm_logits
from safetensors.torch import load_file
from tiny_medusa import LAYOUTS, write_medusa

from specdec_core import CompatibilityError, ConfigError, TrainingBatch, TrainingTarget
from specdec_proposer_medusa import trainee as training
from specdec_proposer_medusa.config import MedusaConfig
from specdec_proposer_medusa.loading import find, load
from specdec_proposer_medusa.module import MedusaHeads
from specdec_proposer_medusa.recipe import RECIPE, MedusaOptions
from specdec_proposer_medusa.trainee import NUM_RANKS, MedusaTrainee

CASES: list[dict[str, Any]] = [
    {"num_heads": 3},
    {"num_heads": 5, "num_layers": 2, "decay": 0.5},
    {"num_heads": 2, "num_layers": 0, "truncated_vocab_size": 20},
    {"num_heads": 3, "truncated_vocab_size": 20, "distill": True},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TrainingTarget:
    return training_target(tmp_path_factory.mktemp("target"))


def made(target: TrainingTarget, *, is_new: bool = False, **options: Any) -> MedusaTrainee:
    """Make heads in training. is_new: as the recipe initializes them; False: with random weights."""
    torch.manual_seed(0)
    trainee: MedusaTrainee = RECIPE.make(MedusaOptions(**options), target, torch.arange(VOCAB_SIZE))
    for parameter in () if is_new else trainee.parameters():
        torch.nn.init.normal_(parameter, std=HIDDEN_SIZE**-0.5)
    return trainee


def by_the_formula(folder: Path, batch: TrainingBatch, target: TrainingTarget, case: dict[str, Any]) -> float:
    """Compute the loss from a checkpoint, one position after another, with the reference implementation.

    case: the recipe's options.
    """
    if case.get("distill"):
        return distilled(folder, batch, target)
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    num_heads, (num_texts, length) = config["num_heads"], batch.token_ids.shape
    losses: list[list[float]] = [[] for _ in range(num_heads)]
    for text in range(num_texts):
        for t in range(length - 2):
            log_probs = vllm_logits(weights, config, batch.features["final"][text, t]).log_softmax(-1)
            for i in range(min(num_heads, length - 2 - t)):
                loss = -float(log_probs[i, batch.token_ids[text, t + 2 + i]])
                if batch.counts[text, t + 2 + i] and loss < float("inf"):  # a token that the heads have
                    losses[i].append(loss)
    return sum(case.get("decay", 0.8) ** i * sum(each) / len(each) for i, each in enumerate(losses))


def distilled(folder: Path, batch: TrainingBatch, target: TrainingTarget) -> float:
    """Compute the same where the heads learn the target's distributions over their vocabulary, in float64."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    ids = weights["token_map"]
    output, total = target.model.get_output_embeddings().weight.detach().double(), 0.0
    for i in range(config["num_heads"]):
        losses = []
        for text, features in enumerate(batch.features["final"].double()):
            for t in range(len(features) - 2 - i):
                logits = output @ features[t + 1 + i]
                if batch.counts[text, t + 2 + i] and int(logits.argmax()) in ids.tolist():
                    log_probs = vllm_logits(weights, config, features[t].float())[i].double().log_softmax(-1)
                    losses.append(-float(logits[ids].softmax(-1) @ log_probs[ids]))
        total += 0.8**i * sum(losses) / len(losses)
    return total


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loss_is_the_formulas(case, target, tmp_path):
    trainee, batch = made(target, **case), random_batch(target)
    trainee.save(tmp_path)
    loss, metrics = trainee(batch)
    assert float(loss.detach()) == pytest.approx(by_the_formula(tmp_path, batch, target, case), abs=1e-4)
    assert metrics.keys() == {f"{kind}_{i}" for kind in ("loss", "accuracy") for i in range(case["num_heads"])}


def written(trainee: MedusaTrainee, folder: Path) -> tuple[dict[str, Any], Any]:
    trainee.save(folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_heads_accuracies_are_measured(case, target, tmp_path):
    trainee, batches = made(target, **case), [random_batch(target), random_batch(target, seed=2)]
    trainee.eval()(batches[0])
    config, weights = written(trainee, tmp_path)
    assert "medusa_head_accuracies" not in config
    first, second = (num_right(config, weights, batch, target) for batch in batches)
    assert (first[0] > 0).sum() >= 3
    for batch, (right, guessed) in zip(
        batches, (first, [0.99 * old + new for old, new in zip(first, second, strict=True)]), strict=True
    ):
        trainee.train()(batch)
        stored = torch.tensor(written(trainee, tmp_path)[0]["medusa_head_accuracies"])
        wanted = (right / guessed.unsqueeze(1)).sort(descending=True).values
        torch.testing.assert_close(stored, wanted, atol=2e-4, rtol=0)

    loaded = made(target, **case)
    loaded.load(str(tmp_path))
    assert written(loaded, tmp_path)[0]["medusa_head_accuracies"] == [
        pytest.approx(row, abs=2e-4) for row in stored.tolist()
    ]
    short = TrainingBatch(batch.token_ids[:, :3], batch.counts[:, :3] | True, {"final": batch.features["final"][:, :3]})
    loaded.train()(short)  # of three tokens only the first head guesses one
    found = torch.tensor(written(loaded, tmp_path)[0]["medusa_head_accuracies"])
    assert torch.allclose(found[1:], stored[1:], atol=2e-4)


def num_right(config: dict[str, Any], weights: Any, batch: TrainingBatch, target: TrainingTarget) -> Any:
    """Count how often the target's likeliest token is each head's likeliest guess, its second likeliest, ..., one
    position after another, with the reference implementation. Returns that, [num_heads, NUM_RANKS], and the number of
    guesses, [num_heads]."""
    output, right = target.model.get_output_embeddings().weight.detach(), torch.zeros(config["num_heads"], NUM_RANKS)
    guessed = torch.zeros(config["num_heads"])
    for text, features in enumerate(batch.features["final"]):
        for t in range(len(features) - 2):
            best = vllm_logits(weights, config, features[t]).topk(min(NUM_RANKS, VOCAB_SIZE))
            for i in range(min(config["num_heads"], len(features) - 2 - t)):
                if batch.counts[text, t + 2 + i]:
                    guessed[i] += 1
                    is_guess = best.indices[i] == (output @ features[t + 1 + i]).argmax()
                    right[i, : len(is_guess)] += is_guess & best.values[i].isfinite()
    return right, guessed


def the_wanted_token_is_the_one_before(patch: pytest.MonkeyPatch) -> None:
    loss = training.token_loss
    patch.setattr(training, "token_loss", lambda logits, wanted, counts: loss(logits, wanted.roll(1, 1), counts))


def all_tokens_count(patch: pytest.MonkeyPatch) -> None:
    loss = training.token_loss
    patch.setattr(training, "token_loss", lambda logits, wanted, counts: loss(logits, wanted, counts | True))


def states_are_those_of_the_next_token(patch: pytest.MonkeyPatch) -> None:
    hidden = MedusaHeads.hidden
    patch.setattr(MedusaHeads, "hidden", lambda self, i, states: hidden(self, i, states.roll(-1, 1)))


def the_first_head_is_trained_alone(patch: pytest.MonkeyPatch) -> None:
    logits = MedusaHeads.logits
    patch.setattr(MedusaHeads, "logits", lambda self, i, states: logits(self, 0, states))


MISTAKES = [
    the_wanted_token_is_the_one_before,
    all_tokens_count,
    states_are_those_of_the_next_token,
    the_first_head_is_trained_alone,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_in_the_loss_are_noticed(mistake, target, tmp_path, monkeypatch):
    mistake(monkeypatch)
    for case in CASES:
        trainee, batch = made(target, **case), random_batch(target)
        (tmp_path / str(case)).mkdir()
        trainee.save(tmp_path / str(case))
        wanted = by_the_formula(tmp_path / str(case), batch, target, case)
        assert abs(float(trainee(batch)[0].detach()) - wanted) > 1e-2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loss_falls(case, target):
    first, *_, last = losses_of(made(target, is_new=True, **case), random_batch(target), 40)
    assert last < 0.5 * first


@torch.no_grad()
def test_heads_begin_with_the_targets_prediction(target):
    """A new head predicts the token after its position, as the target's LM head does."""
    heads, batch = made(target, is_new=True).heads, random_batch(target)
    hidden = batch.features["final"]
    for i in range(5):
        torch.testing.assert_close(heads.logits(i, heads.hidden(i, hidden)), target.output_head(hidden))


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_what_is_saved_is_what_the_proposer_loads(case, target, tmp_path):
    trainee, size = made(target, **case), case.get("truncated_vocab_size", VOCAB_SIZE)
    trainee.save(tmp_path)
    config, stored = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    shapes = {f"lm_heads.{i}.weight": (size, HIDDEN_SIZE) for i in range(case["num_heads"])}
    for i in range(case["num_heads"]):
        for layer in range(case.get("num_layers", 1)):
            shapes[f"blocks.{i}.layers.{layer}.weight"] = (HIDDEN_SIZE, HIDDEN_SIZE)
            shapes[f"blocks.{i}.layers.{layer}.bias"] = (HIDDEN_SIZE,)
    if size < VOCAB_SIZE:
        shapes["token_map"] = (size,)
        assert stored["token_map"].tolist() == list(range(VOCAB_SIZE - size, VOCAB_SIZE))  # the most frequent ones
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == shapes
    found = {"num_heads": case["num_heads"], "num_hidden_layers": case.get("num_layers", 1), "medusa_fc_bias": True}
    found |= {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "model_type": "medusa"}
    assert config.items() >= (found | {"truncated_vocab_size": size if size < VOCAB_SIZE else None}).items()
    heads, ids = load(find(MedusaConfig(model=tmp_path), target.info, case["num_heads"]), target.info)
    assert (ids is None) == (size == VOCAB_SIZE)
    assert ids is None or torch.equal(ids, stored["token_map"])
    hidden = random_batch(target).features["final"]
    for i in range(case["num_heads"]):
        logits = [each.logits(i, each.hidden(i, hidden)) for each in (trainee.heads, heads)]
        assert torch.equal(*logits)


def test_heads_learn_their_target(target, tmp_path):
    first, last = trained("medusa", target, tmp_path, num_heads=2)
    assert last["held_out_loss"] < 0.9 * first["held_out_loss"]
    assert last["acceptance_length"]["greedy"] > first["acceptance_length"]["greedy"] + 0.2


@pytest.mark.parametrize("length", [2, 3, 4])
def test_texts_may_be_shorter_than_a_draft(length, target):
    batch = random_batch(target)
    short = TrainingBatch(
        batch.token_ids[:, :length], batch.counts[:, :length] | True, {"final": batch.features["final"][:, :length]}
    )
    loss, metrics = made(target, num_heads=4)(short)
    assert len(metrics) == 2 * (length - 2)
    assert (float(loss.detach()) > 0) == (length > 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_layers": -1}, "num_layers=-1"),
        ({"decay": 0.0}, "decay=0"),
        ({"truncated_vocab_size": 49}, "truncated_vocab_size=49, but the target has 48 tokens"),
    ],
)
def test_wrong_options_are_explained(options, message, target):
    with pytest.raises(ConfigError, match=message):
        made(target, **options)


def saved_again(name: str, target: TrainingTarget, folder: Path) -> tuple[MedusaTrainee, list[bool]]:
    """Write heads in a published layout, load them into a trainee and save that. Returns the trainee, and for each of
    the heads whether the proposer gets the same logits from both files, over the same tokens."""
    (folder / "saved").mkdir()
    write_medusa(folder / "published", LAYOUTS[name])
    trainee = made(target)
    trainee.load(str(folder / "published"))
    trainee.save(folder / "saved")
    found = [find(MedusaConfig(model=folder / each), target.info, 1) for each in ("published", "saved")]
    (one, its_ids), (other, ids) = (load(each, target.info) for each in found)
    assert (ids is None) == (its_ids is None)
    assert ids is None or torch.equal(ids, its_ids)
    hidden = random_batch(target).features["final"]
    same = []
    for i in range(found[0].sizes.num_heads):
        logits = [each.logits(i, each.hidden(i, hidden)) for each in (one, other)]
        same.append(torch.equal(*logits))
    return trainee, same


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.output == "own"])
def test_published_heads_are_trained_further(name, target, tmp_path):
    trainee, same = saved_again(name, target, tmp_path)
    assert len(same) == LAYOUTS[name].heads
    assert all(same)
    first, *_, last = losses_of(trainee, random_batch(target), 20)
    assert last < first
    assert all(each.requires_grad for each in trainee.parameters())


def test_a_scale_that_is_forgotten_is_noticed(target, tmp_path, monkeypatch):
    save_head = training.save_head

    def changed(folder: Path, target: TrainingTarget, config: dict[str, Any], tensors: Any) -> None:
        save_head(folder, target, {key: each for key, each in config.items() if key != "logit_scale"}, tensors)

    monkeypatch.setattr(training, "save_head", changed)
    _, same = saved_again("vLLM, scaled", target, tmp_path)
    assert not any(same)


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.output != "own"])
def test_heads_without_an_lm_head_each_are_not_trained_further(name, target, tmp_path):
    write_medusa(tmp_path, LAYOUTS[name])
    with pytest.raises(CompatibilityError, match=r"the 3 Medusa heads in .* have [01] LM heads of their own"):
        made(target).load(str(tmp_path))
