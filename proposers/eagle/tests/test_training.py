"""Tests that a head in training computes the same logits, at every position and step, as when it drafts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from reference_heads import reference_eagle, reference_eagle3
from tiny_heads import TinyHead
from transformers import AutoModelForCausalLM

from specdec_core import ConfigError, TargetInfo, TrainingBatch, TrainingTarget, most_frequent
from specdec_proposer_eagle.config import EagleConfig
from specdec_proposer_eagle.loading import find, load
from specdec_proposer_eagle.recipes import EAGLE, EAGLE3, Eagle3Options, EagleOptions
from specdec_proposer_eagle.trainees import _rope, unrolled
from specdec_testing import tiny_target

LENGTH, STEPS = 9, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=8)


@pytest.fixture(scope="module")
def target(folder: Path) -> TrainingTarget:
    model = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    its = model.config
    info = TargetInfo(str(folder), "llama", its.vocab_size, its.hidden_size, its.num_hidden_layers, 512, torch.float32,
                      torch.device("cpu"))  # fmt: skip
    return TrainingTarget(info, its, model, model.get_input_embeddings(), model.get_output_embeddings())


def batch_of(target: TrainingTarget, taps: tuple[str, ...], seed: int = 1) -> TrainingBatch:
    token_ids = torch.randint(48, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    states = target.model(token_ids, output_hidden_states=True).hidden_states
    features = {tap: states[-1 if tap == "final" else int(tap.split(".")[1])] for tap in taps}
    return TrainingBatch(token_ids, torch.ones(2, LENGTH, dtype=torch.bool), features)


def sharpen(trainee: torch.nn.Module) -> torch.nn.Module:
    """Replace the weight matrices of the head in training by larger random ones, so that a wrong position or attention
    mask changes the results. Returns the trainee."""
    for parameter in trainee.head.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    return trainee


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("is_eagle3", [True, False])
@torch.no_grad()
def test_training_is_drafting(is_eagle3, num_layers, target, tmp_path):
    torch.manual_seed(0)
    recipe, options = (EAGLE3, Eagle3Options) if is_eagle3 else (EAGLE, EagleOptions)
    options = options(num_layers=num_layers, **({"draft_vocab_size": 20} if is_eagle3 else {}))
    trainee = sharpen(recipe.make(options, target, torch.arange(48)))
    trainee.save(tmp_path)
    taps = recipe.taps(options, target.info)
    batch = batch_of(target, taps)
    features = torch.cat([batch.features[tap] for tap in taps], dim=-1)
    head = TinyHead.read(tmp_path)
    output_head = trainee.head.lm_head if is_eagle3 else target.output_head
    outputs = unrolled(trainee.head, target, batch.token_ids, trainee.head.fuse(features), STEPS)
    logits = [output_head(output) for output in outputs]
    assert len(logits) == STEPS
    reference = reference_eagle3 if is_eagle3 else reference_eagle
    lm_head = target.model.get_output_embeddings().double()
    try:
        for text in range(2):
            for slot in range(LENGTH - STEPS):
                ids = batch.token_ids[text].tolist()
                chain = [(ids[slot + 2 + k], k - 1) for k in range(STEPS - 1)]
                expected = reference(
                    head.tensors, head.config, target.embed, lm_head, ids[: slot + 2], features[text, : slot + 1], chain
                )
                found = torch.stack([of_step[text, slot] for of_step in logits])
                torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
    finally:
        lm_head.float()


def test_what_is_saved_is_what_the_proposer_loads(target, tmp_path):
    trainee = EAGLE3.make(Eagle3Options(draft_vocab_size=20), target, torch.arange(48))
    trainee.save(tmp_path)
    config = EagleConfig(model=str(tmp_path))
    found = find(config, target.info, is_eagle3=True)
    head, (module, to_target) = found.head, load(found, target.info)
    assert head.taps == ("input.2", "input.4", "input.5")
    assert to_target.tolist() == list(range(28, 48))
    for name, tensor in trainee.head.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name
    published = TinyHead.read(tmp_path).tensors
    assert "midlayer.self_attn.q_proj.weight" in published
    assert "embed_tokens.weight" not in published
    assert (published["d2t"].dtype, published["t2d"].dtype) == (torch.int64, torch.bool)
    assert published["t2d"].nonzero().flatten().tolist() == to_target.tolist()


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (EAGLE, EagleOptions(ttt_steps=2, noise=0.0)),
        (EAGLE3, Eagle3Options(ttt_steps=2)),
        (EAGLE3, Eagle3Options(ttt_steps=2, feature_weight=3.0)),
    ],
)
def test_what_does_not_count_teaches_nothing(recipe, options, target):
    """The loss does not depend on masked tokens, nor on tokens after the last unmasked one."""
    torch.manual_seed(0)
    trainee = recipe.make(options, target, torch.arange(48))
    taps = (*recipe.taps(options, target.info), "final")
    batch = batch_of(target, tuple(dict.fromkeys(taps)))
    counts = batch.counts.clone()
    counts[:, 6:] = False
    whole = trainee(TrainingBatch(batch.token_ids, counts, batch.features))[0]
    cut = {tap: feature[:, :6] for tap, feature in batch.features.items()}
    shorter = trainee(TrainingBatch(batch.token_ids[:, :6], counts[:, :6], cut))[0]
    torch.testing.assert_close(whole, shorter)
    assert float(whole.detach()) > 0


@torch.no_grad()
def test_noise_is_for_learning_alone(target):
    trainee, batch = EAGLE.make(EagleOptions(noise=0.5), target, torch.arange(48)), batch_of(target, ("final",))
    assert trainee(batch)[0] != trainee(batch)[0]
    trainee.eval()
    assert trainee(batch)[0] == trainee(batch)[0]


@pytest.mark.parametrize("weight", [0.0, 3.0])
def test_a_head_that_learned_features_says_so(weight, target, tmp_path):
    EAGLE3.make(Eagle3Options(feature_weight=weight), target, torch.arange(48)).save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()).get("output_is_target_feature", False) == (weight > 0)


def test_nothing_is_learned_where_the_target_means_another_token(target):
    batch = batch_of(target, ("input.2", "input.4", "input.5", "final"))
    likeliest = target.output_head(batch.features["final"]).argmax(-1).unique()
    token_counts = torch.ones(48, dtype=torch.int64)
    token_counts[likeliest] = 0
    trainee = EAGLE3.make(Eagle3Options(draft_vocab_size=48 - len(likeliest)), target, token_counts)
    assert float(trainee(batch)[0].detach()) == 0


@torch.no_grad()
def test_a_head_of_eagle3_learns_features_as_far_as_it_is_told(target):
    taps = ("input.2", "input.4", "input.5")
    batch, weight = batch_of(target, (*taps, "final")), 3.0
    losses = []
    for options in (Eagle3Options(ttt_steps=STEPS), Eagle3Options(ttt_steps=STEPS, feature_weight=weight)):
        torch.manual_seed(0)
        trainee = EAGLE3.make(options, target, torch.arange(48))
        losses.append(trainee(batch)[0])
    fused = trainee.head.fuse(torch.cat([batch.features[tap] for tap in taps], dim=-1))
    expected = 0.0
    for step, outputs in enumerate(unrolled(trainee.head, target, batch.token_ids, fused, STEPS)):
        last = LENGTH - 2 - step  # slot i predicts token i + 2 + step
        distances = [
            torch.nn.functional.smooth_l1_loss(outputs[text, i], batch.features["final"][text, i + 1 + step])
            for text in range(2)
            for i in range(last)
        ]
        expected += options.decay**step * float(torch.stack(distances).mean())
    torch.testing.assert_close(float(losses[1] - losses[0]), weight * expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
def test_the_draft_vocabulary_is_the_most_frequent_tokens(counts, data):
    size = data.draw(st.integers(1, len(counts)))
    by_frequency = sorted(range(len(counts)), key=lambda token: (-counts[token], token))
    assert most_frequent(torch.tensor(counts), size).tolist() == sorted(by_frequency[:size])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_vocab_size": 49}, "draft_vocab_size=49, but the target has 48 tokens"),
        ({"aux_layers": "1,9"}, "aux_layers=1,9, but the target's layers are 0 to 7"),
        ({"aux_layers": "low"}, "aux_layers='low' is not a list of layers"),
        ({"ttt_steps": 0}, "ttt_steps=0"),
    ],
)
def test_wrong_options_are_explained(options, message, target):
    with pytest.raises(ConfigError, match=message):
        EAGLE3.make(Eagle3Options(**options), target, torch.arange(48))


def test_a_new_head_has_the_rope_of_full_attention() -> None:
    """Gemma 3 has one for each type of layer."""
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    ropes["full_attention"] = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert _rope(SimpleNamespace(rope_parameters=ropes)) == ropes["full_attention"]
    assert _rope(SimpleNamespace(rope_parameters=ropes["sliding_attention"])) == ropes["sliding_attention"]


def test_an_aligned_head_stays_aligned(target, tmp_path):
    """Without a feature weight, it would lose the tokens of the context that it drafts."""
    EAGLE3.make(Eagle3Options(feature_weight=3.0), target, torch.arange(48)).save(tmp_path)
    trainee = EAGLE3.make(Eagle3Options(), target, torch.arange(48))
    with pytest.raises(ConfigError, match=r"was trained with a feature_weight, .*: give feature_weight, such as 10$"):
        trainee.load(str(tmp_path))


def test_layers_are_given_as_text_or_as_numbers():
    assert Eagle3Options(aux_layers="0,1").aux_layers == Eagle3Options(aux_layers=[0, 1]).aux_layers == (0, 1)
    for wrong in ("0,a", [None], 3):
        with pytest.raises(ConfigError, match="is not a list of layers: write them as in 2,16,29"):
            Eagle3Options(aux_layers=wrong)
