"""Slots x steps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from sched import Plan, Request, Scheduler
from screen.ink import BLOCKED, DECODE, EMPTY, GHOST, HELD, NAMES, PREFILL
from screen.room import RequestView, View

if TYPE_CHECKING:
    from parts.answers import StepView


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
    useful: int  # cells that did work: in a merged column, of all its steps
    steps: int = 1


Pairs = Iterable[tuple[int, ...]]  # (slot, request, ...)


def cells_of(slots: int, shut: bool, held: Pairs, prefill: Pairs, decode: Pairs, ghosts: Sequence[int]) -> list[Cell]:
    """What each slot did in a step. `shut`: somebody waits, and the policy keeps the free slots from them."""
    cells = [Cell(BLOCKED if shut else EMPTY)] * slots
    for slot, request, *_ in held:
        cells[slot] = Cell(HELD, request)
    for slot, request, *_ in prefill:
        cells[slot] = Cell(PREFILL, request)
    for slot, request in decode:
        cells[slot] = Cell(GHOST if slot in ghosts else DECODE, request)
    return cells


def column(step: int, began: float, ended: float, cells: Sequence[Cell], tokens: int) -> Column:
    return Column(step, began, ended, tuple(cells), tokens, sum(cell.kind in (PREFILL, DECODE) for cell in cells))


SHUTTING = ("static", "serial")  # the policies that keep a free slot from those who wait


def is_shut(step: StepView | Plan) -> bool:
    return step.waiting > 0 and step.policy in SHUTTING


def merge(columns: Sequence[Column]) -> Column:
    """Several steps as one column. A prefill is short and must not get lost; else what is most frequent is shown."""
    if len(columns) == 1:
        return columns[0]
    cells = []
    for slot in zip(*(column.cells for column in columns), strict=True):
        prefill = next((cell for cell in slot if cell.kind == PREFILL), None)
        cells.append(prefill or Counter(slot).most_common(1)[0][0])
    first, last = columns[0], columns[-1]
    totals = sum(c.tokens for c in columns), sum(c.useful for c in columns), sum(c.steps for c in columns)
    return Column(first.step, first.began, last.ended, tuple(cells), *totals)


def useful_of(columns: Sequence[Column]) -> float:
    """The share of slots x steps that computed something for somebody, in percent."""
    cells = sum(column.steps * len(column.cells) for column in columns)
    return 100 * sum(column.useful for column in columns) / cells if cells else 0.0


@dataclass(frozen=True)
class Run:
    """A workload under one policy, measured or simulated: its timeline, and what people ask about it."""

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
    def ttft_p95(self) -> float | None:
        return sorted(self.ttfts)[math.ceil(0.95 * len(self.ttfts)) - 1] if self.ttfts else None

    @property
    def tokens_per_s(self) -> float:
        return sum(c.tokens for c in self.columns) / self.makespan if self.makespan else 0.0


@dataclass(frozen=True)
class Contest:
    """Two runs of one workload, one above the other."""

    title: str
    runs: Sequence[Run]
    note: str = ""


def measured(policy: str, columns: Sequence[Column], requests: Sequence[RequestView], how: str = "measured") -> Run:
    ttfts = [r.metrics.ttft_s for r in requests if r.metrics.ttft_s is not None]
    return Run(policy, how, columns, min((r.arrived for r in requests), default=0.0), ttfts)


def replay(view: View, requests: Sequence[RequestView], policy: str, start: float, costs: tuple[float, float]) -> Run:
    """The same requests through the same scheduler under another policy, on a clock that ticks as the device did.

    All that the scheduler has to know are lengths and arrival times: no text, no model. As the engine does, this runs
    ahead: a step is planned before the one before is committed. `start` is when the first step was planned: what had
    come by then, had come together. `costs` are the seconds of a decode step and of a chunk.
    """
    slots = len(view.engine.slots)
    sched = Scheduler(
        slots, view.max_len, chunk=view.chunk, budget=view.budget, far=view.far, policy=policy, reuse=False
    )
    everybody = [
        Request(
            r.id,
            (0,) * r.metrics.prompt_tokens,
            r.metrics.output_tokens,
            r.arrived,
            prefilled=r.metrics.cached_tokens,
        )
        for r in requests
    ]
    coming, now, columns, flight = deque(everybody), start, [], None
    while coming or sched.waiting or sched.running:
        while coming and coming[0].arrived <= now:
            sched.submit(coming.popleft())
        plan = sched.plan(now)
        if flight:
            sched.commit(flight, [0] * len(flight.emitters), lambda request, token: None, now)
        if plan:
            began, now = now, now + costs[0] * bool(plan.decodes) + costs[1] * len(plan.chunks)
            held, prefill, decode = (
                [(m.slot, m.id) for m in plan.held],
                [(m.slot, m.request.id) for m in plan.chunks],
                [(m.slot, m.request.id) for m in plan.decodes],
            )
            cells = cells_of(slots, is_shut(plan), held, prefill, decode, ())
            columns.append(column(plan.step, began, now, cells, len(plan.emitters)))
        elif not flight and coming:
            now = coming[0].arrived
        flight = plan
    return Run(policy, "simulated", columns, requests[0].arrived, [r.first_token - r.arrived for r in everybody])


def costs_of(steps: Sequence[StepView]) -> tuple[float, float]:
    """Seconds that a decode step and a prefill chunk took here: the median of the one, what remains for the other."""
    plain = sorted(seconds(step) for step in steps if not step.prefill)
    decode = plain[len(plain) // 2] if plain else 0.0
    chunks = sum(len(step.prefill) for step in steps)
    rest = sum(map(seconds, steps)) - decode * sum(bool(step.decode) for step in steps)
    return decode, max(rest / chunks if chunks else 0.0, decode / 10, 1e-6)


def seconds(step: StepView) -> float:
    """What a step took of the engine's time. From `began` to `ended` is longer: the next is planned meanwhile."""
    return step.plan_s + step.build_s + step.wait_s + step.commit_s


def in_time(run: Run, width: int, longest: float) -> list[Column]:
    """A run's columns on a scale of time: `width` cells are `longest` seconds."""
    out, first = [], 0
    for x in range(round(run.makespan / longest * width)):
        stop = bisect_left(run.columns, run.began + (x + 1) * longest / width, key=lambda c: c.ended)
        stop = min(max(stop, first), len(run.columns))
        out.append(merge(run.columns[first:stop]) if stop > first else run.columns[min(first, len(run.columns) - 1)])
        first = stop
    return out


def trace_events(steps: Sequence[StepView], history: Sequence[Column]) -> list[dict]:
    """What the timeline saw, as Chrome's trace format has it: open it in Perfetto or chrome://tracing.

    Process 1 has a track for each slot, with a span for each stretch of steps in which it did the same; process 2 has
    the stages of each step. Times are microseconds.
    """
    out: list[dict] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for pid, name in ((1, "slots"), (2, "engine"))
    ]
    for slot in range(len(history[0].cells) if history else 0):
        out.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": slot, "args": {"name": f"slot {slot}"}})
        for (kind, request), stretch in groupby(history, key=lambda column: column.cells[slot]):
            columns = list(stretch)
            if kind != EMPTY:
                name = NAMES[kind] if request is None else f"r{request} {NAMES[kind]}"
                args = {"first step": columns[0].step, "last step": columns[-1].step}
                out.append(_span(1, slot, name, columns[0].began, columns[-1].ended, args))
    for step in steps:
        args = {"step": step.step, "policy": step.policy, "decoding": len(step.decode), "chunks": len(step.prefill)}
        run, read = step.began + step.plan_s, step.ended - step.commit_s
        for name, began, ended in (("plan", step.began, run), ("run", run, read), ("commit", read, step.ended)):
            # A step is planned while the one before still runs: every other one has a track of its own.
            out.append(_span(2, step.step % 2, name, began, ended, args))
        counters = {"in line": step.waiting, "batch size": len(step.decode) + len(step.prefill)}
        out.append({"ph": "C", "name": "load", "pid": 2, "ts": round(1e6 * step.began), "args": counters})
    return out


def _span(pid: int, tid: int, name: str, began: float, ended: float, args: dict) -> dict:
    times = {"ts": round(1e6 * began, 1), "dur": round(1e6 * (ended - began), 1)}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": "nanobatch", "args": args} | times
