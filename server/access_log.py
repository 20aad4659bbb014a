"""Records of HTTP requests, for the screen (`RequestLog`), the log file (`AccessLog`) and /metrics.

The engine never sees refused requests, and a hang-up is only a cancel to it. So the server keeps its own
records: open requests and the most recent finished ones. Records are numbered so that a watcher can ask for
those added since its last frame. Memory is bounded, and prompts and answers are not stored.
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
from dataclasses import replace
from typing import TextIO

from base.validation import one_line
from cli.options import say
from engine.prefill_progress import PrefillProgress
from engine.registry import Log
from engine.server_snapshot import RequestRecord

# Record fields copied to the log line. The suffix "_s" is dropped from their names
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


def request_line(record: RequestRecord) -> str:
    """Format a record as a logfmt line. Only an error's code is logged: its message may quote the client."""
    method, _, path = record.route.partition(" ")
    ended = record.at + (record.latency_s or 0.0)
    values = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(ended)),
        "request_id": record.id,
        "client": record.client,
        "route": path,
        "method": method,
        "model": record.model,
        "stream": str(record.stream).lower() if record.requests else "",
        "status": record.status,
        "finish_reason" if record.requests else "error": record.reason,
    }
    if record.requests:
        values |= {name.removesuffix("_s"): getattr(record, name) for name in FIGURES}
        if not record.draft_tokens:
            del values["draft_tokens"], values["accepted_tokens"]
        values["total_tps"] = record.tokens / record.latency_s if record.latency_s else None
    values["latency"] = record.latency_s
    return logfmt(values)


def prefill_line(record: RequestRecord, prefill: PrefillProgress) -> str:
    """Format the progress of a long prompt as a logfmt line."""
    values = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "request_id": record.id,
        "client": record.client,
        "event": "prefill",
        "prefilled": prefill.done,
        "prompt_tokens": prefill.total,
        "cached_tokens": prefill.cached,
        "prompt_tps": prefill.tokens_per_s,
        "left": prefill.left_s,
    }
    return logfmt(values)


def logfmt(values: Mapping[str, object]) -> str:
    """Join the fields into a logfmt line. Skip fields without a value."""
    told = [f"{name}={logged(value)}" for name, value in values.items() if value not in (None, "")]
    return " ".join(told)


def logged(value: object) -> str:
    """Format a log value, escaped so that client text cannot end the line or start another field."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)[:200]
    text = re.sub(r"[^\x20-\x7e]", "?", text)
    return text if re.fullmatch(r"[^\s\"=]+", text) else json.dumps(text)


class RequestLog:
    """Open requests and the most recent finished ones. The server writes; any thread may read."""

    def __init__(self) -> None:
        self.open: dict[int, RequestRecord] = {}
        self.ended = Log(1000)
        self.changes = 0  # incremented by every change
        self._lock = threading.Lock()
        self._count = 0

    def open_record(self, client: str, route: str) -> int:
        with self._lock:
            self._count += 1
            self.changes += 1
            self.open[self._count] = RequestRecord(self._count, time.time(), client, route)
            return self._count

    def update(self, number: int, **changes) -> None:
        with self._lock:
            self.open[number] = replace(self.open[number], **changes)
            self.changes += 1

    def close_record(self, number: int, is_kept: bool = True) -> RequestRecord:
        """Close an open record and return it. `is_kept`: keep it among the finished records."""
        with self._lock:
            record = self.open.pop(number)
            if is_kept:
                self.ended.add(record)
            self.changes += 1
            return record

    def records(
        self, since: int = 0
    ) -> tuple[tuple[RequestRecord, ...], tuple[RequestRecord, ...], int]:
        """Return the open requests, those finished after number `since` (if still kept), and the total number
        of finished requests."""
        with self._lock:
            return tuple(self.open.values()), self.ended.since(since), self.ended.count


class HangUps:
    """Counts hang-ups before the first token, per client and prompt.

    An agent with a short timeout resends the same prompt and may never get an answer. Only hashes of
    recent prompts are kept.
    """

    KEPT = 64

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[str, int], int] = OrderedDict()

    def add(self, client: str, prompt: Sequence[int]) -> int:
        """Record a hang-up and return how often this client has hung up on this prompt."""
        key = client, hash(tuple(prompt))
        count = self._counts.pop(key, 0) + 1
        self._counts[key] = count
        if len(self._counts) > self.KEPT:
            self._counts.popitem(last=False)
        return count


def hang_up_advice(client: str, seconds: float, prefill: PrefillProgress) -> str:
    """Return advice to the server's owner about a client that has hung up on the same prompt twice."""
    return (
        f"{client} hung up twice on the same prompt, after {seconds:,.0f} s, with {prefill.words}: "
        "the client's timeout is too short. docs/clients.md names each agent's setting"
    )


# --- the access log -------------------------------------------------------------------------------


class AccessLog:
    """The log file: a line per request, and the progress of long prompts. A separate thread writes it,
    because writing to a full pipe blocks. If the queue is full, lines are dropped and counted. A write error
    is reported once, and the server keeps running."""

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
                    words = (
                        f"{self._file.name}: {error.strerror}; serving continues without its log"
                    )
                    say(one_line(words))
                is_broken = True
