"""The errors page: failed requests, and tracebacks with file and line."""

from __future__ import annotations

from screen.draw.canvas import Canvas
from screen.draw.style import clean, listed
from screen.page import Page
from screen.state import State

NAMED = 4  # maximum number of requests named for one error


def draw(state: State, on: Canvas) -> None:
    on.title("Errors: what has failed, the newest first", "↑↓ scroll  Esc back")
    failed = [request for request in reversed(state.ended) if request.error]
    if not (state.tracebacks or failed):
        on.say("Nothing has failed.", on.muted)
    alike: dict[str, list[str]] = {}  # error -> requests, because one error may fail many
    for request in failed:
        alike.setdefault(clean(request.error), []).append(f"r{request.id}")
    for error, names in alike.items():
        on.say(f"{listed(names, NAMED)} failed: {error}", on.bad)
    if failed:
        on.lines.append([])
    for block in reversed(state.tracebacks):
        what, *rest = block.split("\n")
        on.say(what, on.bad, True)
        for line in rest:
            text = line.lstrip(" ")
            on.say(text, indent=1 + min(len(line) - len(text), on.width // 2))
        on.lines.append([])


PAGE = Page(
    "errors",
    "E",
    "Errors",
    "what has failed in this process: tracebacks with file and line",
    draw,
    is_early=True,
)
