"""Slots x steps: what each slot did in each step, as it was, or as another policy would have made it.

The problem. A policy is hard to judge from numbers. One picture says what batching is about, and two of them, one above
the other, say why the policy matters:

    continuous  0 ▒A██████▒C████████     ▒ prefill: a chunk of the prompt goes into the slot
                1 ▒B██▒D████████████     █ decode: one more token of the answer

    static      0 ▒A██████▒C████████     ╳ blocked: the slot is free and requests wait, but the policy keeps it shut,
                1 ▒B██╳╳╳╳▒D████████       here until the batch that was admitted together has drained

A step becomes a `Column` of cells. The second picture needs no model, because `sched.py` needs none: `replay` takes the
lengths and arrival times of what just ran, and drives a second `Scheduler` through them on a clock of its own.

What this file keeps. Both pictures draw what the plans say. Nothing here knows a policy.

Where next: `state.py`, which keeps the columns; `panes.py`, which draws them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from parts.answers import Limits, RequestView, StepView
from sched import Plan, Request, Scheduler
from screen.ink import BLOCKED, DECODE, EMPTY, GHOST, HELD, NAMES, PREFILL, UNSEEN, number, span


class Cell(NamedTuple):
    kind: int
    request: int | None = None


class Column(NamedTuple):
    """One step of the timeline, or several steps merged into one."""

    step: int
    began: float
    ended: float
    cells: tuple[Cell, ...]  # by slot
    tokens: int  # delivered
    useful: int  # cells that computed something for a request; in a merged column, the sum of all its steps
    view: StepView  # the step as the engine describes it; in a merged column, the last step
    total: int = 0  # tokens delivered up to and with this step
    steps: int = 1
    unseen: int = 0  # so many steps went by before the screen looked: nothing else is known of them


def column(step: StepView, slots: int, before: Column | None = None) -> Column:
    """A step as the timeline draws it, behind `before`, the step before it.

    The engine runs ahead and plans a step before the one before has ended. Here the step begins when that one ends.
    """
    cells = dict.fromkeys(range(slots), Cell(EMPTY)) | {slot: Cell(BLOCKED) for slot in step.blocked}
    cells |= {slot: Cell(HELD, request) for slot, request in step.held}
    cells |= {slot: Cell(PREFILL, request) for slot, request, *_ in step.prefill}
    cells |= {slot: Cell(GHOST if slot in step.ghosts else DECODE, request) for slot, request in step.decode}
    useful = sum(cell.kind in (PREFILL, DECODE) for cell in cells.values())
    began, total = (max(step.began, before.ended), before.total) if before else (step.began, 0)
    return Column(step.step, began, step.ended, tuple(cells.values()), step.tokens, useful, step, total + step.tokens)


def gap(missed: int, tokens: int, first: StepView, before: Column) -> Column:
    """Steps that were missed, and in which so many tokens came: between `before` and `first`, which was seen again."""
    nothing = dict.fromkeys(("admitted", "prefill", "decode", "held", "ghosts", "blocked"), ())
    nothing |= dict.fromkeys(("cost", "plan_s", "build_s", "wait_s", "commit_s"), 0)
    times = {"began": before.ended, "ended": max(before.ended, first.began)}
    view = replace(first, step=first.step - 1, tokens=tokens, **nothing, **times)
    total, cells = before.total + tokens, (Cell(UNSEEN),) * len(before.cells)
    return Column(view.step, *times.values(), cells, tokens, 0, view, total, steps=0, unseen=missed)


def merge(columns: Sequence[Column]) -> Column:
    """Several steps as one column. A cell shows the most frequent kind, but a prefill, which is short, comes first."""
    if len(columns) == 1:
        return columns[0]
    cells = []
    for slot in zip(*(column.cells for column in columns), strict=True):
        rare = max((cell for cell in slot if cell.kind in (PREFILL, UNSEEN)), default=None)
        cells.append(rare or Counter(slot).most_common(1)[0][0])
    names = ("tokens", "useful", "steps", "unseen")
    sums = {name: sum(getattr(column, name) for column in columns) for name in names}
    return columns[-1]._replace(step=columns[0].step, began=columns[0].began, cells=tuple(cells), **sums)


def useful_of(columns: Sequence[Column]) -> float:
    """In how many percent of slots x steps something was computed for a request."""
    cells = sum(column.steps * len(column.cells) for column in columns)
    return 100 * sum(column.useful for column in columns) / cells if cells else 0.0


# --- runs, measured and simulated ----------------------------------------------------------------------------------


FIGURES = ("makespan", "TTFT mean", "TTFT p95", "useful", "tok/s")


class Run(NamedTuple):
    """A workload under one policy, measured or simulated: its timeline and its figures."""

    policy: str
    how: str  # "measured" | "simulated" | "running …"
    columns: Sequence[Column]
    began: float
    ttfts: Sequence[float]

    @property
    def makespan(self) -> float:
        return self.columns[-1].ended - self.began if self.columns else 0.0

    @property
    def ttft_mean(self) -> float | None:
        return sum(self.ttfts) / len(self.ttfts) if self.ttfts else None

    @property
    def figures(self) -> tuple[str, ...]:
        """Its figures as texts, in the order of `FIGURES`."""
        p95 = sorted(self.ttfts)[math.ceil(0.95 * len(self.ttfts)) - 1] if self.ttfts else None
        rate = sum(c.tokens for c in self.columns) / self.makespan if self.makespan else 0.0
        times = map(span, (self.makespan, self.ttft_mean, p95))
        return (*times, f"{useful_of(self.columns):.0f} %", number(rate))


class Contest(NamedTuple):
    """Two runs of one workload, one above the other."""

    title: str
    runs: Sequence[Run]
    note: str = ""


def measured(policy: str, columns: Sequence[Column], requests: Sequence[RequestView], how: str = "measured") -> Run:
    ttfts = [r.metrics.ttft_s for r in requests if r.metrics.ttft_s is not None]
    return Run(policy, how, columns, min((r.arrived for r in requests), default=0.0), ttfts)


Costs = tuple[float, float]  # seconds of a decode step, and of a chunk


def replay(limits: Limits, requests: Sequence[RequestView], policy: str, start: float, costs: Costs) -> Run:
    """The same requests through the same scheduler under another policy, on a clock that ticks as the device did.

    The scheduler needs only lengths and arrival times: no text, no model. Like the engine, this loop runs ahead: a step
    is planned before the one before is committed. `start` is the time at which the first step was planned; all requests
    that had come by then are in line together.
    """
    sched = Scheduler(**limits._asdict(), policy=policy)
    coming = deque()
    for r in requests:
        m, prompt = r.metrics, (0,) * r.metrics.prompt_tokens
        coming.append(Request(r.id, prompt, m.output_tokens, r.arrived, shares=False, prefilled=m.cached_tokens))
    now, flight, columns = start, None, []
    firsts: dict[int, float] = {}  # by request: the time to its first token

    def accept(request: Request, token: int) -> None:
        firsts.setdefault(request.id, now - request.arrived)

    while coming or sched.waiting or sched.running:
        while coming and coming[0].arrived <= now:
            sched.submit(coming.popleft())
        plan: Plan | None = sched.plan(now)
        if flight:
            now += costs[0] * bool(flight.decodes) + costs[1] * len(flight.chunks)
            sched.commit(flight, [0] * len(flight.emitters), accept, now)
            times = {"started": flight.at, "build_s": 0.0, "wait_s": now - flight.at, "read": now, "ended": now}
            columns.append(column(StepView.of(flight, (), **times), limits.slots, columns[-1] if columns else None))
        elif not plan and coming:
            now = coming[0].arrived
        flight = plan
    return Run(policy, "simulated", columns, requests[0].arrived, [firsts[r.id] for r in requests])


def costs_of(columns: Sequence[Column]) -> Costs:
    """How many seconds a decode step and a prefill chunk took here.

    A decode step takes the median of all steps without a prefill. The chunks share the time that then remains.
    """
    steps = [column.view for column in columns]
    plain = sorted(step.seconds for step in steps if not step.prefill)
    decode = plain[len(plain) // 2] if plain else 0.0
    chunks = sum(len(step.prefill) for step in steps)
    rest = sum(step.seconds for step in steps) - decode * sum(bool(step.decode) for step in steps)
    return decode, max(rest / chunks if chunks else 0.0, decode / 10, 1e-6)


def in_time(run: Run, width: int, longest: float) -> list[Column]:
    """A run's columns on a scale of time, on which `longest` seconds are `width` cells wide."""
    out, first = [], 0
    for x in range(round(run.makespan / longest * width)):
        ends = run.began + (x + 1) * longest / width
        stop = max(first, bisect_left(run.columns, ends, key=lambda c: c.ended))
        out.append(merge(run.columns[first:stop]) if stop > first else run.columns[min(first, len(run.columns) - 1)])
        first = stop
    return out


# --- the trace -----------------------------------------------------------------------------------------------------


def trace_events(history: Sequence[Column]) -> list[dict]:
    """The timeline in Chrome's trace format, which Perfetto and chrome://tracing open.

    Process 1 has a track for each slot, with a span for each stretch of steps in which the slot did the same. Process 2
    has the stages of each step. Times are microseconds.
    """
    names = [("process_name", 1, 0, "slots"), ("process_name", 2, 0, "engine")]
    slots = range(len(history[0].cells) if history else 0)
    names += [("thread_name", 1, slot, f"slot {slot}") for slot in slots]
    out = [{"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}} for what, pid, tid, name in names]
    for slot in slots:
        for (kind, request), stretch in groupby(history, key=lambda column: column.cells[slot]):
            columns = list(stretch)
            if kind != EMPTY:
                name = NAMES[kind] if request is None else f"r{request} {NAMES[kind]}"
                args = {"first step": columns[0].step, "last step": columns[-1].step}
                out.append(_span(1, slot, name, columns[0].began, columns[-1].ended, args))
    for step in (column.view for column in history):
        args = {"step": step.step, "policy": step.policy, "decoding": len(step.decode), "chunks": len(step.prefill)}
        run, read = step.began + step.plan_s, step.ended - step.commit_s
        for name, began, ended in (("plan", step.began, run), ("run", run, read), ("commit", read, step.ended)):
            # A step is planned while the one before still runs, so two tracks take turns.
            out.append(_span(2, step.step % 2, name, began, ended, args))
        counters = {"in line": step.waiting, "batch size": len(step.decode) + len(step.prefill)}
        out.append({"ph": "C", "name": "load", "pid": 2, "ts": round(1e6 * step.began), "args": counters})
    return out


def _span(pid: int, tid: int, name: str, began: float, ended: float, args: dict) -> dict:
    times = {"ts": round(1e6 * began, 1), "dur": round(1e6 * (ended - began), 1)}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": "nanobatch", "args": args} | times
