"""The parts of the GPU benchmark run in small on a CPU, their formulas are right, and what fails is recorded."""

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from time import time
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from bits_attention import attention_by_bits

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from on_gpu import decoding, equality, kernels, plain, speculation, steps, timing
from on_gpu.decoding import Decoded
from on_gpu.kernel_cases import CASES
from on_gpu.limits import Limits
from on_gpu.setup import LLAMA_8B, SMALL, Setup, Sizes
from widen import Widths

from specdec_core import LLM, Plugins, SamplingParams
from specdec_core.engine import build
from specdec_core.models import graphs
from specdec_core.ops import REFERENCE
from specdec_core.ops.drawing import draw
from specdec_testing.pretend_cuda import PretendCuda

TINY = evolve(SMALL, batches=(2,), prompts=2, equality_tokens=8, draws=60, methods=("eagle3",))


def small(sizes=TINY, seconds=600.0, **given):
    return Setup(sizes=sizes, device="cpu", until=time() + seconds, **given)


def failures(rows):
    return [row for row in rows if "error" in row or "skipped" in row]


# Kernels


def test_kernels_agree_with_their_references():
    rows = [*kernels.rows(small())]
    assert not failures(rows)
    assert Counter(row["operation"] for row in rows).keys() == {*CASES, "limits of the device", "without a case"}
    assert rows[0]["gb_per_s"] > 0
    assert rows[1]["names"] == kernels.without_case(kernels.kernels("cpu"))
    for row in rows[2:]:
        assert row["reference_us"] > 0
        if kernels.kernels("cpu"):
            assert row["relative_error"] < 0.02
            assert row["different"] <= (0.5 if row["operation"] == "draw" else 0)
            assert row["share_of_limit"] >= 0


def test_a_kernel_that_fails_is_recorded_and_one_that_is_wrong_is_seen(monkeypatch):
    def broken(*args):
        raise RuntimeError("out of registers")

    wrong = {name: lambda *args: None for name in ("store_kv", "compact", "penalize")}
    wrong |= {"most_likely": lambda logits, number: REFERENCE["most_likely"](-logits, number)}
    wrong |= {"rms_norm": lambda hidden, weight, eps: hidden + weight}
    ops = {**REFERENCE, "rotary": broken, **wrong, "another": broken, "likeliest": lambda logits: logits.argmin(-1)}
    ops["truncate"] = lambda logits, *args: logits.clone()
    monkeypatch.setattr(kernels, "kernels", lambda device: ops)
    found = {row["operation"]: row for row in kernels.rows(small())}
    assert found["without a case"]["names"] == sorted(ops.keys() - CASES.keys())
    assert "another" in found["without a case"]["names"]
    assert found["rotary"] == {"operation": "rotary", "rows": 2, "error": "RuntimeError: out of registers"}
    assert min(found[name]["relative_error"] for name in wrong) > 0.1
    assert found["likeliest"]["different"] == 1
    assert found["truncate"]["different"] > 0.5
    right = ("paged_attention", "pack_linear", "draw")
    assert {(found[name]["relative_error"], found[name]["different"]) for name in right} == {(0, 0)}


def test_another_process_does_not_repeat_what_is_done(monkeypatch):
    monkeypatch.setattr(kernels, "kernels", lambda device: {})
    rows = [*kernels.rows(small())]
    assert not any("us" in row for row in rows)
    again = [*kernels.rows(small(done=[row for row in rows if row["operation"] != "draw"]))]
    assert [row["operation"] for row in again[2:]] == ["draw"]


def test_compare():
    inf = float("inf")
    found = [torch.tensor([1.0, 2.2, -inf, inf]), torch.tensor([1, 2, 3, 4])]
    expected = [torch.tensor([1.0, 2.0, -inf, 4.0]), torch.tensor([1, 0, 3, 4])]
    compared = kernels.compare(found, expected)
    assert compared.pop("error") == (
        "the relative error 0.1 is more than 0.0001; 1 of 4 entries are different or NaN; "
        "1 of 4 entries are different or NaN"
    )
    assert compared == {"relative_error": pytest.approx(0.1), "different": 2 / 8}


def test_compare_looks_at_everything(monkeypatch):
    monkeypatch.setattr(kernels, "AT_ONCE", 3)
    expected = torch.full((10,), 2.0)
    for place in range(10):
        found = expected.clone()
        found[place] = 1.0
        assert kernels.compare([found], [expected])["relative_error"] == 0.5
        found[9 - place] = 0.0
        assert kernels.compare([found], [expected])["relative_error"] == 1


def test_limits():
    limits = Limits(bytes_per_s=1e9, flops_per_s=1e12)
    assert limits.seconds(2e9, 1e12) == 2
    assert limits.seconds(2e9, 3e12) == 3
    assert [limits.bound(2e9, flops) for flops in (1e12, 3e12)] == ["memory", "arithmetic"]


# Plain decoding


def test_plain_decoding():
    rows = [*plain.rows(small())]
    assert not failures(rows)
    cells = [(row["engine"], row["batch"], row["context"]) for row in rows[1:]]
    assert cells == [("specdec", 2, 70), ("transformers", 2, 70)]
    for row in rows[1:]:
        assert row["tokens_per_s"] > 0
        assert row["share_of_limit"] == pytest.approx(row["limit_ms"] / row["ms_per_step"], rel=0.01)


def test_what_fails_in_transformers_leaves_the_rest(monkeypatch):
    monkeypatch.setattr(plain, "StaticCache", lambda **given: 1 / 0)
    _, ours, theirs = plain.rows(small())
    assert ours["tokens_per_s"] > 0
    assert theirs["error"] == "ZeroDivisionError: division by zero"


def test_a_context_without_prefill(tmp_path):
    folder = tmp_path / "llama"
    plain.save_without_weights(plain.llama_config(SMALL.llama), folder)
    with plain.loading({str(folder): lambda: plain.random_llama(SMALL.llama, "cpu", "float32")}):
        plugins = Plugins.load(modules=["on_gpu.filled_cache"])
        sizes = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128, "max_num_seqs": 2}
        llm = LLM(folder, device="cpu", kv_manager="filled", plugins=plugins, **sizes)
    with llm:
        prompt = [*range(3, 73)]
        llm.engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=3))
        report = llm.engine.step()
        assert (report.num_cached_tokens, report.num_prefill_tokens) == (64, 6)
        while llm.engine.has_unfinished:
            llm.engine.kv.check_integrity()
            assert llm.engine.load.kv_usage == 5 / 16  # all blocks of the context
            llm.engine.step()
        assert llm.engine.load.kv_usage == 0


def test_a_step_reads_the_weights_and_the_kv_cache_once():
    reads = plain.Reads.of(Setup(sizes=Sizes(), device="cuda", until=0))
    assert plain.llama_config(LLAMA_8B).num_hidden_layers == 32
    assert reads.weight_bytes == 2 * (8_030_261_248 - 128256 * 4096)  # all but the embedding
    assert reads.kv_bytes_per_token == 131072
    assert plain.Reads(16e9, 1000).bytes_of(batch=8, context=2000) == 16.016e9


def test_figures_of_plain_decoding():
    assert plain.figures(seconds=0.01, batch=8, num_bytes=16e9, bytes_per_s=3.2e12) == {
        "tokens_per_s": 800,
        "ms_per_step": 10,
        "limit_ms": 5,
        "share_of_limit": 0.5,
    }


# Speculation


def test_speculation():
    rows = [*speculation.rows(small(evolve(TINY, methods=("no_such_method", "eagle3"))))]
    assert rows[0] == {"model": "small", "num_weights": 38806016}
    (failed,) = failures(rows)
    assert failed["method"] == "no_such_method"
    assert "'no_such_method'" in failed["error"]
    cells = {(row["method"], row["batch"], row["temperature"]): row for row in rows if "batch" in row}
    assert [*cells] == [(method, 2, temperature) for method in ("plain", "eagle3") for temperature in (0, 1)]
    for (method, *_), row in cells.items():
        assert row["speed_up"] == 1 or method != "plain"
        assert row["acceptance_length"] >= 1
        assert row["share_of_predicted"] == pytest.approx(row["speed_up"] / row["predicted_speed_up"], rel=0.01)
        assert row["graph_share"] is None
    assert cells["eagle3", 2, 0.0]["acceptance_length"] > 1.5  # of the embedded model's own head
    assert cells["eagle3", 2, 0.0]["num_speculative_tokens"] > 0


def test_predicted_speed_up():
    assert speculation.predicted_speed_up(acceptance_length=3, plain_s=10, draft_s=2, verify_s=13) == 2
    plain_cell = speculation.Cell(Decoded(seconds=4, num_steps=40, num_tokens=80), Decoded(num_steps=2, target_s=20))
    decoded = Decoded(
        seconds=4, num_steps=20, num_tokens=120, num_drafts=40, num_accepted=80, num_passes=20, num_replayed=10
    )
    row = speculation.Cell(decoded, Decoded(num_steps=4, draft_s=8, target_s=52)).row(plain_cell)
    expected = {"tokens_per_s": 30, "ms_per_step": 200, "speed_up": 1.5, "acceptance_length": 3, "graph_share": 0.5}
    expected |= {"predicted_speed_up": 2, "share_of_predicted": 0.75, "draft_ms": 2000, "verify_ms": 13000}
    assert row == expected
    assert plain_cell.row(plain_cell)["predicted_speed_up"] == 1


def test_what_cannot_be_built_leaves_the_other_shapes(monkeypatch):
    sizes = evolve(TINY, methods=(), shapes={"wrong": (1, Widths(hidden=0, intermediate=1, kv_heads=1)), **TINY.shapes})
    rows = [*speculation.rows(small(sizes))]
    assert failures(rows) == rows[:1]
    assert [row["model"] for row in rows] == ["wrong", "small", "small", "small"]


def test_without_plain_decoding_there_is_no_speed_up(monkeypatch):
    sizes = evolve(TINY, methods=("ngram",))
    monkeypatch.setattr(speculation, "_measure", lambda setup, llm, batch, temperature: 1 / 0)
    rows = [*speculation.rows(small(sizes))]
    assert {row["error"] for row in rows[1:]} == {"ZeroDivisionError: division by zero"}
    monkeypatch.setattr(speculation, "_measure", lambda setup, llm, batch, temperature: None)
    llm = SimpleNamespace(engine=SimpleNamespace(num_speculative_tokens=1))
    with pytest.raises(RuntimeError, match="nothing to compare with"):
        speculation._cell(small(), llm, "ngram", (2, 0.0), {})


def test_parts_are_timed_alone(monkeypatch):
    waits = []
    monkeypatch.setattr(decoding, "synchronize", lambda: waits.append(1))
    with LLM("tiny", device="cpu", max_model_len=64, max_num_seqs=1) as llm:
        llm.engine.add_request([5, 6, 7], SamplingParams(max_tokens=8))
        with decoding.parts_alone():
            llm.engine.step()
        assert len(waits) >= 5  # drafting, forward pass, verification, showing hidden states, and the rest
        waits.clear()
        llm.engine.step()
        assert not waits


def test_share_of_replayed_graphs(monkeypatch):
    monkeypatch.setenv("SPECDEC_DISABLE", "kernels")  # whose kernels need a real GPU
    monkeypatch.setitem(REFERENCE, "paged_attention", attention_by_bits)  # which a graph can replay
    monkeypatch.setattr(
        graphs, "have_same_bits", lambda found, expected: found[0].isnan().all() | True
    )  # but for rounding
    monkeypatch.setattr(build, "capture_ahead", lambda *given: None)  # or all are replayed
    given = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 3}
    prompts = [[5, 6, 7], [5, 6, 8], [5, 6, 9]]  # as many requests as no step had while the engine was built
    decode = partial(decoding.decode, groups=[prompts], params=SamplingParams(temperature=0), num_steps=6)
    with PretendCuda(), LLM("tiny", device="cuda", **given) as llm:
        shares = [decode(llm.engine).graph_share for _ in range(2)]
        found = decode(llm.engine)
    assert 0 < shares[0] < 1  # some were captured, or checked
    assert (shares[1], found.num_passes, found.num_replayed) == (1, 6, 6)
    with LLM("tiny", device="cpu", **given) as llm:
        assert decode(llm.engine).graph_share is None


def test_requests_that_do_not_fit_together_are_an_error():
    with LLM("tiny", device="cpu", max_model_len=128, max_num_seqs=2, num_kv_blocks=8, block_size=16) as llm:
        prompts = [[*range(5, 65)], [*range(7, 67)]]
        with pytest.raises(RuntimeError, match=r"does not hold 2 requests|only 1 of 2 requests"):
            decoding.decode(llm.engine, [prompts], SamplingParams(temperature=0), 20)


# Equality


def test_equality():
    rows = [*equality.rows(small(evolve(TINY, methods=("eagle3", "no_such_method"))))]
    draws, plain_row, eagle3, failed = rows
    assert draws["p_value"] > 1e-3
    assert failures(rows) == [failed]
    for row in (plain_row, eagle3):
        assert (row["num_tokens"], row["num_prompts"], row["num_equal"]) == (16, 2, 2)
        assert row["first_differences"] == [None, None]
    assert eagle3["acceptance_length"] > 1


def test_first_differences():
    expected = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 2, 3]]
    assert equality.compared([[1, 2, 3], [1, 2, 3], [4, 2, 3], [1, 2]], expected) == {
        "num_tokens": 11,
        "num_prompts": 4,
        "num_equal": 1,
        "first_differences": [None, 2, 0, 2],
    }


def test_chi_square():
    assert equality.chi_square(torch.tensor([60, 40]), torch.tensor([1.0, 1.0])) == (4, 2)
    assert equality.chi_square(torch.tensor([50, 50]), torch.tensor([1.0, 1.0])) == (0, 2)
    even = torch.full((100,), 0.01)
    assert equality.chi_square(torch.full((100,), 1), even)[1] == 20  # of 5 tokens each


def test_chi_square_sees_a_wrong_distribution():
    setup = small(evolve(TINY, draws=20_000, draw_vocabulary=300))
    assert equality.chi_square_of(draw, setup)["p_value"] > 1e-3
    sharper = equality.chi_square_of(lambda weights, uniform: draw(weights**1.1, uniform), setup)
    assert sharper["p_value"] < 1e-6
    next_one = equality.chi_square_of(lambda weights, uniform: (draw(weights, uniform) + 1) % 300, setup)
    assert next_one["p_value"] < 1e-6


# Steps, and what all parts have in common


def test_steps(monkeypatch):
    monkeypatch.setattr(steps, "MODELS", ("tiny",))
    monkeypatch.setitem(steps.METHODS, "eagle3", {"method": "no_such_method"})
    rows = [*steps.rows(small(evolve(SMALL, step_batches=(2,))))]
    assert [row["method"] for row in failures(rows)] == ["eagle3"]
    keys = [(row["model"], row["batch"], row["temperature"], row["method"]) for row in rows[1:]]
    assert keys == [("tiny", 2, temperature, method) for temperature in (0, 1) for method in ("plain", "ngram")]
    for row in rows[1:]:
        assert row["tokens_per_s"] > 0
        assert row["ms_per_step"] > 0
        assert len(row["tokens_per_s_of_each_round"]) == 1
        assert {row[key] for key in steps.NO_COUNTS} == {None}
        if row["method"] == "plain":
            assert (row["speed_up"], row["acceptance_length"], row["num_speculative_tokens"]) == (1, 1, 0)


def test_a_method_that_fails_leaves_those_before_it(monkeypatch):
    def measure(*given):
        yield {"method": "plain", "tokens_per_s": 1.0}
        raise ValueError("too large")

    monkeypatch.setattr(steps, "measure", measure)
    monkeypatch.setattr(steps, "builder", lambda *given: lambda method: SimpleNamespace(close=lambda: None))
    rows = [*steps._of_model(small(evolve(SMALL, step_batches=(2,))), "tiny")]
    cell = {"model": "tiny", "batch": 2, "temperature": 0.0}
    assert rows[:2] == [{**cell, "method": "plain", "tokens_per_s": 1.0}, {**cell, "error": "ValueError: too large"}]


def test_the_random_model_and_its_head_fit(tmp_path):
    build = steps.builder("llama", small(), tmp_path)
    params = SamplingParams(temperature=0)
    for method, drafts in (("plain", 0), ("eagle3", 12)):
        with build(method) as llm:
            found = decoding.decode(llm.engine, [steps.prompts_for(llm, 2, 16)], params, 6, 1)
        assert (found.num_steps, found.num_drafts) == (6, drafts)
        assert found.num_tokens >= 12


@pytest.mark.parametrize("part", [kernels, plain, speculation, equality, steps])
def test_nothing_is_measured_when_the_time_is_over(part):
    rows = [*part.rows(small(seconds=-1))]
    cells = [row for row in rows if not row.keys() & {"gb_per_s", "names", "num_weights"}]
    assert cells
    assert {row["skipped"] for row in cells} == {timing.TIME_IS_OVER}


def test_a_failed_device_ends_the_part(monkeypatch):
    def dead():
        raise RuntimeError("an illegal memory access was encountered")

    assert timing.attempt(small(), {"a": 1}, dict) == {"a": 1}
    monkeypatch.setattr(timing, "synchronize", dead)
    with pytest.raises(timing.DeviceIsDeadError) as raised:
        timing.attempt(small(), {"a": 1}, lambda: 1 / 0)
    assert raised.value.row == {"a": 1, "error": "ZeroDivisionError: division by zero"}
    with pytest.raises(timing.DeviceIsDeadError) as raised:
        timing.attempt(small(), {"a": 1}, lambda: {"b": 2})
    assert raised.value.row["error"] == "RuntimeError: an illegal memory access was encountered"


def test_a_function_is_called_for_a_while():
    calls = []
    assert timing.seconds_of(lambda: calls.append(1), "cpu", 0.0) >= 0
    assert len(calls) == timing.NUM_WARM + 1
    timing.seconds_of(lambda: calls.append(1), "cpu", 60.0)
    assert len(calls) == 2 * timing.NUM_WARM + 1 + timing.MOST_CALLS
