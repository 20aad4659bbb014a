"""Why did a request wait, and how would it have fared under another policy?

The page draws the latency as a waterfall of parts, and replays the request under each policy. Both are
computed in `latency_breakdown.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from base.validation import read_real, read_whole
from engine.snapshot import Metrics, RequestView, percentile
from experiments.latency_breakdown import (
    LatencyBreakdown,
    Outcome,
    at_percent,
    blamed,
    breakdown_in,
    company_of,
    is_noisy,
    outcomes,
    ranked,
    steps_of,
)
from experiments.policy_runs import terms_of
from screen.draw.canvas import Canvas, Figure, in_columns
from screen.draw.style import Palette, count, listed, shorten, span, style
from screen.page import NOTHING_ENDED, Page
from screen.pages.request_details import beside, place_of
from screen.state import State, client_of, prices, prompt_of

if TYPE_CHECKING:
    from screen.commands import Session

# --- question -------------------------------------------------------------------------------------

MARKS = (50, 95, 99)  # percentiles marked on the slider

# --- run ------------------------------------------------------------------------------------------


def read_request(text: str) -> int | str:
    """Parse a request's number or a percentile such as p95."""
    if text.startswith("p"):
        read_real("why", text[1:], 0, 100)
        return text
    return read_whole("why", text.removeprefix("r"), 0, 2**31)


def obey(session: Session, rest: str) -> None:
    """Explain the open request, a request by number (/why 7), or the one at a percentile of TTFT (/why
    p95)."""
    state = session.state
    chosen = read_request(rest) if rest else None
    request = state.open
    if isinstance(chosen, str):
        order = ranked(state.ended)
        request = at_percent(float(chosen[1:]), order) if order else None
    elif chosen is not None:
        request = state.requests.get(chosen)
    if request is None:
        words = f"{rest} is not known here" if rest else "no request has ended yet"
        raise ValueError(f"{words}; b fires a burst, and /why p95 looks into a slow one")
    open_request(state, request)


def open_request(state: State, request: RequestView) -> None:
    """Open a request and replay its busy period."""
    state.opened = request.id
    requests = state.requests.values()
    try:
        columns = steps_of(company_of(request, requests), state.history)
        found = outcomes(request, requests, state.history, *terms_of(state, columns))
        record = RequestLatencyRecord(request.id, found)
    except ValueError as error:
        record = RequestLatencyRecord(request.id, why_not=str(error))
    state.kept["why"] = record


def open_beside(state: State, by: int) -> None:
    """Open the next or previous request in order of TTFT."""
    order = ranked(state.ended)
    if order:
        open_request(state, beside(state.open, order, by))


def open_mark(state: State) -> None:
    """Open the request at the next percentile; after the last percentile, the first."""
    order = ranked(state.ended)
    if not order:
        return
    marks = [at_percent(mark, order) for mark in MARKS]
    now = place_of(state.open, order)
    beyond = [mark for mark in marks if now is None or place_of(mark, order) > now]
    open_request(state, (beyond or marks)[0])


# --- record ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestLatencyRecord:
    """The outcomes of a request: measured, replayed alone, and replayed under each policy."""

    request: int
    outcomes: Sequence[Outcome] = ()
    why_not: str = ""  # the reason if there are no outcomes


# --- drawing --------------------------------------------------------------------------------------

NAMES = 16  # characters for a part's name
FIGURES = (14, 8)  # characters for a part's milliseconds and percentage
TABLE = (Figure("TTFT", 10), Figure("total", 10), Figure("steps in all", 16))
LINE = "░"
KNOB = "●"
TELLS = "▸ the policy that ran. Steps: in line + to the first token + to the last."
SOON, LATE = "█▒"  # the glyphs before and after the first token


def draw(state: State, on: Canvas) -> None:
    """Draw a request's parts, the requests that it waited for, and the replays."""
    on.names = NAMES - 1
    r = state.open
    if r is None:
        on.title("Why did I wait?")
        on.say(NOTHING_ENDED, on.muted)
        return
    keys = "←→ tab others  Esc"
    if on.width >= 100:
        keys = "←→ faster, slower  tab p50, p95, p99  Esc back"
    on.title(
        f"Why did r{r.id} wait? {state.reason_of(r) or 'open'}{', ' if r.policy else ''}{r.policy}",
        keys,
    )
    breakdown = breakdown_in(state, r)
    draw_slider(state, on, r)
    draw_parts(on, r, breakdown)
    draw_others(state, on, r, breakdown)
    draw_outcomes(state, on, r)


def draw_slider(state: State, on: Canvas, r: RequestView) -> None:
    """Draw the request's rank by TTFT. A click on a percentile opens the request there."""
    order = ranked(state.ended)
    place = place_of(r, order)
    cells = ["─"] * (on.width - 8)
    for mark in MARKS:
        cells[at_cell(mark / 100, len(cells))] = "┼"
    words = f"{span(r.metrics.ttft_s)}, still running" if r.reason is None else "no first token"
    if place is not None:
        cells[at_cell((place + 1) / len(order), len(cells))] = KNOB
        words = f"{span(r.metrics.ttft_s)}: {place:,} of {len(order):,} were faster"
    track = on.pen().put(" TTFT ├", on.muted)
    for cell in cells:
        track.put(cell, on.accent if cell == KNOB else on.muted, cell == KNOB)
    track.put("┤", on.muted)
    marks = MARKS if order else ()
    labels = [(mark, f"p{mark} {span(at_percent(mark, order).metrics.ttft_s)}") for mark in marks]
    pen = on.pen().put(f" {words}", bold=True)
    pen.to(on.width - 1 - sum(len(label) + 2 for _, label in labels))
    for mark, label in labels:
        pen.put("  ").put(label, on.accent, do=f"command('/why p{mark}')")


def at_cell(part: float, cells: int) -> int:
    return max(0, min(cells - 1, round(part * cells) - 1))


def draw_parts(on: Canvas, r: RequestView, breakdown: LatencyBreakdown) -> None:
    """Draw the waterfall. Each part begins where the previous one ends."""
    first = math.inf if r.metrics.ttft_s is None else r.arrived + r.metrics.ttft_s
    parts = {part: in_ms(seconds) for part, seconds in breakdown.parts().items()}
    parts = {part: spent for part, spent in parts.items() if spent}
    early = breakdown.parts(first)
    whole = sum(parts.values())
    room = on.width - NAMES - sum(FIGURES) - 2
    started = 0.0
    for part, spent in parts.items():
        pen = on.pen().put(f" {part:<{NAMES - 1}}").put(f"{spent:>{FIGURES[0] - 3},.1f} ms")
        pen.put(f"{100 * spent / whole:>{FIGURES[1] - 2}.0f} %  ", on.muted)
        cells = [round(moment / whole * room) for moment in (started, started + spent)]
        wide = max(1, cells[1] - cells[0])
        before = round(wide * min(1.0, 1000 * early.get(part, 0.0) / spent))
        pen.to(pen.width + min(cells[0], room - 1))
        color = color_of(on.p, part, r.id)
        pen.put(SOON * before, style(color, color)).put(LATE * (wide - before), color)
        started += spent
    pen = on.pen().put(f" {'total':<{NAMES - 1}}{whole:>{FIGURES[0] - 3},.1f} ms", bold=True)
    pen.put(f"  {SOON} until its first token  {LATE} after it", on.muted)


def in_ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def color_of(p: Palette, part: str, request: int) -> str:
    """Return the colour of a part: the request's colour for its own work, `bad` for waiting."""
    if part in ("own chunks", "decoding"):
        return p.fill(request)
    return p.bad if part in ("line", "slot") else p.muted


def draw_others(state: State, on: Canvas, r: RequestView, breakdown: LatencyBreakdown) -> None:
    """Draw the requests that this one waited for."""
    clients = shares_of_clients(state, breakdown)
    most = 3 if on.width < 100 else 7
    if breakdown.ahead:
        on.entry("behind", f"{blamed(breakdown.ahead, most)}, in the slots")
    if clients:
        on.entry("clients", f"{clients} of these seconds")
    if breakdown.shut:
        on.entry("blocked", f"{span(breakdown.shut)} in line while a slot was free but blocked")
    if breakdown.overtakers:
        names = [f"r{request}" for request in breakdown.overtakers]
        on.entry("overtaken", f"by {listed(names, most)}, which came later")
    if breakdown.chunks:
        on.entry("beside", f"chunks of {blamed(breakdown.chunks, most)}{bounded(state)}")
    on.entry("cut", cut_short(state, r))
    on.entry("read again", reread_in_words(r.metrics))
    if on.height >= 30:
        on.entry("prompt", shorten(prompt_of(r), on.width - NAMES - 1))


def reread_in_words(m: Metrics) -> str:
    """Explain why a recurrent model prefilled cached tokens again (docs/slots.md)."""
    if not m.reread_tokens:
        return ""
    known = m.cached_tokens + m.reread_tokens
    before = f"; the last one before that is at {m.cached_tokens:,}"
    last = before if m.cached_tokens else " or before"
    return (
        f"{count(m.reread_tokens, 'token')}: a slot had its first {known:,} rows, but there was no "
        f"checkpoint at {known:,}{last}"
    )


def bounded(state: State) -> str:
    """Describe the time limit of a step with a chunk."""
    seconds = state.view.engine.step_s
    return f"; a step with one may take {span(seconds)} (--step-ms)" if seconds else ""


def cut_short(state: State, r: RequestView) -> str:
    """Describe the chunks that the time limit of a step cut short while other requests decoded."""
    steps = [state.history[i].view for i in state.steps_of(r)]
    cut = [
        step.prompt_tokens
        for step in steps
        if step.decode
        and step.computed >= step.budget < state.limits_at(step.step).chunk + len(step.decode)
        and any(request == r.id for _, request, *_ in step.prefill)
    ]
    if not cut:
        return ""
    words = f"{count(percentile(cut, 0.5), 'prompt token')} in {count(len(cut), 'step')}"
    return f"{words}, because others decode{bounded(state)}"


def shares_of_clients(state: State, breakdown: LatencyBreakdown) -> str:
    """Describe each client's share of the slots during the wait, if there were several clients."""
    held: Counter[str] = Counter()
    for request, seconds in breakdown.ahead.items():
        if request in state.requests:
            held[client_of(state.requests[request]) or "this screen"] += seconds
    if len(held) < 2:
        return ""
    whole = sum(held.values())
    shares = [f"{client} {100 * spent / whole:.0f} %" for client, spent in held.most_common(4)]
    return ", ".join(shares)


def draw_outcomes(state: State, on: Canvas, r: RequestView) -> None:
    """Draw the request's outcome under each policy."""
    legend = (
        (LINE, on.bad, "in line"),
        (SOON, on.text, "first token"),
        (LATE, on.text, "the rest"),
    )
    on.heading("Once more, without the model", legend=legend)
    record = state.kept.get("why")
    if record is None or record.request != r.id:
        record = RequestLatencyRecord(r.id, why_not="w replays it")
    if record.why_not:
        on.pen().put(f" {shorten(record.why_not, on.width - 2)}", on.muted)
        return
    titles = in_columns(TABLE, {each.title: each.title for each in TABLE})
    on.axis((NAMES, titles))
    room = on.width - NAMES - len(titles) - 4
    longest = max(each.total for each in record.outcomes) or 1.0
    for each in record.outcomes:
        ran = each.name == r.policy
        line, reading, answering = each.steps
        figures = {
            "TTFT": span(each.ttft),
            "total": span(each.total),
            "steps in all": f"{line:,}+{reading:,}+{answering:,}",
        }
        pen = on.pen().put(f"{'▸' if ran else ' '}{each.name:<{NAMES - 1}}", bold=ran)
        pen.put(f"{in_columns(TABLE, figures)}  ", bold=ran)
        stops = [round(stop / longest * room) for stop in (each.line, each.ttft, each.total)]
        hue = on.p.fill(r.id)
        pen.put(LINE * stops[0], on.bad)
        pen.put(SOON * (stops[1] - stops[0]), style(hue, hue))
        pen.put(LATE * (stops[2] - stops[1]), hue)
    on.say(f"{TELLS}{reliability(state, r, record.outcomes)}", on.muted)


def reliability(state: State, r: RequestView, outcomes: Sequence[Outcome]) -> str:
    """Describe how far the replays deviate from the measured run."""
    words = ""
    ran = next(each for each in outcomes if each.name == r.policy)
    times = outcomes[0].total / ran.total if ran.total else 1.0
    if times > 1.25:
        words += f" Other programs ran: it took {times:.1f} times as long as undisturbed."
    if is_noisy(prices(state)):
        words += " Too noisy to say what a chunk takes: it counts as a step of one row."
    return words


PAGE = Page(
    "why",
    "w",
    "Why",
    "why a request waited: its latency in parts, and by replay under each policy",
    draw,
    footer=10,
    obey=obey,
    example="p95",
    words=[f"p{mark}" for mark in MARKS],
    read=read_request,
    own={
        "left": lambda state: open_beside(state, -1),
        "right": lambda state: open_beside(state, 1),
        "tab": open_mark,
    },
    has_request=True,
)
