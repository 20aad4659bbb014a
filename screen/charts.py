"""The charts: tokens a second, slots at work in each step, how long first tokens took, and what a
row costs.

The problem. A timeline shows what happened. It does not show how fast the engine was, nor how long
requests waited.

What this file keeps. As in `panes.py`, each function is pure: state, colours and a size in, lines
out. Every chart has a zero line and an axis that can be read, and counts the steps and requests
that `State` keeps.

Where next: `waterfall.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice, pairwise

from rich.cells import cell_len

from sched import POLICIES
from screen.ink import HUES, Line, Palette, Pen, axis, heading, number, span, style, wrap
from screen.state import State
from screen.totals import percentile

EIGHTHS = " ▁▂▃▄▅▆▇█"
# Characters: the numbers at the left. Charts of the same time then begin in the same column.
SCALE = 5


def nice(top: float) -> float:
    """The end of an axis: a round number, equal to `top` or a little larger."""
    scale = 10 ** math.floor(math.log10(max(top, 1e-9)))
    return next(n * scale for n in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if n * scale >= top * 0.999)


def draw_area(
    p: Palette,
    values: Sequence[float],
    top: float,
    width: int,
    height: int,
    hue: str,
    ends: tuple[str, str],
) -> list[Line]:
    """Values as columns over a zero line. At the left is the scale; `ends` stand under the first
    and last column."""
    scale = {0: "0", height - 1: f"{top:,.0f}"}
    label = max(len(scale[height - 1]), SCALE)
    values = values[-(width - label - 2) :]
    lines, solid = [], style(hue, hue)
    for row in reversed(range(height)):
        mark = scale.get(row, "")
        pen = Pen().put(f"{mark:>{label}} ", p.muted).put("┤" if mark else "│", p.faint)
        for value in values:
            eighths = round(8 * (value / top * height - row))
            # A small value is not drawn as zero
            eighths = max(eighths, 1) if value and row == 0 else eighths
            pen.put(EIGHTHS[max(0, min(8, eighths))], solid if eighths >= 8 else hue)
        lines.append(pen.line)
    left, right = ends
    last = max(label + 2 + len(values) - len(right), label + 3 + len(left))
    return [*lines, axis(p, (label + 2, left), (min(last, width - len(right)), right))]


def stretch(state: State) -> tuple[float, float]:
    """What the charts cover, from and to: the latest busy period up to the cursor, or its last ten
    seconds."""
    if not state.history:
        return 0.0, 0.0
    last = state.here.ended
    return max(state.history[state.first].began, last - 10), last


def ends_of(began: float, last: float) -> tuple[str, str]:
    """Of an axis of time: how long ago it begins, and 0 in the same unit."""
    ago = span(last - began)
    return (f"−{ago}", f"0 {ago.split()[1]}") if last else ("", "")


def draw_rate(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """Tokens a second."""
    bins, (began, last) = width - SCALE - 2, stretch(state)
    tick = max(last - began, 0.05) / bins
    totals = [state.delivered(began + i * tick) for i in range(bins + 1)]
    values = [(b - a) / tick for a, b in pairwise(totals)]
    lines = [heading(p, width, state.titled("tokens/s"), f"peak {max(values):,.0f}")]
    return lines + draw_area(
        p, values, nice(max(1.0, *values)), width, height - 2, HUES[2], ends_of(began, last)
    )


def draw_batch(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """How many of the slots did useful work, over the same time as the tokens a second."""
    bins, (began, last), slots = width - SCALE - 2, stretch(state), len(state.view.engine.slots)
    tick = max(last - began, 0.05) / bins
    worked = [0.0] * bins  # slots x seconds
    first = bisect_left(state.history, began, key=lambda column: column.ended)
    for column in islice(state.history, first, None):
        if column.began >= last:
            break
        for i in range(
            max(0, int((column.began - began) / tick)),
            min(bins, int((column.ended - began) / tick) + 1),
        ):
            shared = min(column.ended, began + (i + 1) * tick) - max(column.began, began + i * tick)
            worked[i] += max(0.0, shared) * column.useful
    values = [work / tick for work in worked]
    mean = f"mean {sum(values) / bins:.1f} " if last else ""
    lines = [heading(p, width, state.titled("batch size"), f"{mean}of {slots} slots")]
    return lines + draw_area(p, values, slots, width, height - 2, HUES[1], ends_of(began, last))


def draw_queue(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """How many requests were left in line: the most of each few steps of the latest busy period."""
    steps = state.history[state.first : state.at + 1]
    bins = min(len(steps), width - SCALE - 2)
    cuts = [i * len(steps) // max(1, bins) for i in range(bins + 1)]
    waiting = [max(column.view.waiting for column in steps[a:b]) for a, b in pairwise(cuts)]
    ends = (f"step {steps[0].step:,}", f"{steps[-1].step:,}") if steps else ("step", "")
    lines = [heading(p, width, state.titled("queue"), f"peak {max(waiting):,}" if waiting else "")]
    return lines + draw_area(
        p, waiting, nice(max(1, *waiting, 1)), width, height - 2, HUES[0], ends
    )


def draw_waits(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """The median and the 95th percentile of TTFT as they went: each column counts the last 50 first
    tokens."""
    moment = state.moment
    firsts = [first for first in state.firsts if first[0] <= moment]
    if not firsts:
        return [heading(p, width, "TTFT"), Pen().put(" no first token yet", p.muted).line]
    bins, last = max(1, width - 9), firsts[-1][0]
    began = max(state.periods[-1].began if state.periods else 0.0, firsts[0][0], last - 60)
    pairs = []
    for i in range(bins):
        stop = bisect_right(
            firsts, began + (i + 1) * (last - began) / bins + 1e-9, key=lambda first: first[0]
        )
        newest = [ttft for _, ttft in firsts[max(0, stop - 50) : stop]]
        pairs.append((percentile(newest, 0.5) or 0.0, percentile(newest, 0.95) or 0.0))
    half, most = pairs[-1]
    lines = [heading(p, width, state.titled("TTFT"), f"█p50 {span(half)} ▒p95 {span(most)}")]
    rows, top = height - 2, nice(1000 * max(high for _, high in pairs))
    for row in reversed(range(rows)):
        mark = {0: "0 ms", rows - 1: f"{top:,.0f}"}.get(row, "")
        pen = Pen().put(f"{mark:>6} ", p.muted).put("┤" if mark else "│", p.faint)
        for low, high in pairs:
            cells = [math.ceil(1000 * value / top * rows - 0.5) for value in (low, high)]
            cells = [
                max(1, count) if value else 0
                for count, value in zip(cells, (low, high), strict=True)
            ]
            glyph = "█" if row < cells[0] else "▒" if row < cells[1] else " "
            pen.put(glyph, HUES[3])
        lines.append(pen.line)
    left, right = ends_of(began, last)
    return [*lines, axis(p, (8, left), (max(9 + len(left), width - 1 - len(right)), right))]


def cost_of(seconds: Iterable[float]) -> float:
    """Of some steps alike the lower quartile, since what interrupts a step only makes it longer."""
    return percentile(seconds, 0.25)


def draw_cost(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """Why batching pays: what a step takes and what it yields, by how many rows decode in it."""
    costs = {rows: cost_of(seconds) for rows, seconds in sorted(state.costs.items())}
    lines = [heading(p, width, "Why batching pays", "steps that only decode")]
    said = wrap(lesson(costs, state.view.busy), width - 2)
    room = height - len(lines) - 1 - len(said)
    if not costs or room < 1:
        return [*lines, *(Pen().put(f" {part}", p.text).line for part in said)][:height]
    rows = list(costs)
    if len(rows) > room:  # the ends, and some evenly between
        rows = sorted({rows[round(i * (len(rows) - 1) / max(1, room - 1))] for i in range(room)})
    wide = (width - 6) // 2
    slowest, best = max(costs.values()), max(count / seconds for count, seconds in costs.items())
    lines.append(axis(p, (1, "rows"), (6, "ms a step"), (6 + wide, "tokens/s")))
    for count in rows:
        pen = Pen().put(f" {count:>4} ", p.muted)
        values = ((costs[count] / slowest, number(1000 * costs[count]), HUES[0], "▒"),)
        values += ((count / costs[count] / best, number(count / costs[count]), HUES[2], "█"),)
        for i, (part, text, hue, glyph) in enumerate(values):
            pen.to(6 + i * wide).put(glyph * max(1, round(part * (wide - 8))), hue).put(
                f" {text}", p.text
            )
        lines.append(pen.line)
    return [*lines, *(Pen().put(f" {part}", p.text, True).line for part in said)]


def lesson(costs: Mapping[int, float], runs: bool) -> str:
    """What the chart shows, in words. `runs`: something still runs."""
    if len(costs) < 2:
        seen = (
            f"all steps had {number_of_rows(*costs)} so far"
            if costs
            else "no step has only decoded so far"
        )
        more = (
            "wait until some have ended"
            if runs
            else "fire a burst (b), and one prompt alone (enter)"
        )
        return f"{seen.capitalize()}: {more}, to see what a row costs."
    few, many = min(costs), max(costs)
    if costs[many] < costs[few]:  # no row is done for less than nothing
        return (
            f"Too noisy to say: {number_of_rows(many)} took less time than {number_of_rows(few)}."
        )
    cost, gain = costs[many] / costs[few], many / few * costs[few] / costs[many]
    dear = f"{number_of_rows(many)} cost {cost:.2f} × as much as {number_of_rows(few)}"
    return f"{dear}, and yield {gain:.2f} × the tokens."


def number_of_rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"


# Ms
EDGES = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
    10_000,
    20_000,
    50_000,
    100_000,
    10**9,
)
# The policies' textures, in the order of `POLICIES`. A sixth policy would get the first again.
TEXTURES = (
    ("█", style(HUES[2], HUES[2])),
    ("▒", style(HUES[0])),
    ("░", style(HUES[3])),
    ("▓", style(HUES[1])),
    ("▌", style(HUES[4])),
)


def draw_ttft(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """How long requests waited for their first token: a histogram, with a texture for each
    policy."""
    came = [r for r in state.requests.values() if r.arrived <= state.moment]
    requests = [
        r
        for r in came
        if r.metrics.ttft_s is not None and r.arrived + r.metrics.ttft_s <= state.moment
    ]
    told = {r.id for r in requests}
    waiting = sum(r.id not in told and (r.ended is None or r.ended > state.moment) for r in came)
    if not requests:
        return [
            heading(p, width, "TTFT"),
            Pen().put(" time to first token: nothing yet", p.muted).line,
        ]
    ran = {r.policy for r in requests}
    textures = {
        policy: texture for policy, texture in zip(POLICIES, cycle(TEXTURES)) if policy in ran
    }
    mean = sum(r.metrics.ttft_s for r in requests) / len(requests)
    names = Pen()
    for policy, texture in textures.items():
        names.put(" ").put(*texture).put(f" {policy} ", p.muted)
    # A mean that leaves out those that still wait would be too good: say how many they are, or
    # leave it out.
    notes = [
        f"mean {span(mean)} of {len(requests):,}, {waiting:,} still wait",
        f"{span(mean)}, {waiting:,} wait",
    ]
    notes = (
        [*notes, f"{waiting:,} wait"]
        if waiting
        else [f"mean {span(mean)} of {len(requests):,}", f"mean {span(mean)}"]
    )
    title = state.titled("TTFT")
    note = next((note for note in notes if cell_len(note) < width - cell_len(title) - 7), "")
    lines = [heading(p, width, title, note), names.line]
    bins = [bisect_left(EDGES, 1000 * r.metrics.ttft_s) for r in requests]
    if height < 3:
        return lines[:height]
    # If room is short, the shortest waits are counted in one row
    low = max(min(bins), max(bins) - height + 3)
    rows = {b: Counter() for b in range(low, max(bins) + 1)}
    for b, r in zip(bins, requests, strict=True):
        rows[max(low, b)][r.policy] += 1
    most = max(row.total() for row in rows.values())
    labels = [
        f"{f'≤ {EDGES[b]:,}' if b == low else f'{EDGES[b - 1]:,}–{EDGES[b]:,}'} ms" for b in rows
    ]
    left = max(map(len, labels)) + 2
    for row, label in zip(rows.values(), labels, strict=True):
        pen, room = Pen().put(f"{label:>{left - 1}} ", p.muted), width - left - 5
        for policy, (glyph, ink) in textures.items():
            cells = math.ceil(row[policy] * room / most)
            pen.put(glyph * max(0, min(cells, left + room - pen.width)), ink)
        lines.append(pen.put(f" {row.total()}" if row else "", p.text).line)
    return lines
