"""Rotary frequencies do not depend on other requests.

In transformers, the frequencies of some models depend on the longest request of the batch. specdec keeps them constant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reference
from families import HEADS, SIZES, save_family

from specdec_core import LLM, CompatibilityError, ConfigError, SamplingParams
from specdec_core.models import model as target_model
from specdec_core.models.compatibility import Findings

ORIGINAL = 32
SHORT = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = SHORT | {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.5 + i for i in range(8)]}
ONLY_LONG = LONGROPE | {"short_factor": LONGROPE["long_factor"]}
PHIMOE = LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.3}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def save(model_type: str, folder: Path, rope: dict[str, Any], **changes: Any) -> Path:
    """Save a tiny random model with these RoPE parameters. All models of one model_type have equal weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = SIZES | HEADS | {"rope_parameters": dict(rope)} | changes
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ropes")
    save("phi3", root / "longrope", LONGROPE, original_max_position_embeddings=ORIGINAL)
    save("phi3", root / "only_long", ONLY_LONG, original_max_position_embeddings=ORIGINAL)
    save("llama", root / "dynamic", {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    save("llama", root / "plain", {"rope_type": "default", "rope_theta": 10000.0})
    return root


@pytest.mark.parametrize(
    ("model", "max_model_len", "stock", "lengths"),
    [
        ("longrope", 128, "only_long", [1, 9, 20, 60]),
        ("longrope", ORIGINAL, "longrope", [1, 9, 16]),
        ("dynamic", 256, "plain", [1, 9, 20, 200]),
    ],
)
@pytest.mark.parametrize("method", [None, "random_tree"], ids=str)
def test_output_is_that_of_the_pinned_frequencies(
    model: str, max_model_len: int, stock: str, lengths: list, method: Any, folder: Path, make_llm: Any, generate: Any
) -> None:
    prompts = reference.prompts(120, lengths, seed=2)
    target = reference.load(folder / stock)
    expected = [reference.greedy(target, prompt, 16).token_ids for prompt in prompts]
    llm = make_llm(folder / model, method, max_model_len=max_model_len, max_num_batched_tokens=40)
    assert [output.token_ids for output in generate(llm, prompts, GREEDY)] == expected


def test_short_and_long_frequencies_differ(folder: Path) -> None:
    """Negative control: outputs with short rotary frequencies differ from outputs with long ones."""
    (prompt,) = reference.prompts(120, [9], seed=2)
    found = [
        reference.greedy(reference.load(folder / name), prompt, 16).token_ids for name in ("longrope", "only_long")
    ]
    assert found[0] != found[1]


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_longer_request_changes_no_other(
    is_pinned: bool, folder: Path, make_llm: Any, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer request in the batch does not change another request's output.

    Negative control: the output changes without `pin_positions`.
    """
    if not is_pinned:
        monkeypatch.setattr(target_model, "pin_positions", lambda *args: None)
        monkeypatch.setattr(target_model, "try_out", lambda *args: Findings(keeps_rows=True))
    short, long = reference.prompts(120, [9, 60], seed=2)
    llm = make_llm(folder / "longrope", None)
    alone = generate(llm, [short], GREEDY)[0].token_ids
    together = generate(llm, [short, long], GREEDY)[0].token_ids
    assert (alone == together) is is_pinned


def test_what_is_not_pinned_is_found_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is refused if its rotary frequencies still depend on the batch, for example because of custom code."""
    monkeypatch.setattr(target_model, "pin_positions", lambda *args: None)
    with pytest.raises(CompatibilityError, match="max_model_len may help"):
        LLM(str(folder / "longrope"), skip_tokenizer_init=True, dtype="float32")


def test_a_scale_that_follows_the_longest_request_is_refused(tmp_path: Path, make_llm: Any) -> None:
    """PhiMoE is refused if max_model_len exceeds original_max_position_embeddings. Beyond it, the scale of the rotary
    embedding would depend on the longest request in the batch."""
    save("phimoe", tmp_path, PHIMOE, num_local_experts=4, original_max_position_embeddings=ORIGINAL)
    with pytest.raises(CompatibilityError, match="max_model_len may help"):
        make_llm(tmp_path, None)
    make_llm(tmp_path, None, max_model_len=ORIGINAL)


def test_no_request_is_longer_than_the_model_was_trained_for(folder: Path) -> None:
    """A max_model_len above the length that the model was trained for is refused, so dynamic rotary frequencies never
    change."""
    with pytest.raises(ConfigError, match="max_model_len=257"):
        LLM(str(folder / "dynamic"), skip_tokenizer_init=True, max_model_len=257)


def test_temperatures_do_not_follow_the_batch(tmp_path: Path, make_llm: Any, generate: Any) -> None:
    """Outputs of Llama 4 equal those of each request run alone, although transformers scales queries by their row in
    the batch."""
    folder = save_family("llama4_text", tmp_path)
    prompts = reference.prompts(120, [60, 61, 62, 63], seed=2)
    llm = make_llm(folder, None)
    alone = [generate(llm, [prompt], GREEDY)[0].token_ids for prompt in prompts]
    assert [output.token_ids for output in generate(llm, prompts, GREEDY)] == alone
