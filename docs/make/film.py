"""A race as an animated picture: python docs/make/film.py docs/race.svg [--burst 24] [--model demo]

Both legs are drawn on the clock that interruptions do not reach, each from its own beginning. A
cover moves to the right over both, so each step shows at its moment, slower than it ran. There is
no script in it, so it plays in an `<img>`, too. Where animations do not play, all of it shows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import tui
from parts.files import write_whole
from screen.ink import BLOCKED, DARK, DECODE, LIGHT, PREFILL, Palette, ink_on, span
from screen.pages.race import shown_in, verdict
from screen.room import EngineRoom
from screen.runs import Contest, Run
from screen.session import Session
from screen.state import State
from screen.timeline import Column, useful_of

PLAYS, WHOLE = 14.0, 19.0  # seconds: the longest leg, and before all begins anew
LEFT, WIDE, ROW = 34, 880, 15  # pixels: what stands left of the timelines, a timeline, a slot
HEAD = 2 * ROW  # what stands above a leg. The crosses are a pattern that repeats with the rows.


def colours(p: Palette, requests: Iterable[int]) -> str:
    hues = (f".r{r}{{fill:{p.fill(r)}}}text.r{r}{{fill:{ink_on(p.fill(r))}}}" for r in requests)
    words = f"text{{fill:{p.text}}}.muted{{fill:{p.muted}}}.now{{fill:{p.accent}}}.back{{fill:{p.back}}}"
    return f"{words}.empty{{stroke:{p.faint}}}.shut{{stroke:{p.bad}}}.read{{stroke:{p.back}}}{''.join(hues)}"


def animated(name: str, changes: Iterable[tuple[float, str]], how: str = "step-end") -> str:
    """CSS: the class of this name changes at these seconds."""
    moments = "".join(f"{100 * at / WHOLE:.2f}%{{{what}}}" for at, what in changes)
    return f".{name}{{animation:{name} {WHOLE}s {how} infinite}}@keyframes {name}{{{moments}}}"


def stretches(
    columns: Sequence[Column], slot: int
) -> Iterable[tuple[int, int | None, float, float]]:
    """What a slot did, one after the other: kind, request, from, to."""
    for (kind, request), steps in groupby(columns, key=lambda column: column.cells[slot]):
        first, *others = steps
        yield kind, request, first.began, (others or [first])[-1].ended


def ends(columns: Sequence[Column]) -> list[float]:
    """When each request had its last token, in order."""
    worked = ((c, cell) for c in columns for cell in c.cells if cell.kind in (PREFILL, DECODE))
    return sorted({cell.request: c.ended for c, cell in worked}.values())


def draw_slot(run: Run, slot: int, y: float, scale: float) -> Iterable[str]:
    yield f'<text x="{LEFT - 8}" y="{y + 11}" class="end small muted">{slot}</text>'
    yield f'<path class="empty" d="M{LEFT} {y + 6.5}h{WIDE}" stroke-dasharray="1 6"/>'
    for kind, request, began, ended in stretches(run.columns, slot):
        x, wide = LEFT + began * scale, max(1.5, (ended - began) * scale)
        box = f'x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW - 2}"'
        if kind == BLOCKED:
            yield f'<rect {box} class="back"/><rect {box} fill="url(#shut)"/>'
        elif kind == PREFILL:
            yield f'<rect {box} class="r{request}"/><rect {box} fill="url(#read)"/>'
        elif kind == DECODE:
            yield f'<rect {box} class="r{request}"/>'
            if wide > 8 * len(str(request)) + 4:
                yield f'<text x="{x + 3:.1f}" y="{y + 10}" class="small bold r{request}">{request}</text>'


def draw_leg(run: Run, name: str, top: float, scale: float, slower: float) -> Iterable[str]:
    """A timeline under its figures. `scale`: pixels for a second. `slower`: of a second, so many
    are made."""
    slots, done = len(run.columns[0].cells), ends(run.columns)
    last, counts = len(done), [(0.0, "transform:none")]
    counts += [
        (at * slower, f"transform:translateY(-{20 * (i + 1)}px)") for i, at in enumerate(done)
    ]
    yield f"<style>.c{name}{{transform:translateY(-{20 * last}px)}}{animated(f'c{name}', counts)}"
    yield f"{animated(f'o{name}', [(0.0, 'opacity:0'), (run.makespan * slower, 'opacity:1')])}</style>"
    yield f'<text x="{LEFT}" y="{top - 8}" class="bold">{run.policy}</text>'
    yield f'<svg x="{LEFT + 110}" y="{top - 23}" width="260" height="20"><g class="c{name}">'
    yield from (f'<text y="{15 + 20 * i}">{i} of {last} answered</text>' for i in range(last + 1))
    figures = (
        f"{len(run.columns):,} steps · {span(run.makespan)} · useful {useful_of(run.columns):.0f} %"
    )
    yield f'</g></svg><text x="{LEFT + WIDE}" y="{top - 8}" class="end o{name}">{figures}</text>'
    for slot in range(slots):
        yield from draw_slot(run, slot, top + slot * ROW, scale)
    yield f'<rect class="back cover" x="{LEFT}" y="{top}" width="{WIDE + 20}" height="{slots * ROW}"/>'
    yield f'<rect class="now cover" x="{LEFT}" y="{top}" width="1.5" height="{slots * ROW}"/>'


def pattern(name: str, wide: int, tall: int, path: str) -> str:
    size = f'width="{wide}" height="{tall}" patternUnits="userSpaceOnUse"'
    return f'<pattern id="{name}" {size}><path class="{name}" d="{path}"/></pattern>'


def draw(contest: Contest) -> str:
    """The whole picture."""
    longest = max(run.makespan for run in contest.runs)
    slots, body = len(contest.runs[0].columns[0].cells), []
    for number, run in enumerate(contest.runs):
        top = 2 * HEAD + number * (slots * ROW + HEAD)
        body += draw_leg(run, str(number), top, WIDE / longest, PLAYS / longest)
    below = len(contest.runs) * (slots * ROW + HEAD) + HEAD + 14
    for part, anchor in ((0, "start"), (0.5, "middle"), (1, "end")):
        place = f'x="{LEFT + part * WIDE}" y="{below}" style="text-anchor:{anchor}"'
        body.append(
            f'<text {place} class="small muted">{f"{part * longest:.2f}" if part else 0} s</text>'
        )
    words = verdict(contest.runs).partition(";")[0].rstrip(".")
    body.append(f'<text x="{LEFT}" y="{below + 28}" class="now said">{words}.</text>')
    cells = (cell for run in contest.runs for column in run.columns for cell in column.cells)
    requests = sorted({cell.request for cell in cells} - {None})
    title = (
        f"{len(requests)} requests, {slots} slots; {PLAYS / longest:.1f} times slower than it ran"
    )
    gone = f"transform:translateX({WIDE + 30}px)"
    moves = [
        (0.0, "transform:none"),
        (PLAYS, f"transform:translateX({WIDE}px)"),
        (PLAYS + 0.01, gone),
    ]
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDE + 14} {below + 42}">
<style>{colours(LIGHT, requests)}@media(prefers-color-scheme:dark){{{colours(DARK, requests)}}}
text{{font:13px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}}
.bold{{font-weight:bold}}.small{{font-size:11px}}.end{{text-anchor:end}}.shut,.read{{fill:none;stroke-width:1.2}}
.cover{{{gone}}}{animated("cover", moves, "linear")}{animated("said", [(0.0, "opacity:0"), (PLAYS, "opacity:1")])}
@media(prefers-reduced-motion:reduce){{*{{animation:none!important}}}}</style>
{pattern("shut", 8, ROW, "M1 4l5 5m0-5l-5 5")}{pattern("read", 3, 3, "M0 3L3 0")}
<rect class="back" width="100%" height="100%"/>
<text x="{LEFT}" y="22" class="muted">{title}</text>
<text x="{LEFT + WIDE}" y="22" class="end muted">hatched: prefill, full: decode, ×: blocked</text>
{chr(10).join(body)}
</svg>
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--burst", type=int, default=24)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    room = EngineRoom(partial(tui.load_engine, tui.parse_arguments(["--model", args.model])))
    session = Session(room, State(args.model))
    room.start()
    session.obey(f"/race {args.burst}")
    try:
        while not shown_in(session.state).last and session.state.view.stage != "failed":
            time.sleep(0.05)
            session.look()
    finally:
        room.stop(10)
    if not shown_in(session.state).last:
        sys.exit(f"film.py: {session.state.view.error}")
    try:
        write_whole(args.path, draw(shown_in(session.state).last))
    except OSError as error:
        sys.exit(f"docs/make/film.py: {error.filename}: {error.strerror}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
