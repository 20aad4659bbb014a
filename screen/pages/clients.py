"""The clients: what asks over HTTP, what it was answered, and what was refused.

The problem. A request that is refused never reaches the engine, so no slot tells of it; and a
client that hangs up looks like any other end.

What this file keeps. As in `panes.py`, the functions are pure: state, colours and a size in, lines
out. A column that finds no room is left out as a whole.

Where next: `keys.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.cells import cell_len

from door.journal import Call
from screen.ink import Line, Palette, Pen, clean, entry, fitting, heading, number, shorten
from screen.state import State

CLIENTS = "sheet('clients')"  # the action that opens the whole list
REASON = 10  # so many cells at least are left for how a call ended


class Column(NamedTuple):
    title: str
    width: int
    rank: int  # if room is short, the columns of the highest ranks go
    is_text: bool = False


COLUMNS = (
    Column("req", 6, 0, True),
    Column("id", 20, 9, True),
    Column("client", 16, 1, True),
    Column("route", 18, 6, True),
    Column("how", 7, 5, True),
    Column("http", 5, 0, True),
    Column("in", 8, 2),
    Column("reused", 8, 4),
    Column("out", 8, 2),
    Column("TTFT ms", 9, 3),
    Column("tok/s", 7, 7),
    Column("took s", 8, 8),
)


def so_far(state: State, call: Call) -> Call:
    """An open call with the engine's figures: the door writes down its own when the call has
    ended."""
    views = [state.requests[request] for request in call.requests if request in state.requests]
    if call.latency_s is not None or not views:
        return call
    first, metrics = views[0].metrics, [view.metrics for view in views]
    read = {
        "prompt_tokens": first.prompt_tokens,
        "cached_tokens": first.cached_tokens,
        "ttft_s": first.ttft_s,
    }
    return replace(
        call,
        tokens=sum(m.output_tokens for m in metrics),
        generation_tps=first.tokens_per_s,
        **read,
    )


def values(call: Call) -> Iterable[str]:
    """A call's cells, one for each of `COLUMNS`."""
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


def draw_call(p: Palette, call: Call, columns: Sequence[Column], width: int, message: str) -> Line:
    """One call in one line. What a refusal says takes the place of the figures, of which it has
    none."""
    colour = (
        p.bad if call.is_refused else p.text if call.latency_s is None or call.hung_up else p.muted
    )
    pen, cells = (
        Pen().put("╳" if call.hung_up else " ", p.bad, True),
        dict(zip(COLUMNS, values(call), strict=True)),
    )
    for column in columns:
        if column.is_text:
            pen.put(f"{shorten(clean(cells[column]), column.width - 1):<{column.width}}", colour)
        elif call.requests:
            pen.put(f"{cells[column]:>{column.width}}", colour)
    reason = "hung up" if call.hung_up else call.reason or ("" if call.latency_s else "open")
    said = f"{reason}: {message}" if message else reason
    gap = "  " if call.requests else ""
    return pen.put(gap + shorten(clean(said), width - pen.width - len(gap) - 1), colour).line


def draw_clients(
    state: State, p: Palette, width: int, height: int, whole: bool = False
) -> list[Line]:
    """The calls at the door, open ones first, then the newest. `whole`: as many lines as it takes,
    messages in full."""
    door, columns = state.view.door, fitting(COLUMNS, width - REASON - 3)
    if door is None:
        words = "The door is shut. --serve 8000 opens it: then programs that speak OpenAI's protocol can ask."
        return [
            heading(p, width, "Clients", "Esc back", do="screen.dismiss"),
            *entry(p, width, "", words, p.muted),
        ]
    opened, ended = door.open[::-1], state.calls[::-1]
    # A screen that watches asks for nothing
    asking = sum("/watch" not in call.route for call in opened)
    counts = {"open": asking, "ended": door.seen, "refused": state.refused, "hung up ╳": state.gone}
    note = " · ".join(f"{count:,} {what}" for what, count in counts.items())
    pen = Pen().put(" ")
    for title, wide, _, is_text in columns:
        pen.put(f"{title:<{wide}}" if is_text else f"{title:>{wide}}", p.muted)
    title = f"Clients of {door.address.removeprefix('http://')}"
    title = title if len(title) + cell_len(note) + 12 <= width else "Clients"
    note, do = (f"{note}  Esc back", "screen.dismiss") if whole else (note, CLIENTS)
    lines = [heading(p, width, title, note, do=do), pen.put("  end", p.muted).line]
    if not whole:  # a crowd of open ones leaves room for the others
        opened = opened[: max(2 * height // 3, height - 2 - len(ended))]
    for call in (*opened, *ended):
        message = call.message if call.is_refused else ""
        lines.append(draw_call(p, so_far(state, call), columns, width, "" if whole else message))
        lines += entry(p, width, "", clean(message) if whole else "", p.bad, names=5)
        if len(lines) >= height and not whole:
            break
    if len(lines) == 2:
        lines += entry(p, width, "", "Nothing has been asked yet.", p.muted)
    return lines if whole else lines[:height]
