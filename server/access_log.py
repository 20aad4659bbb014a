"""The door's memory: who came, and how each request ended. For the screen, the log and /metrics.

The problem. A refused request never reaches the engine, and the engine never learns that a client
hung up. So the engine's snapshots tell of neither, and the owner of the server wants to know both.

The way out. Each request at the door is a `Call`, a frozen record, replaced by a newer one as the
request goes on. The `Journal` holds the open calls and the newest of the ended calls, numbered like
the entries of the engine's ledger: so a watcher asks for the calls since the last look. `Figures`
are counted for as long as the door is open, in Prometheus' text format.

The invariant: memory is bounded, whatever comes. No prompt and no answer is kept here.

Where next: `wire.py`, which sends calls and views to another machine.
"""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import TextIO

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from runtime.cli import say
from runtime.progress import PrefillProgress
from runtime.registry import Log
from runtime.snapshot import Snapshot, percentile
from runtime.validation import one_line

# The figures of a call that its log line has, too; there without their unit
FIGURES = (
    "prompt_tokens",
    "cached_tokens",
    "tokens",
    "draft_tokens",
    "accepted_tokens",
    "ttft_s",
    "prompt_tps",
    "generation_tps",
)


@dataclass(frozen=True)
class Call:
    """One request at the door. Times are real ones, whatever the engine's clock does."""

    number: int
    at: float  # seconds since 1970
    client: str  # an address
    route: str  # the method and the path
    id: str = ""  # the client's name for the call: chatcmpl-12-7f3a
    requests: tuple[int, ...] = ()  # the engine's numbers, one for each choice
    stream: bool = False
    status: int | None = None  # of the answer; 499 if the client hung up before there was one
    reason: str = ""  # how the answer ended, or the code of the refusal
    message: str = ""  # of a refusal
    hung_up: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    draft_tokens: int = 0  # proposed for the answers
    accepted_tokens: int = 0  # of these
    ttft_s: float | None = None
    prompt_tps: float | None = None
    generation_tps: float | None = None
    latency_s: float | None = None

    @property
    def is_refused(self) -> bool:
        return bool(self.message) and not self.hung_up

    @property
    def line(self) -> str:
        """In logfmt. A refusal's message may quote the client, so only the code is told."""
        method, _, path = self.route.partition(" ")
        values = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self.at)),
            "request_id": self.id,
            "client": self.client,
            "route": path,
            "method": method,
            "stream": str(self.stream).lower() if self.requests else "",
            "status": self.status,
            "finish_reason" if self.requests else "error": self.reason,
            "hung_up": "true" if self.hung_up else "",
        }
        if self.requests:
            values |= {name.removesuffix("_s"): getattr(self, name) for name in FIGURES}
            if not self.draft_tokens:
                del values["draft_tokens"], values["accepted_tokens"]
            values["total_tps"] = self.tokens / self.latency_s if self.latency_s else None
        values["latency"] = self.latency_s
        return logfmt(values)

    def prefill_line(self, prefill: PrefillProgress) -> str:
        """In logfmt: how far a long prompt has been read. The request goes on."""
        values = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "request_id": self.id,
            "client": self.client,
            "event": "prefill",
            "prefilled": prefill.done,
            "prompt_tokens": prefill.total,
            "cached_tokens": prefill.cached,
            "prompt_tps": prefill.tokens_per_s,
            "left": prefill.left_s,
        }
        return logfmt(values)


def logfmt(values: Mapping[str, object]) -> str:
    """The fields of a log line. Fields without a value are left out."""
    told = [f"{name}={logged(value)}" for name, value in values.items() if value not in (None, "")]
    return " ".join(told)


def logged(value: object) -> str:
    """A value of a log line. No text of a client's can end the line or begin another field."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)[:200]
    text = re.sub(r"[^\x20-\x7e]", "?", text)
    return text if re.fullmatch(r"[^\s\"=]+", text) else json.dumps(text)


@dataclass(frozen=True)
class DoorView:
    """The door at one moment, and the calls that have ended since a watcher's last look."""

    address: str
    draining: bool
    connections: int
    watchers: int
    open: tuple[Call, ...]
    ended: tuple[Call, ...]  # since, oldest first
    missed: int  # ended since, and no longer kept
    seen: int  # so many have ended


class Journal:
    """The calls: all open ones, and the newest of the ended ones. The door writes, any thread may
    look."""

    def __init__(self) -> None:
        self.open: dict[int, Call] = {}
        self.ended = Log(1000)
        self.changes = 0  # counts every change of a call
        self._lock = threading.Lock()
        self._count = 0

    def begin(self, client: str, route: str) -> int:
        with self._lock:
            self._count += 1
            self.changes += 1
            self.open[self._count] = Call(self._count, time.time(), client, route)
            return self._count

    def note(self, number: int, **changes) -> None:
        with self._lock:
            self.open[number] = replace(self.open[number], **changes)
            self.changes += 1

    def end(self, number: int, is_kept: bool = True) -> Call:
        """`is_kept`: not so a look at /health."""
        with self._lock:
            call = self.open.pop(number)
            if is_kept:
                self.ended.add(call)
            self.changes += 1
            return call

    def look(self, since: int = 0) -> tuple[tuple[Call, ...], tuple[Call, ...], int]:
        """The open calls, the calls that have ended since, and how many have ended in all."""
        with self._lock:
            return tuple(self.open.values()), self.ended.since(since), self.ended.count


class HangUps:
    """Clients that hung up before the first token, by client and prompt.

    An agent that loses its patience asks the same again, and may never get its answer. Of a prompt
    only a hash is kept, and of those the newest.
    """

    KEPT = 64

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[str, int], int] = OrderedDict()

    def add(self, client: str, prompt: Sequence[int]) -> int:
        """How often this client has hung up on this prompt, this time included."""
        key = client, hash(tuple(prompt))
        count = self._counts.pop(key, 0) + 1
        self._counts[key] = count
        if len(self._counts) > self.KEPT:
            self._counts.popitem(last=False)
        return count


def impatient(client: str, seconds: float, prefill: PrefillProgress) -> str:
    """What the owner of the server can do about a client that hung up on the same prompt twice."""
    return (
        f"{client} hung up twice on the same prompt, after {seconds:,.0f} s, with {prefill.words}: "
        "the client waits too short a time. docs/clients.md names each agent's setting"
    )


# --- the access log -----------------------------------------------------------------------------


class AccessLog:
    """A line for each request. A thread writes them, because writing to a pipe without a reader waits
    for ever. Lines without room are counted, not kept. If the file cannot be written, serving goes on,
    and that is said once."""

    def __init__(self, file: TextIO, room: int = 1000):
        self._file = file
        self._lines: queue.Queue[str | None] = queue.Queue(room)
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)

    def __enter__(self) -> AccessLog:
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        with suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(1)

    def add(self, line: str) -> None:
        lost = f"lost_lines={self._lost} " if self._lost else ""
        try:
            self._lines.put_nowait(lost + line)
            self._lost = 0
        except queue.Full:
            self._lost += 1

    def _write(self) -> None:
        is_broken = False
        while line := self._lines.get():
            try:
                print(line, file=self._file, flush=True)
                is_broken = False
            except OSError as error:
                if not is_broken:
                    words = f"{self._file.name}: {error.strerror}; serving goes on without its log"
                    say(one_line(words))
                is_broken = True


# --- figures ------------------------------------------------------------------------------------

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
disable_created_metrics()  # else each figure would have a second one: the time of its making


class Figures:
    """Counts, for as long as the door is open."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "http_requests", "Requests that have ended.", "status", "reason"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = self._counter(
            "cached_prompt_tokens", "Tokens of prompts that a slot remembered."
        )
        self.draft_tokens = self._counter("draft_tokens", "Draft tokens that were proposed.")
        self.accepted_tokens = self._counter("accepted_tokens", "Draft tokens that were accepted.")
        # Their names before 0.6, for one release
        self.guessed = self._counter("guessed_tokens", "Old name of draft_tokens; goes in 0.7.")
        self.right = self._counter("right_guesses", "Old name of accepted_tokens; goes in 0.7.")
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

    def count(self, call: Call) -> None:
        self.requests.labels(call.status or 0, call.reason).inc()
        self.prompt_tokens.inc(call.prompt_tokens)
        self.cached_tokens.inc(call.cached_tokens)
        for counter in (self.draft_tokens, self.guessed):
            counter.inc(call.draft_tokens)
        for counter in (self.accepted_tokens, self.right):
            counter.inc(call.accepted_tokens)
        self.tokens.inc(call.tokens)
        if call.requests and call.latency_s is not None:
            self.latency.observe(call.latency_s)

    def times(self, ttft_s: float | None, times: Sequence[float]) -> None:
        """Of one choice: the seconds from the request to the first token, and the moments of all
        tokens."""
        if ttft_s is not None:
            self.ttft.observe(ttft_s)
        for before, after in pairwise(times):
            self.gap.observe(after - before)

    def text(self, engine: Snapshot | None, gauges: dict[str, float]) -> str:
        """All figures in Prometheus' text format: the counts, the door's gauges, and the engine's,
        once there is an engine."""
        metrics = list(self.registry.collect())
        if engine:
            gauges = gauges | {
                "requests_running": sum(slot.request is not None for slot in engine.slots),
                "requests_waiting": engine.waiting,
                "slots": len(engine.slots),
                "slot_tokens": engine.limits.max_len,
                "prompt_tokens_per_second": engine.prompt_tokens_per_s,
            }
            metrics.append(steps_of(engine))
            read = "Prompt tokens that were read by all steps so far; cached tokens do not count."
            metrics.append(
                CounterMetricFamily("nanobatch_prefill_tokens", read, engine.prompt_tokens)
            )
        for name, value in gauges.items():
            words = name.replace("_", " ").capitalize()
            metrics.append(GaugeMetricFamily(f"nanobatch_{name}", words, value))
        return generate_latest(SimpleNamespace(collect=lambda: metrics)).decode()


def steps_of(engine: Snapshot) -> Metric:
    """How long steps took: quantiles of the steps since the last look, sum and count of all."""
    name = "nanobatch_step_seconds"
    steps = Metric(name, "How long steps took.", "summary")
    took = [step.seconds for step in engine.steps]
    for part in (0.5, 0.95, 0.99) if took else ():
        steps.add_sample(name, {"quantile": str(part)}, percentile(took, part))
    steps.add_sample(f"{name}_sum", {}, engine.steps_s)
    steps.add_sample(f"{name}_count", {}, engine.seen.steps)
    return steps
