"""All details of a request, as a page and a pane: figures, steps, reason, prompt and text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.snapshot import Metrics, RequestView
from screen.draw import style
from screen.draw.answers import hue_of
from screen.draw.canvas import Canvas
from screen.draw.style import clean, count, number, span
from screen.page import NOTHING_ENDED, Page
from screen.state import State, client_of, prompt_of
from text.tool_parser import split_output

if TYPE_CHECKING:
    from screen.commands import Session


def draw(state: State, on: Canvas) -> None:
    """Draw the open request, or the newest ended one."""
    r = state.open
    if r is None:
        on.title("Requests")
        on.say(NOTHING_ENDED, on.muted)
        return
    which = "open"
    place = place_of(r, state.ended[::-1])
    if place is not None:
        ended = state.view.engine.finished - state.hidden
        which = f"{place + 1:,} of {ended:,} that have ended"
    note = "↑↓ others  w why  Esc back"
    if on.width >= 100:
        note = "↓ earlier  ↑ later  w why  g steps  y copy  Esc back"
    on.title(f"r{r.id}, {which}", note)
    draw_about(state, on, r, state.view.engine.now)


def draw_request(state: State, on: Canvas) -> None:
    """Draw the request in the selected slot as a pane. `g` opens the page."""
    r = state.owner(state.selected)
    if r is None:
        on.heading("Request")
        on.say(f"slot {state.selected}: nothing yet", on.muted)
        return
    on.heading(state.titled(f"Request r{r.id}"), "g opens", do="go")
    draw_about(state, on, r, min(state.view.engine.now, state.moment))
    on.cut(": g", "go")


def draw_about(state: State, on: Canvas, r: RequestView, now: float) -> None:
    """Draw everything known about a request at a given time."""
    on.entry("figures", figures_of(state, r, now))
    on.entry("steps", steps_of(state, r, now))
    on.entry("from", client_of(r), on.muted)
    on.entry("prompt", prompt_of(r), on.muted)
    on.entry("error", clean(r.error or ""), on.bad)
    draw_parts(on, clean(r.text), r.is_thinking)


def figures_of(state: State, r: RequestView, now: float) -> str:
    m = r.metrics
    never = "in line" if r.reason is None else "never admitted"
    lasted = (now if r.ended is None else r.ended) - r.arrived
    figures = (
        state.reason_of(r) or "open",
        r.policy or never,
        f"{count(m.prompt_tokens, 'prompt token')}, {m.cached_tokens:,} of them reused{from_disk(m)}{reread_of(m)}",
        count(m.output_tokens, "new token") + drafted_of(m),
        f"waited {span(m.queued_s)}",
        f"TTFT {span(m.ttft_s)}",
        f"{number(m.tokens_per_s)} tokens/s",
        f"in all {span(lasted)}",
    )
    return "; ".join(figures)


def from_disk(metrics: Metrics) -> str:
    return " from disk" if metrics.cached_from == "disk" else ""


def reread_of(metrics: Metrics) -> str:
    """Describe the prompt tokens that were prefilled again for lack of a state (docs/slots.md)."""
    if not metrics.reread_tokens:
        return ""
    return f", read again: {count(metrics.reread_tokens, 'token')}"


def drafted_of(metrics: Metrics) -> str:
    if not metrics.draft_tokens:
        return ""
    return f", drafted {metrics.draft_tokens:,}, {metrics.accepted_tokens:,} accepted"


def steps_of(state: State, request: RequestView, now: float) -> str:
    """Describe the slot and the remembered steps of a request, up to a given time."""
    steps = []
    for i in state.steps_of(request):
        step = state.history[i]
        if step.ended <= now:
            steps.append(step)
    if not steps:
        return ""
    kinds = Counter(column.cells[request.slot].kind for column in steps)
    what = ", ".join(f"{kinds[kind]:,} {style.NAMES[kind]}" for kind in sorted(kinds))
    return f"{steps[0].step:,} to {steps[-1].step:,}, in slot {request.slot}: {what}"


def draw_parts(on: Canvas, text: str, is_thinking: bool) -> None:
    """Draw an answer with its reasoning and tool calls."""
    names = {"content": "text", "reasoning": "thought", "tool_call": "call"}
    for kind, part in split_output(text, is_thinking):
        on.entry(names[kind], part, hue_of(on, kind))


def obey(session: Session, rest: str) -> None:
    """Open the newest ended request."""
    session.state.opened = session.state.ended[-1].id if session.state.ended else None


def browse(state: State, by: int) -> None:
    """Open an earlier or a later ended request."""
    if state.ended:
        state.opened = beside(state.open, state.ended[::-1], by).id


def place_of(request: RequestView, order: Sequence[RequestView]) -> int | None:
    """Return the index of the request in this order, or None."""
    return next((i for i, r in enumerate(order) if r.id == request.id), None)


def beside(request: RequestView, order: Sequence[RequestView], by: int) -> RequestView:
    """Return the request `by` places after this one; if this one is not in the order, the first."""
    place = place_of(request, order)
    return order[0 if place is None else max(0, min(place + by, len(order) - 1))]


PAGE = Page(
    "requests",
    "f",
    "Finished",
    "finished requests, the newest first: figures, steps, prompt, text; y copies",
    draw,
    footer=10,
    obey=obey,
    pane=draw_request,
    own={"up": lambda state: browse(state, -1), "down": lambda state: browse(state, 1)},
    has_request=True,
)
