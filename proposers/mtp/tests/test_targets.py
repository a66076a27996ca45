"""MTP modules beside real targets of transformers: drafts are the reference's, and outputs those of plain decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mtp_checkpoints as checkpoints
import mtp_reference as reference
import pytest
import torch
from safetensors.torch import load_file
from tiny_mtp import BY_NAME, add_modules, llama_with_modules, stated, tiny_config, tiny_weights
from transformers import AutoConfig, AutoModelForCausalLM
from transformers_log import log_to_stderr

from specdec_core import LLM, CompatibilityError, ConfigError, Observation, SamplingParams
from specdec_core.api.arguments import dry_run
from specdec_proposer_mtp.config import MTPConfig
from specdec_proposer_mtp.families import Family
from specdec_proposer_mtp.proposer import MTPProposer
from specdec_proposer_mtp.several import SeveralModules

TARGETS = ["deepseek_v3", "glm4_moe", "ernie4_5_moe", "longcat_flash", "qwen3_next"]
CONFIG: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"moe_intermediate_size": 8},  # transformers' kernel for experts needs widths of whole 16 bytes
    "glm4_moe": {"moe_intermediate_size": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 1},
    "qwen3_next": {
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
PROMPTS = [{"prompt_token_ids": ids} for ids in ([3, 5, 7, 11], [9, 2], [1, 4, 4, 8, 20, 6])]
SETTINGS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64}


def written(name: str, folder: Path, number: int = 1) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Write a random target, with its MTP modules in a second file. Returns the reference's config and weights."""
    config = tiny_config(name, **CONFIG.get(name, {}), num_nextn_predict_layers=number)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **stated(config), max_position_embeddings=64))
    for each in model.parameters():
        each.data *= 10 if each.ndim > 1 else 0.5 + torch.rand(each.shape)
    model.save_pretrained(folder)
    weights, its = tiny_weights(name, config), load_file(folder / "model.safetensors")
    add_modules(folder, name, config, weights)
    head = model.get_output_embeddings().weight.detach().double()
    for index in range(number):
        names = checkpoints.names(name, config, index)
        weights |= {names["head"]: head}
        if "embed" not in BY_NAME[name].names:  # LongCat's is the module's own
            weights |= {names["embed"]: model.get_input_embeddings().weight.detach().double()}
    weights |= {key: each.double() for key, each in its.items() if key == "model.norm.weight"}
    return config, weights


def embeddings_are_of_the_features_own_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Observation, "following_token_ids", property(lambda self: self.token_ids))


def features_are_not_normed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Family, "tap", lambda self, num_layers: f"input.{num_layers}")


FAULTS = [embeddings_are_of_the_features_own_tokens, features_are_not_normed]


@pytest.mark.parametrize(
    ("name", "number", "fault"),
    [
        *((name, 1, None) for name in TARGETS),
        *(("glm4_moe", 1, fault) for fault in FAULTS),
        *(pytest.param(name, 2, None, marks=pytest.mark.nightly) for name in TARGETS if BY_NAME[name].num_modules),
    ],
)
def test_drafts_are_those_of_the_reference(
    name: str, number: int, fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fault, some are not. number: of MTP modules."""
    config, weights = written(name, tmp_path, number)
    proposer = MTPProposer if number == 1 else SeveralModules
    target = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, experts_implementation="eager")
    propose, wrong, compared = proposer.propose, [], []

    def recording(self: Any, batch: Any) -> Any:
        draft = propose(self, batch)
        for b, request in enumerate(batch.requests):
            tokens = request.token_ids.tolist()
            drafted = draft.token_ids[draft.offsets[b] : draft.offsets[b + 1]].tolist()
            with torch.inference_mode(mode=False), torch.no_grad():
                states = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
                features = before_norm[-1] if BY_NAME[name].feature == "last" else states[-1][0]
                expected, logits = reference.chain(
                    name,
                    config,
                    weights,
                    tokens,
                    features,
                    torch.arange(len(features)),
                    len(drafted),
                    mode="repeat" if number == 1 else "modules",
                )
            top = logits.topk(2).values
            if bool(((top[:, 0] - top[:, 1]) > 1e-3).all()):
                compared.append(tokens)
                wrong.extend([(tokens, drafted, expected)] if drafted != expected else [])
        return draft

    before_norm: list[torch.Tensor] = []
    target.model.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0][0]))
    params = [SamplingParams(temperature=t, seed=7, max_tokens=16, ignore_eos=True) for t in (0.0, 0.0, 1.0)]
    with LLM(tmp_path, **SETTINGS) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    monkeypatch.setattr(proposer, "propose", recording)
    if fault is not None:
        fault(monkeypatch)
    config_of_drafts = {"method": "mtp", "num_speculative_tokens": 3 if number == 1 else 4}
    with LLM(tmp_path, speculative_config=config_of_drafts, max_num_seqs=2, **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert bool(wrong) == (fault is not None), wrong[:2]
    assert len(compared) > 30


def test_other_names_of_the_method_are_taken_with_a_warning(tmp_path: Path) -> None:
    written("glm4_moe", tmp_path)
    with pytest.warns(UserWarning, match="the method 'glm4_moe_mtp' is called 'mtp' here"):
        found = dry_run(tmp_path, speculative_config={"method": "glm4_moe_mtp"}, **SETTINGS).speculative
    assert (found.method, found.num_speculative_tokens) == ("mtp", 1)


def test_a_revision_without_a_checkpoint_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="revision='main' selects a revision of model, which is not given: give model"
    ):
        MTPConfig(revision="main")


def test_a_checkpoint_without_a_module_is_refused(tmp_path: Path) -> None:
    written("glm4_moe", tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file == "model-1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CompatibilityError, match=r"has no MTP module: model.layers.3.eh_proj.weight is not in it"):
        dry_run(tmp_path, speculative_config={"method": "mtp"}, **SETTINGS)


def test_transformers_does_not_report_the_tensors_that_the_module_reads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log_to_stderr(monkeypatch)
    AutoModelForCausalLM.from_pretrained(llama_with_modules(tmp_path))
    assert "UNEXPECTED" in capfd.readouterr().err
    LLM(tmp_path, speculative_config={"method": "mtp"}, **SETTINGS).close()
    assert not {"UNEXPECTED", "eh_proj"} & set("".join(capfd.readouterr()).replace(".", " ").split())
