"""HTTP clients and their requests, including those refused before reaching the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.cells import cell_len

from engine.server_snapshot import RequestRecord
from screen.draw.canvas import BACK, Canvas, Figure
from screen.draw.style import clean, number, shorten
from screen.page import Page
from screen.state import State

CLIENTS = "page('clients')"  # opens the page
REASON = 10  # minimum width of the finish reason


COLUMNS = (
    Figure("req", 6, 0, is_text=True),
    Figure("id", 20, 9, is_text=True),
    Figure("client", 16, 1, is_text=True),
    Figure("route", 18, 6, is_text=True),
    Figure("how", 7, 5, is_text=True),
    Figure("http", 5, 0, is_text=True),
    Figure("in", 8, 2),
    Figure("reused", 8, 4),
    Figure("out", 8, 2),
    Figure("TTFT ms", 9, 3),
    Figure("tok/s", 7, 7),
    Figure("took s", 8, 8),
)


def so_far(state: State, call: RequestRecord) -> RequestRecord:
    """Add the engine's figures to an open HTTP request, whose record has none until it ends."""
    views = [state.requests[request] for request in call.requests if request in state.requests]
    if call.latency_s is not None or not views:
        return call
    first = views[0].metrics
    return replace(
        call,
        tokens=sum(view.metrics.output_tokens for view in views),
        generation_tps=first.tokens_per_s,
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        ttft_s=first.ttft_s,
    )


def values(call: RequestRecord) -> Iterable[str]:
    """Yield the cells of a request, one for each of `COLUMNS`."""
    first, *others = call.requests or (None,)
    yield "–" if first is None else f"r{first}–{others[-1]}" if others else f"r{first}"
    yield call.id
    yield call.client
    yield call.route.partition(" ")[2].removeprefix("/v1")
    yield "stream" if call.stream else "whole" if call.requests else ""
    yield str(call.status or "…")
    yield from (f"{call.prompt_tokens:,}", f"{call.cached_tokens:,}", f"{call.tokens:,}")
    yield "–" if call.ttft_s is None else f"{1000 * call.ttft_s:,.0f}"
    yield number(call.generation_tps)
    yield "" if call.latency_s is None else number(call.latency_s)


def draw_call(on: Canvas, call: RequestRecord, columns: Sequence[Figure], message: str) -> None:
    """Draw one request in a line. A refused one shows its message in place of figures."""
    hue = on.muted
    if call.is_refused:
        hue = on.bad
    elif call.latency_s is None or call.hung_up:
        hue = on.text
    pen = on.pen().put("╳" if call.hung_up else " ", on.bad, True)
    texts = dict(zip(COLUMNS, values(call), strict=True))
    for column in columns:
        if column.is_text or call.requests:
            pen.put(column.cell(clean(texts[column])), hue)
    reason = "hung up" if call.hung_up else call.reason or ("" if call.latency_s else "open")
    said = f"{reason}: {message}" if message else reason
    gap = "  " if call.requests else ""
    pen.put(gap + shorten(clean(said), on.width - pen.width - len(gap) - 1), hue)


def draw(state: State, on: Canvas, whole: bool = True) -> None:
    """Draw HTTP requests, open ones first, then the newest. `whole`: all of them, with messages."""
    server = state.view.server
    if server is None:
        on.title("Clients")
        words = (
            "No server runs. With --serve 8000, programs can send requests in OpenAI's protocol."
        )
        on.entry("", words, on.muted)
        return
    opened = server.open[::-1]
    ended = state.calls[::-1]
    # Screens that watch do not count as clients
    asking = sum("/watch" not in call.route for call in opened)
    counts = {
        "open": asking,
        "ended": server.seen,
        "refused": state.refused,
        "hung up ╳": state.gone,
    }
    note = " · ".join(f"{count:,} {what}" for what, count in counts.items())
    title = f"Clients of {server.address.removeprefix('http://')}"
    title = title if len(title) + cell_len(note) + 12 <= on.width else "Clients"
    note += "  Esc back" * (whole and on.has_keys)
    on.heading(title, note, do=BACK if whole else CLIENTS)
    columns = on.columns(COLUMNS, REASON + 3, "  end")
    if not whole:  # leave room for ended ones
        opened = opened[: max(2 * on.height // 3, on.height - 2 - len(ended))]
    calls = [*opened, *ended]
    for call in calls if whole else calls[: on.lines_left]:
        message = call.message if call.is_refused else ""
        draw_call(on, so_far(state, call), columns, "" if whole else message)
        if whole:
            on.entry("", clean(message), on.bad, names=5)
    if not calls:
        on.entry("", "Nothing has been asked yet.", on.muted)


def draw_clients(state: State, on: Canvas) -> None:
    draw(state, on, whole=False)
    del on.lines[on.height :]


PAGE = Page(
    "clients",
    "h",
    "Clients",
    "HTTP clients and their requests (--serve, --watch), and what was refused",
    draw,
    footer=13,
    pane=draw_clients,
)
