"""Tests of the training recipe: its loss against the formula, learning, and the checkpoint that it saves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from draft_heads import BIN, SAFETENSORS, write_checkpoint
from head_training import HIDDEN_SIZE, VOCAB_SIZE, losses_of, random_batch, trained, training_target
from mlp_reference import DEFAULTS, chain_logits, random_weights, shapes
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from specdec_core import ConfigError, TrainingBatch, TrainingTarget, cli
from specdec_proposer_mlp import trainee as training
from specdec_proposer_mlp.config import MLPSpeculatorConfig
from specdec_proposer_mlp.loading import find, load
from specdec_proposer_mlp.module import Speculator
from specdec_proposer_mlp.recipe import RECIPE, MLPSpeculatorOptions
from specdec_proposer_mlp.trainee import SpeculatorTrainee

CASES: list[dict[str, Any]] = [
    {"n_predict": 3},
    {"n_predict": 4, "tie_weights": True, "scale_input": True},
    {"n_predict": 2, "inner_dim": 20, "scale_input": True},
    {"n_predict": 3, "distill": True},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TrainingTarget:
    return training_target(tmp_path_factory.mktemp("target"))


def made(target: TrainingTarget, **options: Any) -> SpeculatorTrainee:
    torch.manual_seed(0)
    trainee: SpeculatorTrainee = RECIPE.make(MLPSpeculatorOptions(**options), target, torch.arange(48))
    for name, parameter in trainee.named_parameters():
        if ".ln." in name:
            torch.nn.init.normal_(parameter, 1, 0.3)  # so that norms have an effect
    return trainee


def by_the_formula(folder: Path, batch: TrainingBatch, distilled: TrainingTarget | None = None) -> float:
    """Compute the loss from a checkpoint, one position after another, with the reference implementation. distilled: the
    target whose probabilities the heads learn. None: they learn the texts."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    num_heads, (num_texts, length) = config["n_predict"], batch.token_ids.shape
    losses: list[list[float]] = [[] for _ in range(num_heads)]
    for text in range(num_texts):
        tokens = batch.token_ids[text].tolist()
        for t in range(length - 2):
            following = tokens[t + 1 : t + 1 + num_heads]
            logits = chain_logits(weights, config, batch.features["final"][text, t], following)
            for i in range(min(num_heads, length - 2 - t)):
                if batch.counts[text, t + 2 + i]:
                    log_probs = logits[i].log_softmax(0)
                    if distilled is None:
                        losses[i].append(-float(log_probs[tokens[t + 2 + i]]))
                        continue
                    weight = distilled.model.get_output_embeddings().weight.detach().double()
                    wanted = (weight @ batch.features["final"][text, t + 1 + i].double()).softmax(0)
                    losses[i].append(-float(wanted @ log_probs.double()))
    return sum(sum(each) / len(each) for each in losses)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loss_is_the_formulas(case, target, tmp_path):
    trainee, batch = made(target, **case), random_batch(target)
    trainee.save(tmp_path)
    loss, metrics = trainee(batch)
    wanted = by_the_formula(tmp_path, batch, target if "distill" in case else None)
    assert float(loss.detach()) == pytest.approx(wanted, abs=1e-4)
    names = {f"{kind}_{i}" for kind in ("loss", "accuracy") for i in range(case["n_predict"])}
    assert metrics.keys() == names
    assert float(sum(metrics[f"loss_{i}"] for i in range(case["n_predict"])).detach()) == pytest.approx(
        float(loss.detach()), abs=1e-5
    )


def the_wanted_token_is_the_one_that_was_read(patch: pytest.MonkeyPatch) -> None:
    loss = training.token_loss
    patch.setattr(training, "token_loss", lambda logits, wanted, counts: loss(logits, wanted.roll(1, 1), counts))


def all_tokens_count(patch: pytest.MonkeyPatch) -> None:
    loss = training.token_loss
    patch.setattr(training, "token_loss", lambda logits, wanted, counts: loss(logits, wanted, counts | True))


def states_are_those_of_the_next_token(patch: pytest.MonkeyPatch) -> None:
    forward = Speculator.forward
    patch.setattr(Speculator, "forward", lambda self, i, state, ids: forward(self, i, state.roll(-1, 1), ids))


def the_first_head_is_trained_alone(patch: pytest.MonkeyPatch) -> None:
    forward = Speculator.forward
    patch.setattr(Speculator, "forward", lambda self, i, state, ids: forward(self, 0, state, ids))


@pytest.mark.parametrize(
    "mistake",
    [
        the_wanted_token_is_the_one_that_was_read,
        all_tokens_count,
        states_are_those_of_the_next_token,
        the_first_head_is_trained_alone,
    ],
    ids=lambda mistake: mistake.__name__,
)
@pytest.mark.parametrize("distill", [False, True])
def test_mistakes_in_the_loss_are_noticed(distill, mistake, target, tmp_path, monkeypatch):
    mistake(monkeypatch)
    trainee, batch = made(target, distill=distill), random_batch(target)
    trainee.save(tmp_path)
    wanted = by_the_formula(tmp_path, batch, target if distill else None)
    assert abs(float(trainee(batch)[0].detach()) - wanted) > 1e-2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loss_falls(case, target):
    first, *_, last = losses_of(made(target, **case), random_batch(target), 30)
    assert last < 0.5 * first


@torch.no_grad()
def test_weights_may_start_as_the_targets(target):
    """Tokens are as close to each other as in the best approximation of the target's LM head in so many dimensions."""
    size = HIDDEN_SIZE // 2
    speculator = made(target, n_predict=2, inner_dim=size, init_from_target=True).speculator
    left, values, _ = torch.linalg.svd(target.model.get_output_embeddings().weight, full_matrices=False)
    for layers in (speculator.head, speculator.emb if target.config.tie_word_embeddings else ()):
        for layer in layers:
            assert layer.weight.std() == pytest.approx(size**-0.5)
            close, expected = layer.weight @ layer.weight.T, (left[:, :size] * values[:size] ** 2) @ left[:, :size].T
            torch.testing.assert_close(close / close.norm(), expected / expected.norm(), atol=1e-4, rtol=0)
    random = made(target, n_predict=2, inner_dim=size).speculator.head[0].weight
    assert torch.nn.functional.cosine_similarity((random @ random.T).flatten(), expected.flatten(), dim=0) < 0.9


def test_wider_heads_than_the_target_cannot_start_as_the_targets(target):
    with pytest.raises(ConfigError, match=f"inner_dim={2 * HIDDEN_SIZE}, which is more than its width"):
        made(target, inner_dim=2 * HIDDEN_SIZE, init_from_target=True)


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_what_is_saved_is_what_the_proposer_loads(case, target, tmp_path):
    trainee = made(target, **case)
    trainee.save(tmp_path)
    config, stored = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == shapes(config)
    assert config.keys() >= {*DEFAULTS, "architectures", "model_type"}
    found = find(MLPSpeculatorConfig(model=tmp_path), target.info, case["n_predict"])
    assert found.head == trainee._config
    speculator, batch = load(found, target.info), random_batch(target)
    logits = []
    for module in (trainee.speculator, speculator):
        state, rows = module.first_state(batch.features["final"]), []
        for i in range(case["n_predict"]):
            state, of_head = module(i, state, batch.token_ids)
            rows.append(of_head)
        logits.append(torch.stack(rows))
    assert torch.equal(*logits)


def test_a_speculator_learns_its_target(target, tmp_path):
    first, last = trained("mlp_speculator", target, tmp_path, n_predict=2)
    assert last["held_out_loss"] < 0.9 * first["held_out_loss"]
    assert last["acceptance_length"]["greedy"] > first["acceptance_length"]["greedy"] + 0.2


@pytest.mark.parametrize("length", [2, 3, 4])
def test_texts_may_be_shorter_than_a_draft(length, target):
    batch = random_batch(target)
    short = TrainingBatch(
        batch.token_ids[:, :length], batch.counts[:, :length] | True, {"final": batch.features["final"][:, :length]}
    )
    loss, metrics = made(target, n_predict=4)(short)
    assert len(metrics) == 2 * (length - 2)
    assert (float(loss.detach()) > 0) == (length > 2)


@pytest.mark.parametrize(
    ("options", "message"), [({"n_predict": 0}, "n_predict=0"), ({"inner_dim": -1}, "inner_dim=-1")]
)
def test_wrong_options_are_explained(options, message):
    with pytest.raises(ConfigError, match=message):
        MLPSpeculatorOptions(**options)


@pytest.mark.parametrize(("tied_storage", "file"), [("once", SAFETENSORS), ("all", BIN)])
@torch.no_grad()
def test_a_published_speculator_is_trained_further(tied_storage, file, target, tmp_path):
    config = {"n_predict": 3, "tie_weights": True, "scale_input": True, "inner_dim": 20, "vocab_size": VOCAB_SIZE}
    config |= {"emb_dim": HIDDEN_SIZE, "top_k_tokens_per_head": [5, 2, 1], "model_type": "mlp_speculator"}
    weights = random_weights(config, torch.Generator().manual_seed(1), tied_storage)
    write_checkpoint(tmp_path, config, {name: tensor.float() for name, tensor in weights.items()}, file)
    trainee = made(target, tie_weights=True, scale_input=True)
    sizes = {"n_predict": 3, "tie_weights": True, "scale_input": True, "inner_dim": 20}
    assert trainee.load(str(tmp_path)) == {**sizes, "init_from_target": False}
    assert all(parameter.requires_grad for parameter in trainee.parameters())
    (tmp_path / "saved").mkdir()
    trainee.save(tmp_path / "saved")
    found = [find(MLPSpeculatorConfig(model=each), target.info, 3) for each in (tmp_path, tmp_path / "saved")]
    assert found[0].head == found[1].head
    assert found[1].head.top_k_tokens_per_head == (5, 2, 1)
    one, other = (load(each, target.info).state_dict() for each in found)
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def stage(*arguments: object) -> list[float]:
    """Run the command `spec-decode train mlp_speculator` and return the held-out losses from its log."""
    common = ("--dtype", "float32", "--batch", 8, "--evaluate-every", 0, "--eval-prompts", 0, "--lr", 1e-2)
    ran = CliRunner().invoke(cli.main, ["train", "mlp_speculator", *map(str, (*arguments, *common))])
    assert ran.exit_code == 0, ran.output
    lines = (Path(str(arguments[arguments.index("--out") + 1])) / "log.jsonl").read_text().splitlines()
    return [line["held_out_loss"] for line in map(json.loads, lines) if "held_out_loss" in line]


def test_a_second_stage_learns_from_what_the_target_generates(target, tmp_path, monkeypatch):
    """The recipe of Wertheimer et al. 2024, section 4.2: first ground-truth text, then the target's own."""
    monkeypatch.setattr("specdec_train.run.can_draw", lambda: False)
    folder = tmp_path / "target"
    shutil.copytree(target.info.model, folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    random = np.random.default_rng(0)
    (tmp_path / "corpus.txt").write_text(" ".join(f"w{i}" for i in random.integers(0, 24, 3000)))
    prompts = [" ".join(f"w{i}" for i in ids) for ids in random.integers(0, VOCAB_SIZE, (150, 8))]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in prompts))
    sizes = ("--target", folder, "--n-predict", 2)
    generated = ("--data", tmp_path / "prompts.jsonl", "--generate", 16, "--prompt-len", 4, "--length", 20)

    first = stage(*sizes, "--data", tmp_path / "corpus.txt", "--out", tmp_path / "first", "--length", 32, "--steps", 40)
    second = stage(*sizes, *generated, "--out", tmp_path / "second", "--start", tmp_path / "first", "--steps", 40)
    assert first[1] < 0.95 * first[0]
    assert second[1] < 0.95 * second[0]
    assert len((tmp_path / "second" / "generated.jsonl").read_text().splitlines()) == 1 + len(prompts)
