"""Break down the latency of a request into parts, and replay the request under other conditions (for
request_latency.py).

A late first token has three possible causes: the queue, the length of its own prompt, and the other requests
in its steps. Each moment of a request belongs to exactly one part, so the parts add up to the latency. Before
admission a request is queued. Afterwards each step's time is divided by the work in it, in proportion to the costs
of a row and of a chunk (`screen/undisturbed_times.py`).

The scheduler needs no model, so the requests are also replayed: the inspected one alone, and all of them under
each other policy.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from engine.snapshot import Limits, RequestView, StepView, percentile
from experiments.policy_runs import drafts_by_request, guest_of, is_cut_short, simulated
from policies import POLICIES
from screen.draw.style import DECODE, GHOST, PREFILL, listed, span
from screen.state import State, prices
from screen.timeline_columns import Column, during
from screen.undisturbed_times import LEAST, Prices, on_clock

# The parts of a latency, in drawing order
PARTS = {
    "line": "in line: no slot yet",
    "slot": "in a slot, without work: another step ran, or the budget was spent",
    "own chunks": "its own prompt is read",
    "others' chunks": "its steps take longer, since prompts of others are read in them",
    "others' rows": "its steps take longer, since answers of others are decoded in them",
    "decoding": "its own answer",
    "ghost": "computed in its slot after its end, and dropped",
    "unseen": "steps that the screen missed",
}
ROUNDING = 1e-9  # seconds: after a pause, rounding may date a step this much before its prompt
LONGEST = 5_000  # maximum steps of a replay; a longer one would block the screen


class Piece(NamedTuple):
    """A stretch of time that belongs to one part."""

    part: str
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass
class LatencyBreakdown:
    """One request's latency in parts, and the requests that delayed it. Seconds are on the engine's clock."""

    pieces: list[Piece] = field(default_factory=list)
    # request -> its seconds in a slot while this one was queued
    ahead: Counter[int] = field(default_factory=Counter)
    shut: float = 0.0  # seconds in the queue while a slot was free but blocked
    # request -> seconds of its chunks in this one's steps
    chunks: Counter[int] = field(default_factory=Counter)
    overtakers: list[int] = field(default_factory=list)  # arrived later, admitted earlier

    @property
    def seconds(self) -> float:
        return self.pieces[-1].ended - self.pieces[0].began

    def parts(self, until: float = math.inf) -> dict[str, float]:
        """Return part -> seconds up to a time, excluding empty parts."""
        sums = dict.fromkeys(PARTS, 0.0)
        for piece in self.pieces:
            sums[piece.part] += max(0.0, min(piece.ended, until) - piece.began)
        return {part: seconds for part, seconds in sums.items() if seconds > 0}


# --- the parts


def breakdown_in(state: State, request: RequestView) -> LatencyBreakdown:
    """Break down a request's latency at the median step costs."""
    steps = state.steps_of(request)
    step = state.history[steps[-1]].step if steps else None
    usual = prices(state, one_in=2, step=step)
    return break_down(request, state.requests.values(), state.history, usual, state.view.engine.now)


def break_down(
    request: RequestView,
    requests: Iterable[RequestView],
    history: Sequence[Column],
    prices: Prices,
    now: float,
) -> LatencyBreakdown:
    """Break down a request's latency up to its end, or up to now if it is still running.

    `requests`: all known requests. `history`: a column for each step, oldest first.
    """
    breakdown = LatencyBreakdown()
    prices = with_a_chunk(prices)
    admitted = request.admitted
    end = request.ended
    if end is None and admitted is None:
        end = max(now, request.arrived)
    elif end is None:
        end = max(history[-1].ended if history else now, admitted)
    leaves_line = end if admitted is None else admitted
    breakdown.pieces.append(Piece("line", request.arrived, leaves_line))
    _add_queue(breakdown, request, history, leaves_line)
    if admitted is not None:
        for other in requests:
            entered = math.inf if other.admitted is None else other.admitted
            if other.id > request.id and entered < admitted:
                breakdown.overtakers.append(other.id)
        _add_slot(breakdown, request, history, prices, admitted, end)
    return breakdown


def is_noisy(prices: Prices) -> bool:
    """True if a chunk seems to cost less than one row, which is impossible."""
    return prices.chunk <= max(LEAST, prices.row)


def with_a_chunk(prices: Prices) -> Prices:
    """Return the step costs. If they are too noisy, let a chunk cost as much as a step with one
    row."""
    if not is_noisy(prices):
        return prices
    estimated = copy(prices)
    estimated.chunk = prices.seconds(1, 0) or LEAST
    return estimated


def _add_queue(
    breakdown: LatencyBreakdown, request: RequestView, history: Sequence[Column], until: float
) -> None:
    """Add up the seconds of other requests in slots while the request was queued."""
    for column in during(history, request.arrived, until):
        seconds = min(column.ended, until) - max(column.began, request.arrived)
        if column.view.blocked:
            breakdown.shut += seconds
        for kind, owner in column.cells:
            if owner not in (None, request.id) and kind != GHOST:
                breakdown.ahead[owner] += seconds


def _add_slot(
    breakdown: LatencyBreakdown,
    request: RequestView,
    history: Sequence[Column],
    prices: Prices,
    admitted: float,
    end: float,
) -> None:
    """Divide each step after admission into parts."""
    slot = request.slot
    now = admitted
    first = bisect_left(history, admitted, key=lambda column: column.ended)
    for i in range(first, len(history)):
        column = history[i]
        kind, owner = column.cells[slot]
        is_at_work = owner == request.id and kind in (PREFILL, DECODE, GHOST)
        if now >= end and not (is_at_work and kind == GHOST):
            break
        worked = column.ended if i == len(history) - 1 else work_ends(column.view)
        stop = min(worked, end)
        if stop > now:
            shares = {"slot": 1.0}
            if column.unseen:
                shares = {"unseen": 1.0}
            elif is_at_work:
                shares = _shares(breakdown, request, column, prices, stop - now)
            breakdown.pieces += _divided(shares, now, stop)
            now = stop
        if is_at_work and kind == GHOST:
            ghost = Piece("ghost", now, max(now, worked))
            breakdown.pieces.append(ghost)
            now = ghost.ended
    if now < end:  # cancelled before the next step
        breakdown.pieces.append(Piece("slot", now, end))


def work_ends(step: StepView) -> float:
    """Return the time at which the computation of a step finished.

    A step ends when its tokens are read. On a CPU the computation runs while Python launches the step, but
    the tokens are read only after the next step was launched.
    """
    started = step.began + step.plan_s + step.build_s + step.device_s
    return min(started, step.ended) if step.device_s > step.wait_s else step.ended


def _shares(
    breakdown: LatencyBreakdown,
    request: RequestView,
    column: Column,
    prices: Prices,
    seconds: float,
) -> dict[str, float]:
    """Return part -> share of a step's time, in proportion to the costs."""
    rows = len(column.view.decode)
    read = {owner: stop - start for _, owner, start, stop in column.view.prefill}
    tokens = sum(read.values())
    own = read.pop(request.id, 0)
    per_token = prices.seconds(0, len(column.view.prefill)) / max(1, tokens)
    own_row = 0.0 if own else prices.seconds(1, 0) or LEAST
    all_rows = max(own_row, prices.seconds(rows, 0))
    whole = per_token * tokens + all_rows
    for owner, theirs in read.items():
        breakdown.chunks[owner] += seconds * per_token * theirs / whole
    return {
        "own chunks": per_token * own / whole,
        "decoding": own_row / whole,
        "others' chunks": per_token * (tokens - own) / whole,
        "others' rows": (all_rows - own_row) / whole,
    }


def _divided(shares: Mapping[str, float], began: float, ended: float) -> Iterator[Piece]:
    """Divide a step's time into consecutive pieces, one for each part."""
    parts = [(part, share) for part, share in shares.items() if share > 0]
    now = began
    for part, share in parts[:-1]:
        stop = min(ended, now + share * (ended - began))
        yield Piece(part, now, stop)
        now = stop
    yield Piece(parts[-1][0], now, ended)


# --- replays


class Outcome(NamedTuple):
    """The measured or replayed outcome of a request. Seconds count from its arrival."""

    name: str  # "measured", "alone" or a policy
    # number of steps to the admission, then to the first token, then to the last token
    steps: tuple[int, int, int]
    line: float
    ttft: float
    total: float


def outcomes(
    request: RequestView,
    requests: Iterable[RequestView],
    history: Sequence[Column],
    limits: Limits,
    prices: Prices,
) -> list[Outcome]:
    """Return the outcomes: measured, replayed alone, and under each policy.

    For the request's own policy, these are the measured steps without interruptions; the other policies
    are replayed. Raise ValueError if a replay is not possible.
    """
    if not request.metrics.output_tokens:
        raise ValueError("it has no token yet, and a replay must know how long its answer is")
    prices = with_a_chunk(prices)
    # Leave out requests that are still queued
    company = [
        r for r in company_of(request, requests) if r.admitted is not None or is_cut_short(r)
    ]
    columns = steps_of(company, history)
    undisturbed, moment = on_clock(columns, prices)
    arrived = moment(request.arrived)
    came = next_plan(columns, request.arrived)
    real = outcome("measured", request, columns, request.arrived, came)
    total = real.total if request.ended is None else request.ended - request.arrived
    real = real._replace(line=request.metrics.queued_s, ttft=request.metrics.ttft_s, total=total)
    drafts = drafts_by_request(column.view for column in columns)
    # A request that was cut short runs to the same number of tokens in the replays
    whole = replace(request, reason="length") if is_cut_short(request) else request
    alone = simulated(limits, [guest_of(whole, lambda at: 0.0, drafts)], request.policy, prices)
    out = [real, outcome("alone", request, alone, 0.0)]
    late = sum(after.view.began >= before.view.ended for before, after in pairwise(columns))
    run_ahead = 2 * late < len(columns)  # slow motion reads a step before it plans the next
    for policy in POLICIES:
        if policy == request.policy:  # use its measured steps
            ran = outcome(policy, request, undisturbed, arrived, came)
            out.append(ran._replace(line=moment(request.admitted) - arrived))
        else:
            others = [whole if r.id == request.id else r for r in company]
            guests = [guest_of(r, moment, drafts) for r in others]
            steps = simulated(limits, guests, policy, prices, run_ahead=run_ahead)
            out.append(outcome(policy, request, steps, arrived))
    return out


def company_of(request: RequestView, requests: Iterable[RequestView]) -> list[RequestView]:
    """Return the requests of the same busy period."""
    group: list[RequestView] = []
    until = -math.inf
    for r in sorted(requests, key=lambda r: r.id):
        if r.arrived > until:
            if any(other.id == request.id for other in group):
                break
            group = []
        group.append(r)
        until = max(until, math.inf if r.ended is None else r.ended)
    return group


def steps_of(company: Sequence[RequestView], history: Sequence[Column]) -> Sequence[Column]:
    """Return the steps of a busy period. Raise ValueError if some are unknown."""
    began = company[0].arrived
    ended = max(math.inf if r.ended is None else r.ended for r in company)
    first = bisect_left(history, began - ROUNDING, key=lambda column: column.view.began)
    stop = bisect_left(history, ended, key=lambda column: column.view.began)
    columns = history[first:stop]
    if len(columns) > LONGEST:
        raise ValueError(f"{len(columns):,} steps in a row are too many to be replayed")
    if not columns or not columns[0].view.admitted or any(column.unseen for column in columns):
        raise ValueError("not all steps of that time are remembered")
    return columns


def next_plan(columns: Sequence[Column], moment: float) -> int:
    """Return the number, from 1, of the first step planned at this time or later."""
    return bisect_left(columns, moment - ROUNDING, key=lambda column: column.view.began) + 1


def outcome(
    name: str, request: RequestView, steps: Iterable[Column], arrived: float, came: int = 0
) -> Outcome:
    """Return a request's outcome in a run. `came`: the first step after its arrival; 0: find it by time."""
    admitted = first = last = 0
    line = ttft = total = 0.0
    for number, column in enumerate(steps, 1):
        if not came and column.view.began >= arrived:
            came = number
        kind = next((kind for kind, owner in column.cells if owner == request.id), None)
        if kind is not None and not admitted:
            admitted = number
            line = max(0.0, column.view.began - arrived)
        if kind == PREFILL:
            first = number
            ttft = column.ended - arrived
        if kind in (PREFILL, DECODE):
            last = number
            total = column.ended - arrived
        elif last and kind in (None, GHOST):
            break
    if not first:
        raise ValueError("its steps are no longer remembered")
    counts = (admitted - came, first + 1 - admitted, last - first)
    return Outcome(name, counts, line, ttft, total)


# --- ranks


def ranked(requests: Iterable[RequestView]) -> list[RequestView]:
    """Return the finished requests in order of TTFT."""
    done = [r for r in requests if r.ended is not None and r.metrics.ttft_s is not None]
    return sorted(done, key=lambda r: (r.metrics.ttft_s, r.id))


def at_percent(percent: float, order: Sequence[RequestView]) -> RequestView:
    """Return the request at a percentile of TTFT."""
    return order[percentile(range(len(order)), percent / 100)]


# --- in words


def blamed(seconds: Counter[int], most: int = 3) -> str:
    """List requests with their seconds, the longest first: "r3 0.90 s, r5 0.41 s and 3 more"."""
    names = [f"r{request} {span(spent)}" for request, spent in seconds.most_common()]
    return listed(names, most)
