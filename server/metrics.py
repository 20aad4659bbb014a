"""The server's metrics in Prometheus' text format (`/metrics`).

Metrics of a model have its name as a label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from engine.server_snapshot import RequestRecord
from engine.snapshot import Snapshot, percentile

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ENGINE_GAUGES: dict[str, Callable[[Snapshot], float]] = {
    "requests_running": lambda engine: sum(slot.request is not None for slot in engine.slots),
    "requests_waiting": lambda engine: engine.waiting,
    "slots": lambda engine: len(engine.slots),
    "slot_tokens": lambda engine: engine.limits.max_len,
    "prompt_tokens_per_second": lambda engine: engine.prompt_tokens_per_s,
}
STATES = {  # counters of recurrent models; zero for other models
    "checkpoints_made": "Checkpoints of states that chunks have made.",
    "checkpoints_restored": "Prompts that have started from a checkpoint.",
    "checkpoints_dropped": "Checkpoints given up for newer ones, or not proven to be finite.",
    "reread_prompt_tokens": "Prompt tokens that were read again because no checkpoint was there, "
    "although the same client's rows were.",
}
disable_created_metrics()  # otherwise each metric gets a second one with its creation time


class ServerMetrics:
    """Counters and histograms since the server started."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "http_requests", "Finished requests.", "model", "status", "reason"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens.", "model")
        self.cached_tokens = self._counter(
            "cached_prompt_tokens",
            "Prompt tokens whose rows the same client wrote.",
            "model",
            "source",
        )
        self.prefill_tokens = self._counter(
            "prefill_tokens",
            "Prompt tokens that were read, or that another client's rows spared.",
            "model",
        )
        self.draft_tokens = self._counter(
            "draft_tokens", "Draft tokens that were proposed.", "model"
        )
        self.accepted_tokens = self._counter(
            "accepted_tokens", "Draft tokens that were accepted.", "model"
        )
        self.tokens = self._counter("generated_tokens", "Generated tokens.", "model")
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Time from a request to its first token."
        )
        self.gap = self._histogram(
            "token_gap_seconds", "Time from one token of an answer to the next."
        )
        self.latency = self._histogram(
            "request_seconds", "Time from a request to the end of its answer."
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"nanobatch_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"nanobatch_{name}", text, ("model",), buckets=SECONDS, registry=self.registry
        )

    def add_model(self, name: str) -> None:
        """Start a model's metrics at zero. Prometheus misses the first increase of a counter that
        appears later."""
        for metric in (self.prompt_tokens, self.prefill_tokens, self.tokens):
            metric.labels(name)
        for metric in (self.draft_tokens, self.accepted_tokens):
            metric.labels(name)
        for metric in (self.ttft, self.gap, self.latency):
            metric.labels(name)
        for source in ("slot", "other_slot", "disk"):
            self.cached_tokens.labels(name, source)

    def count(self, record: RequestRecord) -> None:
        model = record.model
        self.requests.labels(model, record.status or 0, record.reason).inc()
        if not record.requests:
            return
        self.draft_tokens.labels(model).inc(record.draft_tokens)
        self.accepted_tokens.labels(model).inc(record.accepted_tokens)
        self.tokens.labels(model).inc(record.tokens)
        if record.latency_s is not None:
            self.latency.labels(model).observe(record.latency_s)

    def prompt(self, model: str, tokens: int, own: int, source: str) -> None:
        """Record a prompt.

        `own`: the number of cached tokens whose rows the same client wrote. Counting other clients'
        rows would confirm a guess at their prompts. `source`: "slot" | "other_slot" | "disk".
        """
        self.prompt_tokens.labels(model).inc(tokens)
        self.prefill_tokens.labels(model).inc(tokens - own)
        if own:
            self.cached_tokens.labels(model, source).inc(own)

    def times(self, model: str, ttft_s: float | None, times: Sequence[float]) -> None:
        """Record a choice: seconds to its first token, and the times of all its tokens."""
        if ttft_s is not None:
            self.ttft.labels(model).observe(ttft_s)
        for before, after in pairwise(times):
            self.gap.labels(model).observe(after - before)

    def text(self, engines: Mapping[str, Snapshot], gauges: Mapping[str, float]) -> str:
        """Return all metrics as text: the counters, the server's gauges, and each loaded engine's
        metrics."""
        metrics = list(self.registry.collect())
        for name, value in gauges.items():
            metrics.append(GaugeMetricFamily(f"nanobatch_{name}", in_words(name), value))
        steps = Metric("nanobatch_step_seconds", "Duration of steps.", "summary")
        own = {
            name: GaugeMetricFamily(f"nanobatch_{name}", in_words(name), labels=["model"])
            for name in ENGINE_GAUGES
        }
        for model, engine in engines.items():
            for name, value in ENGINE_GAUGES.items():
                own[name].add_metric([model], value(engine))
            add_steps(steps, model, engine)
        states = [
            CounterMetricFamily(f"nanobatch_{name}", words, labels=["model"])
            for name, words in STATES.items()
        ]
        for model, engine in engines.items():
            for counter, value in zip(states, engine.states, strict=True):
                counter.add_metric([model], value)
        if engines:
            metrics += [*own.values(), steps, *states]
        return generate_latest(SimpleNamespace(collect=lambda: metrics)).decode()


def in_words(name: str) -> str:
    return name.replace("_", " ").capitalize()


def add_steps(steps: Metric, model: str, engine: Snapshot) -> None:
    """Add step durations: quantiles since the last scrape, and the overall sum and count."""
    label = {"model": model}
    took = [step.seconds for step in engine.steps]
    for part in (0.5, 0.95, 0.99) if took else ():
        steps.add_sample(steps.name, label | {"quantile": str(part)}, percentile(took, part))
    steps.add_sample(f"{steps.name}_sum", label, engine.steps_s)
    steps.add_sample(f"{steps.name}_count", label, engine.seen.steps)
