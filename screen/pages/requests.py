"""What has been: requests that ended, busy periods, tracebacks. Most are pages that a key opens.

What this file keeps. A page has as many lines as it takes: the sheet that shows it can be scrolled
(`tui.py`).

Where next: `why.py`, a request's life in parts.
"""

from __future__ import annotations

from collections import Counter

from parts.api.views import RequestView
from parts.text.speech import marked
from screen import ink
from screen.ink import Line, Palette, Pen, clean, count, entry, heading, number, span, wrap
from screen.panes import colour_of
from screen.periods import CLOCK, explained, table
from screen.state import State, client_of, price_in, prompt_of

# --- a request ----------------------------------------------------------------------------------


def draw_requests(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """One request: its figures, its steps and why it ended, its prompt, and its text."""
    r = state.open
    if r is None:
        nothing = Pen().put(" Nothing has ended yet. Esc goes back.", p.muted)
        return [heading(p, width, "Requests"), nothing.line]
    which = "open"
    ids = [request.id for request in reversed(state.ended)]
    if r.id in ids:
        which = f"{ids.index(r.id) + 1:,} of {state.view.engine.finished:,} that have ended"
    note = "↑↓ others  w why  Esc back"
    if width >= 100:
        note = "↓ earlier  ↑ later  w why  g steps  y copy  Esc back"
    title = heading(p, width, f"r{r.id}, {which}", note, do="screen.dismiss")
    return [title, *about(state, p, width, r, state.view.engine.now)]


def draw_request(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """The request in the selected slot, in a pane. `g` opens all of it."""
    r = state.owner(state.selected)
    if r is None:
        nothing = Pen().put(f" slot {state.selected}: nothing yet", p.muted)
        return [heading(p, width, "Request"), nothing.line]
    now = min(state.view.engine.now, state.moment)
    title = heading(p, width, state.titled(f"Request r{r.id}"), "g opens", do="go")
    lines = [title, *about(state, p, width, r, now)]
    hidden = len(lines) - height
    if hidden <= 0:
        return lines
    more = Pen().put(f" ↓ {count(hidden + 1, 'more line')}: g", p.accent, do="go")
    return [*lines[: height - 1], more.line]


def about(state: State, p: Palette, width: int, r: RequestView, now: float) -> list[Line]:
    """All that was known about a request at a moment."""
    return [
        *entry(p, width, "figures", figures_of(r, now)),
        *entry(p, width, "steps", steps_of(state, r, now)),
        *entry(p, width, "from", client_of(r), p.muted),
        *entry(p, width, "prompt", prompt_of(r), p.muted),
        *entry(p, width, "error", clean(r.error or ""), p.bad),
        *parts_of(p, width, clean(r.text), r.is_thinking),
    ]


def figures_of(r: RequestView, now: float) -> str:
    m = r.metrics
    never = "in line" if r.reason is None else "never admitted"
    lasted = (now if r.ended is None else r.ended) - r.arrived
    figures = (
        r.reason or "open",
        r.policy or never,
        f"{count(m.prompt_tokens, 'prompt token')}, {m.cached_tokens:,} of them reused",
        count(m.output_tokens, "new token"),
        f"waited {span(m.queued_s)}",
        f"TTFT {span(m.ttft_s)}",
        f"{number(m.tokens_per_s)} tokens/s",
        f"in all {span(lasted)}",
    )
    return "; ".join(figures)


def steps_of(state: State, request: RequestView, now: float) -> str:
    """In which slot and in which steps a request was up to a moment, as far as they are
    remembered."""
    steps = []
    for i in state.steps_of(request):
        step = state.history[i]
        if step.ended <= now:
            steps.append(step)
    if not steps:
        return ""
    kinds = Counter(column.cells[request.slot].kind for column in steps)
    what = ", ".join(f"{kinds[kind]:,} {ink.NAMES[kind]}" for kind in sorted(kinds))
    return f"{steps[0].step:,} to {steps[-1].step:,}, in slot {request.slot}: {what}"


def parts_of(p: Palette, width: int, text: str, is_thinking: bool) -> list[Line]:
    """An answer, its thoughts and its calls."""
    lines = []
    for kind, part in marked(text, is_thinking):
        name = "text" if kind == "answer" else kind
        lines += entry(p, width, name, part, colour_of(p, kind))
    return lines


# --- all of them --------------------------------------------------------------------------------


def draw_totals(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """What each busy period came to, the newest first."""
    title = "Totals: busy periods, the newest first"
    lines = [heading(p, width, title, "Esc back", do="screen.dismiss")]
    if not state.periods:
        return [*lines, Pen().put(" Nothing has run yet. b fires a burst.", p.muted).line]
    titles, *rows = table(state.periods, price_in(state), width, len(state.periods))
    lines.append(Pen().put(titles, p.muted).line)
    for row, period in zip(rows, reversed(state.periods), strict=True):
        pen = Pen().put(" " if period.over else "▶", p.accent)
        lines.append(pen.put(row[1:], p.text).line)
    lines.append([])
    lines += (Pen().put(f" {part}", p.muted).line for part in wrap(explained(width), width - 2))
    return lines


def farewell(state: State, width: int) -> list[str]:
    """What stays in the terminal: the last busy periods, and how many requests have been left
    unfinished."""
    lost = ""
    left = state.view.engine.submitted - state.view.engine.finished
    is_elsewhere = state.view.watches or state.view.door
    if left and not is_elsewhere:
        lost = f"{count(left, 'request')} not finished.\n"
    lines = table(state.periods, price_in(state), width, 10)
    return [*lines, *(f" {part}" for part in wrap(lost + CLOCK, width - 2))]


# --- what has failed ----------------------------------------------------------------------------


def draw_errors(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """The tracebacks of all that has failed in this process, the newest first."""
    title = "Errors: what has failed, the newest first"
    lines = [heading(p, width, title, "↑↓ scroll  Esc back", do="screen.dismiss")]
    if not state.tracebacks:
        lines.append(Pen().put(" Nothing has failed.", p.muted).line)
    for block in reversed(state.tracebacks):
        what, *rest = block.split("\n")
        lines += (Pen().put(f" {part}", p.bad, True).line for part in wrap(what, width - 2))
        for line in rest:
            text = line.lstrip(" ")
            indent = min(len(line) - len(text), width // 2) + 1
            for part in wrap(text, width - indent - 1):
                lines.append(Pen().to(indent).put(part, p.text).line)
        lines.append([])
    return lines
