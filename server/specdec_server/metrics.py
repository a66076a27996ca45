"""/metrics in Prometheus' format, under the names that vLLM's server has."""

from __future__ import annotations

import re
from collections import Counter as CounterOf
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from starlette.responses import Response

from specdec_core import Counter, Gauge, Histogram, Vector

Metric = Counter | Vector | Gauge | Histogram

FINISH_REASONS = ("stop", "length", "abort", "error")
"""Reasons for which a completion ends: "abort" if its client left or its time was over."""


class ServerMetrics:
    """Turns the engine's metrics into Prometheus' text, and counts how completions ended. Nothing is global: the
    registry is this object's own.

    model_name: the label of each metric.
    """

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name}
        self._finished = CounterOf(dict.fromkeys(FINISH_REASONS, 0))
        self._engine: Sequence[Metric] = ()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count(self, finish_reasons: Iterable[str | None]) -> None:
        """Count completions that ended. None: the server ended one before the engine did."""
        self._finished.update(reason or "abort" for reason in finish_reasons)

    def response(self, engine: Sequence[Metric]) -> Response:
        """engine: the engine's metrics, read just now."""
        self._engine = engine
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    def collect(self) -> Iterator[Family]:
        """Called by the registry."""
        for metric in self._engine:
            yield FAMILIES[type(metric)](metric, self._labels)
        if self._engine:
            prefix = self._engine[0].name.partition(":")[0]
            family = CounterMetricFamily(
                f"{prefix}:request_success",
                "completions by the reason of their end",
                labels=[*self._labels, "finished_reason"],
            )
            for reason, number in self._finished.items():
                family.add_metric([*self._labels.values(), reason], number)
            yield family


def _counter(metric: Counter, labels: dict[str, str]) -> Family:
    family = CounterMetricFamily(*_named(metric), labels=[*labels])
    family.add_metric([*labels.values()], metric.value)
    return family


def _gauge(metric: Gauge, labels: dict[str, str]) -> Family:
    family = GaugeMetricFamily(*_named(metric), labels=[*labels])
    family.add_metric([*labels.values()], metric.value)
    return family


def _vector(metric: Vector, labels: dict[str, str]) -> Family:
    family = CounterMetricFamily(*_named(metric), labels=[*labels, "position"])
    for position, number in enumerate(metric.values):
        family.add_metric([*labels.values(), str(position)], number)
    return family


def _histogram(metric: Histogram, labels: dict[str, str]) -> Family:
    family = HistogramMetricFamily(*_named(metric), labels=[*labels])
    family.add_metric([*labels.values()], [*metric.buckets.items()], metric.sum)
    return family


FAMILIES: dict[type, Callable[..., Family]] = {
    Counter: _counter,
    Gauge: _gauge,
    Vector: _vector,
    Histogram: _histogram,
}


def _named(metric: Metric) -> tuple[str, str]:
    """The name that Prometheus takes, and a description. Names of plugins may have other characters."""
    return re.sub(r"[^a-zA-Z0-9_:]", "_", metric.name), metric.name.partition(":")[2].replace("_", " ")
