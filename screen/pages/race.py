"""Two policies, one above the other, on one scale of time.

The problem. Whether a policy is quicker is seen at once if both timelines have the same scale, and
never if each fills the width.

What this file keeps. What is drawn is a `Contest` (`runs.py`), whether it was measured or simulated;
each run says which.

Where next: `runs.py`, the clock and the replay; `state.py`, which races and compares.
"""

from __future__ import annotations

from collections.abc import Sequence

from screen import ink
from screen.ink import Line, Palette, Pen, axis, clean, heading, legend, wrap
from screen.panes import aligned, draw_cells, fit_slots
from screen.runs import FIGURES, Contest, Run, answer_in, in_time, until
from screen.state import NEXT, State, race, verdict

WIDE = (22, 7, 11, 11, 11, 8, 8)  # a run's name, then its figures
NARROW = (12, 7, 11, 11, 0, 9, 0)


def draw_contest(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """Each run under its figures, and a sentence that says which policy won."""
    contest = contest_of(state)
    longest = max([run.makespan for run in contest.runs], default=0) or 1.0
    is_film = state.film is not None and contest is state.raced
    result = "" if is_film else verdict(contest.runs)
    if is_film:
        runs = [until(run, state.film) for run in contest.runs]
        seconds = f"{state.film:.2f} of {longest:.2f} s"
        shown = f"Both legs on one clock: {seconds}. End leads to the result."
        contest = contest._replace(runs=runs, note=shown)
    words = [Pen().put(f" {line}", p.text, True).line for line in wrap(result, width - 2) if line]
    words += [Pen().put(f" {line}", p.muted).line for line in wrap(contest.note, width - 2) if line]
    kinds = legend(p, ink.PREFILL, ink.DECODE, ink.BLOCKED, ink.HELD, ink.EMPTY)
    title = heading(p, width, contest.title, "Esc back", kinds, do="screen.dismiss")
    if not contest.runs:
        return [title, *words]
    room = (height - 7 - len(words)) // 2  # lines for each run
    count = len(state.view.engine.slots)
    slots = fit_slots(state, max(1, room + 1))
    part = f"slots {slots[0]}–{slots[-1]}" if len(slots) < count else ""
    figures = aligned(("", *FIGURES), WIDE if width >= 80 else NARROW)
    indent = len(figures) - len(figures.lstrip())
    lines = [title, axis(p, (1, part), (indent, figures.lstrip()))]
    for run in contest.runs:
        lines += draw_run(run, p, width, slots, longest)
        if room > count:
            lines.append([])
    half, whole = f"{longest / 2:.2f} s", f"{longest:.2f} s"
    middle = 4 + (width - 5) // 2 - len(half) // 2
    lines.append(axis(p, (4, "0 s"), (middle, half), (width - 1 - len(whole), whole)))
    lines += words
    return [*lines, *draw_answers(state, p, width, height - len(lines), contest.runs)]


def contest_of(state: State) -> Contest:
    """What was asked for; else the race that runs, or ran last."""
    if state.contest:
        return state.contest
    if state.raced and not state.view.racing:
        return state.raced
    return race(state)


def draw_run(run: Run, p: Palette, width: int, slots: Sequence[int], longest: float) -> list[Line]:
    """One run: its figures, then a timeline on which `longest` seconds fill the width."""
    widths = WIDE if width >= 80 else NARROW
    name = f" {run.policy}, {run.how}" if width >= 80 else f" {run.policy}"
    pen = Pen().put(name, p.text, True).to(widths[0])
    lines = [pen.put(aligned(run.figures, widths[1:]), p.text).line]
    columns = in_time(run, width - 5, longest)
    for slot in slots:
        pen = Pen().put(f"{slot:>3} ", p.muted)
        draw_cells(pen, p, columns, slot)
        if run.how == NEXT:
            pen.put(ink.GLYPHS[ink.EMPTY] * (width - 5), p.faint)
        lines.append(pen.line)
    return lines


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
