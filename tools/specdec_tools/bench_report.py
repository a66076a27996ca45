"""The results of `spec-decode bench` as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from specdec_core.contracts.target import TargetInfo
from specdec_tools.acceptance import context_title, vllm_fields
from specdec_tools.compare import Comparison
from specdec_tools.figures import Figures
from specdec_tools.latencies import PERCENTILES, Latencies
from specdec_tools.results import Result
from specdec_tools.step_costs import StepCosts

DIGITS = 6


def as_json(results: Sequence[Result], settings: Mapping[str, Any], info: TargetInfo) -> str:
    """Return all results as the text of a JSON file. Figures of the first configuration are at the top, too.

    settings: the command's options.
    """
    first = results[0]
    record = {
        "settings": settings,
        "num_speculative_tokens": first.ran.num_speculative_tokens,
        "model": {"name": info.model, "model_type": info.model_type, "dtype": first.ran.dtype},
        "machine": machine(info.device),
        "versions": first.ran.versions,
        **_rounded(_results(first)),
        "configurations": [
            {**attrs.asdict(result.ran), "ran": str(result.ran), **_rounded(_results(result))} for result in results
        ],
    }
    return json.dumps(record, indent=1, default=str) + "\n"


def _results(result: Result) -> dict[str, Any]:
    """Return the figures of batches by group, or those of each load. `batches` and `loads` have the seconds of every
    run."""
    if result.loads:
        return {
            "loads": [
                {**result.loads[row], **_comparison(comparison)}
                for row, comparisons in result.rows.items()
                for comparison in comparisons
            ]
        }
    return {
        "total": _figures(result.total),
        "groups": {group: _figures(figures) for group, figures in result.figures.items()},
        "batches": [
            {"title": c.title, "group": group, **_comparison(c)} for group, each in result.rows.items() for c in each
        ],
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        **_figures(Figures.of(comparison)),
        "plain_runs_s": [run.seconds for run in comparison.plain],
        "speculative_runs_s": [run.seconds for run in comparison.speculative],
        "first_difference": comparison.first_difference,
    }


def _figures(figures: Figures) -> dict[str, Any]:
    drafts, unlooped = figures.drafts, figures.unlooped
    return {
        "num_tokens": figures.num_tokens,
        "num_plain_tokens": figures.num_plain_tokens,
        "plain_s": figures.plain_s,
        "speculative_s": figures.speculative_s,
        "speed_up": figures.speed_up,
        "user_speed_up": figures.user_speed_up if figures.plain_latencies.tokens_per_s else None,
        "tokens_per_s": {
            "plain": _speeds(figures.plain_tokens_per_s, figures.plain_latencies),
            "speculative": _speeds(figures.tokens_per_s, figures.latencies),
        },
        **vllm_fields(drafts),
        "contexts": {context_title(start): vllm_fields(counts) for start, counts in figures.contexts.items()},
        "categories": {group: vllm_fields(counts) for group, counts in figures.groups.items()},
        "acceptance_length": drafts.acceptance_length,
        "acceptance_rate": drafts.acceptance_rate,
        "acceptance_rate_per_pos": drafts.acceptance_rate_per_pos,
        "num_drafts_of_all_runs": drafts.num_drafts,
        "unlooped": {
            "num_tokens": figures.num_unlooped,
            "acceptance_length": unlooped.acceptance_length,
            "acceptance_rate_per_pos": unlooped.acceptance_rate_per_pos,
            "num_drafts_of_all_runs": unlooped.num_drafts,
        },
        "distinct_4_grams": figures.distinct_ngrams,
        "drafting_share": figures.drafting_share,
        "decoding_speed_up": figures.decoding_speed_up,
        "efficiency": figures.efficiency,
        "costs": _costs(figures.costs),
        "latency_s": {"plain": _latencies(figures.plain_latencies), "speculative": _latencies(figures.latencies)},
        "num_preempted_in_all_runs": {"plain": figures.num_plain_preempted, "speculative": figures.num_preempted},
        "identical": figures.is_identical,
    }


def _rounded(value: Any) -> Any:
    """Round all numbers in nested lists and dicts."""
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return round(value, DIGITS) if isinstance(value, float) else value


def _speeds(together: float, latencies: Latencies) -> dict[str, float]:
    return {"all": together, "user": latencies.user_tokens_per_s}


def _costs(costs: StepCosts | None) -> dict[str, Any] | None:
    if costs is None:
        return None
    return {
        "block_efficiency": costs.block_efficiency,
        "drafting": costs.drafting,
        "verification": costs.verification,
        "draft_token": costs.draft_token,
        "output_token": costs.token,
        "memory_bound_speed_up": costs.memory_bound_speed_up,
        "memory_bound_speed_up_of_drafts": costs.memory_bound_speed_up_of_drafts,
        "draft_len": costs.draft_len,
        "drafted_share": costs.drafted_share,
        "tokens_per_forward_pass": costs.tokens_per_forward_pass,
    }


def _latencies(latencies: Latencies) -> dict[str, dict[str, float] | None]:
    return {
        name: None if values is None else {f"p{p}": s for p, s in zip(PERCENTILES, values, strict=True)}
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


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return ", ".join(sorted(names)) or platform.processor() or platform.machine()
