"""The slots pane: a line for each slot, with the rows of its KV cache, and the queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len

from engine.prefill_progress import PrefillProgress
from engine.snapshot import SlotView
from screen.busy_period_stats import Period, words
from screen.draw import style
from screen.draw.canvas import Canvas
from screen.draw.style import Palette, Pen, number, shorten, span
from screen.state import State

TOTALS = "page('totals')"  # opens the table of busy periods
PROMPT_END = "┊"  # the end of a long prompt in a slot's bar, during its prefill
CHECKPOINT = "┃"  # a checkpoint of the recurrent state (docs/slots.md)


def aligned(values: Iterable[str], widths: Sequence[int]) -> str:
    """Right-align figures in columns of these widths; a width of 0 leaves one out."""
    return "".join(
        f"{value:>{width}}" for value, width in zip(values, widths, strict=False) if width
    )


def fit_slots(state: State, rows: int) -> range:
    """Return the visible slots. If not all fit, the selected one is in the middle."""
    count = len(state.view.engine.slots)
    first = min(max(0, state.selected - rows // 2), max(0, count - rows))
    return range(first, min(count, first + rows))


def why_waiting(state: State, slots: Sequence[SlotView]) -> str:
    """Return why requests are waiting. The reason is the same for all of them."""
    view = state.view
    past = state.past
    if view.paused and not past:
        return "paused"
    if view.engine.draining_to and not past:
        return "wait: the slots are being drained"
    if all(slot.request is not None for slot in slots):
        return "wait: every slot is taken"
    if any(slot.phase == "blocked" for slot in slots):
        return f"wait: free slots are blocked ({past.view.policy if past else view.engine.policy})"
    return "wait: the next step admits"


def draw_slots(state: State, on: Canvas) -> None:
    """Draw a line for each slot: its request, and the rows of the KV cache by kind."""
    slots = state.slots()
    rows = fit_slots(state, on.height - 3)
    widths = (11, 9, 7) if on.width >= 70 else (11,)
    right = aligned(("used/rows", "TTFT ms", "tok/s"), widths)
    bar = on.width - 19 - len(right)
    part = "" if len(rows) == len(slots) else f" {rows[0]}–{rows[-1]} of {len(slots)}"
    kinds = on.legend(style.REUSED, style.PREFILL, style.DECODE, style.REMEMBERED)
    on.heading(state.titled(f"Slots{part}"), legend=kinds)
    cache = shorten("rows of the KV cache", bar)
    on.axis((2, "#"), (4, "phase   req"), (18, cache), (18 + bar, right))
    for row in rows:
        draw_slot(state, on, slots[row], bar, widths)
    is_over = not state.view.busy and state.periods and state.periods[-1].over
    if is_over and not state.past:
        last_line(state.periods[-1], on)
    else:
        queue_line(state, slots, on)


def draw_slot(state: State, on: Canvas, slot: SlotView, bar: int, widths: Sequence[int]) -> None:
    request = state.requests.get(slot.request)
    request = request and state.then(request)
    max_len = state.view.engine.limits.max_len
    hue = on.text if request else on.muted
    is_selected = slot.slot == state.selected
    how = (is_selected, f"select({slot.slot})")
    phase = state.phase(slot)
    pen = on.pen().put("▌" if is_selected else " ", on.accent)
    pen.put(f"{slot.slot:>2} ", hue, *how)
    pen.put(f"{phase:<8}", on.bad if phase == "blocked" else hue, *how)
    pen.put(f"r{request.id}" if request else "", hue, *how).to(18)
    draw_rows(pen, on.p, slot, max_len, bar)
    right = ""
    if request and slot.prefill.is_long:
        right = prefill_figures(slot.prefill, widths)
    elif request:
        ttft = request.metrics.ttft_s
        rate = request.metrics.tokens_per_s
        figures = (
            f"{slot.used:,}/{max_len:,}",
            "–" if ttft is None else f"{1000 * ttft:,.0f}",
            "–" if rate is None else f"{rate:,.0f}",
        )
        right = aligned(figures, widths)
    elif slot.remembered:  # no request owns these rows; a new one may reuse or overwrite them
        words = f"({slot.remembered:,} remembered)" if len(widths) > 1 else f"({slot.remembered:,})"
        right = f"{words:>{sum(widths)}}"
    pen.put(right, hue, *how)


def prefill_figures(prefill: PrefillProgress, widths: Sequence[int]) -> str:
    """Return the figures of a slot during a long prefill: progress, time left, speed."""
    first, *rest = widths
    left = f"{prefill.left} left" if prefill.left else f"{prefill.total:,}"
    if not rest:
        return f"{left:>{first}}"
    width = first + rest[0]
    words = f"{prefill.done:,}/{prefill.total:,} {prefill.left}".rstrip()
    words = words if len(words) < width else left
    return f"{words:>{width}}" + f"{number(prefill.tokens_per_s):>{rest[1]}}"


def queue_line(state: State, slots: Sequence[SlotView], on: Canvas) -> None:
    waiting, line = state.line()
    why = why_waiting(state, slots)
    pen = on.pen().put(f" queue {waiting:,}", bold=True)
    if waiting and pen.width + cell_len(why) + 14 <= on.width:
        pen.put(f"  {why}", on.bad if "blocked" in why else on.muted)
    left = waiting  # number of waiting requests not drawn yet
    for request, waited in line:
        text = f"  r{request} {span(waited)}"
        if pen.width + len(text) + 12 > on.width and left > 1:
            break
        pen.put(text)
        left -= 1
    pen.put(f"  +{left:,} more" if left else "", on.muted)


def last_line(period: Period, on: Canvas) -> None:
    """Draw the last busy period in as many phrases as fit."""
    pen = on.pen().put(" last:", bold=True, do=TOTALS)
    for i, phrase in enumerate(words(period)):
        text = f"{',' if i else ''} {phrase}"
        if pen.width + cell_len(text) > on.width:
            break
        pen.put(text, do=TOTALS)


def draw_rows(pen: Pen, p: Palette, slot: SlotView, max_len: int, width: int) -> None:
    """Draw the rows of a slot as a bar, with at least one cell for each kind that occurs."""
    prompt = min(slot.used, slot.prompt_tokens)
    kinds = (
        (min(slot.reused, prompt), style.REUSED),
        (prompt, style.PREFILL),
        (slot.used, style.DECODE),
        (slot.remembered, style.REMEMBERED),
    )
    marks = {min(width - 1, row * width // max_len) for row in slot.checkpoints}
    start = drawn = 0
    for stop, kind in kinds:
        if stop > start:
            end = min(width, max(round(stop * width / max_len), drawn + 1))
            cells = range(drawn, end)
            bar = "".join(CHECKPOINT if i in marks else style.GLYPHS[kind] for i in cells)
            pen.put(bar, p.cell(kind, slot.request))
            start = stop
            drawn = end
    if slot.prefill.is_long:  # a mark where the prompt will end
        end = max(drawn, min(width - 1, round(slot.prompt_tokens * width / max_len)))
        pen.put(style.GLYPHS[style.EMPTY] * (end - drawn), p.faint)
        pen.put(PROMPT_END * (end < width), p.fill(slot.request))
        drawn = end + 1
    pen.put(style.GLYPHS[style.EMPTY] * (width - drawn), p.faint)
