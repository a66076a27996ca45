"""Engines run operations from a plugin. The plugin's attention uses only the device tensors of an `AttentionPlan`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, field, frozen
from bits_attention import attention_by_bits, attention_to_all_nodes, attention_without_bits

from specdec_core import (
    DEAD,
    LLM,
    Draft,
    DraftTree,
    KVLayout,
    OpsContext,
    OpsSpec,
    Plan,
    PluginError,
    Plugins,
    Proposer,
    ProposerSpec,
    SamplingParams,
    hookimpl,
)
from specdec_core.ops import REFERENCE, resolve
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_testing import tiny_target

NUM_TOKENS = 80  # a draft has no more nodes than there are tokens to come, and some are to have two words of bits
MARGIN = 1e-4  # of log-probabilities: attention in another order changes them by 1e-5 at most


@frozen
class GuessConfig:
    kind: str = "tree"  # or "chain"
    texts: Sequence[Sequence[int]] = field(factory=list)  # prompts with the outputs that are known to be right


class Guess(Proposer):
    """A proposer whose drafts contain the right continuation, with some tokens replaced by random ones.

    Its trees also have random branches and dead (padding) nodes.
    """

    def __init__(self, config: GuessConfig, context: Any) -> None:
        self.config, self.vocab_size, self.device = config, context.target.vocab_size, context.device

    def propose(self, batch: Any) -> Draft:
        trees = [
            self.tree(r.token_ids.tolist(), most)
            for r, most in zip(batch.requests, batch.max_draft_tokens, strict=True)
        ]
        if self.config.kind == "chain":
            return Draft.from_chains([tree.token_ids for tree in trees], self.device)
        return Draft.from_trees(trees, self.device)

    def tree(self, text: list[int], most: int) -> DraftTree:
        rng = np.random.default_rng(text)
        right = next((list(known[len(text) :]) for known in self.config.texts if list(known[: len(text)]) == text), [])
        tokens, parents, path = [], [], [-1]  # path: the root and the nodes of the right continuation
        for node in range(most):
            if self.config.kind == "chain" or (rng.random() < 0.5 and len(path) <= len(right)):
                depth = len(path) - 1
                tokens.append(right[depth] if depth < len(right) and rng.random() < 0.8 else self.any(rng))
                parents.append(path[-1])
                path.append(node)
            else:
                tokens.append(self.any(rng))
                parents.append(DEAD if rng.random() < 0.1 else int(rng.integers(-1, node)))
        return DraftTree(tokens, parents)

    def any(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.vocab_size))


GUESS = ProposerSpec(
    name="guess",
    config=GuessConfig,
    build=Guess,
    api=1,
    plan=lambda config, target, num_speculative_tokens: Plan(observes=False),
)


class Used:
    """A callable that counts its calls and forwards each call to a function, by default an attention function."""

    def __init__(self, function: Callable[..., Any] = attention_by_bits) -> None:
        self.function, self.num_calls = function, 0

    def __call__(self, *args: Any, **features: Any) -> Any:
        self.num_calls += 1
        return self.function(*args, **features)


@pytest.fixture
def offering(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plugins]:
    """Return a function that takes any number of OpsSpecs and loads one plugin for each, for the device "cpu" only.

    It also loads the proposer GUESS and the installed plugins except `kernels`.
    """

    def load(*offered: Any) -> Plugins:
        modules = []
        for i, spec in enumerate(offered):
            module = ModuleType(f"ops_of_a_test_{i}")
            module.specdec_ops = hookimpl(specname="specdec_ops")(
                lambda device, spec=spec: spec if device == "cpu" else None
            )
            monkeypatch.setitem(sys.modules, module.__name__, module)
            modules.append(module.__name__)
        guess = ModuleType("guess_of_a_test")
        guess.specdec_proposers = hookimpl(specname="specdec_proposers")(lambda: [GUESS])
        monkeypatch.setitem(sys.modules, guess.__name__, guess)
        others = [entry.name for entry in entry_points(group="specdec") if entry.name == "kernels"]
        return Plugins.load(disable=others, modules=[*modules, guess.__name__])

    return load


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("llama"), num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model in which every layer has a sliding window of 7 tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, sliding_window=7, initializer_range=0.3,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MistralForCausalLM(config)
    folder = tmp_path_factory.mktemp("mistral")
    model.save_pretrained(folder)
    return folder


PROMPTS = [np.random.default_rng(n).integers(48, size=n).tolist() for n in (1, 2, 5, 9, 16, 17, 40, 70)]


@frozen
class Outcome:
    token_ids: list[list[int]]
    margins: list[float]  # of each output, the least of any token over the next likely one
    metrics: dict[str, float]


def complete(
    model: Path | str, plugins: Plugins, speculative: Any = None, num_tokens: int = NUM_TOKENS, **settings: Any
) -> Outcome:
    options = {
        "dtype": "float32",
        "block_size": 4,
        "max_model_len": 160,
        "num_kv_blocks": 500,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=2)
    with LLM(
        model, skip_tokenizer_init=True, plugins=plugins, speculative_config=speculative, **options | settings
    ) as llm:
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        metrics = {metric.name.rpartition(":")[2]: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    outputs = [output.outputs[0] for output in found]
    margins = []
    for output in outputs:
        best = [sorted((each.logprob for each in step.values()), reverse=True) for step in output.logprobs]
        margins.append(min(first - second for first, second, *_ in best))
    return Outcome([list(output.token_ids) for output in outputs], margins, metrics)


@pytest.fixture(scope="module")
def plain(llama: Path) -> list[list[int]]:
    """Outputs of plain decoding with core's reference operations."""
    return certain(complete(llama, reference_alone()))


def reference_alone() -> Plugins:
    return Plugins.load(disable=[entry.name for entry in entry_points(group="specdec") if entry.name == "kernels"])


def certain(outcome: Outcome) -> list[list[int]]:
    assert min(outcome.margins) > MARGIN, "a near tie: choose other prompts"
    return outcome.token_ids


def guess(plain: list[list[int]], kind: str) -> dict[str, Any]:
    texts = [prompt + output for prompt, output in zip(PROMPTS, plain, strict=True)]
    return {"method": "guess", "num_speculative_tokens": 9 if kind == "chain" else 70, "kind": kind, "texts": texts}


def test_plain_decoding(llama: Path, plain: list, offering: Any) -> None:
    used = Used()
    assert complete(llama, offering(OpsSpec(1, {"paged_attention": used}))).token_ids == plain
    assert used.num_calls > 2 * NUM_TOKENS


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_drafts(kind: str, llama: Path, plain: list, offering: Any) -> None:
    plugins = offering(OpsSpec(1, {"paged_attention": attention_by_bits}))
    found = complete(llama, plugins, guess(plain, kind), max_num_batched_tokens=700)
    assert found.token_ids == plain
    assert found.metrics["spec_decode_num_accepted_tokens"] > 80


def test_preemption(llama: Path, plain: list, offering: Any) -> None:
    plugins = offering(OpsSpec(1, {"paged_attention": attention_by_bits}))
    found = complete(llama, plugins, guess(plain, "tree"), num_kv_blocks=60, max_num_batched_tokens=200)
    assert found.token_ids == plain
    assert found.metrics["num_preemptions"] > 0
    assert found.metrics["spec_decode_num_accepted_tokens"] > 20


def test_windows(mistral: Path, offering: Any) -> None:
    plain = certain(complete(mistral, reference_alone()))
    plugins = offering(OpsSpec(1, {"paged_attention": attention_by_bits}))
    found = complete(mistral, plugins, guess(plain, "tree"), max_num_batched_tokens=700)
    assert found.token_ids == plain
    assert found.metrics["spec_decode_num_accepted_tokens"] > 80


def test_eagle3(offering: Any) -> None:
    """With a plugin's attention in both the target and the EAGLE-3 draft head, outputs equal those of plain
    decoding."""
    pytest.importorskip("specdec_model_tiny")
    asked: list[OpsContext] = []

    def supports(name: str, context: OpsContext) -> bool:
        asked.append(context)
        return True

    plain = complete("tiny", reference_alone(), num_tokens=24)
    plugins = offering(OpsSpec(1, {"paged_attention": attention_by_bits}, supports))
    config = {"method": "eagle3", "adaptive_draft_length": False}
    found = complete("tiny", plugins, config, num_tokens=24, max_num_batched_tokens=700)
    assert found.token_ids == certain(plain)
    assert found.metrics["spec_decode_num_accepted_tokens"] > 20
    assert {context.kv_layout.num_layers for context in asked} == {8, 1}


@pytest.mark.parametrize("fault", [attention_without_bits, attention_to_all_nodes], ids=lambda fault: fault.__name__)
def test_a_fault_is_noticed(fault: Any, llama: Path, plain: list, offering: Any) -> None:
    plugins = offering(OpsSpec(1, {"paged_attention": fault}))
    begun = [output[:24] for output in plain]

    def found(kind: str) -> list[list[int]]:
        drafting = guess(plain, kind)
        return complete(llama, plugins, drafting, num_tokens=24, max_num_batched_tokens=200).token_ids

    assert found("chain") == begun
    assert found("tree") != begun


@pytest.mark.parametrize(
    "features", [{}, {"window": 3}, {"softcap": 0.7}, {"sinks": torch.linspace(-1, 2, 4)}], ids=str
)
def test_each_call_agrees_with_the_reference(features: dict, llama: Path, plain: list, offering: Any) -> None:
    num_words: set[int] = set()

    def both(query: Any, keys: Any, values: Any, plan: AttentionPlan, scaling: float, **given: Any) -> Any:
        expected, found = (
            function(query, keys, values, plan, scaling, **features)
            for function in (REFERENCE["paged_attention"], attention_by_bits)
        )
        n = int((plan.token_requests >= 0).sum())
        num_words.add(plan.ancestors.shape[1])
        torch.testing.assert_close(found[:n], expected[:n], rtol=1e-5, atol=1e-5)
        return REFERENCE["paged_attention"](query, keys, values, plan, scaling, **given)

    used = Used(both)
    found = complete(
        llama, offering(OpsSpec(1, {"paged_attention": used})), guess(plain, "tree"), max_num_batched_tokens=700
    )
    assert found.token_ids == plain
    assert used.num_calls > 15
    assert num_words == {0, 1, 2}


def test_accepted_nodes_are_moved_by_the_plugins_operation(llama: Path, plain: list, offering: Any) -> None:
    used = Used(REFERENCE["compact"])
    assert complete(llama, offering(OpsSpec(1, {"compact": used})), guess(plain, "tree")).token_ids == plain
    assert used.num_calls > 10
    nothing = offering(OpsSpec(1, {"compact": lambda *moves: None}))
    assert complete(llama, nothing, guess(plain, "tree")).token_ids != plain


def test_penalties_are_the_plugins_operation(llama: Path, offering: Any) -> None:
    used = Used(REFERENCE["penalize"])
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, frequency_penalty=1.0)
    plugins = offering(OpsSpec(1, {"penalize": used}))
    with LLM(llama, plugins=plugins, dtype="float32", num_kv_blocks=50, skip_tokenizer_init=True) as llm:
        llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
    assert used.num_calls == 5


def test_draft_tokens_are_found_by_the_plugins_operation(offering: Any) -> None:
    used = Used(REFERENCE["most_likely"])
    speculative = {"method": "eagle3", "eagle_topk": 4, "num_speculative_tokens": 12, "adaptive_draft_length": False}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    plugins = offering(OpsSpec(1, {"most_likely": used}))
    with LLM("tiny", plugins=plugins, dtype="float32", speculative_config=speculative) as llm:
        llm.generate("def mean(values):", params, use_tqdm=False)
    assert used.num_calls > 2


def only_bfloat16(name: str, context: OpsContext) -> bool:
    return context.dtype == torch.bfloat16


def test_what_does_not_support_the_engines_layers_is_not_used(llama: Path, plain: list, offering: Any) -> None:
    used = Used()
    plugins = offering(OpsSpec(1, {"paged_attention": used}, only_bfloat16))
    assert complete(llama, plugins).token_ids == plain
    assert used.num_calls == 0
    complete(llama, plugins, dtype="bfloat16")
    assert used.num_calls > 0


def test_nobody_is_asked_while_tokens_are_computed(llama: Path, plain: list, offering: Any) -> None:
    asked: list[str] = []

    def supports(name: str, context: OpsContext) -> bool:
        asked.append(name)
        return True

    plugins = offering(OpsSpec(1, {"paged_attention": attention_by_bits, "store_kv": REFERENCE["store_kv"]}, supports))
    with LLM(llama, plugins=plugins, dtype="float32", num_kv_blocks=50, skip_tokenizer_init=True) as llm:
        num_asked = len(asked)
        llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=5), use_tqdm=False)
    assert num_asked == len(asked) > 0


CONTEXT = OpsContext(torch.device("cpu"), torch.float32, KVLayout(2, 1, 64, 64, torch.float32))


def test_features_are_told_apart(offering: Any) -> None:
    """Two plugins can share the attention of one model. One computes plain attention, the other attention with a
    sliding window. Core's reference computes the rest, such as attention with a softcap."""
    whole, windowed = Used(lambda *args, **features: "whole"), Used(lambda *args, **features: "windowed")
    plugins = offering(
        OpsSpec(1, {"paged_attention": whole}, lambda name, context: not context.features),
        OpsSpec(1, {"paged_attention": windowed}, lambda name, context: context.features == {"window"}),
    )
    attention = resolve(plugins.ops("cpu"), [CONTEXT])["paged_attention"]
    assert attention(1, 2, 3, 4, 5, window=None, softcap=None, sinks=None) == "whole"
    assert attention(1, 2, 3, 4, 5, window=7) == "windowed"
    with pytest.raises(TypeError):
        attention()
    with pytest.raises(AttributeError):  # the reference, of which these are no tensors
        attention(1, 2, 3, 4, 5, window=7, softcap=1.0)


def test_one_function_for_all_features_is_called_as_it_is(offering: Any) -> None:
    plugins = offering(OpsSpec(1, {"paged_attention": attention_by_bits}))
    found = resolve(plugins.ops("cpu"), [CONTEXT])
    assert found == {**REFERENCE, "paged_attention": attention_by_bits}
    assert resolve(offering().ops("cpu"), [CONTEXT]) == REFERENCE


def refusal(model: Path, plugins: Plugins) -> str:
    with pytest.raises(PluginError) as caught:
        LLM(model, plugins=plugins, dtype="float32", skip_tokenizer_init=True)
    return str(caught.value)


def test_two_plugins_for_the_same_layers(llama: Path, plain: list, offering: Any) -> None:
    one, other = OpsSpec(1, {"paged_attention": Used()}), OpsSpec(1, {"paged_attention": Used()})
    said = refusal(llama, offering(one, other))
    assert "'paged_attention' is replaced by 'ops_of_a_test_0' (" in said
    assert "SPECDEC_DISABLE=ops_of_a_test_1" in said
    other = evolve(other, supports=only_bfloat16)
    assert complete(llama, offering(one, other)).token_ids == plain


@pytest.mark.parametrize(
    ("offered", "said"),
    [
        (OpsSpec(2, {}), "is written for plugin API 2, but this specdec-core has plugin API 1"),
        ({"rms_norm": len}, "not an OpsSpec. Return OpsSpec(api=1, ops={'rms_norm': ...}), or None"),
        (OpsSpec(1, {"rms_nrom": len}), "offers the operations ['rms_nrom'], which replace nothing: core has ["),
    ],
    ids=["another API", "a bare mapping", "a name that core does not have"],
)
def test_what_is_refused(offered: Any, said: str, llama: Path, offering: Any) -> None:
    text = refusal(llama, offering(offered))
    assert "plugin 'ops_of_a_test_0' (" in text
    assert said in text
    assert "SPECDEC_DISABLE=ops_of_a_test_0" in text
