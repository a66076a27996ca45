"""MTP modules in training, beside tiny random targets, and what the reference computes for their steps."""

from __future__ import annotations

from typing import Any

import mtp_checkpoints as checkpoints
import mtp_reference as reference
import torch
from attrs import frozen
from tiny_mtp import Weights, loaded_into, of_the_module, stated, tiny_config, tiny_weights
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from specdec_core import TargetInfo, TrainingBatch, TrainingTarget
from specdec_proposer_mtp.recipe import RECIPE, MTPOptions

BATCH, LENGTH = 2, 7
STEP = tuple[int, int, int]


class MiMoConfig(Qwen2Config):
    """MiMo's own code has such a class; transformers has none."""

    model_type = "mimo"


@frozen(eq=False)
class Case:
    """A module in training with random weights, and a batch of random texts and features."""

    name: str
    config: dict[str, Any]
    weights: Weights
    target: TrainingTarget
    trainee: Any
    batch: TrainingBatch

    def chains(self, num_steps: int) -> dict[STEP, torch.Tensor]:
        """Draft from each position of each text with the reference, where the text's own tokens are drafted. Returns
        logits, float64 [vocab], by text, position and step."""
        (features,) = (self.batch.features[tap] for tap in RECIPE.taps(MTPOptions(), self.target.info))
        table = self.weights[checkpoints.names(self.name, self.config)["embed"]]
        found: dict[STEP, torch.Tensor] = {}
        for text, ids in enumerate(self.batch.token_ids):
            for slot in range(len(ids) - 1):
                states = features[text, : slot + 1].double()
                for step in range(min(num_steps, len(ids) - 1 - slot)):
                    embedded = table[ids[1 : slot + 2 + step]]
                    hidden, logits = reference.forward(
                        self.name, self.config, self.weights, embedded, states, torch.arange(len(states))
                    )
                    found[text, slot, step] = logits[-1]
                    states = torch.cat([states, hidden[-1:]])
        return found


def training_target(name: str, **changes: Any) -> tuple[dict[str, Any], TrainingTarget]:
    """Make a tiny random target. Returns the reference's config, too."""
    config = tiny_config(name, **changes)
    torch.manual_seed(0)
    ours = stated(config) | {"max_position_embeddings": 64}
    if name == "mimo":
        model = Qwen2ForCausalLM(MiMoConfig(**ours))
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **ours))
    model.eval().requires_grad_(False)
    sizes = (config[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers"))
    info = TargetInfo("tiny", name, *sizes, 64, torch.float32, torch.device("cpu"))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    model.base_model.norm.weight.normal_()
    embedding.weight.normal_()
    head.weight.normal_(std=0.5)
    return config, TrainingTarget(info, model.config, model, embedding, head)


def made(name: str, *, is_new: bool = False, **options: Any) -> Case:
    """Make a module in training. is_new: as the recipe initializes it; False: with random weights."""
    config, target = training_target(name)
    trainee = RECIPE.make(MTPOptions(**options), target, torch.ones(config["vocab_size"]))
    weights = tiny_weights(name, config)
    own = of_the_module(name, config, weights)
    if not is_new:
        loaded_into(trainee.module, name, config, weights)
    names = checkpoints.names(name, config)
    weights |= {names["embed"]: target.embed.weight.double(), names["head"]: target.output_head.weight.double()}
    weights |= own
    return Case(name, config, weights, target, trainee, random_batch(config, target))


def random_batch(config: dict[str, Any], target: TrainingTarget) -> TrainingBatch:
    """Return a batch of random token ids and features. The loss mask is False for about a third of the tokens."""
    generator, shape = torch.Generator().manual_seed(1), (BATCH, LENGTH)
    token_ids = torch.randint(config["vocab_size"], shape, generator=generator)
    taps = {"final", *RECIPE.taps(MTPOptions(), target.info)}
    features = {tap: torch.randn(*shape, config["hidden_size"], generator=generator) for tap in sorted(taps)}
    return TrainingBatch(token_ids, torch.rand(shape, generator=generator) > 1 / 3, features)
