"""A workload under a policy: as it ran, or replayed; on a clock that interruptions do not reach.

The problem. Two policies are to be compared by their seconds. But other programs take the processor
away in mid-step, and the same race comes out as 1.0 or 3.9 times as fast.

The way out. Steps that do the same work take the same time, unless they are disturbed. So all steps
that are known are sorted into classes: so many rows decode, so many chunks of prompts go in. A
class's time is that of its quickest steps: 19 of 20 took longer. (With a busy program beside each
core, three of four steps are disturbed, so a quartile still followed the load.) A straight line
through the classes gives the price of a step, so that no step depends on a class that was seldom
seen. A run's seconds are the prices of its steps, added up. What the engine's clock shows beyond
that is named: interruptions. And the number of steps is printed; nothing can disturb it.

What it cannot tell apart: a step that looks back on more rows of the cache takes longer, too. So
where answers are very long, a part of what is called interruptions is none.

A replay needs no model (`parts/replay.py`): `replay` takes the lengths and arrival times of what
just ran. Its steps have the same prices.

What this file keeps. Every time in a `Run` but `took` is on the clock of the prices, which begins
at 0.

Where next: `state.py`, which compares and races; `panes.py`, which draws both.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from parts.api.views import Limits, RequestView, StepView
from parts.replay import Guest, Ran, Replay
from policies import POLICIES
from sched import Plan, Request
from screen.ink import DECODE, number, span
from screen.timeline import Cell, Column, column, merge, useful_of

FIGURES = ("steps", "makespan", "TTFT mean", "TTFT p95", "useful", "tok/s")


class Run(NamedTuple):
    """A workload under one policy, measured or simulated: its timeline and its figures."""

    policy: str
    how: str  # "measured" | "simulated" | "running …" | "cut short"
    columns: Sequence[Column]
    ttfts: Sequence[float]
    took: float = 0.0  # seconds on the engine's clock; 0 if simulated
    # Of a race: by the number that a request has in `columns`
    requests: Mapping[int, RequestView] = {}

    @property
    def makespan(self) -> float:
        return self.columns[-1].ended if self.columns else 0.0

    @property
    def ttft_mean(self) -> float | None:
        return sum(self.ttfts) / len(self.ttfts) if self.ttfts else None

    @property
    def figures(self) -> tuple[str, ...]:
        """Its figures as texts, in the order of `FIGURES`."""
        p95 = sorted(self.ttfts)[math.ceil(0.95 * len(self.ttfts)) - 1] if self.ttfts else None
        rate = sum(c.tokens for c in self.columns) / self.makespan if self.makespan else 0.0
        times = map(span, (self.makespan, self.ttft_mean, p95))
        return (f"{len(self.columns):,}", *times, f"{useful_of(self.columns):.0f} %", number(rate))

    @property
    def on_the_engines(self) -> str:
        """Its seconds on the engine's clock, and how many of them were none of its own."""
        lost = self.took - self.makespan
        return span(self.took) + (
            f", of it interruptions: {span(lost)}" if lost > self.took / 50 else ""
        )


class Contest(NamedTuple):
    """Two runs of one workload, one above the other."""

    title: str
    runs: Sequence[Run]
    note: str = ""


# --- the clock ----------------------------------------------------------------------------------

LEAST = 1e-6  # seconds: a price that is lower is lost in the noise
# So many of the newest steps are asked for their times, so races in a row have one clock
KNOWN = 10_000


def undisturbed(times: Iterable[float], one_in: int = 20) -> float:
    """Of the times of steps that did the same: the one that 19 of 20 exceed."""
    times = sorted(times)
    return times[(len(times) - 1) // one_in]


class Prices:
    """What a step takes undisturbed: so much for itself, more for each row that decodes and each
    chunk of a prompt.

    `one_in`: of steps that did the same, one in so many is quicker. With 2 it is what they usually
    take, disturbed or not. That divides a step's own seconds better, since few chunks are enough.
    """

    def __init__(self, steps: Iterable[StepView], one_in: int = 20):
        classes: dict[tuple[int, int], list[float]] = defaultdict(list)
        # Not those that the screen has missed
        for step in (step for step in steps if step.decode or step.prefill):
            classes[len(step.decode), len(step.prefill)].append(step.seconds)
        plain = [
            (rows, undisturbed(times, one_in), len(times))
            for (rows, chunks), times in classes.items()
            if not chunks
        ]
        # The straight line that fits best. A class counts as often as it was seen.
        seen = sum(n for *_, n in plain) or 1
        rows, seconds = (
            sum(r * n for r, _, n in plain) / seen,
            sum(t * n for _, t, n in plain) / seen,
        )
        spread = sum(n * (r - rows) ** 2 for r, _, n in plain)
        slope = sum(n * (r - rows) * (t - seconds) for r, t, n in plain) / spread if spread else 0.0
        # No row is done for less than nothing, nor a step
        self.row = min(max(0.0, slope), seconds / max(rows, 1))
        self.step = seconds - self.row * rows
        adds = [
            (t - self.of(rows, 0)) / chunks
            for (rows, chunks), times in classes.items()
            if chunks
            for t in times
        ]
        self.chunk = max(undisturbed(adds, one_in) if adds else 0.0, LEAST)

    def of(self, rows: int, chunks: int) -> float:
        return (self.step + self.row * rows if rows else 0.0) + (
            self.chunk * chunks if chunks else 0.0
        )


def on_clock(
    columns: Sequence[Column], prices: Prices
) -> tuple[list[Column], Callable[[float], float]]:
    """The same steps on the clock of the prices, and a function that says what that clock shows at
    a moment."""
    out, now = [], 0.0
    for i, c in enumerate(columns):
        # A time in which nothing was to do stays as it is
        began = now + (c.began - columns[i - 1].ended if i else 0.0)
        now = began + prices.of(len(c.view.decode), len(c.view.prefill))
        out.append(c._replace(began=began, ended=now))

    def moment(at: float) -> float:
        i = bisect_left(columns, at, key=lambda c: c.ended)
        if i == len(columns):
            return now
        real, ours = columns[i], out[i]
        part = (at - real.began) / ((real.ended - real.began) or 1.0)
        return (
            ours.began + part * (ours.ended - ours.began)
            if part > 0
            else max(0.0, ours.began + at - real.began)
        )

    return out, moment


# --- runs, measured and simulated ---------------------------------------------------------------


def measured(
    policy: str,
    columns: Sequence[Column],
    requests: Sequence[RequestView],
    prices: Prices,
    how: str = "measured",
) -> Run:
    """What ran. The first token of a request comes with the last piece of its prompt."""
    steps, moment = on_clock(columns, prices)
    ends = {(request, stop): c.ended for c in steps for _, request, _, stop in c.view.prefill}
    firsts = (
        (r, ends.get((r.id, r.metrics.prompt_tokens)))
        for r in requests
        if r.metrics.ttft_s is not None
    )
    ttfts = [first - moment(r.arrived) for r, first in firsts if first is not None]
    took = (
        columns[-1].ended - min((r.arrived for r in requests), default=columns[0].began)
        if columns
        else 0.0
    )
    return Run(policy, how, steps, ttfts, took)


def renumbered(columns: Iterable[Column], numbers: dict[int, int]) -> list[Column]:
    """The same steps, with other numbers for the requests."""
    return [
        c._replace(cells=tuple(Cell(kind, numbers.get(r)) for kind, r in c.cells)) for c in columns
    ]


def replay(
    limits: Limits,
    requests: Sequence[RequestView],
    policy: str,
    moment: Callable[[float], float],
    prices: Prices,
) -> Run:
    """The same requests through the same scheduler under another policy, on the clock of the
    prices: its timeline and its figures."""
    columns: list[Column] = []
    firsts: dict[int, float] = {}  # by request: the time to its first token
    guests = [guest_of(request, moment) for request in requests]
    for plan, _, ended, _ in replayed(limits, guests, policy, prices):
        view = StepView.of(
            plan,
            (),
            started=plan.at,
            build_s=0.0,
            device_s=ended - plan.at,
            wait_s=0.0,
            read=ended,
            ended=ended,
        )
        columns.append(column(view, limits.slots, columns[-1] if columns else None))
        for chunk in plan.chunks:
            if chunk.emits:
                firsts[chunk.request.id] = ended - chunk.request.arrived
    ttfts = [firsts[r.id] for r in requests if r.id in firsts]  # some were cancelled before
    return Run(policy, "simulated", columns, ttfts)


def replayed(
    limits: Limits, guests: Sequence[Guest], policy: str, prices: Prices, **options: Any
) -> Iterable[Ran]:
    """The steps of a replay, on the clock of the prices. The options are those of `Replay`."""

    def seconds(plan: Plan) -> float:
        return prices.of(len(plan.decodes), len(plan.chunks))

    return Replay.under(limits._asdict(), POLICIES[policy], guests, seconds, **options)


def guest_of(request: RequestView, moment: Callable[[float], float]) -> Guest:
    """A request for a replay. If it still runs, it counts as far as it is.

    `moment` says what the clock of the prices showed when it arrived.
    """
    metrics = request.metrics
    tokens = metrics.output_tokens
    again = Request(
        request.id,
        (0,) * metrics.prompt_tokens,
        tokens if request.reason is None else request.max_tokens,
        moment(request.arrived),
        shares=False,
        client=request.client,
        prefilled=metrics.cached_tokens,
    )
    if is_cut_short(request):
        return Guest(again, math.inf, again.arrived, [moment(request.ended)] * 2)
    return Guest(again, tokens, again.arrived)


def is_cut_short(request: RequestView) -> bool:
    """Did something else than its own length end it?"""
    return request.reason in ("cancelled", "error")


def until(run: Run, moment: float) -> Run:
    """A run as far as it had come at a moment of its clock. Of a race: all requests came at 0."""
    columns = run.columns[: bisect_right(run.columns, moment, key=lambda c: c.ended)]
    ttfts = [ttft for ttft in run.ttfts if ttft <= moment]
    return run._replace(columns=columns, ttfts=ttfts)


def answer_in(run: Run, slot: int) -> tuple[int, str] | None:
    """The number and the text so far of the request that had this slot last; None: none had it."""
    number = None
    said = 0  # tokens of its answer
    for step in reversed(run.columns):
        kind, request = step.cells[slot]
        if number is None:
            number = request
        elif request != number:
            break
        if number is None:
            continue
        stops = [stop for at, _, _, stop in step.view.prefill if at == slot]
        known = run.requests.get(number)
        is_first = known is not None and known.metrics.prompt_tokens in stops
        said += kind == DECODE or is_first
    if number not in run.requests:
        return None
    request = run.requests[number]
    return number, request.text[: sum(request.lengths[:said])]


def in_time(run: Run, width: int, longest: float) -> list[Column]:
    """A run's columns on a scale of time, on which `longest` seconds are `width` cells wide."""
    out, first = [], 0
    for x in range(round(run.makespan / longest * width)):
        ends = (x + 1) * longest / width
        stop = max(first, bisect_left(run.columns, ends, key=lambda c: c.ended))
        out.append(
            merge(run.columns[first:stop])
            if stop > first
            else run.columns[min(first, len(run.columns) - 1)]
        )
        first = stop
    return out
