"""Several methods in one speculative_config: which keys belong to which, what each one drafts, and outputs."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from specdec_core import LLM, ConfigError, SamplingParams, SpeculativeConfig
from specdec_core.api.arguments import prepare
from specdec_core.cli import main

PROMPTS = ["import os\n\nclass Tree:\n    def __init__(self", "x = [1, 2, 3]\n" * 4]
BOTH: dict[str, Any] = {"method": ["suffix", "eagle3"], "eagle_topk": 1, "num_speculative_tokens": 5}


def completed(speculative_config: Any) -> tuple[SpeculativeConfig, ...]:
    found = prepare("tiny", speculative_config=speculative_config, skip_tokenizer_init=True).speculative
    assert isinstance(found, tuple)
    return found


def counts_of(llm: LLM) -> dict[str, int]:
    """The engine's counters so far, without the prefix of their names."""
    found = {each.name.removeprefix("vllm:spec_decode_"): getattr(each, "value", None) for each in llm.get_metrics()}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def test_keys_go_to_the_methods_that_have_them() -> None:
    given = {**BOTH, "suffix_decoding_max_tree_depth": 8, "adaptive_draft_length": True}
    suffix, eagle3 = completed(given)
    assert (suffix.method, eagle3.method) == ("suffix", "eagle3")
    assert suffix.suffix_decoding_max_tree_depth == 8
    assert eagle3.eagle_topk == 1
    for each in (suffix, eagle3):
        assert (each.num_speculative_tokens, each.adaptive_draft_length) == (5, True)


def test_a_method_may_have_keys_of_its_own() -> None:
    given = {"method": ["suffix", {"method": "eagle3", "num_speculative_tokens": 3}], "num_speculative_tokens": 9}
    suffix, eagle3 = completed(given)
    assert (suffix.num_speculative_tokens, eagle3.num_speculative_tokens) == (9, 3)


def test_complete_configs_can_be_given_again() -> None:
    found = completed(BOTH)
    assert completed(found) == found
    assert completed([each.as_mapping() for each in found]) == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": []}, "names no method"),
        ({"method": ["suffix", "suffix"]}, "names the method 'suffix' twice"),
        ({"method": ["suffix", 3], "num_speculative_tokens": 3}, "has 3 among its methods: give a name, or a dict"),
        ({"method": ["suffix", "eagle3"], "eagle_topp": 1}, "eagle_topp"),
        ({"method": ["eagle", "eagle3"], "model": "a/b"}, "'eagle' and 'eagle3' take one each: write it beside its"),
        ({"method": ["suffix", "nothing"]}, "nothing"),
        ({"method": ["suffix", "draft_model"]}, "'draft_model' cannot draft beside other methods"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        LLM("tiny", speculative_config=given)


@pytest.mark.parametrize("method", ["ngram", ["suffix", "ngram"]], ids=str)
def test_pieces_name_the_methods_that_drafted_them(method: Any) -> None:
    """Of one method, each accepted draft token is its own; of several, pieces have what the metrics count."""
    config = {"method": method, "num_speculative_tokens": 4, "adaptive_draft_length": False}
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with LLM("tiny", dtype="float32", speculative_config=config, max_model_len=512, disable_log_stats=True) as llm:
        outputs = [output for prompt in PROMPTS for output in llm.stream(prompt, params)]
        pieces = [piece for output in outputs for piece in output.pieces]
        assert all(bool(piece.methods) == piece.is_draft for piece in pieces)
        found = {name: sum(name in piece.methods for piece in pieces) for name in ("suffix", "ngram")}
        assert found["ngram"] > 10
        if method == "ngram":
            assert found == {"suffix": 0, "ngram": sum(piece.is_draft for piece in pieces)}
        else:
            assert found == {name: counts_of(llm)[f"{name}_num_accepted_tokens"] for name in found}
            assert {piece.methods for piece in pieces} >= {(), ("suffix",)}
        ends = [output for output in outputs if output.finish_reason is not None]
        assert [output.num_drafts for output in ends] == [output.speculation.num_drafts for output in ends]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", [["suffix", "eagle3"], ["eagle", "eagle3"]], ids="+".join)
@pytest.mark.parametrize("adaptive", [False, True])
def test_outputs_are_those_of_plain_decoding(method: list[str], temperature: float, adaptive: bool) -> None:
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=40, ignore_eos=True)

    def tokens(config: Any) -> tuple[Any, dict[str, Any]]:
        with LLM("tiny", dtype="float32", speculative_config=config, disable_log_stats=True) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs], counts_of(llm)

    expected, _ = tokens(None)
    found, counts = tokens({"method": method, "adaptive_draft_length": adaptive, "num_speculative_tokens": 6})
    assert found == expected
    accepted = [counts[f"{name}_num_accepted_tokens"] for name in method]
    least = 0 if adaptive else 1  # what pays depends on measured times
    assert all(least <= number <= counts["num_accepted_tokens"] for number in accepted)
    assert sum(accepted) >= counts["num_accepted_tokens"], "each accepted token was drafted by one of them, or by both"
    assert all(counts[f"{name}_num_drafts"] <= counts["num_drafts"] for name in method)


def test_tokens_after_a_stop_count_for_no_method() -> None:
    """A draft may run past a stop token that is accepted. What follows it is not emitted."""
    copied = "x = 1\n" * 30
    with LLM("tiny", dtype="float32", speculative_config=BOTH, disable_log_stats=True) as llm:
        (plain,) = llm.generate([copied], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
        stops = [plain.outputs[0].token_ids[4]]
        params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=stops)
        before = counts_of(llm)
        llm.generate([copied], params, use_tqdm=False)
        counts = {name: number - before.get(name, 0) for name, number in counts_of(llm).items()}
    assert 0 < counts["num_accepted_tokens"] < counts["num_draft_tokens"]
    for name in BOTH["method"]:
        assert counts[f"{name}_num_accepted_tokens"] <= counts["num_accepted_tokens"]


def test_the_prefix_cache_serves_requests_for_which_a_head_never_drafts() -> None:
    """The head's keys and values are missing then, and are not asked for."""
    params = SamplingParams(temperature=0, max_tokens=4, speculative_methods=["suffix"])
    with LLM("tiny", speculative_config=BOTH, kv_manager="prefix", disable_log_stats=True) as llm:
        cached = [llm.generate(["x = 1\n" * 30], params, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert cached[0] == 0
    assert cached[1] > 50


def test_a_request_without_a_method_gets_no_draft_tokens() -> None:
    """Its share of a full step is that of the other requests."""
    reports = []
    params = [SamplingParams(temperature=0, max_tokens=8, speculative_methods=each) for each in (None, ())]
    with LLM("tiny", speculative_config=BOTH, disable_log_stats=True) as llm:
        limit = llm.engine._scheduler._limit
        llm.engine._scheduler._limit = lambda request, running: (
            reports.append((request.params.speculative_methods, limit(request, running))) or reports[-1][1]
        )
        llm.generate([PROMPTS[1]] * 2, params, use_tqdm=False)
    assert {most for methods, most in reports if methods == ()} == {0}
    assert max(most for methods, most in reports if methods is None) > 0


def test_a_request_may_name_its_methods() -> None:
    drafted: dict[str, set[str]] = {"suffix": set(), "eagle3": set()}
    with LLM("tiny", speculative_config=BOTH, disable_log_stats=True) as llm:
        for drafter in llm.engine._speculation.drafters:
            proposer, name = drafter.proposer.proposer, drafter.proposer.name

            def record(batch: Any, propose: Any = proposer.propose, name: str = name) -> Any:
                drafted[name].update(request.id for request in batch.requests)
                return propose(batch)

            proposer.propose = record  # type: ignore[method-assign]
        params = [
            SamplingParams(temperature=0, max_tokens=8, speculative_methods=methods)
            for methods in (None, "suffix", ["eagle3"], ())
        ]
        llm.generate([PROMPTS[1]] * 4, params, use_tqdm=False)
        with pytest.raises(ConfigError, match="has 'ngram', and the engine's methods are 'suffix', 'eagle3'"):
            llm.generate(PROMPTS, SamplingParams(speculative_methods=["ngram"]))
    assert drafted == {"suffix": {"request-0", "request-1"}, "eagle3": {"request-0", "request-2"}}


def test_the_command_line_takes_several() -> None:
    result = CliRunner().invoke(main, ["check", "--method", "suffix,eagle3", "--json"])
    assert result.exit_code == 0, result.output
    assert '"method": "suffix + eagle3"' in result.output
