"""The panes: pure functions from state, colours and a size to lines of text.

The problem. A screen is hard to test, and a terminal may have any size.

What this file keeps. Each function takes (state, palette, width, height) and answers with at most
`height` lines of at most `width` cells. What finds no room is left out as a whole, since a number
that is cut is a lie. Nothing here remembers anything between two calls or knows a terminal, so a
test compares text with text.

Where next: `charts.py` and `keys.py`, the rest of the panes; `tui.py`, which places them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, zip_longest

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from parts.api.views import RanksView, RequestView, SlotView, StepView
from parts.text.speech import marked
from screen import ink
from screen.ink import (
    Line,
    Palette,
    Pen,
    axis,
    clean,
    count,
    entry,
    heading,
    legend,
    number,
    shorten,
    span,
    wrap,
)
from screen.room import View
from screen.runs import FIGURES, Run, answer_in, in_time, until
from screen.state import NEXT, State, client_of, prices, prompt_of, race, verdict
from screen.timeline import Column, useful_of
from screen.totals import CLOCK, Period, explained, table, words

TOTALS = "sheet('totals')"  # the action that opens the table of busy periods
FIRST = (  # what stands in the timeline before the first step
    "b fires a burst of prompts; i types a prompt, and Enter fires it.",
    "Where no answers are in sight, v leads to them, and to other panes.",
    "space stops the engine, s takes a step: then read the step's plan.",
    "? explains every key and every word.",
)


def aligned(values: Iterable[str], widths: Sequence[int]) -> str:
    """Figures in columns of these widths, each at the right of its column. A width of 0 leaves the
    figure out."""
    return "".join(
        f"{value:>{width}}" for value, width in zip(values, widths, strict=False) if width
    )


def fit_slots(state: State, rows: int) -> range:
    """The slots that are shown. If not all find room, it is those around the selected one."""
    count = len(state.view.engine.slots)
    first = min(max(0, state.selected - rows // 2), max(0, count - rows))
    return range(first, min(count, first + rows))


def what_is_done(view: View) -> str:
    if view.gone_s is not None:
        return f"✗ gone for {view.gone_s:,.0f} s"
    if view.door and view.door.draining:
        return "⇣ ending"
    if view.engine.draining_to:
        return f"{'▮▮ paused,' if view.paused else '⇣'} draining → {view.engine.draining_to}"
    if view.paused:
        return "▮▮ paused"
    sign, word = "■", "idle"
    if view.busy:
        sign, word = "▶", "running"
    if view.racing:
        sign, word = "⚑", "racing"
    # The watcher's clock counts these steps; all other figures go by the engine's.
    return f"{sign} slow: {view.slow:g} steps/s" if view.slow else f"{sign} {word}"


def others_of(view: View) -> str:
    """That other programs take the cores, so that a slow step is not thought to be the engine's."""
    return f"others: {view.others:.1f} of {view.cores} cores" if view.others else ""


def draw_status(state: State, p: Palette, width: int, height: int) -> list[Line]:
    view, engine, door = state.view, state.view.engine, state.view.door
    doing = what_is_done(view)
    now = (
        p.bad if view.gone_s is not None else p.accent if view.busy and not state.past else p.muted
    )
    clients = sum(bool(call.requests) for call in door.open) if door else 0
    asking = f"{clients:,} asking at {door.address.partition('//')[2]}" if door else ""
    newest = [column.view.seconds for column in state.history[max(0, state.at - 19) : state.at + 1]]
    mean = number(1000 * sum(newest) / len(newest) if newest else None)
    newest_step = state.history[-1].step if state.history else 0
    back = f"◀ back at step {state.cursor:,} of {newest_step:,}" if state.past else ""
    policy = state.step.policy if state.past else "" if engine.draining_to else engine.policy
    parts = [
        ("nanobatch", p.text, True, ""),
        (back, p.accent, True, "follow"),
        (shorten(state.model.rstrip("/").rsplit("/", 1)[-1], 28), p.muted, False, ""),
        (f"now: {doing}" if state.past else doing, now, True, "pause"),
        (policy, p.text, True, "command('/policy')"),
        (f"{len(engine.ranks.memory)} ranks" if engine.ranks.memory else "", p.text, False, ""),
        (
            f"{number(state.tokens_per_s()) if view.busy or back else '–':>5} tok/s",
            p.text,
            False,
            "",
        ),
        (others_of(view) if view.busy and not state.past else "", p.bad, True, ""),
        (f"{state.finished:,} ended", p.text, False, "open"),
        (asking, p.text, False, "sheet('clients')"),
        ("" if state.past else f"step {newest_step:,}", p.muted, False, ""),
        (f"{mean:>5} ms/step", p.muted, False, ""),
        (f"load {view.load:g}/s" if view.load else "", p.text, False, "command('/load')"),
        (
            f"budget {engine.limits.budget:,}" if engine.limits != view.made_with else "",
            p.accent,
            False,
            "command('/budget off')",
        ),
        ("space: go on" if view.paused else "", p.accent, False, "pause"),
        (
            "0: full speed" if view.slow and not view.paused else "",
            p.accent,
            False,
            "command('/slow off')",
        ),
    ]
    pen = Pen().put(" ")
    for text, *how in parts:
        if text and pen.width + cell_len(text) + 1 <= width:
            pen.put(text, *how)
            pen.put("  "[: width - pen.width])
    return [pen.line]


def why_waiting(state: State, slots: Sequence[SlotView]) -> str:
    """Why the first request in line waits. All behind it wait for the same reason."""
    view, past = state.view, state.past
    if view.paused and not past:
        return "paused"
    if view.engine.draining_to and not past:
        return "wait: the slots are being drained"
    if all(slot.request is not None for slot in slots):
        return "wait: every slot is taken"
    if any(slot.phase == "blocked" for slot in slots):
        return f"wait: free slots are shut ({past.view.policy if past else view.engine.policy})"
    return "wait: the next step admits"


def draw_slots(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """A line for each slot: the request that holds it, and what fills how many of its rows of the
    KV cache."""
    slots = state.slots()
    rows = fit_slots(state, height - 3)
    widths = (11, 9, 7) if width >= 70 else (11,)
    right = aligned(("used/rows", "TTFT ms", "tok/s"), widths)
    bar = width - 18 - len(right)
    title = state.titled(
        "Slots" if len(rows) == len(slots) else f"Slots {rows[0]}–{rows[-1]} of {len(slots)}"
    )
    glyphs = legend(p, ink.REUSED, ink.PREFILL, ink.DECODE, ink.REMEMBERED)
    labels = (
        (2, "#"),
        (4, "phase   req"),
        (18, shorten("rows of the KV cache", bar)),
        (18 + bar, right),
    )
    lines = [heading(p, width, title, legend=glyphs), axis(p, *labels)]
    lines += [draw_slot(state, p, slots[row], bar, widths) for row in rows]
    last = not state.past and not state.view.busy and state.periods and state.periods[-1].over
    return [
        *lines,
        last_line(state.periods[-1], p, width) if last else queue_line(state, slots, p, width),
    ]


def draw_slot(state: State, p: Palette, slot: SlotView, bar: int, widths: Sequence[int]) -> Line:
    request, max_len = state.requests.get(slot.request), state.view.engine.limits.max_len
    request = request and state.then(request)
    here, do, colour = (
        slot.slot == state.selected,
        f"select({slot.slot})",
        p.text if request else p.muted,
    )
    pen = Pen().put("▌" if here else " ", p.accent).put(f"{slot.slot:>2} ", colour, here, do)
    phase = state.phase(slot)
    pen.put(f"{phase:<8}", p.bad if phase == "blocked" else colour, here, do)
    pen.put(f"r{request.id}" if request else "", colour, here, do).to(18)
    draw_rows(pen, p, slot, max_len, bar)
    if request:
        ttft, rate = request.metrics.ttft_s, request.metrics.tokens_per_s
        times = (
            "–" if ttft is None else f"{1000 * ttft:,.0f}",
            "–" if rate is None else f"{rate:,.0f}",
        )
        right = aligned((f"{slot.used:,}/{max_len:,}", *times), widths)
    else:  # no request owns these rows: another may reuse them or write over them
        words = f"({slot.remembered:,} remembered)" if len(widths) > 1 else f"({slot.remembered:,})"
        right = f"{words:>{sum(widths)}}" if slot.remembered else ""
    return pen.put(right, colour, here, do).line


def queue_line(state: State, slots: Sequence[SlotView], p: Palette, width: int) -> Line:
    (waiting, line), why = state.line(), why_waiting(state, slots)
    pen = Pen().put(f" queue {waiting:,}", p.text, True)
    pen.put(f"  {why}" if waiting else "", p.bad if "shut" in why else p.muted)
    left = waiting  # requests that have not been named yet
    for request, waited in line:
        text = f"  r{request} {span(waited)}"
        if pen.width + len(text) + 12 > width and left > 1:
            break
        pen.put(text, p.text)
        left -= 1
    return pen.put(f"  +{left:,} more" if left else "", p.muted).line


def last_line(period: Period, p: Palette, width: int) -> Line:
    """What the last busy period came to, in as many phrases as find room."""
    pen = Pen().put(" last:", p.text, True, TOTALS)
    for i, phrase in enumerate(words(period)):
        text = f"{',' if i else ''} {phrase}"
        if pen.width + cell_len(text) > width:
            break
        pen.put(text, p.text, do=TOTALS)
    return pen.line


def draw_totals(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """What each busy period came to, the newest first."""
    lines = [
        heading(p, width, "Totals: busy periods, the newest first", "Esc back", do="screen.dismiss")
    ]
    if not state.periods:
        return [*lines, Pen().put(" Nothing has run yet. b fires a burst.", p.muted).line]
    titles, *rows = table(state.periods, prices(state).of, width, len(state.periods))
    lines.append(Pen().put(titles, p.muted).line)
    for row, period in zip(rows, reversed(state.periods), strict=True):
        lines.append(Pen().put(" " if period.over else "▶", p.accent).put(row[1:], p.text).line)
    return [
        *lines,
        [],
        *(Pen().put(f" {part}", p.muted).line for part in wrap(explained(width), width - 2)),
    ]


def farewell(state: State, width: int) -> list[str]:
    """What stays in the terminal: the last busy periods, and how many requests have been left
    unfinished."""
    left, elsewhere = (
        state.view.engine.submitted - state.view.engine.finished,
        state.view.watches or state.view.door,
    )
    lost = f"{count(left, 'request')} not finished.\n" if left and not elsewhere else ""
    return [
        *table(state.periods, prices(state).of, width, 10),
        *(f" {part}" for part in wrap(lost + CLOCK, width - 2)),
    ]


def draw_rows(pen: Pen, p: Palette, slot: SlotView, max_len: int, width: int) -> None:
    """The rows of one slot as a bar. Each kind of rows that the slot has gets one cell at least."""
    prompt = min(slot.used, slot.prompt_tokens)
    parts = [(min(slot.reused, prompt), ink.REUSED), (prompt, ink.PREFILL), (slot.used, ink.DECODE)]
    start = drawn = 0
    for stop, kind in [*parts, (slot.remembered, ink.REMEMBERED)]:
        cells = (
            min(width, max(round(stop * width / max_len), drawn + 1)) - drawn if stop > start else 0
        )
        pen.put(ink.GLYPHS[kind] * cells, p.cell(kind, slot.request))
        start, drawn = max(start, stop), drawn + cells
    pen.put(ink.GLYPHS[ink.EMPTY] * (width - drawn), p.faint)


def draw_cells(
    pen: Pen, p: Palette, columns: Sequence[Column], slot: int, cursor: int | None = None
) -> None:
    """One slot's line of a timeline, with each request's number behind the request's first cell.

    The first cell stays as it is, so that a prefill of one step can be seen and the numbers of
    neighbours never touch. A request with too few cells for its number is shown without it.
    """
    i = 0
    for request, stretch in groupby(columns, key=lambda column: column.cells[slot].request):
        cells = [column.cells[slot] for column in stretch]
        label = "" if request is None or len(str(request)) >= len(cells) else f" {request}"
        digits = zip_longest(range(i, i + len(cells)), cells, label)
        for (cell, digit, here), alike in groupby(
            digits, key=lambda place: (*place[1:], place[0] == cursor)
        ):
            many = sum(1 for _ in alike)
            if digit and digit != " ":
                back = p.ground(cell.kind, request)  # the cell's colour stays behind the digit
                pen.put(digit * many, ink.style(ink.ink_on(back), back, True, here))
            else:
                pen.put(ink.GLYPHS[cell.kind] * many, p.cell(cell.kind, request, here))
        i += len(cells)


def draw_timeline(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """Slots x steps: what each slot did in each step. This picture shows what batching is about."""
    zoom, columns, cursor = state.window(width - 4)
    rare = (ink.UNSEEN,) if any(column.unseen for column in columns) else ()
    kinds = legend(p, *rare, ink.PREFILL, ink.DECODE, ink.BLOCKED, ink.HELD, ink.GHOST, ink.EMPTY)
    lines = [heading(p, width, "Timeline", f"useful {useful_of(columns):.0f} %", kinds)]
    hints = [] if columns else [f"{hint} " for hint in FIRST if cell_len(hint) < width - 5]
    for slot in fit_slots(state, height - 2):
        pen = Pen().put(
            f"{slot:>3} ", p.text if slot == state.selected else p.muted, do=f"select({slot})"
        )
        draw_cells(pen, p, columns, slot, cursor)
        if hints:
            pen.put(hints.pop(0), p.text)
        lines.append(pen.put(ink.GLYPHS[ink.EMPTY] * (width - pen.width), p.faint).line)
    if cursor is not None:
        label = f" step {state.cursor:,}  End: follow "
        fits = 5 + cursor + len(label) <= width
        pen = Pen().to(4 + cursor if fits else max(0, 4 + cursor - len(label)))
        return [*lines, pen.put(f"▲{label}" if fits else f"{label}▲", p.accent, True).line]
    unit, every = ("step", 20) if zoom == 1 else (f"1 column = {zoom} steps", 16)
    last = min(len(columns), width - 3 - len(unit) - every)
    ticks = [(4 + i, f"╵{columns[i].step:,}") for i in range(0, last, every)]
    return [*lines, axis(p, *ticks, (width - len(unit) - 1, unit))]


def draw_stream(state: State, p: Palette, width: int, height: int, slot: int) -> list[Line]:
    """One slot's request: its prompt, and the end of its text, where the text grows."""
    request, here, title = state.owner(slot), slot == state.selected, f"slot {slot}"
    if request is None:
        return [Pen().put(f"{title}  ", p.muted, here).put("nothing yet", p.muted).line]
    pen = Pen().put(f"{title} r{request.id}", p.text if here else p.muted, True, f"select({slot})")
    pen.put(f" {request.reason}" if request.reason else "", p.muted)
    pen.put(f" ← {client_of(request)}" if client_of(request) else "", p.muted)
    pen.put(f"  {shorten(prompt_of(request), width - pen.width - 3)}", p.muted)
    lines = []
    for kind, text in marked(clean(request.text) + ("" if request.reason else "▏")):
        colour = colour_of(p, kind)
        lines += [Pen().put(line, colour).line for line in wrap(text, width - 1)]
    # Of the newest token alone: back in time there is none
    glass = draw_glass(request, p, width) if state.cursor is None and height > 2 else []
    room = height - 1 - len(glass)
    return [pen.line, *(lines[-room:] if room > 0 else []), *glass]


def draw_glass(request: RequestView, p: Palette, width: int) -> list[Line]:
    """JSON under glass: the likeliest tokens for the newest place, the forbidden struck through."""
    pen = Pen()
    for text, probability, is_allowed in request.glass:
        said = clean(repr(text)[1:-1])
        words = f"{'✓' if is_allowed else '✗'}{said} {probability:.0%}"
        if pen.width + cell_len(words) + 2 > width:
            break
        how = p.accent if is_allowed else Style(color=p.muted, strike=True)
        pen.put(words, how).put("  ")
    return [pen.line] if pen.line else []


def colour_of(p: Palette, kind: str) -> str:
    """Of a part of an answer: thoughts are dim, and calls of tools stand out."""
    return {"thought": p.muted, "call": p.accent}.get(kind, p.text)


def draw_streams(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """All slots' texts, if there are two lines for each of them; else only the selected slot's."""
    count = len(state.view.engine.slots)
    across = max(1, min(count, (width + 2) // 30))
    tall, wide, shown = (height - 1) // -(-count // across), width // across, range(count)
    if tall < 2:
        across, tall, wide, shown = 1, height - 1, width, [state.selected]
    lines = [heading(p, width, state.titled("Answers"), "y copies" if len(shown) == 1 else "")]
    for first in shown[::across]:
        texts = [
            draw_stream(state, p, wide - 2, tall, slot)
            for slot in range(first, min(count, first + across))
        ]
        for row in range(tall):
            parts = (
                Strip(text[row] if row < len(text) else []).adjust_cell_length(wide - 1)
                for text in texts
            )
            lines.append([segment for part in parts for segment in (Segment(" "), *part)])
    return lines


def draw_step(state: State, p: Palette, width: int, height: int, whole: bool = False) -> list[Line]:
    """One step: what was planned, how many tokens it computed, and where its time went. `whole`:
    all lines."""
    step, unseen = state.step, state.here.unseen if state.here else 0
    title, which = (
        f"Step {step.step:,}" if step else "Step",
        "one of many" if state.hurries else "newest",
    )
    which = which if state.cursor is None else "End: follow"
    lines = [heading(p, width, title, which)]
    if step is None:
        return [*lines, Pen().put(" plan → run → commit: nothing has run yet", p.muted).line]
    if unseen:
        said = f"{unseen:,} steps up to this one went by before the screen looked, and {step.tokens:,} tokens came."
        return [*lines, *(Pen().put(f" {part}", p.muted).line for part in wrap(said, width - 2))][
            :height
        ]
    prefill, decode = sum(stop - start for *_, start, stop in step.prefill), len(step.decode)
    budget = state.limits_at(step.step).budget
    held = step.held and ", ".join(f"r{r}" for _, r in sorted(step.held))
    entries = {
        "admitted": admissions(step) or "no request",
        "prefill": ", ".join(f"r{r} {a:,}–{b:,} → slot {s}" for s, r, a, b in sorted(step.prefill))
        or "no chunk",
        "decode": named(s for s, _ in step.decode) if decode else "no slot",
        "tokens": f"{prefill:,} prefill + {decode} decode = {prefill + decode:,} in one step; {step.tokens} delivered",
        "budget": f"cost {step.cost - decode:,} + {decode} of {budget:,}",
        "held": step.held and f"{held}: over the budget, or what they share is being written",
        "ghosts": step.ghosts and f"{named(step.ghosts)}: had ended, seen one step late",
        "in line": f"{step.waiting:,}" if step.waiting else "",
        "ranks": ranks_line(state.view.engine.ranks),
    }
    for name, text in entries.items():
        lines += entry(p, width, name, text)
    lines += draw_time(step, p, width)
    hidden = len(lines) - height
    if whole or hidden <= 0:
        return lines
    return [
        *lines[: height - 1],
        Pen().put(f" ↓ {count(hidden + 1, 'more line')}", p.accent, do="sheet('step')").line,
    ]


def draw_time(step: StepView, p: Palette, width: int) -> list[Line]:
    """Where a step's time went: sums in milliseconds, and a bar of the same.

    The parts are rounded before they are added up, so that a reader who adds them up gets the same
    sum.
    """
    python = {
        "plan": in_ms(step.plan_s),
        "build": in_ms(step.build_s),
        "commit": in_ms(step.commit_s),
    }
    parts = {
        "Python": sum(python.values()),
        "device": in_ms(step.device_s),
        "wait": in_ms(step.wait_s),
    }
    total = sum(parts.values())
    lines = entry(p, width, "time", f"{total:,.2f} ms = {' + '.join(named_ms(parts))}")
    lines += entry(p, width, "Python", ", ".join(named_ms(python)))
    bar = Pen().to(10)
    for (name, spent), hue in zip(parts.items(), ink.HUES, strict=False):
        cells = max(1, round(spent / (total or 1) * (width - 14)))
        label = name if cells > len(name) else name[0]
        bar.put(f"{label:─^{cells}}", ink.style(ink.ink_on(hue), hue))
    return [*lines, bar.line]


def in_ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


def named_ms(parts: Mapping[str, float]) -> list[str]:
    return [f"{name} {spent:,.2f}" for name, spent in parts.items()]


def named(slots: Iterable[int]) -> str:
    names = [str(slot) for slot in sorted(slots)]
    return f"slot{'s' if len(names) > 1 else ''} {', '.join(names)}"


def admissions(step: StepView) -> str:
    """Which requests got which slots, and why: those with the same reason share it."""
    slots = sorted(zip(step.admitted, step.why, strict=True))
    reasons = groupby(slots, key=lambda one: one[1])
    return "; ".join(
        ", ".join(f"r{r} → slot {s}" for (s, r), _ in some) + f": {why}" for why, some in reasons
    )


def ranks_line(ranks: RanksView) -> str:
    """The processes that share the model."""
    if not ranks.memory:
        return ""
    memory = ", ".join(f"{nbytes / 2**20:,.0f}" for nbytes in ranks.memory)
    return f"{len(ranks.memory)} by {ranks.backend}, of {memory} MiB"


def draw_requests(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """One request: its figures, its steps and why it ended, its prompt, and its text."""
    r = state.open
    if r is None:
        return [
            heading(p, width, "Requests"),
            Pen().put(" Nothing has ended yet. Esc goes back.", p.muted).line,
        ]
    ids = [request.id for request in reversed(state.ended)]
    which = (
        f"{ids.index(r.id) + 1:,} of {state.view.engine.finished:,} that have ended"
        if r.id in ids
        else "open"
    )
    note = (
        "↓ earlier  ↑ later  w why  g steps  y copy  Esc back"
        if width >= 100
        else "↑↓ others  w why  Esc back"
    )
    title = heading(p, width, f"r{r.id}, {which}", note, do="screen.dismiss")
    return [title, *about(state, p, width, r, state.view.engine.now)]


def draw_errors(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """The tracebacks of all that has failed in this process, the newest first."""
    lines = [
        heading(
            p,
            width,
            "Errors: what has failed, the newest first",
            "↑↓ scroll  Esc back",
            do="screen.dismiss",
        )
    ]
    if not state.tracebacks:
        lines.append(Pen().put(" Nothing has failed.", p.muted).line)
    for block in reversed(state.tracebacks):
        what, *rest = block.split("\n")
        lines += [Pen().put(f" {part}", p.bad, True).line for part in wrap(what, width - 2)]
        for line in rest:
            text = line.lstrip(" ")
            indent = min(len(line) - len(text), width // 2) + 1
            lines += [
                Pen().to(indent).put(part, p.text).line for part in wrap(text, width - indent - 1)
            ]
        lines.append([])
    return lines


def draw_request(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """The request in the selected slot. `g` opens all of it."""
    r = state.owner(state.selected)
    if r is None:
        return [
            heading(p, width, "Request"),
            Pen().put(f" slot {state.selected}: nothing yet", p.muted).line,
        ]
    now = min(state.view.engine.now, state.moment)
    lines = [
        heading(p, width, state.titled(f"Request r{r.id}"), "g opens", do="go"),
        *about(state, p, width, r, now),
    ]
    if (hidden := len(lines) - height) <= 0:
        return lines
    return [
        *lines[: height - 1],
        Pen().put(f" ↓ {count(hidden + 1, 'more line')}: g", p.accent, do="go").line,
    ]


def about(state: State, p: Palette, width: int, r: RequestView, now: float) -> list[Line]:
    """All that was known about a request at a moment."""
    m, lasted = r.metrics, (now if r.ended is None else r.ended) - r.arrived
    figures = (
        f"{r.reason or 'open'}; {r.policy or ('in line' if r.reason is None else 'never admitted')}; "
        f"{count(m.prompt_tokens, 'prompt token')}, {m.cached_tokens:,} of them reused; "
        f"{count(m.output_tokens, 'new token')}; waited {span(m.queued_s)}; TTFT {span(m.ttft_s)}; "
        f"{number(m.tokens_per_s)} tokens/s; in all {span(lasted)}"
    )
    return [
        *entry(p, width, "figures", figures),
        *entry(p, width, "steps", life_of(state, r, now)),
        *entry(p, width, "from", client_of(r), p.muted),
        *entry(p, width, "prompt", prompt_of(r), p.muted),
        *entry(p, width, "error", clean(r.error or ""), p.bad),
        *parts_of(p, width, clean(r.text)),
    ]


def parts_of(p: Palette, width: int, text: str) -> list[Line]:
    lines = []
    for kind, part in marked(text):
        name = "text" if kind == "answer" else kind
        lines += entry(p, width, name, part, colour_of(p, kind))
    return lines


def life_of(state: State, request: RequestView, now: float) -> str:
    """In which slot and in which steps a request was up to a moment, as far as they are
    remembered."""
    steps = [step for i in state.steps_of(request) if (step := state.history[i]).ended <= now]
    if not steps:
        return ""
    kinds = Counter(column.cells[request.slot].kind for column in steps)
    what = ", ".join(f"{kinds[kind]:,} {ink.NAMES[kind]}" for kind in sorted(kinds))
    return f"{steps[0].step:,} to {steps[-1].step:,}, in slot {request.slot}: {what}"


def draw_contest(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """Two timelines on one scale of time, each under its figures, and a sentence that says which
    policy won."""
    contest = state.contest or (
        race(state) if state.view.racing or not state.raced else state.raced
    )
    longest = max([run.makespan for run in contest.runs], default=0) or 1.0
    is_film = state.film is not None and contest is state.raced
    if is_film:
        runs = [until(run, state.film) for run in contest.runs]
        shown = (
            f"Both legs on one clock: {state.film:.2f} of {longest:.2f} s. End leads to the result."
        )
        contest = contest._replace(runs=runs, note=shown)
    kinds = legend(p, ink.PREFILL, ink.DECODE, ink.BLOCKED, ink.HELD, ink.EMPTY)
    widths = (22, 7, 11, 11, 11, 8, 8) if width >= 80 else (12, 7, 11, 11, 0, 9, 0)
    titles = aligned(("", *FIGURES), widths)
    result = "" if is_film else verdict(contest.runs)
    words = [Pen().put(f" {line}", p.text, True).line for line in wrap(result, width - 2) if line]
    words += [Pen().put(f" {line}", p.muted).line for line in wrap(contest.note, width - 2) if line]
    slots, room = len(state.view.engine.slots), (height - 7 - len(words)) // 2
    shown = fit_slots(state, max(1, room + 1))
    part = f"slots {shown[0]}–{shown[-1]}" if len(shown) < slots else ""
    names = axis(p, (1, part), (len(titles) - len(titles.lstrip()), titles.lstrip()))
    lines = [heading(p, width, contest.title, "Esc back", kinds, do="screen.dismiss"), names]
    if not contest.runs:
        return [lines[0], *words]
    for run in contest.runs:
        pen = (
            Pen()
            .put(f" {run.policy}, {run.how}" if width >= 80 else f" {run.policy}", p.text, True)
            .to(widths[0])
        )
        lines.append(pen.put(aligned(run.figures, widths[1:]), p.text).line)
        columns = in_time(run, width - 5, longest)
        for slot in shown:
            pen = Pen().put(f"{slot:>3} ", p.muted)
            draw_cells(pen, p, columns, slot)
            if run.how == NEXT:
                pen.put(ink.GLYPHS[ink.EMPTY] * (width - 5), p.faint)
            lines.append(pen.line)
        if room > slots:
            lines.append([])
    half, whole = f"{longest / 2:.2f} s", f"{longest:.2f} s"
    middle, end = 4 + (width - 5) // 2 - len(half) // 2, width - 1 - len(whole)
    lines += [axis(p, (4, "0 s"), (middle, half), (end, whole)), *words]
    return [*lines, *draw_answers(state, p, width, height - len(lines), contest.runs)]


def draw_answers(
    state: State, p: Palette, width: int, height: int, runs: Sequence[Run]
) -> list[Line]:
    """The runs of a race side by side: what each slot's request has answered so far, its end in
    sight."""
    runs = [run for run in runs if run.requests]
    if height < 2 or not runs:
        return []
    wide = width // len(runs)
    titles = [(i * wide + 1, f"answers, {run.policy}") for i, run in enumerate(runs)]
    lines = [axis(p, *titles)]
    for slot in fit_slots(state, height - 1):
        pen = Pen()
        for i, run in enumerate(runs):
            pen.to(i * wide).put(f"{slot:>3} ", p.muted)
            found = answer_in(run, slot)
            if found:
                number, text = found
                pen.put(f"r{number:<3}", p.text, True)
                room = (i + 1) * wide - pen.width - 2
                pen.put((wrap(clean(text), room) or [""])[-1], p.text)
        lines.append(pen.line)
    return lines


def draw_loading(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """What is being done while the model loads; or what went wrong, and what helps."""
    view, indent = state.view, " " * max(2, (width - 70) // 2)
    room = width - 2 * len(indent)
    text: list[Line] = []

    def say(words: str, colour: str, first: str = "", bold: bool = False, do: str = "") -> None:
        for i, part in enumerate(wrap(words, room - 2)):
            text.append(
                Pen()
                .put(f"{indent}{first if i == 0 else ' ' * len(first)}{part}", colour, bold, do)
                .line
            )

    say("nanobatch", p.text, bold=True)
    say("watch an LLM serving engine work\n", p.muted)
    *before, last = view.done or ("starting",)
    for stage in before:
        say(stage, p.muted, "✓ ")
    say(last, p.text, "✗ " if view.stage == "failed" else "… ")
    if state.said:
        say(f"{state.said}; they wait for the model", p.accent, "  ")
    if state.kept and not view.error:
        say(f"kept until then: {state.kept}", p.accent, "  ")
    if state.printed and not view.error:
        say(state.printed, p.muted, "  ")
    if view.door and not view.error:
        say(f"\n{view.door.address}/v1 is open, and answers 503 until then", p.muted)
    if view.error:
        say(f"\n{view.error}", p.bad, bold=True)
    say("\nq quits", p.muted, do="quit")
    return [[]] * max(0, (height - len(text)) // 3) + text


def draw_small(state: State, p: Palette, width: int, height: int) -> list[Line]:
    return [
        Pen().put(part, p.text).line
        for part in wrap("nanobatch needs 60×20 characters; q quits", width)
    ][:height]


def draw_mark(state: State, p: Palette, width: int, height: int) -> list[Line]:
    return [Pen().put(" ❯", p.accent if state.typing else p.faint, state.typing).line]


def draw_settings(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """How the next prompt is fired; before the first, which key leads into the box. For a while
    after a key, what the key has done."""
    s = state.settings
    first = "" if state.has_typed else "press i to type"
    seed = "–" if s.seed is None else s.seed
    parts = [f"temp {s.temperature:g}", f"max {s.max_tokens:,} tok", f"seed {seed}"]
    if state.said:
        first, parts = shorten(state.said, width - 2), []
    left = width - 2 - cell_len(first)
    texts = []  # as many of them as find room
    for part in parts:
        blank = " · " if first or texts else ""
        left -= cell_len(blank + part)
        if left < 0:
            break
        texts.append(blank + part)
    words = "".join(texts)
    pen = Pen().to(width - 1 - cell_len(first + words))
    pen.put(first, p.accent, not state.said, "settings" if state.said else "prompt")
    return [pen.put(words, p.muted, do="settings").line]
