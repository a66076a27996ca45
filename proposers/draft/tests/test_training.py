"""Tests of the training of draft models: initialization, loss and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from other_vocabularies import save_words
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from specdec_core import CompatibilityError, ConfigError, TargetInfo, TrainingBatch, TrainingTarget
from specdec_proposer_draft.recipe import RECIPE, DraftTrainingOptions
from specdec_testing import tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TrainingTarget:
    folder = tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=3)
    words = {f"w{i}": i for i in range(48)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0"))).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    info = TargetInfo(str(folder), "llama", 48, 32, 3, 512, torch.float32, torch.device("cpu"))
    return TrainingTarget(info, model.config, model, model.get_input_embeddings(), model.get_output_embeddings())


def batch_of(target: TrainingTarget) -> TrainingBatch:
    token_ids = torch.arange(20).reshape(2, 10)
    final = target.model.model(token_ids).last_hidden_state
    return TrainingBatch(token_ids, torch.ones(2, 10, dtype=torch.bool), {"final": final})


def make(target: TrainingTarget, **options):
    torch.manual_seed(0)
    return RECIPE.make(DraftTrainingOptions(**options), target, None)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_loss_is_the_distance_to_the_target(share, target):
    trainee = make(target, from_layers=2, hard_weight=share)
    trainee.model = target.model
    batch = batch_of(target)
    loss, metrics = trainee(batch)
    log_probs = target.model(batch.token_ids).logits[:, :-1].log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    of_data = -log_probs.gather(-1, batch.token_ids[:, 1:, None]).mean()
    torch.testing.assert_close(loss, (1 - share) * entropy + share * of_data)
    assert metrics["accuracy"] == 1


def test_a_small_model_begins_with_what_the_target_knows_of_tokens(target):
    known = target.model.get_input_embeddings().weight.detach()
    whole = make(target, hidden_size=known.shape[1]).model.get_input_embeddings().weight
    torch.testing.assert_close(whole @ whole.T, known @ known.T)  # equal up to a rotation
    half = make(target, hidden_size=known.shape[1] // 2).model.get_input_embeddings().weight
    left, values, _ = torch.linalg.svd(known, full_matrices=False)
    best = left[:, : half.shape[1]] * values[: half.shape[1]]
    torch.testing.assert_close(half @ half.T, best @ best.T)


def test_the_first_layers_are_the_targets(target, tmp_path):
    trainee = make(target, from_layers=2)
    ids = torch.arange(10)[None]
    states = target.model(ids, output_hidden_states=True).hidden_states
    expected = target.output_head(target.model.model.norm(states[2]))
    with torch.no_grad():
        torch.testing.assert_close(trainee.model(ids).logits, expected)
    assert all(parameter.requires_grad for parameter in trainee.parameters())
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert target.model.config.num_hidden_layers == 3


@pytest.mark.parametrize("options", [{"from_layers": 1}, {"tie": False}, {"hidden_size": 24, "num_heads": 3}])
def test_what_is_saved(options, target, tmp_path):
    trainee = make(target, **options)
    trainee.save(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(saved(ids).logits, trainee.model.eval()(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == {f"w{i}": i for i in range(48)}
    assert Path(tmp_path / "model.safetensors").exists()


def test_any_causal_model_is_trained_further(target, tmp_path):
    """Its architecture stays as it is, whatever the sizes of a new draft model would be."""
    changes = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True, "seed": 3}
    given = tiny_target(tmp_path / "given", num_hidden_layers=1, intermediate_size=40, **changes)
    (tmp_path / "saved").mkdir()
    trainee = make(target)
    sizes = {"num_layers": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "tie": True}
    assert trainee.load(str(given)) == sizes
    assert all(parameter.requires_grad for parameter in trainee.parameters())
    trainee(batch_of(target))[0].backward()
    trainee.save(tmp_path / "saved")
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("given", "saved"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ({}, {"vocab_size": 50}, r"has 50 tokens, and the target 48: start from one with the target's vocabulary"),
        ({"from_layers": 1}, {}, r"from_layers=1 copies the target's layers, and the start .* leave either out"),
    ],
)
def test_what_cannot_be_trained_further_is_explained(options, sizes, message, target, tmp_path):
    given = tiny_target(tmp_path, num_hidden_layers=1, **sizes)
    with pytest.raises((ConfigError, CompatibilityError), match=message):
        make(target, **options).load(str(given))


def test_a_start_whose_tokens_are_others_is_refused(target, tmp_path):
    given = tiny_target(tmp_path, num_hidden_layers=1)
    save_words(given, [f"w{i}" for i in reversed(range(48))])  # other ids of the same words
    with pytest.raises(CompatibilityError, match="w47"):
        make(target).load(str(given))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"from_layers": 3}, "from_layers=3, but the target has 3 layers"),
        ({"from_layers": 1, "num_layers": 2}, "so num_layers cannot be given"),
        ({"from_layers": 1, "tie": True}, "so tie cannot be given"),
        ({"hidden_size": 30, "num_heads": 4}, "hidden_size=30 cannot be divided among num_heads=4"),
        ({"hard_weight": 2}, "hard_weight=2"),
    ],
)
def test_wrong_options_are_explained(options, message, target):
    with pytest.raises(ConfigError, match=message):
        make(target, **options)
