"""A clock that interruptions do not reach: what steps take undisturbed, and a replay on that clock.

The problem. Two policies are to be compared by their seconds. But other programs take the processor
away in mid-step, and the same race comes out as 1.0 or 3.9 times as fast.

The way out. Steps that do the same work take the same time, unless they are disturbed. So all steps
that are known are sorted into classes: so many rows decode, so many chunks of prompts go in. A
class's time is that of its quickest steps: 19 of 20 took longer. (With a busy program beside each
core, three of four steps are disturbed, so a quartile still followed the load.) A straight line
through the classes gives the price of a step, so that no step depends on a class that was seldom
seen.

What this file keeps. A replay has the lengths and the arrival times of what ran, and its steps have
the same prices. One thing cannot be told apart: a step that looks back on more rows of the cache
takes longer, too. So where answers are very long, a part of what is called interruptions is none.

Where next: `analysis/simulator.py`, which turns the wheel; `screen/policy_runs.py`, which compares.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, linear_regression
from typing import Any

from analysis.simulator import Guest, Ran, Replay, drafts_in
from policies import POLICIES
from runtime.snapshot import Limits, RequestView, StepView, percentile
from sched import Plan, Request

LEAST = 1e-6  # seconds: a price that is lower is lost in the noise


def undisturbed(times: Iterable[float], one_in: int = 20) -> float:
    """Of the times of steps that did the same: the one that 19 of 20 exceed."""
    return percentile(times, 1 / one_in)


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
        # The straight line that fits best. A class counts as often as it was seen.
        rows: list[int] = []
        seconds: list[float] = []
        for (count, chunks), times in classes.items():
            if not chunks:
                rows += [count] * len(times)
                seconds += [undisturbed(times, one_in)] * len(times)
        usual_rows = fmean(rows) if rows else 0.0
        usual = fmean(seconds) if rows else 0.0
        slope = linear_regression(rows, seconds).slope if len({*rows}) > 1 else 0.0
        # No row is done for less than nothing, nor a step
        self.row = min(max(0.0, slope), usual / max(usual_rows, 1))
        self.step = usual - self.row * usual_rows
        self.chunk = 0.0  # not known yet
        adds: list[float] = []
        for (count, chunks), times in classes.items():
            if chunks:
                adds += [(time - self.of(count, 0)) / chunks for time in times]
        self.chunk = max(undisturbed(adds, one_in) if adds else 0.0, LEAST)

    def of(self, rows: int, chunks: int) -> float:
        decoding = self.step + self.row * rows if rows else 0.0
        return decoding + self.chunk * chunks


def replayed(
    limits: Limits, guests: Sequence[Guest], policy: str, prices: Prices, **options: Any
) -> Iterable[Ran]:
    """The steps of a replay, on the clock of the prices. The options are those of `Replay`."""

    def seconds(plan: Plan) -> float:
        return prices.of(len(plan.decodes), len(plan.chunks))

    return Replay.under(limits._asdict(), POLICIES[policy], guests, seconds, **options)


def drafts_by_request(steps: Iterable[StepView]) -> dict[int, list[tuple[int, int]]]:
    """What these steps drafted, for `guest_of`."""
    return drafts_in((step.decode, step.ghosts, step.drafts) for step in steps)


def guest_of(
    request: RequestView,
    moment: Callable[[float], float],
    drafts: Mapping[int, Sequence[tuple[int, int]]],
) -> Guest:
    """A request for a replay. If it still runs, it counts as far as it is: if its prompt is still
    being read, to its first token.

    `moment` says what the clock of the prices showed when it arrived.
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
    guest = Guest(again, tokens, again.arrived, drafts=drafts.get(request.id, ()))
    if is_cut_short(request):
        return guest._replace(tokens=math.inf, leaves=[moment(request.ended)] * 2)
    return guest


def is_cut_short(request: RequestView) -> bool:
    """Did something else than its own length end it?"""
    return request.reason in ("cancelled", "error")
