"""benchmarks/inflate.py adds layers to a model without changing the generated text or the acceptance rate."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from recorded_runs import VOCAB_SIZE, save_talkative_model

sys.path.append(str(Path(__file__).parents[2] / "proposers" / "eagle" / "tests"))
sys.path.append(str(Path(__file__).parents[2] / "proposers" / "mtp" / "tests"))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from fitted_heads import fitted
from inflate import inflate
from tiny_heads import write_eagle, write_specforge
from tiny_mtp import llama_with_modules
from tiny_weights import Target

from specdec_core import Checkpoint, SamplingParams

NUM_LAYERS, TIMES = 6, 3
TAPS = {"eagle": [-1], "eagle3": [2, 3, 5]}
NESTED = {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}  # outputs


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of a target with EAGLE and EAGLE-3 draft heads ("shallow"), and of the same with more layers in the
    target ("deep")."""
    folder = tmp_path_factory.mktemp("inflated")
    shallow = save_talkative_model(folder / "shallow", certainty=1, num_hidden_layers=NUM_LAYERS)
    sizes = Target(32, VOCAB_SIZE, NUM_LAYERS, embedding_rms=1.2, feature_rms=1.0)
    for method, write in (("eagle", write_eagle), ("eagle3", write_specforge)):
        written = write(folder / method, sizes, seed=3)
        if method == "eagle3":
            (written.folder / "config.json").write_text(json.dumps(written.config | NESTED))
        head = fitted(written, shallow, folder / f"fitted-{method}", TAPS[method])
        shutil.copytree(head.folder, shallow / "drafts" / method)
    inflate(shallow, folder / "deep", TIMES)
    return {"shallow": shallow, "deep": folder / "deep"}


def test_logits_are_the_same_bit_for_bit(both: dict[str, Path]) -> None:
    shallow, deep = reference.load(both["shallow"]), reference.load(both["deep"])
    assert deep.config.num_hidden_layers == TIMES * NUM_LAYERS
    tokens = torch.randint(VOCAB_SIZE, (4, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = (model(tokens, output_hidden_states=True) for model in (shallow, deep))
    assert torch.equal(expected.logits, found.logits)
    for layer in range(NUM_LAYERS):
        assert torch.equal(expected.hidden_states[layer], found.hidden_states[TIMES * layer])


def test_both_conventions_name_the_same_places(both: dict[str, Path]) -> None:
    config = json.loads((both["deep"] / "drafts" / "eagle3" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [6, 9, 15]
    assert config["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [5, 8, 14]}


def test_nothing_can_be_skipped(both: dict[str, Path]) -> None:
    weights = reference.load(both["deep"]).state_dict()
    zeros = {name.split(".", 3)[3] for name, tensor in weights.items() if not tensor.any()}
    assert zeros == {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
    queries = [tensor for name, tensor in weights.items() if name.endswith("q_proj.weight")]
    assert len({tuple(tensor.flatten().tolist()) for tensor in queries}) == TIMES * NUM_LAYERS


@pytest.mark.parametrize("options", [{"eagle_topk": 1}, {"eagle_topk": 3, "eagle_depth": 2}], ids=["chain", "tree"])
@pytest.mark.parametrize("method", TAPS)
def test_as_much_is_accepted(
    both: dict[str, Path], method: str, options: dict[str, Any], make_llm: Callable[..., Any]
) -> None:
    prompts = [{"prompt_token_ids": ids} for ids in reference.prompts(VOCAB_SIZE, [3, 9, 17], seed=2)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    found = {}
    for name, folder in both.items():
        outputs = make_llm(folder, method, options=options, max_model_len=64).generate(prompts, params, use_tqdm=False)
        found[name] = [(output.outputs[0].token_ids, output.speculation) for output in outputs]
    assert found["shallow"] == found["deep"]
    assert sum(counts.num_accepted for _, counts in found["deep"]) > 20


def test_mtp_modules_stay_behind_the_last_layer(tmp_path: Path, make_llm: Callable[..., Any]) -> None:
    inflate(llama_with_modules(tmp_path / "shallow", 2), tmp_path / "deep", TIMES)
    shallow, deep = (Checkpoint(str(tmp_path / name)) for name in ("shallow", "deep"))
    num_layers, num_deep = (each.config["num_hidden_layers"] for each in (shallow, deep))
    assert num_deep == TIMES * num_layers
    for module in range(2):
        old, new = f"model.layers.{num_layers + module}.", f"model.layers.{num_deep + module}."
        names = [name for name in shallow.shapes if name.startswith(old)]
        assert len(names) > 5
        before, after = shallow.load(names), deep.load([name.replace(old, new) for name in names])
        assert all(torch.equal(before[name], after[name.replace(old, new)]) for name in names)
    assert not [name for name in deep.shapes if name.startswith(f"model.layers.{num_deep + 2}.")]
    llm = make_llm(tmp_path / "deep", "mtp", options={"num_speculative_tokens": 2}, max_model_len=64)
    (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=4))
    assert output.speculation.num_drafts


def test_it_is_deterministic(both: dict[str, Path], tmp_path: Path) -> None:
    inflate(both["shallow"], tmp_path / "again", TIMES)
    files = sorted(path.relative_to(both["deep"]) for path in both["deep"].rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*.*"))
    for file in files:
        assert (both["deep"] / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
