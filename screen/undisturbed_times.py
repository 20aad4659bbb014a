"""Estimate step times without interruptions.

With measured times, a policy came out as 1.0 or 3.9 times as fast as another, depending on what
else ran. So steps are grouped by the numbers of decoding rows and of chunks. A group's time is its
5th percentile, because a busy program on each core disturbs three of four steps. A straight line
through the groups gives the cost of a step.

One effect cannot be separated: a step that attends to more rows takes longer, too. With very long
answers, some of the engine's own time counts as interruption.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, linear_regression

from engine.snapshot import StepView, percentile
from screen.timeline_columns import Column

# Number of newest steps that costs are fitted to; large, so that consecutive runs share costs
KNOWN = 10_000
LEAST = 1e-6  # seconds: lower costs are lost in the noise


def undisturbed(times: Iterable[float], one_in: int = 20) -> float:
    """Return a low quantile of the times of equal steps: by default, 19 of 20 took longer."""
    return percentile(times, 1 / one_in)


class Prices:
    """The undisturbed cost of a step: a constant, and more for each decoding row and each chunk.

    `one_in`: one in this many equal steps is faster than the estimate. 2 gives the median, which is
    better for splitting one step's time into parts, because it needs only a few chunks.
    """

    def __init__(self, steps: Iterable[StepView], one_in: int = 20):
        classes: dict[tuple[int, int], list[float]] = defaultdict(list)
        # Skip steps that the screen missed
        for step in (step for step in steps if step.decode or step.prefill):
            classes[len(step.decode), len(step.prefill)].append(step.seconds)
        # Least squares, weighted by how often each class was seen
        rows: list[int] = []
        seconds: list[float] = []
        for (count, chunks), times in classes.items():
            if not chunks:
                rows += [count] * len(times)
                seconds += [undisturbed(times, one_in)] * len(times)
        usual_rows = fmean(rows) if rows else 0.0
        usual = fmean(seconds) if rows else 0.0
        slope = linear_regression(rows, seconds).slope if len({*rows}) > 1 else 0.0
        # A cost is not negative
        self.row = min(max(0.0, slope), usual / max(usual_rows, 1))
        self.step = usual - self.row * usual_rows
        self.chunk = 0.0  # not known yet
        adds: list[float] = []
        for (count, chunks), times in classes.items():
            if chunks:
                adds += [(time - self.seconds(count, 0)) / chunks for time in times]
        self.chunk = max(undisturbed(adds, one_in) if adds else 0.0, LEAST)

    def seconds(self, rows: int, chunks: int) -> float:
        decoding = self.step + self.row * rows if rows else 0.0
        return decoding + self.chunk * chunks


def on_clock(
    columns: Sequence[Column], prices: Prices
) -> tuple[list[Column], Callable[[float], float]]:
    """Return the steps with undisturbed times, and a function from real to undisturbed time."""
    out = []
    now = 0.0
    for i, c in enumerate(columns):
        # Keep idle times
        began = now + (c.began - columns[i - 1].ended if i else 0.0)
        now = began + prices.seconds(len(c.view.decode), len(c.view.prefill))
        out.append(c._replace(began=began, ended=now))

    def moment(at: float) -> float:
        i = bisect_left(columns, at, key=lambda c: c.ended)
        if i == len(columns):
            return now
        real = columns[i]
        ours = out[i]
        since = at - real.began
        if since <= 0:
            return max(0.0, ours.began + since)
        part = since / ((real.ended - real.began) or 1.0)
        return ours.began + part * (ours.ended - ours.began)

    return out, moment
