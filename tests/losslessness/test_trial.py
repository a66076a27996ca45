"""A model that would silently generate wrong outputs on the paged KV cache is refused while it is loaded. The tests
patch each such fault into a Llama."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from families import save_family
from transformers.models.llama import modeling_llama

from specdec_core import LLM, CompatibilityError, ConfigError, SamplingParams
from specdec_core.models import compatibility as trial
from specdec_core.models.compatibility import StockChecks, telling_mask
from specdec_core.models.load import ModelSource
from specdec_core.models.model import Model

Change = Callable[[Callable[..., Any]], Callable[..., Any]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("llama", tmp_path_factory.mktemp("llama"))


def load(folder: Path, **kwargs: Any) -> LLM:
    return LLM(str(folder), **{"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128, **kwargs})


def mixes_tokens(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, x: forward(self, x - x.mean(dim=1, keepdim=True))


def has_limited_capacity(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A deliberate fault: only the first six tokens of a forward pass are computed, as in a mixture-of-experts layer
    with limited capacity. The others get zeros."""
    return lambda self, x: torch.cat([forward(self, x[:, :6]), torch.zeros_like(x[:, 6:])], dim=1)


def counts_positions(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, x, position_ids: forward(self, x, torch.arange(x.shape[1]).unsqueeze(0))


def shifts_tokens(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, x, **kwargs: forward(self, x + 0.1 * x.roll(1, dims=1), **kwargs)


def scales_otherwise(eager: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, q, k, v, mask, scaling, **kwargs: eager(
        module, q, k, v, mask, scaling=1.1 * scaling, **kwargs
    )


def has_position_bias(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: forward(self, *args, position_bias=torch.zeros(1), **kwargs)


def adds_to_its_mask(forward: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, *args: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return forward(self, *args, attention_mask=None if attention_mask is None else attention_mask + 0.0, **kwargs)

    return changed


def has_more_logits(forward: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = torch.nn.functional.pad(output.logits, (0, 8))
        return output

    return changed


def fails(forward: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, x: Any) -> Any:
        raise ZeroDivisionError("a bug in this model")

    return changed


WRONG: dict[Change, tuple[Any, str, str]] = {
    mixes_tokens: (modeling_llama.LlamaMLP, "forward", "depends on other tokens"),
    has_limited_capacity: (modeling_llama.LlamaMLP, "forward", "depends on other tokens"),
    counts_positions: (modeling_llama.LlamaRotaryEmbedding, "forward", "depends on other tokens"),
    shifts_tokens: (modeling_llama.LlamaDecoderLayer, "forward", "depends on other tokens"),
    scales_otherwise: (modeling_llama, "eager_attention_forward", "computes attention in a way"),
    has_position_bias: (modeling_llama.LlamaAttention, "forward", "passes position_bias"),
    adds_to_its_mask: (modeling_llama.LlamaAttention, "forward", "a mask of its own making"),
    has_more_logits: (modeling_llama.LlamaForCausalLM, "forward", "computes 128 logits"),
    fails: (modeling_llama.LlamaMLP, "forward", "ZeroDivisionError: a bug in this model"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_what_is_silently_wrong_is_refused(
    change: Change, dtype: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, message = WRONG[change]
    load(llama, dtype=dtype)
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    if change is has_limited_capacity and dtype == "bfloat16":
        return  # some tokens may differ by rounding, and this changes no more of them
    with pytest.raises(CompatibilityError, match=message):
        load(llama, dtype=dtype)


def test_windows_that_only_the_mask_knows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mistral import modeling_mistral

    folder = save_family("mistral", tmp_path)
    attend = trial.trial_attention

    def without_window(*args: Any, sliding_window: int, **kwargs: Any) -> Any:
        return attend(*args, **kwargs)

    load(folder)
    monkeypatch.setitem(modeling_mistral.ALL_ATTENTION_FUNCTIONS._global_mapping, trial.TRIAL, without_window)
    with pytest.raises(CompatibilityError, match="position 5 sees position 0"):
        load(folder)
    load(folder, max_model_len=5)  # no request is as long as the window


def test_masks_are_compared_at_any_distance() -> None:
    """A model whose attention mask hides a single position is refused if max_model_len reaches past that position."""
    mask = telling_mask(
        mask_function=lambda batch, head, query, key: (key <= query) & (key != 50),
        batch_size=1,
        q_length=4,
        kv_length=4,
        dtype=torch.float32,
    )
    StockChecks(max_model_len=50).check_mask(torch.nn.Identity(), mask, None)
    with pytest.raises(CompatibilityError, match="position 99 sees position 50"):
        StockChecks(max_model_len=100).check_mask(torch.nn.Identity(), mask, None)


@pytest.mark.parametrize("is_parameter", [True, False])
def test_logits_of_all_rows_are_no_obstacle(
    is_parameter: bool, llama: Path, generate: Any, make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs are right with a model that returns the logits of all rows, because its forward lacks or ignores the
    argument `logits_to_keep`."""
    prompts = reference.prompts(120, [1, 9, 33], seed=2)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    expected = [output.token_ids for output in generate(make_llm(llama, None), prompts, params)]
    forward = modeling_llama.LlamaForCausalLM.forward

    def with_parameter(self: Any, *args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    def without_parameter(self: Any, input_ids: Any, position_ids: Any, use_cache: bool) -> Any:
        return forward(self, input_ids, position_ids=position_ids, use_cache=use_cache)

    monkeypatch.setattr(
        modeling_llama.LlamaForCausalLM, "forward", with_parameter if is_parameter else without_parameter
    )
    llm = make_llm(llama, "random_tree", max_num_batched_tokens=7)
    assert [output.token_ids for output in generate(llm, prompts, params)] == expected


def test_a_model_is_as_it_was_after_the_trial(llama: Path) -> None:
    """The compatibility checks while loading leave no attributes on the model's modules, and its attention is the paged
    one."""
    model = Model(ModelSource(model=llama, device=torch.device("cpu"), dtype="float32"))._model
    assert model.config._attn_implementation == "specdec"
    assert not [name for module in model.modules() for name in vars(module) if name.startswith("specdec")]


@pytest.mark.parametrize(("model_type", "message"), [("t5", "encoder-decoder"), ("vit", "no causal language model")])
def test_what_is_no_causal_language_model_is_refused(model_type: str, message: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(CompatibilityError, match=message):
        load(tmp_path)


def test_a_context_of_unknown_length_has_to_be_given(tmp_path: Path) -> None:
    from transformers import BloomConfig

    BloomConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="give max_model_len"):
        LLM(str(tmp_path), skip_tokenizer_init=True)
