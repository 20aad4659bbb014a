"""The answers pane: each slot's text and, with a grammar, candidates for the newest token."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from engine.prefill_progress import UNREAD
from engine.snapshot import RequestView
from screen.draw.canvas import Canvas
from screen.draw.style import Line, Pen, clean, shorten, wrap
from screen.state import State, client_of, prompt_of
from text.tool_parser import split_output


def draw_stream(state: State, on: Canvas, slot: int) -> None:
    """Draw the request in one slot: its prompt and the end of its text."""
    request = state.owner(slot)
    is_selected = slot == state.selected
    pen = on.pen()
    if request is None:
        pen.put(f"slot {slot}  ", on.muted, is_selected).put("nothing yet", on.muted)
        return
    hue = on.text if is_selected else on.muted
    pen.put(f"slot {slot} r{request.id}", hue, True, f"select({slot})")
    pen.put(f" {state.reason_of(request)}" if request.reason else "", on.muted)
    pen.put(f" ← {client_of(request)}" if client_of(request) else "", on.muted)
    pen.put(f"  {shorten(prompt_of(request), on.width - pen.width - 3)}", on.muted)
    below = Canvas(on.p, on.width, on.height)
    now = state.slots()[slot]
    prefill = now.prefill if now.request == request.id else UNREAD
    if prefill.is_long:
        below.say(f"reading: {prefill.words}", on.muted, indent=0)
    growing = "" if request.reason or prefill.is_long else "▏"
    for kind, text in split_output(clean(request.text) + growing, request.is_thinking):
        for line in wrap(text, on.width - 1):
            below.pen().put(line, hue_of(on, kind))
    inspector = draw_token_inspector(request, on) if on.height > 2 else []
    room = on.lines_left - len(inspector)
    on.lines += below.lines[-room:] if room > 0 else []
    on.lines += inspector


def draw_token_inspector(request: RequestView, on: Canvas) -> list[Line]:
    """Return a line with the newest token, and the tokens that were likeliest without the grammar; empty
    without candidates.

    Forbidden tokens are struck through, and a space is drawn as ␣.
    """
    pen = Pen()
    for i, (text, probability, is_allowed) in enumerate(request.candidates):
        said = clean(repr(text)[1:-1]).replace(" ", "␣")
        words = f"{'✓' if is_allowed else '✗'}{said} {probability:.0%}"
        if pen.width + cell_len(words) + 2 > on.width:
            break
        if i == 1:
            pen.put("│ ", on.faint)
        pen.put(words, on.accent if is_allowed else Style(color=on.muted, strike=True)).put("  ")
    return [pen.line] if pen.line else []


def hue_of(on: Canvas, kind: str) -> str:
    """Return the colour of a part of an answer: thoughts are dim, tool calls stand out."""
    return {"reasoning": on.muted, "tool_call": on.accent}.get(kind, on.text)


def draw_streams(state: State, on: Canvas) -> None:
    """Draw the text of every slot if each has two lines, otherwise only the selected slot's."""
    count = len(state.view.engine.slots)
    across = max(1, min(count, (on.width + 2) // 30))
    tall = (on.height - 1) // math.ceil(count / across)  # lines for each slot
    slots: Sequence[int] = range(count)
    if tall < (3 if state.inspected else 2):  # the token inspector needs a line
        across = 1
        tall = on.height - 1
        slots = [state.selected]
    wide = on.width // across
    on.heading(state.titled("Answers"), "y copies" if len(slots) == 1 else "")
    for first in range(0, len(slots), across):
        beside = []
        for slot in slots[first : first + across]:
            beside.append(Canvas(on.p, wide - 2, tall))
            draw_stream(state, beside[-1], slot)
        for row in range(tall):
            line: Line = []
            for canvas in beside:
                part = Strip(canvas.lines[row] if row < len(canvas.lines) else [])
                line += [Segment(" "), *part.adjust_cell_length(wide - 1)]
            on.lines.append(line)
