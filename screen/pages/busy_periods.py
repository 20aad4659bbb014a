"""The statistics of each busy period, newest first, to compare bursts and policies."""

from __future__ import annotations

from screen.draw.canvas import Canvas, Figure, fitting
from screen.draw.style import DARK, count, span
from screen.page import NOTHING_RAN, Page
from screen.state import State, price_in

CLOCK = "On the engine's clock, first arrival to last token; makespan: without interruptions."
FIGURES = (
    Figure("policy", 13, 0, is_text=True),
    Figure("requests", 9, 0),
    Figure("lost", 6, 9, " Lost: cancelled or failed."),
    Figure("tokens", 9, 1),
    Figure("took", 9, 0),
    Figure("makespan", 10, 5),
    Figure("tok/s", 8, 2),
    Figure("TTFT p50", 10, 3),
    Figure("TTFT p95", 10, 4),
    Figure("gap p95", 9, 6, " Gap: from a token to the next of its answer."),
    Figure(
        "slots used", 12, 7, " Slots used: the share of slots × steps that worked for a request."
    ),
)


def draw(state: State, on: Canvas) -> None:
    on.title("Totals: busy periods, the newest first")
    if not state.periods:
        on.say(NOTHING_RAN, on.muted)
        return
    draw_table(state, on, len(state.periods))
    on.lines.append([])
    meanings = (figure.meaning for figure in fitting(FIGURES, on.width - 1))
    on.say(CLOCK + "".join(meanings), on.muted)


def draw_table(state: State, on: Canvas, most: int) -> None:
    """Draw a line for each of the last `most` periods."""
    price_of = price_in(state)
    shown = on.columns(FIGURES)
    for period in [*state.periods][: -most - 1 : -1]:
        price = price_of(period)
        makespan = span(period.makespan(price) if price else None)
        mark = " " if period.over else "▶"
        on.row(shown, period.figures | {"makespan": makespan}, mark=mark)


def farewell(state: State, width: int) -> list[str]:
    """Return the lines printed at exit: the last busy periods, and the unfinished requests."""
    on = Canvas(DARK, width, 0)
    draw_table(state, on, 10)
    left = state.view.engine.submitted - state.view.engine.finished
    is_elsewhere = state.view.watches or state.view.server
    lost = f"{count(left, 'request')} not finished.\n" if left and not is_elsewhere else ""
    on.say(lost + CLOCK)
    return ["".join(segment.text for segment in line) for line in on.lines]


PAGE = Page(
    "totals",
    "t",
    "Totals",
    "the statistics of each busy period: compare bursts and policies",
    draw,
    footer=10,
)
