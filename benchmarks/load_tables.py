"""The tables about outputs, batches and rates of arrival, for `readme.py`: from each record to Markdown."""

from __future__ import annotations

from typing import Any

from budget_tables import KINDS, ran_on, table_of


def where_it_pays(record: dict[str, Any]) -> str:
    """Speed-ups by output length of one request, then by batch size at the usual length."""
    ups = {
        (row["prompts"], row["temperature"], row["batch_size"], row["num_output_tokens"]): f"{row['speed_up']:.2f}"
        for row in record["rows"]
    }
    usual = record["usual_length"]
    kinds, temperatures, batches, lengths = ([*dict.fromkeys(key[i] for key in ups)] for i in range(4))
    cases = [(kind, temperature) for kind in kinds for temperature in temperatures]
    titles = [f"{KINDS[kind]}, {'temperature 1' if temperature else 'greedy'}" for kind, temperature in cases]
    by_length = [
        [title, *(ups[*case, 1, length] for length in lengths)] for title, case in zip(titles, cases, strict=True)
    ]
    by_batch = [
        [title, *(ups[*case, batch, usual] for batch in batches)] for title, case in zip(titles, cases, strict=True)
    ]
    return "\n".join(
        [
            f"`{record['method']}` with default settings, medians of {record['rounds']} rounds. {ran_on(record)}",
            "",
            *table_of(["speed-up, one request", *(f"{length} output tokens" for length in lengths)], by_length),
            "",
            *table_of([f"speed-up, {usual} output tokens", *(f"batch {batch}" for batch in batches)], by_batch),
        ]
    )


def request_rates(record: dict[str, Any]) -> str:
    """The latency of whole requests by the rate of arrival."""
    cells = {
        (row["requests_per_s"], row["method"]): f"{row['p50_ms']:.0f} ({row['p95_ms']:.0f})" for row in record["rows"]
    }
    rates, methods = ([*dict.fromkeys(key[i] for key in cells)] for i in (0, 1))
    heads = ["requests per second", *("plain" if method == "plain" else f"`{method}`" for method in methods)]
    rows = [[f"{rate:g}", *(cells[rate, method] for method in methods)] for rate in rates]
    what = f"From arrival to the last of {record['num_output_tokens']} tokens in ms, median and 95th percentile"
    return "\n".join([f"{what}: medians of {record['rounds']} rounds. {ran_on(record)}", "", *table_of(heads, rows)])
