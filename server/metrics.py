"""Counters, histograms and gauges of a server, in Prometheus' text format (`/metrics`)."""

from __future__ import annotations

from collections.abc import Sequence
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

from engine.server_view import RequestRecord
from engine.snapshot import Snapshot, percentile

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
disable_created_metrics()  # else each metric would have a second one: its creation time


class ServerMetrics:
    """Counters and histograms since the server's start."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "http_requests", "Requests that have ended.", "status", "reason"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = self._counter(
            "cached_prompt_tokens", "Prompt tokens whose rows the same client wrote.", "source"
        )
        self.prefill_tokens = self._counter(
            "prefill_tokens", "Prompt tokens that were read, or that another client's rows spared."
        )
        self.draft_tokens = self._counter("draft_tokens", "Draft tokens that were proposed.")
        self.accepted_tokens = self._counter("accepted_tokens", "Draft tokens that were accepted.")
        for source in ("slot", "other_slot", "disk"):
            self.cached_tokens.labels(source)
        self.tokens = self._counter("generated_tokens", "Tokens of answers.")
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From a request to its first token."
        )
        self.gap = self._histogram(
            "token_gap_seconds", "From one token of an answer to the next one."
        )
        self.latency = self._histogram(
            "request_seconds", "From a request to the end of its answer."
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"nanobatch_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"nanobatch_{name}", text, buckets=SECONDS, registry=self.registry)

    def count(self, record: RequestRecord) -> None:
        self.requests.labels(record.status or 0, record.reason).inc()
        self.draft_tokens.inc(record.draft_tokens)
        self.accepted_tokens.inc(record.accepted_tokens)
        self.tokens.inc(record.tokens)
        if record.requests and record.latency_s is not None:
            self.latency.observe(record.latency_s)

    def prompt(self, tokens: int, own: int, source: str) -> None:
        """Record a prompt. `own`: the cached tokens whose rows the same client wrote; others would
        confirm a guess at another client's prompt. `source`: "slot" | "other_slot" | "disk"."""
        self.prompt_tokens.inc(tokens)
        self.prefill_tokens.inc(tokens - own)
        if own:
            self.cached_tokens.labels(source).inc(own)

    def times(self, ttft_s: float | None, times: Sequence[float]) -> None:
        """Record a choice: seconds to the first token, and the time of each token."""
        if ttft_s is not None:
            self.ttft.observe(ttft_s)
        for before, after in pairwise(times):
            self.gap.observe(after - before)

    def text(self, engine: Snapshot | None, gauges: dict[str, float]) -> str:
        """All metrics: the counters, the server's gauges, and the engine's, once there is an
        engine."""
        metrics = list(self.registry.collect())
        if engine:
            gauges = gauges | {
                "requests_running": sum(slot.request is not None for slot in engine.slots),
                "requests_waiting": engine.waiting,
                "slots": len(engine.slots),
                "slot_tokens": engine.limits.max_len,
                "prompt_tokens_per_second": engine.prompt_tokens_per_s,
            }
            metrics += [steps_of(engine), *states_of(engine)]
        for name, value in gauges.items():
            words = name.replace("_", " ").capitalize()
            metrics.append(GaugeMetricFamily(f"nanobatch_{name}", words, value))
        return generate_latest(SimpleNamespace(collect=lambda: metrics)).decode()


def states_of(engine: Snapshot) -> list[Metric]:
    """Counters of a model with states; 0 with others."""
    texts = {
        "checkpoints_made": "Checkpoints of states that chunks have left.",
        "checkpoints_restored": "Prompts that have started from a checkpoint.",
        "checkpoints_dropped": "Checkpoints given up for newer ones, or not proven to be finite.",
        "reread_prompt_tokens": "Prompt tokens that were read again because no checkpoint was there, although "
        "the same client's rows were.",
    }
    return [
        CounterMetricFamily(f"nanobatch_{name}", text, value)
        for (name, text), value in zip(texts.items(), engine.states, strict=True)
    ]


def steps_of(engine: Snapshot) -> Metric:
    """Duration of steps: quantiles since the last scrape, sum and count of all."""
    name = "nanobatch_step_seconds"
    steps = Metric(name, "How long steps took.", "summary")
    took = [step.seconds for step in engine.steps]
    for part in (0.5, 0.95, 0.99) if took else ():
        steps.add_sample(name, {"quantile": str(part)}, percentile(took, part))
    steps.add_sample(f"{name}_sum", {}, engine.steps_s)
    steps.add_sample(f"{name}_count", {}, engine.seen.steps)
    return steps
