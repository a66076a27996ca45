"""Tests that published heads of all layouts can be trained further, and are saved as what they were."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_heads import TinyHead, llama3_rope, write_eagle, write_eagle3, write_specforge, write_speculators
from tiny_weights import Shape, Target
from transformers import AutoModelForCausalLM

from specdec_core import CompatibilityError, ConfigError, TargetInfo, TrainingBatch, TrainingTarget
from specdec_proposer_eagle import trainees
from specdec_proposer_eagle.config import EagleConfig
from specdec_proposer_eagle.loading import find, load
from specdec_proposer_eagle.recipes import EAGLE, EAGLE3, Eagle3Options, EagleOptions
from specdec_testing import tiny_target

NUM_LAYERS, LENGTH = 8, 7
OWN = Shape(own_embeddings=True)
ROPE = Shape(attention_bias=True, mlp_bias=True, rope_scaling=llama3_rope(), head_dim=12)
SPECULATORS = Shape(norm_before_residual=True, draft_vocab_size=20)
QWEN3 = Shape(qk_norm=True, fc_norm=True, norm_output=True, rms_norm_eps=1e-3)
HEADS: dict[str, Callable[..., TinyHead]] = {
    "eagle": write_eagle,
    "eagle, embeddings": partial(write_eagle, shape=OWN),
    "eagle, norms": partial(write_eagle, para_norm=True),
    "eagle3": write_eagle3,
    "eagle3, small vocabulary": partial(write_eagle3, shape=Shape(draft_vocab_size=17)),
    "eagle3, biases, llama3": partial(write_eagle3, shape=ROPE),
    "eagle3, norms before fc": partial(write_eagle3, shape=Shape(norm_before_fc=True)),
    "SpecForge": partial(write_specforge, shape=Shape(rope_theta=500.0, own_embeddings=True)),
    "speculators": partial(write_speculators, shape=SPECULATORS),
    "speculators, Qwen3": partial(write_speculators, shape=QWEN3),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TrainingTarget:
    folder = tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=NUM_LAYERS)
    model = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    info = TargetInfo(str(folder), "llama", 48, model.config.hidden_size, NUM_LAYERS, 512, torch.float32,
                      torch.device("cpu"))  # fmt: skip
    return TrainingTarget(info, model.config, model, model.get_input_embeddings(), model.get_output_embeddings())


def sizes(target: TrainingTarget) -> Target:
    return Target(target.info.hidden_size, target.info.vocab_size, NUM_LAYERS)


def batch_of(target: TrainingTarget) -> TrainingBatch:
    token_ids = torch.randint(48, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    states = target.model(token_ids, output_hidden_states=True).hidden_states
    features = {f"input.{i}": states[i] for i in range(NUM_LAYERS)} | {"final": states[-1]}
    return TrainingBatch(token_ids, torch.ones(2, LENGTH, dtype=torch.bool), features)


def new_trainee(name: str, target: TrainingTarget) -> torch.nn.Module:
    torch.manual_seed(0)
    if name.split(",", maxsplit=1)[0] == "eagle":
        return EAGLE.make(EagleOptions(), target, torch.arange(48))
    return EAGLE3.make(Eagle3Options(ttt_steps=2), target, torch.arange(48))


def differing(name: str, target: TrainingTarget, folder: Path) -> list[str]:
    """Write a published head, load it into a trainee, save that, and return what differs from the published one."""
    HEADS[name](folder / "published", sizes(target))
    trainee = new_trainee(name, target)
    trainee.load(str(folder / "published"))
    (folder / "saved").mkdir()
    trainee.save(folder / "saved")
    is_eagle3 = name.split(",", maxsplit=1)[0] != "eagle"
    heads, modules, ids = [], [], []
    for each in ("published", "saved"):
        found = find(EagleConfig(model=folder / each), target.info, is_eagle3=is_eagle3)
        module, to_target = load(found, target.info)
        heads.append(found.head)
        modules.append(module.state_dict())
        ids.append(range(48) if to_target is None else to_target.tolist())
    faults = [] if list(ids[0]) == list(ids[1]) else ["ids"]
    faults += [field for field in ("shapes", "num_layers", "aux_layer_ids", "norm_before_residual", "norm_output")
               if getattr(heads[0], field) != getattr(heads[1], field)]  # fmt: skip
    keys = ("rope_parameters", "rms_norm_eps", "head_dim", "num_attention_heads", "num_key_value_heads", "hidden_act")
    faults += [key for key in keys if getattr(heads[0].layer, key) != getattr(heads[1].layer, key)]
    return faults + [name for name, tensor in modules[0].items() if not torch.equal(tensor, modules[1][name])]


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_trained_further_is_saved_as_what_it_was(name, target, tmp_path):
    assert differing(name, target, tmp_path) == []


def a_variant_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    save_head = trainees.save_head
    others = {"norm_before_residual": False}
    patch.setattr(
        trainees, "save_head", lambda folder, target, config, *rest: save_head(folder, target, config | others, *rest)
    )


def the_vocabulary_is_the_datas(patch: pytest.MonkeyPatch) -> None:
    vocabulary = trainees.DraftVocabulary
    patch.setattr(trainees, "DraftVocabulary", lambda ids, size: vocabulary(torch.arange(48)[-len(ids) :], size))


@pytest.mark.parametrize(
    ("mistake", "fault"), [(a_variant_is_forgotten, "norm_before_residual"), (the_vocabulary_is_the_datas, "ids")]
)
def test_what_is_lost_is_noticed(mistake, fault, target, tmp_path, monkeypatch):
    mistake(monkeypatch)
    assert differing("speculators", target, tmp_path) == [fault]


@pytest.mark.parametrize("name", HEADS)
def test_all_of_a_head_learns_but_its_embedding(name, target, tmp_path):
    HEADS[name](tmp_path, sizes(target))
    trainee = new_trainee(name, target)
    trainee.load(str(tmp_path))
    trainee(batch_of(target))[0].backward()
    still = {key for key, each in trainee.named_parameters() if each.grad is None or not each.grad.any()}
    assert still == ({"head.embed_tokens.weight"} if name in ("eagle, embeddings", "SpecForge") else set())


def test_an_embedding_of_its_own_is_used(target, tmp_path):
    head, losses = write_eagle3(tmp_path, sizes(target), shape=OWN), []
    for sign in (1, -1):
        embedding = {"embed_tokens.weight": sign * head.tensors["embed_tokens.weight"]}
        torch.save(head.tensors | embedding, tmp_path / "pytorch_model.bin")
        trainee = new_trainee("eagle3", target)
        trainee.load(str(tmp_path))
        losses.append(float(trainee(batch_of(target))[0].detach()))
    assert abs(losses[0] - losses[1]) > 1e-2


@pytest.mark.parametrize(
    ("write", "name", "message"),
    [
        (
            partial(write_eagle3, shape=Shape(hidden_size=24)),
            "eagle3",
            "hidden_size=24, and training needs one of its own",
        ),
        (
            partial(write_speculators, aux_layer_ids=[1, 2, 3]),
            "eagle3",
            "layers 1,2,3, .* are 2,4,5: give aux_layers=1,2,3",
        ),
    ],
)
def test_what_cannot_be_trained_further_is_explained(write, name, message, target, tmp_path):
    write(tmp_path, sizes(target))
    trainee = new_trainee(name, target)
    with pytest.raises((CompatibilityError, ConfigError), match=message):
        trainee.load(str(tmp_path))
