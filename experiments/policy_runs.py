"""A workload under a policy, measured or replayed, on a clock without interruptions (for race.py and
request_latency.py).

Other programs interrupt steps, so measured seconds of one race differ by factors of 1.0 to 3.9. A
run is therefore as long as the undisturbed times of its steps (`screen/undisturbed_times.py`); the rest
of the engine's clock is shown as interruptions. Every time in a `Run` except `took` is on that
clock.
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
    """A workload under one policy, measured or simulated: timeline and figures."""

    policy: str
    how: str  # "measured" | "simulated" | "running …" | "cut short"
    columns: Sequence[Column]
    ttfts: Sequence[float]
    took: float = 0.0  # seconds on the engine's clock; 0 if simulated
    # in a race: by the number in `columns`
    requests: Mapping[int, RequestView] = {}

    @property
    def makespan(self) -> float:
        return self.columns[-1].ended if self.columns else 0.0

    @property
    def ttft_mean(self) -> float | None:
        return sum(self.ttfts) / len(self.ttfts) if self.ttfts else None

    @property
    def figures(self) -> dict[str, str]:
        """As texts, by the titles of `FIGURES`."""
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
        """Seconds on the engine's clock, and how much of it were interruptions."""
        lost = self.took - self.makespan
        words = f", of it interruptions: {span(lost)}" if lost > self.took / 50 else ""
        return span(self.took) + words


@dataclass(frozen=True)
class Contest:
    """Two runs of one workload to compare."""

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
    """A real run."""
    steps, moment = on_clock(columns, prices)
    took = 0.0
    if columns:
        came = min((r.arrived for r in requests), default=columns[0].began)
        took = columns[-1].ended - came
    return Run(policy, how, steps, ttfts_of(steps, requests, moment), took)


def ttfts_of(
    columns: Iterable[Column], requests: Iterable[RequestView], moment: Callable[[float], float]
) -> list[float]:
    """TTFTs: a first token comes with the last chunk of the prompt."""
    ends = {(request, stop): c.ended for c in columns for _, request, _, stop in c.view.prefill}
    ttfts = []
    for r in requests:
        first = ends.get((r.id, r.metrics.prompt_tokens))
        if first is not None and r.metrics.ttft_s is not None:
            ttfts.append(first - moment(r.arrived))
    return ttfts


def renumbered(columns: Iterable[Column], numbers: dict[int, int]) -> list[Column]:
    """The same steps, with other numbers for the requests."""
    return [
        c._replace(cells=tuple(Cell(kind, numbers.get(r)) for kind, r in c.cells)) for c in columns
    ]


def terms_of(state: State, columns: Sequence[Column]) -> tuple[Limits, Prices]:
    """The limits of these steps and the prices then, for a replay. ValueError if the budget changed
    in between."""
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
    """Replay requests through the scheduler under another policy, on the clock of the prices. `steps`:
    the steps that were run, with their drafts."""
    drafts = drafts_by_request(steps)
    guests = [guest_of(request, moment, drafts) for request in requests]
    columns = [*simulated(limits, guests, policy, prices)]
    return Run(policy, "simulated", columns, ttfts_of(columns, requests, moment))


def simulated(
    limits: Limits, guests: Sequence[Guest], policy: str, prices: Prices, **options: Any
) -> Iterator[Column]:
    """The steps of a replay on the clock of the prices. Options are those of `Replay`."""

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
    """The draft tokens of these steps, for `guest_of`."""
    return drafts_in((step.decode, step.ghosts, step.drafts) for step in steps)


def guest_of(
    request: RequestView,
    moment: Callable[[float], float],
    drafts: Mapping[int, Sequence[tuple[int, int]]],
) -> Guest:
    """A request for a replay. If it still runs, it counts as far as it is: during prefill, to its
    first token.

    `moment` converts arrival times to the clock of the costs.
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
    """True if a cancel or an error ended it."""
    return request.reason in ("cancelled", "error")


def until(run: Run, moment: float) -> Run:
    """A run up to a time of its clock, in a race, where all requests arrive at 0."""
    columns = run.columns[: bisect_right(run.columns, moment, key=lambda c: c.ended)]
    ttfts = [ttft for ttft in run.ttfts if ttft <= moment]
    return run._replace(columns=columns, ttfts=ttfts)


def answer_in(run: Run, slot: int) -> tuple[int, str] | None:
    """Number and text so far of the last request in a slot, or None."""
    step = last_in(run.columns, slot)
    number = step and step.cells[slot].request
    if number not in run.requests:
        return None
    request = run.requests[number]
    said = said_in(step.rows[slot], request.metrics.prompt_tokens)
    return number, request.text[: sum(request.lengths[:said])]


def in_time(run: Run, width: int, longest: float) -> list[Column]:
    """A run's columns on a time scale, with `longest` seconds over `width` cells."""
    out = []
    first = 0
    for x in range(round(run.makespan / longest * width)):
        ends = (x + 1) * longest / width
        stop = max(first, bisect_left(run.columns, ends, key=lambda c: c.ended))
        # A cell in which no step ends shows the step that is running
        merged = run.columns[first:stop] or [run.columns[min(first, len(run.columns) - 1)]]
        out.append(merge(merged))
        first = stop
    return out
