"""What ran, as a trace that Perfetto and chrome://tracing open.

The problem. A trace viewer draws what overlaps on one track wrongly, or not at all. An engine that
runs ahead has two steps on their way at a time, and plans one while the other is still on the
device.

The way out. Each track shows one thing that does one thing at a time: a slot, the engine's thread,
a request. Steps, of which two are on their way, take turns on two tracks.

What this file keeps. Spans on one track never overlap, and every track and every process has a
name. Times are whole microseconds, which are rounded at both ends of a span alike: else neighbours
would overlap by what was rounded.

Where next: `state.py`, which keeps the steps and the requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise

from parts.api.views import RequestView
from screen.ink import EMPTY, NAMES, clean, shorten
from screen.timeline import Column

SLOTS, ENGINE, REQUESTS = 1, 2, 3  # the processes; 0 would be an idle processor's
THREAD, ODD, EVEN = 1, 2, 3  # tracks of the engine


def trace_events(
    history: Sequence[Column], requests: Iterable[RequestView] = (), now: float = 0.0
) -> list[dict]:
    """All of it as events of Chrome's trace format. Requests that are still open end `now`."""
    requests = sorted(requests, key=lambda request: request.id)
    slots = range(len(history[0].cells) if history else 0)
    tracks = {(SLOTS, slot + 1): f"slot {slot}" for slot in slots}
    tracks |= {
        (ENGINE, THREAD): "its thread",
        (ENGINE, ODD): "steps, odd",
        (ENGINE, EVEN): "steps, even",
    }
    tracks |= {(REQUESTS, r.id): f"r{r.id} {shorten(clean(r.prompt), 40)}" for r in requests}
    out = [
        _name("process_name", pid, 0, name)
        for pid, name in enumerate(("slots", "engine", "requests"), start=1)
    ]
    out += [_name("thread_name", pid, tid, name) for (pid, tid), name in tracks.items()]
    spans = [
        _slots(history, slots),
        _thread(history),
        _steps(history),
        _requests(requests, now),
        _counters(history),
    ]
    return out + [event for events in spans for event in events]


def _slots(history: Sequence[Column], slots: Iterable[int]) -> Iterator[dict]:
    """A span for each stretch of steps in which a slot did the same."""
    for slot in slots:
        for (kind, request), stretch in groupby(history, key=lambda column: column.cells[slot]):
            columns = list(stretch)
            if kind != EMPTY:
                name = NAMES[kind] if request is None else f"r{request} {NAMES[kind]}"
                args = {"first step": columns[0].step, "last step": columns[-1].step}
                yield _span(SLOTS, slot + 1, name, columns[0].began, columns[-1].ended, args)


def _thread(history: Iterable[Column]) -> Iterator[dict]:
    """What the engine's thread did: it plans and runs a step, then commits the one before.

    While a step is run, building, the device and waiting take turns. Each is drawn once, as long as
    its turns together.
    """
    stages = []
    for step in (column.view for column in history):
        began = step.began
        run = {
            "plan": step.plan_s,
            "build": step.build_s,
            "device": step.device_s,
            "wait": step.wait_s,
        }
        for name, seconds in run.items():
            stages.append((began, began + seconds, name, step.step))
            began += seconds
        stages.append((step.ended - step.commit_s, step.ended, "commit", step.step))
    last = 0.0
    for began, ended, name, step in sorted(stages):
        # subtle: the end of the waiting, in which the tokens are read, comes after the commit of
        # the step before. It is drawn before that commit, which then begins later by so much.
        began = max(began, last)
        last = max(began, ended)
        yield _span(ENGINE, THREAD, name, began, last, {"step": step})


def _steps(history: Iterable[Column]) -> Iterator[dict]:
    """Each step from its plan to its commit. The next but one is planned after that, so two tracks
    are enough."""
    free = {ODD: 0.0, EVEN: 0.0}
    for step in (column.view for column in history):
        args = {"policy": step.policy, "decoding": len(step.decode), "chunks": len(step.prefill)}
        track = ODD if step.step % 2 else EVEN
        began = max(step.began, free[track])  # after a failure numbers may be skipped
        free[track] = max(began, step.ended)
        yield _span(
            ENGINE,
            track,
            f"step {step.step}",
            began,
            free[track],
            args | {"delivered": step.tokens},
        )


def _requests(requests: Iterable[RequestView], now: float) -> Iterator[dict]:
    """Each request from its arrival to its end: in line, then reading its prompt, then decoding."""
    for r in requests:
        m, end = r.metrics, now if r.ended is None else r.ended
        marks = [
            r.arrived,
            *(r.arrived + s for s in (m.queued_s, m.ttft_s) if s is not None),
            max(end, r.arrived),
        ]
        args = {
            "prompt tokens": m.prompt_tokens,
            "reused": m.cached_tokens,
            "new tokens": m.output_tokens,
        }
        for name, (began, ended) in zip(
            ("in line", "prefill", "decode"), pairwise(marks), strict=False
        ):
            yield _span(
                REQUESTS, r.id, name, began, max(began, ended), args | {"ends": r.reason or "open"}
            )


def _counters(history: Sequence[Column]) -> Iterator[dict]:
    """Figures that change from step to step. They are 0 while nothing runs."""
    for i, c in enumerate(history):
        rate = c.tokens / (c.ended - c.began) if c.ended > c.began else 0.0
        yield from _counts(c.began, rate, c.view.waiting, len(c.view.decode) + len(c.view.prefill))
        if i + 1 == len(history) or history[i + 1].began > c.ended:
            yield from _counts(c.ended, 0.0, 0, 0)


def _counts(at: float, rate: float, waiting: int, working: int) -> Iterator[dict]:
    for name, value in (
        ("tokens/s", round(rate, 1)),
        ("in line", waiting),
        ("batch size", working),
    ):
        yield {
            "ph": "C",
            "name": name,
            "pid": ENGINE,
            "tid": 0,
            "ts": round(1e6 * at),
            "args": {name: value},
        }


def _name(what: str, pid: int, tid: int, name: str) -> dict:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _span(pid: int, tid: int, name: str, began: float, ended: float, args: dict) -> dict:
    times = {"ts": round(1e6 * began), "dur": round(1e6 * ended) - round(1e6 * began)}
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "cat": "nanobatch",
        "args": args,
    } | times
