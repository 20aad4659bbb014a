"""Charts: tokens per second, batch size, the histogram of TTFT, and the cost of a row.

Every chart has a zero line and a readable axis.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle, pairwise

from rich.cells import cell_len

from engine.prefill_progress import LONG_S
from engine.snapshot import RequestView, percentile
from policies import POLICIES
from screen.draw.canvas import Canvas
from screen.draw.style import HUES, count, number, span, style, wrap
from screen.state import State
from screen.timeline_columns import Column, spread

# Width of the scale on the left. It is the same in all charts, so that their time axes line up
SCALE = 5


def nice(top: float) -> float:
    """Return the end of an axis: the smallest round number that is at least `top`."""
    scale = 10 ** math.floor(math.log10(max(top, 1e-9)))
    return next(n * scale for n in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if n * scale >= top * 0.999)


def draw_area(
    on: Canvas, values: Sequence[float], top: float, hue: str, ends: tuple[str, str]
) -> None:
    """Draw values as columns over a zero line, with the scale on the left.

    `ends` are the labels of the first and last column.
    """
    height = on.lines_left - 1
    scale = {0: "0", height - 1: f"{top:,.0f}"}
    label = max(len(scale[height - 1]), SCALE)
    values = values[-(on.width - label - 3) :]
    for row in reversed(range(height)):
        mark = scale.get(row, "")
        pen = on.pen().put(f"{mark:>{label}} ", on.muted).put("┤" if mark else "│", on.faint)
        for value in values:
            pen.bar(value / top * height or None, row, hue)
    left, right = ends
    last = max(label + 2 + len(values) - len(right), label + 3 + len(left))
    on.axis((label + 2, left), (min(last, on.width - 1 - len(right)), right))


def stretch(state: State) -> tuple[float, float]:
    """Return the time span of the charts.

    It ends at the cursor, and covers at most the last ten seconds of the latest busy period.
    """
    if not state.history:
        return 0.0, 0.0
    last = state.here.ended
    return max(state.history[state.first].began, last - 10), last


def rates_of(state: State, on: Canvas, part: Callable[[Column], float]) -> list[float]:
    """Return a quantity of the steps as a rate per second, for each column of a chart."""
    bins = on.width - SCALE - 3
    began, last = stretch(state)
    tick = max(last - began, 0.05) / bins
    edges = [began + i * tick for i in range(bins + 1)]
    return [spread(state.history, *ends, part) / tick for ends in pairwise(edges)]


def ends_of(began: float, last: float) -> tuple[str, str]:
    """Return the labels of a time axis: how long ago it begins, and 0 in the same unit."""
    ago = span(last - began)
    return (f"−{ago}", f"0 {ago.split()[1]}") if last else ("", "")


def only_reads(state: State) -> bool:
    """True if the steps of the last `LONG_S` seconds have only prefilled."""
    began, last = stretch(state)
    recent = last - LONG_S
    if recent < began:
        return False
    tokens = spread(state.history, recent, last, lambda column: column.tokens)
    return not tokens and spread(state.history, recent, last, prompt_tokens) > 0


def prompt_tokens(column: Column) -> int:
    return column.view.prompt_tokens


def draw_rate(state: State, on: Canvas) -> None:
    """Draw output tokens per second, or prompt tokens while the engine only prefills."""
    title = "tokens/s"
    values = rates_of(state, on, lambda column: column.tokens)
    if only_reads(state):
        title = "prompt tokens/s"
        values = rates_of(state, on, prompt_tokens)
    on.heading(state.titled(title), f"peak {max(values):,.0f}")
    draw_area(on, values, nice(max(1.0, *values)), HUES[2], ends_of(*stretch(state)))


def draw_batch(state: State, on: Canvas) -> None:
    """Draw how many slots did useful work, on the time axis of the token rate."""
    slots = len(state.view.engine.slots)
    values = rates_of(state, on, lambda column: column.useful * (column.ended - column.began))
    _, last = stretch(state)
    mean = f"mean {sum(values) / len(values):.1f} " if last else ""
    on.heading(state.titled("batch size"), f"{mean}of {slots} slots")
    draw_area(on, values, slots, HUES[1], ends_of(*stretch(state)))


def cost_of(seconds: Iterable[float]) -> float:
    """Return the lower quartile of similar steps, because interruptions only make steps longer."""
    return percentile(seconds, 0.25)


def draw_cost(state: State, on: Canvas) -> None:
    """Draw time and tokens of a step by number of decoding rows, to show why batching pays."""
    costs = {rows: cost_of(state.costs[rows]) for rows in sorted(state.costs)}
    on.heading("Why batching pays", "steps that only decode")
    words = lesson(costs, state.view.busy)
    room = on.height - 2 - len(wrap(words, on.width - 2))
    if not costs or room < 1:
        on.say(words)
        return
    rows = list(costs)
    if len(rows) > room:  # keep both ends, and evenly spaced rows between them
        rows = sorted({rows[round(i * (len(rows) - 1) / max(1, room - 1))] for i in range(room)})
    wide = (on.width - 6) // 2
    slowest = max(costs.values())
    best = max(many / seconds for many, seconds in costs.items())
    on.axis((1, "rows"), (6, "ms a step"), (6 + wide, "tokens/s"))
    for many in rows:
        seconds = costs[many]
        rate = many / seconds
        pen = on.pen().put(f" {many:>4} ", on.muted)
        pen.put("▒" * max(1, round(seconds / slowest * (wide - 8))), HUES[0])
        pen.put(f" {number(1000 * seconds)}").to(6 + wide)
        pen.put("█" * max(1, round(rate / best * (wide - 8))), HUES[2])
        pen.put(f" {number(rate)}")
    on.say(words, bold=True)


def lesson(costs: Mapping[int, float], runs: bool) -> str:
    """Return what the chart teaches, in one sentence. `runs`: requests are still running."""
    if len(costs) < 2:
        seen = "No step has only decoded so far"
        if costs:
            seen = f"All steps had {count(*costs, 'row')} so far"
        more = "fire a burst (b), and one prompt alone (enter)"
        if runs:
            more = "wait until some have ended"
        return f"{seen}: {more}, to see what a row costs."
    few = min(costs)
    many = max(costs)
    if costs[many] < costs[few]:  # a row cannot cost less than nothing
        quicker = f"{count(many, 'row')} took less time than {count(few, 'row')}"
        return f"Too noisy to say: {quicker}."
    cost = costs[many] / costs[few]
    dear = f"{count(many, 'row')} cost {cost:.2f} × as much as {count(few, 'row')}"
    return f"{dear}, and yield {many / few / cost:.2f} × the tokens."


# Edges of the bins, in milliseconds: 1, 2, 5, 10, ...
EDGES = (*(n * 10**power for power in range(5) for n in (1, 2, 5)), 100_000, 10**9)
# Textures of the policies, in the order of `POLICIES`
TEXTURES = (
    ("█", style(HUES[2], HUES[2])),
    ("▒", style(HUES[0])),
    ("░", style(HUES[3])),
    ("▓", style(HUES[1])),
    ("▌", style(HUES[4])),
)


def draw_ttft(state: State, on: Canvas) -> None:
    """Draw a histogram of TTFT, with a texture for each policy."""
    requests, waiting = first_tokens(state)
    if not requests:
        on.heading("TTFT")
        on.say("time to first token: nothing yet", on.muted)
        return
    ran = {r.policy for r in requests}
    textures = {policy: how for policy, how in zip(POLICIES, cycle(TEXTURES)) if policy in ran}
    title = state.titled("TTFT")
    on.heading(title, mean_note(requests, waiting, on.width - cell_len(title) - 7))
    names = on.pen()
    for policy, texture in textures.items():
        names.put(" ").put(*texture).put(f" {policy} ", on.muted)
    if on.height < 3:
        return
    last = len(EDGES) - 1  # the last bin also counts longer waits
    bins = [min(last, bisect_left(EDGES, 1000 * r.metrics.ttft_s)) for r in requests]
    # If there is too little room, the shortest waits share a row
    low = max(min(bins), max(bins) - on.height + 3)
    rows = {b: Counter() for b in range(low, max(bins) + 1)}
    for b, r in zip(bins, requests, strict=True):
        rows[max(low, b)][r.policy] += 1
    most = max(row.total() for row in rows.values())
    labels = {b: f"{EDGES[b - 1]:,}–{EDGES[b]:,} ms" for b in rows}
    labels[low] = f"≤ {EDGES[low]:,} ms"
    left = max(map(len, labels.values())) + 2
    room = on.width - left - 5
    for b, row in rows.items():
        pen = on.pen().put(f"{labels[b]:>{left - 1}} ", on.muted)
        for policy, (glyph, color) in textures.items():
            cells = math.ceil(row[policy] * room / most)
            pen.put(glyph * max(0, min(cells, left + room - pen.width)), color)
        pen.put(f" {row.total()}" if row else "")


def first_tokens(state: State) -> tuple[list[RequestView], int]:
    """Return the requests with a first token at the cursor, and how many still wait."""
    had = []
    waiting = 0
    for r in state.requests.values():
        ttft = r.metrics.ttft_s
        if r.arrived > state.moment:
            continue
        if ttft is not None and r.arrived + ttft <= state.moment:
            had.append(r)
        elif r.ended is None or r.ended > state.moment:
            waiting += 1
    return had, waiting


def mean_note(requests: Sequence[RequestView], waiting: int, room: int) -> str:
    """Return the longest note that fits.

    A mean without the waiting requests would be too optimistic, so the note says how many still
    wait, or leaves out the mean.
    """
    mean = span(sum(r.metrics.ttft_s for r in requests) / len(requests))
    of = f"mean {mean} of {len(requests):,}"
    notes = (of, f"mean {mean}")
    if waiting:
        notes = (f"{of}, {waiting:,} still wait", f"{mean}, {waiting:,} wait", f"{waiting:,} wait")
    return next((note for note in notes if cell_len(note) < room), "")
