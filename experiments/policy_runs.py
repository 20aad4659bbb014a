"""Runs of a workload under a policy, measured or replayed, on a clock without interruptions (for race.py
and request_latency.py).

Other programs interrupt steps: measured times of the same race differed by factors of up to 3.9. So the
duration of a run is the sum of its steps' undisturbed times (`screen/undisturbed_times.py`), and the rest
of the engine's time is shown as interruptions. All times in a `Run` except `took` are on this clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.snapshot import Limits, RequestView, StepView, percentile
from experiments.simulator import Guest, Replay, drafts_in
from policies import POLICIES
from request import Plan, Request
from screen.draw.canvas import Figure
from screen.draw.style import number, span
from screen.state import State
from screen.state import prices as prices_in
from screen.timeline_columns import Cell, Column, column, last_in, merge, said_in, useful_of
from screen.undisturbed_times import Prices, on_clock

FIGURES = (
    Figure("steps", 6),
    Figure("makespan", 10),
    Figure("TTFT mean", 11),
    Figure("TTFT p95", 10, 2),
    Figure("slots used", 12),
    Figure("tok/s", 8, 1),
)


class Run(NamedTuple):
    """The timeline and figures of a workload under one policy, measured or simulated."""

    policy: str
    how: str  # "measured" | "simulated" | "running …" | "cut short"
    columns: Sequence[Column]
    ttfts: Sequence[float]
    took: float = 0.0  # seconds on the engine's clock; 0 if simulated
    # in a race, whose `columns` number requests from 1: number -> request
    requests: Mapping[int, RequestView] = {}

    @property
    def makespan(self) -> float:
        return self.columns[-1].ended if self.columns else 0.0

    @property
    def ttft_mean(self) -> float | None:
        return sum(self.ttfts) / len(self.ttfts) if self.ttfts else None

    @property
    def figures(self) -> dict[str, str]:
        """The figures as text, by the titles of `FIGURES`."""
        rate = sum(c.tokens for c in self.columns) / self.makespan if self.makespan else 0.0
        return {
            "steps": f"{len(self.columns):,}",
            "makespan": span(self.makespan),
            "TTFT mean": span(self.ttft_mean),
            "TTFT p95": span(percentile(self.ttfts, 0.95)),
            "slots used": f"{useful_of(self.columns):.0f} %",
            "tok/s": number(rate),
        }

    @property
    def on_the_engines(self) -> str:
        """The duration on the engine's clock, and the part that was interruptions."""
        lost = self.took - self.makespan
        words = f", of it interruptions: {span(lost)}" if lost > self.took / 50 else ""
        return span(self.took) + words


@dataclass(frozen=True)
class Contest:
    """Two runs of the same workload to compare."""

    title: str
    runs: Sequence[Run]
    note: str = ""


# --- runs, measured and simulated ---------------------------------------------------------------


def measured(
    policy: str,
    columns: Sequence[Column],
    requests: Sequence[RequestView],
    prices: Prices,
    how: str = "measured",
) -> Run:
    """Return a measured run."""
    steps, moment = on_clock(columns, prices)
    took = 0.0
    if columns:
        came = min((r.arrived for r in requests), default=columns[0].began)
        took = columns[-1].ended - came
    return Run(policy, how, steps, ttfts_of(steps, requests, moment), took)


def ttfts_of(
    columns: Iterable[Column], requests: Iterable[RequestView], moment: Callable[[float], float]
) -> list[float]:
    """Return the TTFTs. The last chunk of a prompt yields its first token."""
    ends = {(request, stop): c.ended for c in columns for _, request, _, stop in c.view.prefill}
    ttfts = []
    for r in requests:
        first = ends.get((r.id, r.metrics.prompt_tokens))
        if first is not None and r.metrics.ttft_s is not None:
            ttfts.append(first - moment(r.arrived))
    return ttfts


def renumbered(columns: Iterable[Column], numbers: dict[int, int]) -> list[Column]:
    """Return the steps with renumbered requests."""
    return [
        c._replace(cells=tuple(Cell(kind, numbers.get(r)) for kind, r in c.cells)) for c in columns
    ]


def terms_of(state: State, columns: Sequence[Column]) -> tuple[Limits, Prices]:
    """Return the limits and costs of these steps, for a replay. Raise ValueError if the budget changed
    between them."""
    first, last = columns[0].step, columns[-1].step
    return state.limits_of(first, last), prices_in(state, step=first)


def replay(
    limits: Limits,
    requests: Sequence[RequestView],
    policy: str,
    moment: Callable[[float], float],
    prices: Prices,
    steps: Iterable[StepView] = (),
) -> Run:
    """Replay requests through the scheduler under a policy, with fitted step costs.

    `steps`: the original steps, from which draft tokens are taken.
    """
    drafts = drafts_by_request(steps)
    guests = [guest_of(request, moment, drafts) for request in requests]
    columns = [*simulated(limits, guests, policy, prices)]
    return Run(policy, "simulated", columns, ttfts_of(columns, requests, moment))


def simulated(
    limits: Limits, guests: Sequence[Guest], policy: str, prices: Prices, **options: Any
) -> Iterator[Column]:
    """Yield the steps of a replay, timed by the step costs. `options`: arguments for `Replay`."""

    def seconds(plan: Plan) -> float:
        return prices.seconds(len(plan.decodes), len(plan.chunks))

    before = None
    replay = Replay.under(limits._asdict(), POLICIES[policy], guests, seconds, **options)
    for plan, _, ended, ghosts, drafted in replay:
        view = StepView.from_plan(
            plan,
            ghosts=ghosts,
            tokens=len(plan.emitters) - len(ghosts) + sum(right for *_, right in drafted),
            ended=ended,
            plan_s=0.0,
            build_s=0.0,
            device_s=ended - plan.at,
            wait_s=0.0,
            commit_s=0.0,
            drafts=drafted,
        )
        before = column(view, limits.slots, before)
        yield before


def drafts_by_request(steps: Iterable[StepView]) -> dict[int, list[tuple[int, int]]]:
    """Return the draft tokens of these steps, for `guest_of`."""
    return drafts_in((step.decode, step.ghosts, step.drafts) for step in steps)


def guest_of(
    request: RequestView,
    moment: Callable[[float], float],
    drafts: Mapping[int, Sequence[tuple[int, int]]],
) -> Guest:
    """Return a request for a replay. A running request is replayed up to its newest token, or to its first
    token during prefill.

    `moment` converts arrival times to the replay's clock.
    """
    metrics = request.metrics
    tokens = max(1, metrics.output_tokens)
    again = Request(
        request.id,
        (0,) * metrics.prompt_tokens,
        tokens if request.reason is None else request.max_tokens,
        moment(request.arrived),
        prefix_cache=False,
        client=request.client,
        prefilled=metrics.cached_tokens,
    )
    guest = Guest(again, tokens, drafts=drafts.get(request.id, ()))
    if is_cut_short(request):
        return guest._replace(tokens=math.inf, leaves=moment(request.ended))
    return guest


def is_cut_short(request: RequestView) -> bool:
    """True if the request was cancelled or failed."""
    return request.reason in ("cancelled", "error")


def until(run: Run, moment: float) -> Run:
    """Return a run up to a time on its clock. All requests must have arrived at 0, as in a race."""
    columns = run.columns[: bisect_right(run.columns, moment, key=lambda c: c.ended)]
    ttfts = [ttft for ttft in run.ttfts if ttft <= moment]
    return run._replace(columns=columns, ttfts=ttfts)


def answer_in(run: Run, slot: int) -> tuple[int, str] | None:
    """Return the number and the text so far of the last request in a slot, or None."""
    step = last_in(run.columns, slot)
    number = step and step.cells[slot].request
    if number not in run.requests:
        return None
    request = run.requests[number]
    said = said_in(step.rows[slot], request.metrics.prompt_tokens)
    return number, request.text[: sum(request.lengths[:said])]


def in_time(run: Run, width: int, longest: float) -> list[Column]:
    """Return a run's columns merged to a time scale of `longest` seconds over `width` cells."""
    out = []
    first = 0
    for x in range(round(run.makespan / longest * width)):
        ends = (x + 1) * longest / width
        stop = max(first, bisect_left(run.columns, ends, key=lambda c: c.ended))
        # A cell in which no step ends shows the running step
        merged = run.columns[first:stop] or [run.columns[min(first, len(run.columns) - 1)]]
        out.append(merge(merged))
        first = stop
    return out
