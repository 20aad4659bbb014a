"""Which of two policies serves the same requests faster?

A race measures it: the legs run one after another, each from an idle engine, and are shown on a common clock.
A comparison simulates it: the last busy period is replayed through the scheduler under its own policy and
another one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from experiments.experiment import WAITS, Experiment, disturbed, read_count
from experiments.policy_runs import (
    FIGURES,
    Contest,
    Run,
    answer_in,
    in_time,
    measured,
    renumbered,
    replay,
    terms_of,
    until,
)
from policies import POLICIES, policy_of
from screen.draw import style
from screen.draw.canvas import Canvas, fitting, in_columns
from screen.draw.slots import fit_slots
from screen.draw.style import clean, count, span, wrap
from screen.draw.timeline import draw_cells
from screen.engine_view import ExperimentRecord, ExperimentRun, View
from screen.page import NOTHING_RAN, Key, Page
from screen.state import State, prices
from screen.undisturbed_times import LEAST, on_clock
from screen.workload import Ask

if TYPE_CHECKING:
    from screen.commands import Session

# --- question -------------------------------------------------------------------------------------

RIVALS = tuple(POLICIES)[1::-1]  # static, then continuous

# --- run ------------------------------------------------------------------------------------------


class Race(Experiment):
    """Waits until the engine is idle, then runs the same requests under each policy."""

    what = "race"
    fixes: ClassVar = {
        "budget": "a race is running; its legs have one budget",
        "policy": "a race is running; it sets the policies itself",
    }

    def __init__(self, asks: Sequence[Ask], policies: Sequence[str]):
        super().__init__(RaceRecord((), tuple(policies)))
        self._asks = asks

    def run(self) -> Iterator[RaceRecord]:
        engine = self.engine
        own = self.client.next_policy
        try:
            yield from self.until_idle()
            for policy in self.record.to_race:
                # The engine is idle, so the policy changes immediately. This also clears the slots' caches
                engine.drain(policy)
                first = engine.sched.steps + 1
                handles = [*map(self.client.submit, self._asks)]
                leg = ExperimentRun(policy, first, None, tuple(handle.id for handle in handles))
                before = self.record.legs
                self.update(legs=(*before, leg), to_race=self.record.to_race[1:])
                yield from self.until_idle()
                self.update(legs=(*before, leg._replace(last_step=engine.sched.steps)))
            yield self.record
        finally:
            engine.drain(own)


def obey_race(session: Session, rest: str) -> None:
    """Race a burst of this size under these policies: /race 12 static serial. /race last shows the
    last race."""
    state = session.state
    if rest == "last":
        if not shown_in(state).last.runs:
            raise ValueError("no race has been run yet; r runs one")
        show_again(state)
        return
    session.check_alone(Race.what)
    words = rest.split()
    policies = [policy_of(word).name for word in words if not word[:1].isdigit()] or RIVALS
    size = next((word for word in words if word[:1].isdigit()), str(state.settings.burst))
    asks = session.asks(read_count("race")(size))
    # The same seeds in each leg, so that all legs sample the same tokens
    seed = state.settings.seed or 0
    # Tokenize here and not in the engine's thread, because a chat template may be slow
    asks = [session.client.tokenize(ask._replace(seed=seed + i)) for i, ask in enumerate(asks)]
    shown_in(state).film = None
    session.run_experiment(Race(asks, policies))


def compare(state: State, rival: str = "") -> Contest:
    """Replay the last busy period under its own policy and under another one.

    Both are simulated, because the difference between a measured and a simulated run would include the
    simulation's error. Raise ValueError if there is nothing to compare.
    """
    columns = state.history[state.woke :]
    if not columns:
        raise ValueError("nothing has run yet; b fires a burst")
    seen = {cell.request for column in columns for cell in column.cells} - {None}
    known = [state.requests[id] for id in sorted(seen & state.requests.keys())]
    requests = [request for request in known if request.metrics.output_tokens]
    if len(requests) < 2:
        raise ValueError("one request alone takes as long under every policy; b fires a burst")
    limits, costs = terms_of(state, columns)
    # Several policies if the user changed it
    policies = Counter(column.view.policy for column in columns)
    ran = policies.most_common(1)[0][0]
    rival = rival or next(policy for policy in POLICIES if policy != ran)
    _, moment = on_clock(columns, costs)
    steps = [column.view for column in columns]
    runs = [replay(limits, requests, policy, moment, costs, steps) for policy in (ran, rival)]
    real = measured(", then ".join(policies), columns, requests, costs)
    paid = (
        (costs.seconds(1, 0), "with one row"),
        (costs.row, "more for each row"),
        (costs.chunk, "for a chunk"),
    )
    said = (
        f"{span(s)} {what}" if s > LEAST else f"too noisy to say how much {what}"
        for s, what in paid
    )
    note = (
        f"Simulated on the times of undisturbed steps: {', '.join(said)}. What really ran ({real.policy}) took "
        f"{real.figures['steps']} steps, {real.figures['makespan']} on that clock; on the engine's clock "
        f"{real.on_the_engines}."
    )
    left = state.view.engine.submitted - state.view.engine.finished
    if left:
        run = sum(r.reason is None for r in requests)
        mute = f"; {left - run:,} more have no token yet" if left > run else ""
        note = f"Not over: {run:,} of them still run, and count as far as they are{mute}. {note}"
    return Contest(f"Compare: {ran} and {rival}, {count(len(requests), 'request')}", runs, note)


def obey_compare(session: Session, rest: str) -> None:
    rival = policy_of(rest).name if rest else ""
    session.state.kept["compare"] = compare(session.state, rival)


# --- record ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RaceRecord(ExperimentRecord):
    """The same requests under several policies, one after another."""

    name = "race"
    doing = "⚑ racing"
    is_one_run = False
    legs: tuple[ExperimentRun, ...]  # the burst's run under each policy so far
    to_race: tuple[str, ...]  # policies of the remaining legs

    @property
    def parts(self) -> tuple[ExperimentRun, ...]:
        return self.legs


def is_racing(view: View) -> bool:
    return isinstance(view.experiment, RaceRecord)


def legs_in(view: View) -> tuple[ExperimentRun, ...]:
    """Return the legs of the running race, or of the last experiment if it was a race."""
    return view.record.legs if isinstance(view.record, RaceRecord) else ()


def race_in(state: State) -> Contest:
    """Return the race so far. Requests are numbered from 1 in each leg, so that legs can be compared."""
    runs: list[Run] = []
    racing = is_racing(state.view)
    legs = legs_in(state.view)
    costs = prices(state)
    for leg in legs:
        numbers = {id: number for number, id in enumerate(leg.requests, 1)}
        columns = renumbered(state.between(leg.first_step, leg.stop), numbers)
        known = {n: state.requests[id] for id, n in numbers.items() if id in state.requests}
        how = "measured" if leg.last_step else "running …" if racing else "cut short"
        run = measured(leg.policy, columns, [*known.values()], costs, how)
        runs.append(run._replace(requests=known))
    if racing:
        runs += [Run(policy, NEXT, [], []) for policy in state.view.record.to_race]
    title = f"Race: {' and '.join(run.policy for run in runs)}"
    if not legs:
        return Contest(title, [], f"{disturbed(state.view, WAITS)}.")
    title = f"{title}, {count(len(legs[0].requests), 'request')}"
    if racing:
        return Contest(title, runs, f"{disturbed(state.view, RACE_RUNS)}.")
    took = "; ".join(f"{run.policy} {run.on_the_engines}" for run in runs)
    note = f"Each step counts as long as steps of its kind take undisturbed. On the engine's clock: {took}."
    return Contest(title, runs, note)


def verdict(runs: Sequence[Run]) -> str:
    """Compare two finished runs in one sentence."""
    if len(runs) < 2 or any(
        run.how in ("running …", "cut short") or not run.makespan for run in runs
    ):
        return ""
    slow, fast = sorted(runs, key=lambda run: -run.makespan)
    if slow.makespan < 1.01 * fast.makespan and len(fast.ttfts) <= len(fast.columns[0].cells):
        alike = f"{fast.policy} and {slow.policy} take {span(fast.makespan)} each"
        return f"{alike}: there are no more requests than slots, so none ever waits for one."
    steps = f"{len(fast.columns):,} steps instead of {len(slow.columns):,}"
    times = f"{span(fast.makespan)} instead of {span(slow.makespan)}: {slow.makespan / fast.makespan:.2f} times as fast"
    words = f"{fast.policy} takes {steps}, {times} as {slow.policy}"
    if slow.ttft_mean and fast.ttft_mean:
        words += f"; the first token comes after {span(fast.ttft_mean)} instead of {span(slow.ttft_mean)} on average"
    return words + "."


# --- drawing --------------------------------------------------------------------------------------

FILM = (4.0, 10.0)  # minimum and maximum seconds of the animation
NAME = 23  # characters for a policy and how it ran
SHORT_NAME = 12  # characters for the policy only, on a narrow screen
TALLEST = 3  # maximum number of lines per slot
RACE_RUNS = "The legs run one after the other. Then both are shown together, on one clock."
NEXT = "runs next"
NO_RACE = Contest("Race", [], "No race has been run: r runs one.")
NO_COMPARISON = Contest("Compare", [], NOTHING_RAN)


@dataclass
class Shown:
    """The state of the race page."""

    last: Contest = NO_RACE  # the last finished race
    # position of the animation in seconds on the common clock; None: not animated
    film: float | None = None
    began: float | None = None  # when the animation began


def shown_in(state: State) -> Shown:
    return state.kept.setdefault("race", Shown())


def draw(state: State, on: Canvas) -> None:
    shown = shown_in(state)
    if is_racing(state.view):
        draw_contest(state, on, race_in(state))
    else:
        film = shown.film if on.has_keys else None  # a log shows only the result
        draw_contest(state, on, shown.last, film)


def draw_comparison(state: State, on: Canvas) -> None:
    draw_contest(state, on, state.kept.get("compare", NO_COMPARISON))


def draw_contest(state: State, on: Canvas, contest: Contest, film: float | None = None) -> None:
    """Draw the runs with their figures, and a sentence about the winner."""
    longest = max([run.makespan for run in contest.runs], default=0) or 1.0
    result = verdict(contest.runs)
    if film is not None:
        result = ""
        runs = [until(run, film) for run in contest.runs]
        seconds = f"{film:.2f} of {longest:.2f} s"
        note = f"Both legs on one clock: {seconds}. End leads to the result."
        contest = replace(contest, runs=runs, note=note)
    below = Canvas(on.p, on.width, on.height)
    below.say(result, bold=True)
    below.say(contest.note, on.muted)
    kinds = on.legend(style.PREFILL, style.DECODE, style.BLOCKED, style.HELD, style.EMPTY)
    on.title(contest.title, legend=kinds)
    if not contest.runs:
        on.lines += below.lines
        return
    room = (on.height - 7 - len(below.lines)) // 2  # lines for each run
    many = len(state.view.engine.slots)
    slots = fit_slots(state, max(1, room + 1))
    # Use several lines per slot on a tall screen if the answers below still have a line each
    tall = max(1, min(TALLEST, (on.height - 8 - len(below.lines) - many) // (2 * many)))
    part = f"slots {slots[0]}–{slots[-1]}" if len(slots) < many else ""
    name = NAME if on.width >= 80 else SHORT_NAME
    figures = fitting(FIGURES, on.width - name)
    on.axis((1, part), (name, in_columns(figures, {each.title: each.title for each in figures})))
    for run in contest.runs:
        words = f"{run.policy}, {run.how}" if name == NAME else run.policy
        pen = on.pen().put(f" {words}", bold=True)
        pen.to(name).put(in_columns(figures, run.figures))
        draw_run(run, on, slots, longest, tall)
        if room > many:
            on.lines.append([])
    half, whole = f"{longest / 2:.2f} s", f"{longest:.2f} s"
    middle = 4 + (on.width - 5) // 2 - len(half) // 2
    on.axis((4, "0 s"), (middle, half), (on.width - 1 - len(whole), whole))
    on.lines += below.lines
    draw_answers(state, on, contest.runs)


def draw_run(run: Run, on: Canvas, slots: Sequence[int], longest: float, tall: int) -> None:
    """Draw the timeline of a run. The width is `longest` seconds."""
    columns = in_time(run, on.width - 5, longest)
    for slot in slots:
        for line in range(tall):
            pen = on.pen().put("" if line else f"{slot:>3}", on.muted).to(4)
            draw_cells(pen, on.p, columns, slot, numbered=not line)
            if run.how == NEXT:
                pen.put(style.GLYPHS[style.EMPTY] * (on.width - 5), on.faint)


def draw_answers(state: State, on: Canvas, runs: Sequence[Run]) -> None:
    """Draw the end of each slot's answer in all legs, side by side."""
    runs = [run for run in runs if run.requests]
    if on.lines_left < 2 or not runs:
        return
    wide = on.width // len(runs)
    slots = fit_slots(state, on.lines_left - 1)
    on.axis(*((i * wide + 1, f"answers, {run.policy}") for i, run in enumerate(runs)))
    tall = max(1, on.lines_left // len(slots))
    for slot in slots:
        pens = [on.pen() for _ in range(tall)]
        for i, run in enumerate(runs):
            pens[0].to(i * wide).put(f"{slot:>3} ", on.muted)
            found = answer_in(run, slot)
            if found:
                number, text = found
                pens[0].put(f"r{number:<3}", bold=True)
                for pen, line in zip(pens, wrap(clean(text), wide - 10)[-tall:], strict=False):
                    pen.to(i * wide + 8).put(line)


def show_again(state: State) -> None:
    """Show the last race, animated if two legs can be compared."""
    shown = shown_in(state)
    shown.film = 0.0 if verdict(shown.last.runs) else None
    shown.began = None


def show_result(state: State, before: View) -> None:
    """Show a race that has just finished."""
    view = state.view
    if is_racing(view):
        return
    if legs_in(view) and (is_racing(before) or view.record is not before.record):
        shown_in(state).last = race_in(state)
        show_again(state)


def advance_film(session: Session) -> bool:
    shown = shown_in(session.state)
    if shown.film is None:
        return False
    now = time.monotonic()
    shown.began = shown.began or now
    longest = max(run.makespan for run in shown.last.runs)
    least, most = FILM
    film = (now - shown.began) * longest / min(max(longest, least), most)
    shown.film = film if film < longest else None
    return True


def to_the_end(state: State) -> None:
    shown_in(state).film = None


RACE = Page(
    "race",
    "r",
    "Race",
    f"the same burst under {RIVALS[0]}, then {RIVALS[1]} (measured)",
    draw,
    footer=5,
    obey=obey_race,
    example="12 static serial",
    words=(*POLICIES, "last"),
    read=read_count("race"),
    own={"end": to_the_end},
    on_view=show_result,
    poll=advance_film,
    leave=lambda session: to_the_end(session.state),
    repeats=True,
    disturbs=True,
)
COMPARE = Page(
    "compare",
    "c",
    "Compare",
    "the last run simulated under two policies (/compare serial)",
    draw_comparison,
    footer=4,
    obey=obey_compare,
    example="fair",
    words=[*POLICIES],
    repeats=True,
)
PAGES = (
    COMPARE,
    RACE,
    Key(
        "R",
        "R",
        "command('/race last')",
        "Last race",
        "the last race once more: its timelines and its figures",
    ),
)
