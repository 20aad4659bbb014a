"""Step times without interruptions, and replays on that clock: with measured times, the same race came
out as 1.0 or 3.9 times as fast, depending on what else ran.

Steps are grouped by the numbers of decoding rows and of chunks. A group's time is its 5th percentile
(next to a busy program on each core, three of four steps are disturbed), and a straight line through
the groups gives the cost of a step. What cannot be separated: a step that attends to more rows takes
longer, too, so with very long answers some of the engine's own time counts as interruption.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, linear_regression
from typing import Any

from engine.snapshot import Limits, RequestView, StepView, percentile
from experiments.simulator import Guest, Ran, Replay, drafts_in
from policies import POLICIES
from sched import Plan, Request

LEAST = 1e-6  # seconds: a lower cost is lost in the noise


def undisturbed(times: Iterable[float], one_in: int = 20) -> float:
    """The fast end of steps that did the same work: 19 of 20 took longer."""
    return percentile(times, 1 / one_in)


class Prices:
    """The undisturbed cost of a step: a constant, and more for each decoding row and each chunk.

    `one_in`: one in this many steps that did the same is faster. With 2 it is the median, disturbed
    or not. That splits a step's own seconds better, since few chunks are enough.
    """

    def __init__(self, steps: Iterable[StepView], one_in: int = 20):
        classes: dict[tuple[int, int], list[float]] = defaultdict(list)
        # Not those that the screen missed
        for step in (step for step in steps if step.decode or step.prefill):
            classes[len(step.decode), len(step.prefill)].append(step.seconds)
        # Least squares. A class counts as often as it was seen.
        rows: list[int] = []
        seconds: list[float] = []
        for (count, chunks), times in classes.items():
            if not chunks:
                rows += [count] * len(times)
                seconds += [undisturbed(times, one_in)] * len(times)
        usual_rows = fmean(rows) if rows else 0.0
        usual = fmean(seconds) if rows else 0.0
        slope = linear_regression(rows, seconds).slope if len({*rows}) > 1 else 0.0
        # No negative costs
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
    """The steps of a replay, on the clock of these costs. The options are those of `Replay`."""

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
