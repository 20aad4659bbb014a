"""Two policies, one above the other, on one scale of time.

The problem. Whether a policy is quicker is seen at once if both timelines have the same scale, and
never if each fills the width.

What this file keeps. What is drawn is a `Contest` (`runs.py`), whether it was measured or simulated;
each run says which.

Where next: `runs.py`, the clock and the replay; `state.py`, which races and compares.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from parts.api.handle import Handle
from parts.checks import read_whole
from policies import POLICIES, policy_of
from screen import ink
from screen.ink import clean, wrap
from screen.page import Desk, Page
from screen.panes import aligned, draw_cells, fit_slots
from screen.paper import Paper
from screen.room import RIVALS, EngineRoom, Leg, Race, Read
from screen.runs import FIGURES, Contest, Run, answer_in, in_time, until
from screen.state import NEXT, State, asked, compare, lines_of, race, verdict

FILM = (4.0, 10.0)  # seconds for which the two legs of a race are shown, at least and at most
WIDE = (22, 7, 11, 11, 11, 8, 8)  # a run's name, then its figures
NARROW = (12, 7, 11, 11, 0, 9, 0)


def draw(state: State, on: Paper) -> None:
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
    below = Paper(on.p, on.width, on.height)
    below.say(result, bold=True)
    below.say(contest.note, on.muted)
    kinds = on.legend(ink.PREFILL, ink.DECODE, ink.BLOCKED, ink.HELD, ink.EMPTY)
    on.title(contest.title, legend=kinds)
    if not contest.runs:
        on.lines += below.lines
        return
    room = (on.height - 7 - len(below.lines)) // 2  # lines for each run
    count = len(state.view.engine.slots)
    slots = fit_slots(state, max(1, room + 1))
    part = f"slots {slots[0]}–{slots[-1]}" if len(slots) < count else ""
    figures = aligned(("", *FIGURES), WIDE if on.width >= 80 else NARROW)
    indent = len(figures) - len(figures.lstrip())
    on.axis((1, part), (indent, figures.lstrip()))
    for run in contest.runs:
        draw_run(run, on, slots, longest)
        if room > count:
            on.lines.append([])
    half, whole = f"{longest / 2:.2f} s", f"{longest:.2f} s"
    middle = 4 + (on.width - 5) // 2 - len(half) // 2
    on.axis((4, "0 s"), (middle, half), (on.width - 1 - len(whole), whole))
    on.lines += below.lines
    draw_answers(state, on, contest.runs)


def contest_of(state: State) -> Contest:
    """What was asked for; else the race that runs, or ran last."""
    if state.contest:
        return state.contest
    if state.raced and not state.view.racing:
        return state.raced
    return race(state)


def draw_run(run: Run, on: Paper, slots: Sequence[int], longest: float) -> None:
    """One run: its figures, then a timeline on which `longest` seconds fill the width."""
    widths = WIDE if on.width >= 80 else NARROW
    name = f" {run.policy}, {run.how}" if on.width >= 80 else f" {run.policy}"
    on.pen().put(name, bold=True).to(widths[0]).put(aligned(run.figures, widths[1:]))
    columns = in_time(run, on.width - 5, longest)
    for slot in slots:
        pen = on.pen().put(f"{slot:>3} ", on.muted)
        draw_cells(pen, on.p, columns, slot)
        if run.how == NEXT:
            pen.put(ink.GLYPHS[ink.EMPTY] * (on.width - 5), on.faint)


def draw_answers(state: State, on: Paper, runs: Sequence[Run]) -> None:
    """The runs of a race side by side: what each slot's request has answered so far, its end in
    sight."""
    runs = [run for run in runs if run.requests]
    if on.room < 2 or not runs:
        return
    wide = on.width // len(runs)
    slots = fit_slots(state, on.room - 1)
    on.axis(*((i * wide + 1, f"answers, {run.policy}") for i, run in enumerate(runs)))
    for slot in slots:
        pen = on.pen()
        for i, run in enumerate(runs):
            pen.to(i * wide).put(f"{slot:>3} ", on.muted)
            found = answer_in(run, slot)
            if found:
                number, text = found
                pen.put(f"r{number:<3}", bold=True)
                room = (i + 1) * wide - pen.width - 2
                pen.put((wrap(clean(text), room) or [""])[-1])


# --- the commands -------------------------------------------------------------------------------


def how_many(text: str) -> int:
    return read_whole("race", text, 1, 1000)


def run(room: EngineRoom, reads: Sequence[Read], policies: Sequence[str]) -> Iterator[Race]:
    """The trial: when all requests have ended, these under one policy, then again under the next."""
    engine = room.engine
    own = room.next_policy
    race = Race((), tuple(policies))
    handles: list[Handle] = []
    try:
        while engine.has_work:
            yield race
        for policy in policies:
            # Nothing runs, so this is done at once; the slots forget the leg before
            engine.drain(policy)
            first = engine.sched.steps + 1
            handles = [room.submit(read.ask, read=read) for read in reads]
            leg = Leg(policy, first, None, tuple(handle.id for handle in handles))
            before = race.legs
            race = Race((*before, leg), race.to_race[1:])
            while engine.has_work:
                yield race
            race = race._replace(legs=(*before, leg._replace(last_step=engine.sched.steps)))
        yield race
    finally:
        for handle in handles:
            handle.cancel()
        engine.drain(own)


def obey_race(desk: Desk, rest: str) -> None:
    """A burst of this size under the policies that are named: /race 12 static serial. /race last
    shows the last."""
    state = desk.state
    if rest == "last":
        if not state.raced:
            raise ValueError("no race has been run yet; r runs one")
        show_again(state)
        return
    desk.check_alone("race")
    words = rest.split()
    policies = [policy_of(word).name for word in words if not word[:1].isdigit()] or RIVALS
    size = next((word for word in words if word[:1].isdigit()), str(state.settings.burst))
    asks = desk.asks(how_many(size))
    # The same seeds in each leg, so that all legs sample alike
    seed = state.settings.seed or 0
    state.contest = None if state.view.racing else asked(state, policies)
    desk.kept["race"] = (state.raced, time.monotonic())
    # A chat template may take long, so this is not left to the thread that steps
    reads = [desk.room.read(ask._replace(seed=seed + i)) for i, ask in enumerate(asks)]
    desk.try_out("race", lambda room: run(room, reads, policies))


def obey_compare(desk: Desk, rest: str) -> None:
    desk.state.contest = compare(desk.state, policy_of(rest).name if rest else "")


def show_again(state: State) -> None:
    """The last race, and both of its legs on one clock, if there are two."""
    state.contest = state.raced
    state.film = 0.0 if verdict(state.raced.runs) else None


def look(desk: Desk) -> None:
    """A race that has ended is shown once more: both legs side by side, on one clock."""
    state = desk.state
    now = time.monotonic()
    raced = state.raced
    shown, before = desk.kept.get("race", (None, now))
    # Not if a comparison has been asked for meanwhile
    if raced is not shown and raced and state.contest is None and verdict(raced.runs):
        show_again(state)
    elif state.film is not None:
        longest = max(run.makespan for run in raced.runs)
        least, most = FILM
        state.film += longest / min(max(longest, least), most) * (now - before)
        if state.film >= longest:
            state.film = None
    desk.kept["race"] = (raced, now)


def leave(desk: Desk) -> None:
    desk.state.film = None


def to_the_end(state: State) -> None:
    state.film = None


def tell(state: State) -> list[str]:
    return lines_of(state.contest)


PAGE = Page(
    "race",
    "r",
    "Race",
    f"the same burst under {RIVALS[0]}, then {RIVALS[1]} (measured)",
    draw,
    footer=5,
    obey=obey_race,
    example="12 static serial",
    words=(*POLICIES, "last"),
    read=how_many,
    own={"end": to_the_end},
    look=look,
    leave=leave,
    repeats=True,
    disturbs=True,
)
COMPARE = Page(
    "compare",
    "c",
    "Compare",
    "the last run simulated under two policies (/compare serial)",
    draw,
    footer=4,
    obey=obey_compare,
    example="fair",
    words=[*POLICIES],
    tell=tell,
    repeats=True,
)
