"""The tables about the budget of a step, for `readme.py`: from each record to Markdown."""

from __future__ import annotations

from typing import Any

from specdec_tools.advice import SLOWER
from specdec_tools.tune import Setting

KINDS = {"code": "new code", "edits": "edits of code", "text": "articles", "random": "random tokens", "mix": "a mix"}


def ran_on(record: dict[str, Any]) -> str:
    machine = record["machine"]
    return f"{machine['threads']} threads of {machine['processor']}: `{record['command']}`."


def table_of(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(f"| {' | '.join(row)} |" for row in rows)]


def _column(temperature: float, batch_size: int) -> str:
    return f"{'greedy' if not temperature else f'temperature {temperature:g}'}, batch {batch_size}"


def _cell(row: dict[str, Any]) -> tuple[str, str, float, int]:
    return row["method"], row["prompts"], row["temperature"], row["batch_size"]


def final_rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of `default_settings.py`'s record. Those that were repeated replace the first ones."""
    return [*{_cell(row): row for row in [*record["rows"], *record["repeated"]]}.values()]


def default_settings(record: dict[str, Any]) -> str:
    """A row for each method and kind of prompt: medians with their intervals, by temperature and batch size."""
    cells = {_cell(row): row for row in final_rows(record)}
    tables: dict[tuple[tuple[float, int], ...], dict[tuple[str, str], list[str]]] = {}
    for method, prompts in sorted({key[:2] for key in cells}):
        columns = tuple(sorted(key[2:] for key in cells if key[:2] == (method, prompts)))
        found = [cells[method, prompts, *column] for column in columns]
        shown = [f"{cell['median']:.2f} ({cell['low']:.2f}, {cell['high']:.2f})" for cell in found]
        tables.setdefault(columns, {})[method, prompts] = shown
    about = [ran_on(record), "Medians of the rounds' ratios (95 % interval of the ratios' geometric mean)."]
    if num_repeated := len(record["repeated"]):
        about.append(f"The lowest, {num_repeated} of {len(cells)}, were measured again, in more rounds.")
    lines = [" ".join(about)]
    for columns, rows in tables.items():
        heads = ["speed-up", *(_column(*column) for column in columns)]
        body = [[f"`{method}`, {KINDS[prompts]}", *shown] for (method, prompts), shown in rows.items()]
        lines += ["", *table_of(heads, body)]
    medians = sorted(row["median"] for row in cells.values())
    num_below = sum(row["high"] < SLOWER for row in cells.values())
    lines += [
        "",
        (
            f"Of {len(cells)} medians the lowest is {medians[0]:.2f}; {sum(m >= 1 for m in medians)} are 1 or more. "
            f"The whole interval is below {SLOWER:g} in {num_below}."
        ),
    ]
    return "\n".join(lines)


def overview(record: dict[str, Any]) -> str:
    """The README's table: medians of each method for edits, if they were measured, and new code; small batches first,
    then the middle one of METHODS beside the larger one of MORE_METHODS."""
    cells = {_cell(row): row["median"] for row in final_rows(record)}
    sizes = {method: sorted({key[3] for key in cells if key[0] == method})[:2] for method, *_ in cells}
    larger = sorted({size for _, size in sizes.values()})
    heads = [
        "speed-up over plain decoding",
        *(_column(temperature, sizes[next(iter(sizes))][0]) for temperature in (0.0, 1.0)),
        *(f"{'temperature 1' if t else 'greedy'}, batch {' or '.join(map(str, larger))}" for t in (0.0, 1.0)),
    ]
    rows = []
    for method, batches in sizes.items():
        for prompts in ("edits", "code"):
            columns = [(temperature, size) for size in batches for temperature in (0.0, 1.0)]
            if (method, prompts, *columns[0]) in cells:
                shown = [f"{cells[method, prompts, *column]:.2f}" for column in columns]
                rows.append([f"`{method}`, {KINDS[prompts]}", *shown])
    by_size = {size: [f"`{method}`" for method in sizes if sizes[method][1] == size] for size in larger}
    sized = "; ".join(f"{size}: {', '.join(methods)}" for size, methods in by_size.items())
    about = f"Medians. The larger batch is {sized}. `suffix` caches no earlier outputs here."
    return "\n".join([*table_of(heads, rows), "", f"{about} {ran_on(record)}"])


def headline(record: dict[str, Any]) -> str:
    """The README's headline: the speed-ups of `suffix` on edits, one request at a time."""
    machine = record["machine"]
    ups = {
        row["temperature"]: row["median"]
        for row in final_rows(record)
        if _cell(row)[::3] == ("suffix", 1) and row["prompts"] == "edits"
    }
    return (
        f"**With the suffix-tree drafter, the engine edits code {ups[0]:.2f} times as fast as plain decoding\n"
        f"when greedy, and {ups[1]:.2f} times at temperature 1** (one request at a time, a model of 10M parameters,\n"
        f"{machine['threads']} cores of {machine['processor']}). [The table](#methods) has other methods."
    )


def fixed_numbers(record: dict[str, Any]) -> str:
    heads = ["drafts", "prompts", "", "default", "best fixed number", "default / best"]
    methods, rows = [*dict.fromkeys(row["method"] for row in record["rows"])], []

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        return methods.index(row["method"]), row["prompts"], row["temperature"], row["batch_size"]

    for row in sorted(record["rows"], key=place):
        ups, best = row["speed_up"], str(row["best"])
        where = _column(row["temperature"], row["batch_size"])
        cells = [f"`{row['method']}`", KINDS[row["prompts"]], where, f"{ups['default']:.2f}"]
        cells += [f"{ups[best]:.2f} ({best})", f"{row['of_best']:.2f}"]
        rows.append(cells)
    return "\n".join([ran_on(record), "", *table_of(heads, rows)])


def combined(record: dict[str, Any]) -> str:
    first, second = record["methods"]
    names = [first, second, "both"]
    fixed = {
        (row["prompts"], row["temperature"]): row["tokens_per_pass"]
        for row in record["rows"]
        if row["number"] == "fixed"
    }
    lines = [ran_on(record), ""]
    heads = [f"tokens per forward pass, {record['num_speculative_tokens']} draft tokens", f"`{first}`", f"`{second}`"]
    rows = [
        [f"{KINDS[prompts]}, temperature {temperature:g}", *(f"{tokens[name]:.2f}" for name in names)]
        for (prompts, temperature), tokens in fixed.items()
    ]
    lines += [*table_of([*heads, "both"], rows), ""]
    rows = [
        [
            f"{KINDS[row['prompts']]}, {_column(row['temperature'], row['batch_size'])}",
            *(f"{row['speed_up'][name]:.2f}" for name in names),
        ]
        for row in record["rows"]
        if row["number"] == "default"
    ]
    lines += table_of(["speed-up with default settings", f"`{first}`", f"`{second}`", "both"], rows)
    return "\n".join(lines)


def calibration(record: dict[str, Any]) -> str:
    rows = [
        [row["method"], f"{row['temperature']:g}", f"{row['num_nodes']:,}", f"{row['expected_calibration_error']:.3f}"]
        for row in record["rows"]
    ]
    heads = ["drafts", "temperature", "draft tokens", "expected calibration error"]
    return "\n".join([ran_on(record), "", *table_of(heads, rows)])


def off_cost(record: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['step']}, batch {row['batch_size']}",
            f"{row['plain_ms']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['plain_ratio']:.3f}",
        ]
        for row in record["rows"]
    ]
    heads = ["step", "plain, ms", "off / plain", "plain / plain"]
    return "\n".join([ran_on(record), "", *table_of(heads, rows)])


def retry_share(record: dict[str, Any]) -> str:
    rows: dict[tuple[str, float], dict[int, str]] = {}
    for row in record["rows"]:
        rows.setdefault((row["method"], row["temperature"]), {})[row["batch_size"]] = f"{100 * row['share']:.1f} %"
    batches = sorted({row["batch_size"] for row in record["rows"]})
    lines = [
        [f"`{method}`", f"{temperature:g}", *(shares.get(batch, "") for batch in batches)]
        for (method, temperature), shares in sorted(rows.items())
    ]
    heads = ["method", "temperature", *(f"batch {batch}" for batch in batches)]
    return "\n".join([ran_on(record), "", *table_of(heads, lines)])


def tuned(record: dict[str, Any]) -> str:
    rows = []
    for row in record["rows"]:
        where = f"{KINDS[row['prompts']]}, {_column(row['temperature'], row['batch_size'])}"
        chosen = "plain decoding" if row["chosen"] is None else Setting(row["chosen"]).name
        fastest = f"{row['fastest']} ({row['speed_up'][row['fastest']]:.2f})"
        rows.append([where, f"{chosen} ({row['speed_up']['chosen']:.2f})", fastest, f"{row['of_fastest']:.2f}"])
    return "\n".join([ran_on(record), "", *table_of(["prompts", "chosen", "fastest", "chosen / fastest"], rows)])
