"""The output files of `spec-decode bench`: results as JSON, and a plot."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from specdec_core.plugins import Plugins
from specdec_tools.compare import Comparison, TimedModel
from specdec_tools.figures import Figures
from specdec_tools.latencies import PERCENTILES, Latencies
from specdec_tools.step_costs import StepCosts

DIGITS = 6

Groups = Mapping[str, Sequence[Comparison]]


def record(groups: Groups, settings: Mapping[str, Any], model: TimedModel) -> dict[str, Any]:
    """Return all results as a dict that can be written as JSON. Its key `batches` has the seconds of every run.

    groups: {name of a group of prompts: comparisons of plain with speculative decoding, one for each batch}.
    settings: the command's options.
    model: the model with speculation. Options that were not given are read from it.
    """
    info = model.llm.engine.target.info
    return {
        "settings": settings,
        "num_speculative_tokens": model.llm.engine.num_speculative_tokens,
        "model": {"name": info.model, "model_type": info.model_type, "dtype": str(info.dtype).removeprefix("torch.")},
        "machine": machine(info.device),
        "versions": versions(model.plugins, str(settings["llm"]["speculative_config"].get("method"))),
        "total": _figures(Figures.of(*(c for comparisons in groups.values() for c in comparisons))),
        "groups": {group: _figures(Figures.of(*comparisons)) for group, comparisons in groups.items()},
        "batches": [_batch(group, c) for group, comparisons in groups.items() for c in comparisons],
    }


def _batch(group: str, comparison: Comparison) -> dict[str, Any]:
    return {
        "title": comparison.title,
        "group": group,
        **_figures(Figures.of(comparison)),
        "plain_runs_s": [round(run.seconds, DIGITS) for run in comparison.plain],
        "speculative_runs_s": [round(run.seconds, DIGITS) for run in comparison.speculative],
        "first_difference": comparison.first_difference,
    }


def _figures(figures: Figures) -> dict[str, Any]:
    drafts, unlooped = figures.drafts, figures.unlooped
    found = {
        "num_tokens": figures.num_tokens,
        "num_plain_tokens": figures.num_plain_tokens,
        "plain_s": figures.plain_s,
        "speculative_s": figures.speculative_s,
        "speed_up": figures.speed_up,
        "acceptance_length": drafts.acceptance_length,
        "acceptance_rate": drafts.acceptance_rate,
        "acceptance_rate_per_pos": [round(rate, DIGITS) for rate in drafts.acceptance_rate_per_pos],
        "num_drafts_of_all_runs": drafts.num_drafts,
        "unlooped": {
            "num_tokens": figures.num_unlooped,
            "acceptance_length": round(unlooped.acceptance_length, DIGITS),
            "acceptance_rate_per_pos": [round(rate, DIGITS) for rate in unlooped.acceptance_rate_per_pos],
            "num_drafts_of_all_runs": unlooped.num_drafts,
        },
        "distinct_4_grams": figures.distinct_ngrams,
        "drafting_share": figures.drafting_share,
        "decoding_speed_up": figures.decoding_speed_up,
        "efficiency": figures.efficiency,
        "costs": _costs(figures.costs),
        "latency_s": {"plain": _latencies(figures.plain_latencies), "speculative": _latencies(figures.latencies)},
        "identical": figures.is_identical,
    }
    return {key: _rounded(value) for key, value in found.items()}


def _rounded(value: Any) -> Any:
    return round(value, DIGITS) if isinstance(value, float) else value


def _costs(costs: StepCosts | None) -> dict[str, Any] | None:
    if costs is None:
        return None
    found = {
        "block_efficiency": costs.block_efficiency,
        "drafting": costs.drafting,
        "verification": costs.verification,
        "draft_token": costs.draft_token,
        "output_token": costs.token,
        "memory_bound_speed_up": costs.memory_bound_speed_up,
    }
    return {key: _rounded(value) for key, value in found.items()}


def _latencies(latencies: Latencies) -> dict[str, dict[str, float] | None]:
    return {
        name: None if values is None else {f"p{p}": round(s, DIGITS) for p, s in zip(PERCENTILES, values, strict=True)}
        for name, values in latencies.percentiles().items()
    }


def machine(device: torch.device) -> dict[str, Any]:
    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else str(device),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }


def versions(plugins: Plugins, method: str) -> dict[str, str]:
    """Return the versions of the software that ran, {distribution: version}.

    These are Python, torch, transformers, specdec-core, and all plugins that provide the method or compiled operations.
    """
    parts = {f"proposer {method}", "ops"}
    found = {p.distribution: p.version for p in plugins.listing() if p.status == "ok" and parts & {*p.provides}}
    named = {name: version(name) for name in ("torch", "transformers", "specdec-core")}
    return {"python": platform.python_version(), **named, **found}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return ", ".join(sorted(names)) or platform.processor() or platform.machine()


def plot(groups: Groups, method: str, path: Path, *, title: str) -> None:
    """Plot the speed-up of every batch, and the acceptance rate at each position of a draft.

    groups: {name of a group of prompts: comparisons of plain with speculative decoding, one for each batch}.
    method: the speculative method, for the axis label.
    path: the file to write.
    title: describes what was measured.
    """
    from matplotlib.figure import Figure

    bars = [(group, c.title, Figures.of(c).speed_up) for group, comparisons in groups.items() for c in comparisons]
    colors = {group: f"C{index % 10}" for index, group in enumerate(groups)}
    figure = Figure(figsize=(11, max(3.0, 0.3 * len(bars) + 1.2)), layout="constrained")
    left, right = figure.subplots(1, 2)

    places = range(len(bars))
    for group, color in colors.items():
        own = [place for place in places if bars[place][0] == group]
        left.barh(own, [bars[place][2] for place in own], color=color, label=group.lstrip("_"))
    left.set_yticks(places, [title for _, title, _ in bars])
    left.invert_yaxis()
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set_xlabel(f"speed-up by {method} over plain decoding")
    legend = left.legend()

    rates = Figures.of(*(c for comparisons in groups.values() for c in comparisons)).drafts.acceptance_rate_per_pos
    right.bar(range(1, len(rates) + 1), rates)
    right.set_ylim(0, 1)
    right.set_xlabel("position in the draft")
    right.set_ylabel("accepted share of the drafts")
    heading = figure.suptitle(title, fontsize="medium", wrap=True)
    for text in (heading, *left.get_yticklabels(), *legend.get_texts(), left.xaxis.label):
        text.set_parse_math(False)  # names may have dollar signs
    figure.savefig(path, dpi=110)
