"""The timeline: slots × steps, and what each slot did in each step. See `timeline_columns.py`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.cells import cell_len

from screen.draw import style
from screen.draw.canvas import Canvas
from screen.draw.slots import fit_slots
from screen.draw.style import Palette, Pen
from screen.state import State
from screen.timeline_columns import Column, useful_of

FIRST = (  # shown in the timeline before the first step
    "b fires a burst of prompts; i types a prompt, and Enter fires it.",
    "Where no answers are in sight, v leads to them, and to other panes.",
    "space stops the engine, s takes a step: then read the step's plan.",
    "? explains every key and word",
)


def draw_cells(
    pen: Pen,
    p: Palette,
    columns: Sequence[Column],
    slot: int,
    cursor: int | None = None,
    numbered: bool = True,
) -> None:
    """Draw one slot's line of a timeline, with each request's number after its first cell.

    The first cell keeps its glyph, so that a prefill of one step is visible and the numbers of
    adjacent requests never touch. In other cells, a small number gives the number of tokens that a
    step with draft tokens yielded.
    """
    first = 0
    for request, group in groupby(columns, key=lambda column: column.cells[slot].request):
        stretch = list(group)
        kinds = [column.cells[slot].kind for column in stretch]
        has_room = numbered and request is not None and len(str(request)) < len(kinds)
        label = f" {request}" if has_room else ""
        places = []
        for i, kind in enumerate(kinds):
            digit = label[i : i + 1].strip() or tokens_of(stretch[i], slot)
            places.append((kind, digit, first + i == cursor))
        for (kind, digit, here), alike in groupby(places):
            many = sum(1 for _ in alike)
            if digit:
                back = p.ground(kind, request)  # the digit keeps the cell's colour
                pen.put(digit * many, style.style(style.text_color_on(back), back, True, here))
            else:
                pen.put(style.GLYPHS[kind] * many, p.cell(kind, request, here))
        first += len(kinds)


def tokens_of(column: Column, slot: int) -> str:
    """Return the tokens of a step with drafts as a small number, if the column is one step."""
    right = {drafter: right for drafter, _, right in column.view.drafts}
    is_known = column.steps == 1 and slot in right
    return style.SMALL[min(1 + right[slot], 10)] if is_known else ""


def draw_timeline(state: State, on: Canvas) -> None:
    """Draw slots × steps: what each slot did in each step."""
    zoom, columns, cursor = state.window(on.width - 4)
    there = {column.cells[0].kind for column in columns}
    rare = there & {style.UNSEEN, style.FAILED}
    kinds = on.legend(
        *rare, style.PREFILL, style.DECODE, style.BLOCKED, style.HELD, style.GHOST, style.EMPTY
    )
    on.heading("Timeline", f"used {useful_of(columns):.0f} %", kinds)
    hints = [f"{hint} " for hint in hints_in(state) if cell_len(hint) < on.width - 5]
    for slot in fit_slots(state, on.height - 2):
        hue = on.text if slot == state.selected else on.muted
        pen = on.pen().put(f"{slot:>3} ", hue, do=f"select({slot})")
        draw_cells(pen, on.p, columns, slot, cursor)
        if hints:
            pen.put(hints.pop(0))
        pen.put(style.GLYPHS[style.EMPTY] * (on.width - pen.width), on.faint)
    if cursor is None:
        step_axis(on, columns, zoom)
    else:
        cursor_line(state, on, 4 + cursor)


def hints_in(state: State) -> list[str]:
    """Return the text for a new user before the first step: the offer, and the first keys."""
    if state.history or state.strip:
        return []
    *keys, help = FIRST
    hints = [*keys, "; ".join((help, *state.hints)) + "."]
    return [state.offer, *hints] if state.offer else hints


def cursor_line(state: State, on: Canvas, at: int) -> None:
    """Draw the cursor's step below the timeline."""
    label = f"▲ step {state.cursor:,}  End: follow "
    if at + len(label) > on.width:  # move the label to the left of its mark
        at = max(0, at + 1 - len(label))
        label = f"{label[1:]}▲"
    on.pen().to(at).put(label, on.accent, True)


def step_axis(on: Canvas, columns: Sequence[Column], zoom: int) -> None:
    """Draw the numbers of some steps below the timeline."""
    unit = "step" if zoom == 1 else f"1 column = {zoom} steps"
    every = 20 if zoom == 1 else 16
    last = min(len(columns), on.width - 3 - len(unit) - every)
    ticks = [(4 + i, f"╵{columns[i].step:,}") for i in range(0, last, every)]
    on.axis(*ticks, (on.width - len(unit) - 1, unit))
