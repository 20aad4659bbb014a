"""What happens at the door: which clients came, what became of them. For the screen, the log and /metrics.

The problem. A request that is refused never reaches the engine, and the engine does not know that a client hung up, so
no snapshot of it tells. A door without a book of its own would lose exactly what its owner wants to know.

The way out. Each request at the door is a `Call`, a frozen record, which is replaced as it goes on. The `Journal` holds
the open ones and the newest of the ended ones, numbered as the engine's ledger numbers its own: a watcher asks for what
has happened since it looked last. What is counted for ever goes into `Figures`, in Prometheus' text.

The invariant: memory is bounded, whatever comes. Prompts and answers are in none of this.

Where next: `wire.py`, which sends it to another machine.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TextIO

from parts.api.ledger import Log
from parts.api.views import Snapshot


@dataclass(frozen=True)
class Call:
    """One request at the door. Times are real ones, whatever the engine's clock does."""

    number: int
    at: float  # seconds since 1970
    client: str  # its address
    route: str  # the method and the path
    id: str = ""  # as the client knows it: chatcmpl-12-7f3a
    requests: tuple[int, ...] = ()  # what it is to the engine, one for each choice
    stream: bool = False
    status: int | None = None  # of the answer; 499 if the client hung up before there was one
    reason: str = ""  # how it ended, or the code of the refusal
    message: str = ""  # why it was refused
    hung_up: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    ttft_s: float | None = None
    prompt_tps: float | None = None
    generation_tps: float | None = None
    latency_s: float | None = None

    @property
    def is_refused(self) -> bool:
        return bool(self.message) and not self.hung_up

    @property
    def line(self) -> str:
        """In logfmt. A message may quote what a client has sent, so only its code is told."""
        values = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self.at)),
            "request_id": self.id,
            "client": self.client,
            "route": self.route.partition(" ")[2],
            "method": self.route.partition(" ")[0],
            "stream": str(self.stream).lower() if self.requests else None,
            "status": self.status,
            "finish_reason" if self.requests else "error": self.reason,
            "hung_up": "true" if self.hung_up else None,
        }
        if self.requests:
            values |= {name: getattr(self, name) for name in ("prompt_tokens", "cached_tokens", "tokens")}
            values |= {"ttft": self.ttft_s, "prompt_tps": self.prompt_tps, "generation_tps": self.generation_tps}
            values["total_tps"] = self.tokens / self.latency_s if self.latency_s else None
        values["latency"] = self.latency_s
        return " ".join(f"{name}={logged(value)}" for name, value in values.items() if value not in (None, ""))


def logged(value: object) -> str:
    """A value of a log line. What a client has sent cannot end the line, nor begin another field."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)[:200]
    text = re.sub(r"[^\x20-\x7e]", "?", text)
    return text if re.fullmatch(r"[^\s\"=]+", text) else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass(frozen=True)
class DoorView:
    """The door at one moment, and what has happened there since a watcher looked last."""

    address: str
    draining: bool
    connections: int
    watchers: int
    open: tuple[Call, ...]
    ended: tuple[Call, ...]  # since, oldest first
    missed: int  # ended since, and no longer kept
    seen: int  # so many have ended


class Journal:
    """The calls: all that are open, and the newest that have ended. The door writes it, any thread may look."""

    def __init__(self) -> None:
        self.open: dict[int, Call] = {}
        self.ended = Log(1000)
        self.changes = 0  # so often has something happened
        self._lock, self._count = threading.Lock(), 0

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

    def end(self, number: int) -> Call:
        with self._lock:
            call = self.open.pop(number)
            self.ended.add(call)
            self.changes += 1
            return call

    def forget(self, number: int) -> None:
        """A look at /health is no news."""
        with self._lock:
            self.open.pop(number, None)
            self.changes += 1

    def look(self, since: int = 0) -> tuple[tuple[Call, ...], tuple[Call, ...], int]:
        """The open calls, those that have ended since, and how many have ended in all."""
        with self._lock:
            return tuple(self.open.values()), self.ended.since(since), self.ended.count


class LogFile:
    """A line for each request, written by a thread of its own: a write to a pipe that is never read waits for ever.

    Lines that find no room are counted, not kept.
    """

    def __init__(self, file: TextIO):
        self._file, self._lost = file, 0
        self._lines: queue.Queue[str | None] = queue.Queue(1000)
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        try:
            self._lines.put_nowait(f"lost_lines={self._lost} {line}" if self._lost else line)
            self._lost = 0
        except queue.Full:
            self._lost += 1

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._file.write(line + "\n")
                self._file.flush()
            except (OSError, ValueError):  # a full disk, or a pipe that is closed: serving goes on
                self._lost += 1

    def close(self) -> None:
        try:
            self._lines.put(None, timeout=1)
            self._thread.join(1)
        except queue.Full:
            pass


# --- figures -------------------------------------------------------------------------------------------------------


class Histogram:
    """How many values were at most so large."""

    BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(self.BOUNDS) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.BOUNDS, value)] += 1
        self.sum += value

    def lines(self, name: str) -> Iterable[str]:
        total = 0
        for bound, count in zip((*map(str, self.BOUNDS), "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self.sum:.6f}"
        yield f"{name}_count {total}"


class Figures:
    """What is counted as long as the door is open."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[int, str]] = Counter()  # by status and reason
        self.prompt_tokens = self.cached_tokens = self.tokens = 0
        self.ttft, self.gap, self.latency = Histogram(), Histogram(), Histogram()

    def count(self, call: Call) -> None:
        self.requests[call.status or 0, call.reason] += 1
        self.prompt_tokens += call.prompt_tokens
        self.cached_tokens += call.cached_tokens
        self.tokens += call.tokens
        if call.requests and call.latency_s is not None:
            self.latency.add(call.latency_s)

    def times(self, ttft_s: float | None, times: Sequence[float]) -> None:
        """Of one choice: when its first token came after the request did, and when each of its tokens came."""
        if ttft_s is not None:
            self.ttft.add(ttft_s)
        for before, after in pairwise(times):
            self.gap.add(after - before)

    def text(self, engine: Snapshot | None, gauges: dict[str, float]) -> str:
        """All of it in Prometheus' text format."""
        lines = ["# TYPE nanobatch_http_requests_total counter"]
        for (status, reason), count in sorted(self.requests.items()):
            lines.append(f'nanobatch_http_requests_total{{status="{status}",reason="{reason}"}} {count}')
        counters = {"prompt": self.prompt_tokens, "cached_prompt": self.cached_tokens, "generated": self.tokens}
        for name, value in counters.items():
            lines += [f"# TYPE nanobatch_{name}_tokens_total counter", f"nanobatch_{name}_tokens_total {value}"]
        if engine:
            running = sum(slot.request is not None for slot in engine.slots)
            gauges = gauges | {"requests_running": running, "requests_waiting": engine.waiting}
            gauges |= {"slots": engine.limits.slots, "slot_tokens": engine.limits.max_len}
        for name, value in gauges.items():
            lines += [f"# TYPE nanobatch_{name} gauge", f"nanobatch_{name} {value:g}"]
        if engine:
            took = sorted(step.seconds for step in engine.steps)
            lines.append("# TYPE nanobatch_step_seconds summary")
            for part in (0.5, 0.95, 0.99) if took else ():
                value = took[min(len(took) - 1, int(part * len(took)))]
                lines.append(f'nanobatch_step_seconds{{quantile="{part}"}} {value:.6f}')
            lines += [f"nanobatch_step_seconds_sum {engine.steps_s:.6f}"]
            lines += [f"nanobatch_step_seconds_count {engine.seen.steps}"]
        named = {"time_to_first_token": self.ttft, "token_gap": self.gap, "request": self.latency}
        for name, histogram in named.items():
            lines += [f"# TYPE nanobatch_{name}_seconds histogram", *histogram.lines(f"nanobatch_{name}_seconds")]
        return "\n".join(lines) + "\n"
