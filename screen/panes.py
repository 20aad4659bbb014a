"""The panes: pure functions from state, colours and a size to lines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.segment import Segment
from textual.strip import Strip

from sched import PADDING
from screen.ink import (
    BLOCKED,
    DECODE,
    EMPTY,
    GHOST,
    GLYPHS,
    HELD,
    HUES,
    PREFILL,
    REMEMBERED,
    REUSED,
    Line,
    Palette,
    Pen,
    axis,
    entry,
    heading,
    ink_on,
    legend,
    mixed,
    number,
    shorten,
    span,
    style,
    wrap,
)
from screen.room import View, policy_of
from screen.state import State, race, verdict
from screen.timeline import SHUTTING, Column, in_time, seconds, useful_of

if TYPE_CHECKING:
    from parts.answers import SlotView


def fit_slots(state: State, rows: int) -> range:
    """Which of the slots are shown, if not all find room: those around the selected one."""
    count = len(state.view.engine.slots)
    first = min(max(0, state.selected - rows // 2), max(0, count - rows))
    return range(first, min(count, first + rows))


def draw_status(state: State, p: Palette, width: int, height: int) -> list[Line]:
    view = state.view
    doing = "⚑ racing" if view.racing else "▶ running" if view.busy else "■ idle"
    if view.switching_to:
        doing = f"▮▮ paused, draining → {view.switching_to}" if view.paused else f"⇣ draining → {view.switching_to}"
    elif view.paused:
        doing = "▮▮ paused"
    newest = state.steps[-20:]
    parts = [
        ("nanobatch", p.text, True, ""),
        (shorten(state.model.rstrip("/").rsplit("/", 1)[-1], 28), p.muted, False, ""),
        (doing, p.accent if view.busy else p.muted, True, "pause"),
        ("" if view.switching_to else policy_of(view), p.text, True, "command('/policy')"),
        (f"{number(state.tokens_per_s()) if view.busy else '–':>5} tok/s", p.text, False, ""),
        (f"{len(state.ended)} done", p.text, False, "open(0)"),
        (f"step {state.steps[-1].step if state.steps else 0:,}", p.muted, False, ""),
        (
            f"{number(1000 * sum(map(seconds, newest)) / len(newest) if newest else None):>5} ms/step",
            p.muted,
            False,
            "",
        ),
        (f"load {view.load:g}/s" if view.load else "", p.text, False, "command('/load')"),
        ("space: go on" if view.paused else "", p.accent, False, "pause"),
    ]
    pen = Pen().put(" ")
    for text, *how in parts:
        if text and pen.width + cell_len(text) + 1 <= width:
            pen.put(text, *how).put("  ")
    return [pen.line]


def why_waiting(view: View) -> str:
    """One reason for all of the line: it is first come, first served."""
    if view.paused:
        return "paused"
    if view.switching_to:
        return "wait: the slots are being drained"
    if all(slot.request is not None for slot in view.engine.slots):
        return "wait: every slot is taken"
    return {"static": "wait: the batch must drain first", "serial": "wait: one at a time"}.get(policy_of(view), "wait")


def draw_slots(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """A line for each slot: who holds it, and how far its rows of the KV cache are filled, and with what."""
    slots = state.view.engine.slots
    rows = fit_slots(state, height - 3)
    names = ("used/rows", "TTFT ms", "tok/s") if width >= 70 else ("used/rows",)
    right = "".join(f"{name:>{size}}" for name, size in zip(names, FIGURES, strict=False))
    bar = width - 18 - len(right)
    title = "Slots" if len(rows) == len(slots) else f"Slots {rows[0]}–{rows[-1]} of {len(slots)}"
    if state.view.paused and state.steps and state.view.planned > state.steps[-1].step:
        title += f", one step ahead: {state.view.planned:,}"  # it is in flight: planned, and not yet read back
    glyphs = [(REUSED, p.text, "reused"), *legend(p, PREFILL, DECODE), (REMEMBERED, p.text, "remembered")]
    labels = ((2, "#"), (4, "phase   req"), (18, shorten("rows of the KV cache", bar)), (18 + bar, right))
    lines = [heading(p, width, title, legend=glyphs), axis(p, *labels)]
    lines += [draw_slot(state, p, slots[row], bar, len(names)) for row in rows]
    return [*lines, draw_queue(state.view, p, width)]


FIGURES = (11, 9, 7)  # how wide the columns at the right of the slots are


def draw_slot(state: State, p: Palette, slot: SlotView, bar: int, figures: int) -> Line:
    view, request = state.view, state.request(slot.request)
    here, do = slot.slot == state.selected, f"select({slot.slot})"
    phase, ink = slot.phase, p.text
    if request is None:
        shut = view.engine.queue and (view.switching_to or policy_of(view) in SHUTTING)
        phase, ink = "blocked" if shut else "free", p.muted
    pen = Pen().put("▌" if here else " ", p.accent).put(f"{slot.slot:>2} ", ink, here, do)
    pen.put(f"{phase:<8}", p.bad if phase == "blocked" else ink, here, do)
    pen.put(f"r{request.id}" if request else "", ink, here, do).to(18)
    draw_rows(pen, p, slot, view.max_len, bar)
    if request is None:  # what it remembers is nobody's: it may be taken over, or written over
        wide, room = f"({slot.remembered:,} remembered)", sum(FIGURES[:figures])
        right = f"{wide if len(wide) < room else f'({slot.remembered:,})':>{room}}" if slot.remembered else ""
    else:
        ttft, rate = request.metrics.ttft_s, request.metrics.tokens_per_s
        used = f"{slot.used:,}/{view.max_len:,}"
        values = (used, "–" if ttft is None else f"{1000 * ttft:,.0f}", "–" if rate is None else f"{rate:,.0f}")
        right = "".join(f"{value:>{size}}" for value, size in zip(values[:figures], FIGURES, strict=False))
    return pen.put(right, ink, here, do).line


def draw_queue(view: View, p: Palette, width: int) -> Line:
    waiting, why = view.engine.queue, why_waiting(view)
    pen = Pen().put(f" queue {len(waiting)}", p.text, True)
    if waiting:
        pen.put(f"  {why}", p.bad if "batch" in why else p.muted)
    for i, (request, waited) in enumerate(waiting):
        text, left = f"  r{request} {span(waited)}", len(waiting) - i
        if pen.width + len(text) + 10 > width and left > 1:
            return pen.put(f"  +{left} more", p.muted).line
        pen.put(text, p.text)
    return pen.line


def draw_rows(pen: Pen, p: Palette, slot: SlotView, max_len: int, width: int) -> None:
    """The rows of one slot as a bar. Whatever there is at all gets a cell at least."""
    if slot.request is None:
        parts = [(slot.remembered, REMEMBERED, p.muted)]
    else:
        hue, prompt = p.fill(slot.request), min(slot.used, slot.prompt_tokens)
        parts = [
            (min(slot.reused, prompt), REUSED, style(mixed(p.back, hue, 0.6), mixed(p.back, hue, 0.15))),
            (prompt, GLYPHS[PREFILL], p.cell(PREFILL, slot.request)),
            (slot.used, GLYPHS[DECODE], p.cell(DECODE, slot.request)),
        ]
    start = drawn = 0
    for stop, glyph, ink in parts:
        cells = min(width, max(round(stop * width / max_len), drawn + 1)) - drawn if stop > start else 0
        pen.put(glyph * cells, ink)
        start, drawn = max(start, stop), drawn + cells
    pen.put(GLYPHS[EMPTY] * (width - drawn), p.faint)


def draw_cells(pen: Pen, p: Palette, columns: Sequence[Column], slot: int, cursor: int | None = None) -> None:
    """One slot's line of a timeline. Each request carries its number behind its first cell, which stays as it is.

    So a prefill of one step can be seen, and neighbours' numbers never touch. Where there is no room, there is none.
    """
    i = 0
    for request, stretch in groupby(columns, key=lambda column: column.cells[slot].request):
        cells = [column.cells[slot] for column in stretch]
        label = "" if request is None else f" {request}"
        for cell, digit in zip_longest(cells, label if len(label) <= len(cells) else ""):
            ink = p.cell(cell.kind, request, i == cursor)
            if digit and digit != " ":  # on the colour of what it covers
                fill = p.fill(request) if cell.kind == DECODE else mixed(p.back, p.fill(request), 0.3)
                pen.put(digit, style(ink_on(fill), fill, True, i == cursor))
            else:
                pen.put(GLYPHS[cell.kind], ink)
            i += 1


def draw_timeline(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """Slots x steps: what each slot did in each step. This is the picture that says what batching is about."""
    zoom, columns, cursor = state.window(width - 4)
    kinds = legend(p, PREFILL, DECODE, BLOCKED, HELD, GHOST, EMPTY)
    lines = [heading(p, width, "Timeline", f"useful {useful_of(columns):.0f} %", kinds)]
    for slot in fit_slots(state, height - 2):
        pen = Pen().put(f"{slot:>3} ", p.text if slot == state.selected else p.muted, do=f"select({slot})")
        draw_cells(pen, p, columns, slot, cursor)
        lines.append(pen.put(GLYPHS[EMPTY] * (width - pen.width), p.faint).line)
    if cursor is not None:
        label = f" step {state.cursor:,}  End: follow "
        fits = 5 + cursor + len(label) <= width
        pen = Pen().to(4 + cursor if fits else max(0, 4 + cursor - len(label)))
        return [*lines, pen.put(f"▲{label}" if fits else f"{label}▲", p.accent, True).line]
    unit, every = ("step", 20) if zoom == 1 else (f"1 column = {zoom} steps", 16)
    ticks = [
        (4 + i, f"╵{columns[i].step:,}") for i in range(0, min(len(columns), width - 3 - len(unit) - every), every)
    ]
    return [*lines, axis(p, *ticks, (width - len(unit) - 1, unit))]


def draw_stream(state: State, p: Palette, width: int, height: int, slot: int) -> list[Line]:
    """One slot's request: its prompt, and the end of its text, which is where it grows."""
    request, here, title = state.owner(slot), slot == state.selected, f"slot {slot}"
    if request is None:
        return [Pen().put(f"{title}  ", p.muted, here).put("nothing yet", p.muted).line]
    pen = Pen().put(f"{title} r{request.id}", p.text if here else p.muted, True, f"select({slot})")
    pen.put(f" {request.reason}" if request.reason else "", p.muted)
    pen.put(f"  {shorten(request.prompt, width - pen.width - 3)}", p.muted)
    text = wrap(request.text + ("" if request.reason else "▏"), width - 1)[-(height - 1) :] if height > 1 else []
    return [pen.line, *(Pen().put(line, p.text).line for line in text)]


def draw_streams(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """All slots' texts side by side, where there are two lines for each; else the selected slot's alone."""
    count = len(state.view.engine.slots)
    across = max(1, min(count, (width + 2) // 30))
    tall, wide, shown = (height - 1) // -(-count // across), width // across, range(count)
    if tall < 2:
        across, tall, wide, shown = 1, height - 1, width, [state.selected]
    lines = [heading(p, width, "Answers", "y copies" if len(shown) == 1 else "")]
    for first in shown[::across]:
        texts = [draw_stream(state, p, wide - 2, tall, slot) for slot in range(first, min(count, first + across))]
        for row in range(tall):
            parts = (Strip(text[row] if row < len(text) else []).adjust_cell_length(wide - 1) for text in texts)
            lines.append([segment for part in parts for segment in (Segment(" "), *part)])
    return lines


def draw_step(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """One turn of the wheel: what was planned, how many tokens it computed, and where its time went."""
    step = state.step
    title, which = f"Step {step.step:,}" if step else "Step", "newest" if state.cursor is None else "End: follow"
    lines = [heading(p, width, title, which)]
    if step is None:
        return [*lines, Pen().put(" plan → run → commit: nothing has run yet", p.muted).line]
    prefill, decode = sum(stop - start for *_, start, stop in step.prefill), len(step.decode)
    stages = {"plan": step.plan_s, "build": step.build_s, "wait": step.wait_s, "commit": step.commit_s}
    total = seconds(step) or 1e-9
    held = step.held and ", ".join(f"r{r}" for _, r in step.held)
    entries = {
        "admitted": ", ".join(f"r{r} → slot {s}" for s, r in step.admitted) or "nobody",
        "prefill": ", ".join(f"r{r} {a:,}–{b:,} → slot {s}" for s, r, a, b in step.prefill) or "no chunk",
        "decode": f"slots {', '.join(str(s) for s, _ in step.decode)}" if decode else "no slot",
        "tokens": f"{prefill} prefill + {decode} decode = {prefill + decode} in one step; {step.tokens} delivered",
        "budget": f"cost {step.cost - decode} + {decode} of {state.view.budget} (chunks count in {PADDING}s)",
        "held": step.held and f"{held}: over the budget, or another writes what they share",
        "ghosts": step.ghosts and f"slots {', '.join(map(str, step.ghosts))}: had ended, seen one step late",
        "in line": str(step.waiting or ""),
        "time": f"{1000 * total:.2f} ms = " + " + ".join(f"{name} {1000 * s:.2f}" for name, s in stages.items()),
    }
    for name, text in entries.items():
        lines += entry(p, width, name, text)
    pen = Pen().to(10)
    for (name, spent), hue in zip(stages.items(), (HUES[0], HUES[1], HUES[2], HUES[3]), strict=True):
        cells = max(1, round(spent / total * (width - 15)))  # of its own name: these are no phases of a request
        pen.put(f"{name:─^{cells}}"[:cells] if cells > len(name) else name[:cells], style(ink_on(hue), hue))
    return [*lines[: height - 1], pen.line] if len(lines) < height else lines[:height]


def draw_requests(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """One of those that have ended: prompt, text, why it ended, and its figures."""
    if not state.ended:
        return [heading(p, width, "Requests"), Pen().put(" Nothing has ended yet. Esc goes back.", p.muted).line]
    opened = min(state.opened, len(state.ended) - 1)
    r = state.ended[opened]
    m = r.metrics
    figures = (
        f"{r.reason}; {r.policy}; {m.prompt_tokens} prompt tokens, {m.cached_tokens} of them reused; "
        f"{m.output_tokens} new tokens; TTFT {span(m.ttft_s)}; {number(m.tokens_per_s)} tokens/s; "
        f"in all {span(r.ended - r.arrived)}"
    )
    title = f"r{r.id}, {opened + 1} of {len(state.ended)} that have ended"
    return [
        heading(p, width, title, "↓ earlier  ↑ later  y copy  Esc back", do="screen.back"),
        *entry(p, width, "figures", figures),
        *entry(p, width, "prompt", r.prompt, p.muted),
        *entry(p, width, "error", r.error or "", p.bad),
        *entry(p, width, "text", r.text),
    ]


def draw_contest(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """Two timelines on one scale of time, each under its figures, and a sentence that says who won."""
    contest = state.contest or race(state)
    kinds = legend(p, PREFILL, DECODE, BLOCKED, HELD, EMPTY)
    widths = (21, 12, 12, 12, 9, 9) if width >= 78 else (12, 11, 12, 0, 9, 0)
    titles = zip(("", "makespan", "TTFT mean", "TTFT p95", "useful", "tok/s"), widths, strict=True)
    titles = "".join(f"{name:>{size}}" for name, size in titles if size)
    longest = max([run.makespan for run in contest.runs], default=0) or 1.0
    words = [Pen().put(f" {line}", p.text, True).line for line in wrap(verdict(contest.runs), width - 2) if line]
    words += [Pen().put(f" {line}", p.muted).line for line in wrap(contest.note, width - 2) if line]
    slots, room = len(state.view.engine.slots), (height - 7 - len(words)) // 2
    shown = fit_slots(state, max(1, room + 1))
    part = f"slots {shown[0]}–{shown[-1]}" if len(shown) < slots else ""
    names = axis(p, (1, part), (len(titles) - len(titles.lstrip()), titles.lstrip()))
    lines = [heading(p, width, contest.title, "Esc back", kinds, do="screen.back"), names]
    for run in contest.runs:
        title = f" {run.policy}, {run.how}" if width >= 78 else f" {run.policy}"
        figures = span(run.makespan), span(run.ttft_mean), span(run.ttft_p95), f"{useful_of(run.columns):.0f} %"
        values = zip((*figures, number(run.tokens_per_s)), widths[1:], strict=True)
        pen = Pen().put(title, p.text, True).to(widths[0])
        lines.append(pen.put("".join(f"{value:>{size}}" for value, size in values if size), p.text).line)
        columns = in_time(run, width - 5, longest)
        for slot in shown:
            pen = Pen().put(f"{slot:>3} ", p.muted)
            draw_cells(pen, p, columns, slot)
            lines.append(pen.line)
        if room > slots:
            lines.append([])
    half, whole_ = f"{longest / 2:.2f} s", f"{longest:.2f} s"
    middle, end = 4 + (width - 5) // 2 - len(half) // 2, width - 1 - len(whole_)
    return [*lines, axis(p, (4, "0 s"), (middle, half), (end, whole_)), *words]


def draw_loading(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """What is being done before there is anything to see, or what went wrong and what helps."""
    view, indent = state.view, " " * max(2, (width - 70) // 2)
    room = width - 2 * len(indent)
    text = [Pen().put(f"{indent}nanobatch", p.text, True).line]

    def say(words: str, ink: str, first: str = "", bold: bool = False, do: str = "") -> None:
        for i, part in enumerate(wrap(words, room - 2)):
            text.append(Pen().put(f"{indent}{first if i == 0 else ' ' * len(first)}{part}", ink, bold, do).line)

    say("watch an LLM serving engine work\n", p.muted)
    *before, last = view.done or ("starting",)
    for stage in before:
        say(stage, p.muted, "✓ ")
    say(last, p.text, "✗ " if view.stage == "failed" else "… ")
    if state.printed and not view.error:
        say(state.printed, p.muted, "  ")
    if view.error:
        say(f"\n{view.error}", p.bad, bold=True)
    text.append([])
    say("q quits", p.muted, do="quit")
    return [[]] * max(0, (height - len(text)) // 3) + text


def draw_small(state: State, p: Palette, width: int, height: int) -> list[Line]:
    return [Pen().put(part, p.text).line for part in wrap("nanobatch needs 60×20 characters; q quits", width)][:height]


def draw_mark(state: State, p: Palette, width: int, height: int) -> list[Line]:
    return [Pen().put(" ❯", p.accent, True).line]


def draw_settings(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """How the next prompt is fired; for a while after a key, what that key has done."""
    s = state.settings
    text = f"temp {s.temperature:g} · max {s.max_tokens} tok · seed {'–' if s.seed is None else s.seed}"
    text = shorten(state.said or text, width - 2)
    return [Pen().to(width - 1 - cell_len(text)).put(text, p.accent if state.said else p.muted, do="settings").line]
