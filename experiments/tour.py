"""How does the engine work? Each of eight scenes asks a question, lets the engine answer, and explains.

    set the stage -> ask -> a guess -> run -> explain -> the next scene

A scene (`tour_scenes.py`) sends the same lines that a user would type (`Session.obey`), and the tour shows the
keys for them. The player (`Tour._play`) and each scene are generators; `Tour.advance` resumes them as far as
possible without waiting. `restoring` always restores policy, budget, pause, settings and selection, and
cancels the tour's requests. No part of a scene takes longer than `LONGEST`.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len

from base.error_reports import describe, show_fault
from base.installation import command
from experiments.tour_scenes import SCENES, STOP, WAIT, Explanation, Question, Scene, Sight
from screen.draw.canvas import Canvas
from screen.draw.status import others_of
from screen.draw.style import clean, shorten
from screen.engine_view import Fault
from screen.page import Key, Page
from screen.state import State
from screen.workload import Settings

if TYPE_CHECKING:
    from screen.commands import Session

# --- question -------------------------------------------------------------------------------------

HURRY = 8.0  # seconds after which a scene runs at full speed
LONGEST = 14.0  # seconds after which a scene is cut short
LEAST_SLOTS = 4  # minimum slots for the scenes to show anything
# Run before each scene, so that nothing runs and all slots are empty
CLEARED = ("/pause", "/cancel all", "/slow off", "/budget off", "/policy continuous")
# Fields of the state that the tour changes
FIELDS = ("settings", "prompts", "lower", "has_chosen", "zoom", "cursor", "selected")
OFFER = "New here? T takes a tour. Esc: do not offer it again."
DECLINED = "T begins the tour, whenever you like"
FAREWELL = (
    "That was the tour. b fires a burst, r runs a race, w says why a request waited, ? explains "
    "every key and word; and course/ladder climbs from one token to an engine in seven short programs."
)

# --- run ------------------------------------------------------------------------------------------

RUNS = "enter: at full speed · esc: leave"
COMES = "the tour begins when the model is loaded"


class Tour:
    """Plays scenes one after another. No method blocks. `now`: a clock in seconds."""

    def __init__(
        self,
        session: Session,
        now: Callable[[], float] = time.monotonic,
        scenes: Sequence[Scene] = SCENES,
    ):
        self.session = session
        self.state = session.state
        self.waits = False  # waiting for the user
        self._runs = False  # a scene is running and can be sped up
        self._now = now
        self._scenes = scenes
        self._right = 0  # number of correct guesses
        self._playing = self._play()
        self.advance()

    # --- input from the user

    def guess(self, answer: int) -> None:
        """Record the user's guess, counted from 1, if a question is open and has that answer."""
        if self.state.strip.asks and 1 <= answer <= len(self.state.strip.answers):
            self.seen.guess = answer
            self.go_on()

    def go_on(self) -> None:
        """Continue without a guess, or with the next scene. Speed up a scene that is running."""
        if self.waits:
            self.waits = False
            self.advance()
        elif self._runs:
            self.seen.hurries = True
            self.session.obey("/slow off")
            self.session.obey("/resume")

    def leave(self) -> None:
        """Leave the tour immediately and restore the previous state."""
        self._playing.close()
        self.state.strip = None

    # --- playing

    def advance(self) -> None:
        """Continue as far as possible without waiting."""
        has_failed = self.state.view.stage == "failed"
        if has_failed or not (self.waits or next(self._playing, "over") is None):
            self.leave()

    def _play(self) -> Iterator[None]:
        """Play the tour. Each `yield` returns control to the screen."""
        check_idle(self.session)
        self.state.strip = TourRecord(0, 0, "", "", hint=COMES)
        while self.state.view.stage != "ready":
            yield
        check_idle(self.session)
        with restoring(self.session):
            for number, scene in enumerate(self._scenes, 1):
                self._number = number
                self.scene = scene
                try:
                    yield from self._play_scene()
                except ValueError as error:
                    self._give_up(str(error))
                except Exception as error:  # a bug in the scene
                    show_fault(f"the scene {self.scene.title!r} failed", error)
                    self._give_up(f"{describe(error)}; E shows where")
                yield from self._until_the_user()
            self._end()
            yield from self._until_the_user()

    def _play_scene(self) -> Iterator[None]:
        """Run the lines of a story. If the scene is late, skip lines and waits."""
        self._set_stage()
        yield from self._until_next_view()
        for line in self.scene.story(self.seen):
            if isinstance(line, Question):
                yield from self._ask(line)
            elif isinstance(line, Explanation):
                self._judge(line)
            elif line in (WAIT, STOP):
                if line == STOP:
                    self._runs = False
                    self.session.obey("/pause")
                yield from self._until_quiet()
            elif not self.seen.late:
                self._obey(line)

    def _until_the_user(self) -> Iterator[None]:
        self._runs = False
        self.waits = True
        while self.waits:
            yield

    def _until_quiet(self) -> Iterator[None]:
        """Wait until the view shows the effect of all lines so far."""
        while not self.seen.late:
            yield from self._until_next_view()
            if self.session.handled and not self.state.view.stepping:
                return

    def _until_next_view(self) -> Iterator[None]:
        yield
        spent = self._now() - self._began
        self.seen.late = spent >= LONGEST
        if spent >= HURRY and not self.seen.hurries:
            self.go_on()
        if self._runs and self.seen.found:
            self._change_hint(f"{self.seen.found.so_far} · {RUNS}")
        faults = self.state.faults[self._faults :]
        if faults:  # a prompt could not be submitted
            raise ValueError(faults[0].message)

    def _obey(self, line: str) -> None:
        if len(line) > 1:
            self.session.obey(line)
        word = self.session.menu.pressed(line)
        if word not in self._pressed:
            self._pressed.append(word)

    def _set_stage(self) -> None:
        for line in CLEARED:
            self.session.obey(line)
        self.state.settings = Settings(speculate=False)
        self.state.prompts = self.scene.prompts
        self.state.cursor = None
        self.state.selected = 0
        self.state.zoom = None
        self.seen = Sight(self.state)
        self._faults = len(self.state.faults)
        self._pressed: list[str] = []
        self._began = self._now()
        self._show("The stage is being set …", "esc: leave")

    # --- output of the tour

    def _ask(self, question: Question) -> Iterator[None]:
        answers = tuple(question.answers)
        hint = f"1–{len(answers)}: your guess · enter: no guess · esc: leave"
        self._show(question.text, hint, answers=answers, asks=True)
        yield from self._until_the_user()
        self._began = self._now()  # the time limit starts again for the run
        self._runs = True
        self._change_hint(f"it runs … · {RUNS}", asks=False, guess=self.seen.guess)
        yield from self._until_next_view()

    def _judge(self, told: Explanation) -> None:
        guess = self.seen.guess
        self._right += guess == told.right
        self._explain(
            told.text,
            verdict=judged(told.right, guess, self.state.strip.answers),
            place=line_of(*self.scene.place),
            pressed=tuple(self._pressed),
        )

    def _give_up(self, why: str) -> None:
        """Say that the scene failed. The tour continues with the next one."""
        late = f" within {LONGEST:g} s" if self.seen.late else ""
        self._explain(f"This scene failed{late}: {clean(why)}.")

    def _explain(self, text: str, **more: object) -> None:
        # Mention other programs next to the figures, because they slow steps down
        others = others_of(self.state.view)
        note = f" · {others}" if others else ""
        self._show(text, f"enter: go on · esc: leave{note}", **more)

    def _end(self) -> None:
        came = f"{self._right} of your guesses came true." if self._right else ""
        hint = "enter, esc: settings and policy as they were before"
        self._show(FAREWELL, hint, title="the end", verdict=came)

    def _show(self, text: str, hint: str, title: str = "", **more: object) -> None:
        title = title or self.scene.title
        self.state.strip = TourRecord(
            self._number, len(self._scenes), title, text, hint=hint, **more
        )

    def _change_hint(self, hint: str, **more: object) -> None:
        self.state.strip = replace(self.state.strip, hint=hint, **more)


@contextmanager
def restoring(session: Session) -> Iterator[None]:
    """Reserve the engine and the screen for the tour, and restore their state afterwards."""
    client = session.client
    state = session.state
    view = state.view
    limits = view.engine.limits
    policy = view.engine.draining_to or view.engine.policy
    budget = None if limits == view.made_with else limits.budget
    eases = session.eases
    is_fresh = not state.history
    fields = {name: getattr(state, name) for name in FIELDS}
    session.eases = False
    session.stays = False  # experiments end without waiting for the user
    try:
        yield
    finally:
        client.cancel(None)
        client.switch(policy)
        client.set_budget(budget)
        client.slow(view.slow)
        client.pause(view.paused)
        session.eases = eases
        session.stays = True  # experiments again run until their page is closed
        if is_fresh:
            state.begin_anew()
        for name, value in fields.items():
            setattr(state, name, value)


def check_idle(session: Session) -> None:
    """Raise ValueError if the tour cannot start now."""
    view = session.state.view
    session.check_alone("tour")
    if not session.handled:  # otherwise the tour would restore stale values
        raise ValueError("the last keys have not reached the engine yet; press T again")
    if view.busy or view.load:
        raise ValueError(
            "the tour needs an idle engine: X cancels all requests, l ends a steady load"
        )
    slots = view.engine.limits.slots if view.engine else LEAST_SLOTS
    if slots < LEAST_SLOTS:
        raise ValueError(
            f"the tour needs {LEAST_SLOTS} slots, and there are {slots}; start with --slots {LEAST_SLOTS}"
        )


def obey(session: Session, rest: str) -> str:
    if not session.has_chats:
        raise ValueError(
            f"the tour needs a screen; {command('tui.py')} --plain --tour tells it in lines"
        )
    session.state.kept["tour"] = Tour(session)
    session.state.offer = ""
    session.state.chatting = False
    return COMES if session.state.view.stage == "loading" else ""


def advance(session: Session) -> bool:
    """Advance the tour. A tour requested while the model was loading may be refused now."""
    state = session.state
    told = state.strip
    try:
        state.kept["tour"].advance()
    except ValueError as error:
        state.strip = None
        state.faults.append(Fault(str(error)))
    return state.strip is not told


def press(state: State, act: Callable[[Tour], None]) -> None:
    """Handle a key of the tour."""
    act(state.kept["tour"])


OWN = {
    "enter": partial(press, act=Tour.go_on),
    "space": partial(press, act=Tour.go_on),
    "escape": partial(press, act=Tour.leave),
}
for number in range(1, 5):
    OWN[str(number)] = partial(press, act=partial(Tour.guess, answer=number))


def run_plain_tour(session: Session) -> int:
    """Run the tour as text: print each question, read a guess from standard input, and explain. Return the
    exit code."""
    tour = Tour(session)
    told: TourRecord | None = None
    while session.state.strip:
        now = replace(session.state.strip, hint="")  # the hint changes with each token
        if now != told:
            told = now
            print("\n".join(in_lines(session.state.strip)), flush=True)
        elif tour.waits:
            obey_line(tour, sys.stdin.readline())
        time.sleep(0.05)
        session.refresh()
        tour.advance()
    if session.state.view.stage == "failed":
        print(f"nanobatch: {session.state.view.error}", file=sys.stderr)
        return 2
    return 0


def obey_line(tour: Tour, line: str) -> None:
    """Handle a line of standard input: a number is a guess, q leaves, anything else continues."""
    word = line.strip().lower()
    if word in ("q", "quit", "/quit", "esc", "\x1b"):
        tour.leave()
    elif word.isdecimal() and tour.state.strip.asks:
        tour.guess(int(word))
    else:
        tour.go_on()


# --- record ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TourRecord:
    """The current scene: its question, the user's guess, and the explanation."""

    scene: int  # counted from 1
    scenes: int
    title: str
    text: str  # the question or the explanation
    answers: tuple[str, ...] = ()
    asks: bool = False  # waits for an answer
    guess: int | None = None  # counted from 1
    verdict: str = ""  # the correct answer
    pressed: tuple[str, ...] = ()  # keys with the same effect as the scene's lines
    place: str = ""  # file, line and function of the code
    hint: str = ""  # the available keys


def judged(right: int, guess: int | None, answers: Sequence[str]) -> str:
    """Return the correct answer, and whether the user guessed it."""
    if not 1 <= right <= len(answers):
        return "None of the answers was right."
    said = f'{right}: "{answers[right - 1]}".'
    if guess is None:
        return f"It was {said}"
    return f"Right, it was {said}" if guess == right else f"You said {guess}; it was {said}"


ROOT = Path(__file__).parents[1]


def line_of(file: str, name: str) -> str:
    """Return the place of a function, such as "sched.py:234  Scheduler._admit"."""
    begins = None
    with suppress(OSError, UnicodeError):  # the file may be missing while it is edited
        text = (ROOT / file).read_text(encoding="utf-8")
        begins = re.search(rf"^ *(def|static void) {name.rpartition('.')[2]}\(", text, re.MULTILINE)
    line = f":{text.count(chr(10), 0, begins.start()) + 1}" if begins else ""
    return f"{file}{line}  {name}"


# --- drawing --------------------------------------------------------------------------------------


def draw(state: State, on: Canvas) -> None:
    """Draw the tour: the heading, the text, and as much of the rest as fits."""
    told = state.strip
    if told is None:
        return
    title = f"Tour {told.scene} of {told.scenes}: {told.title}"
    on.heading(title, "esc leaves, and restores everything", do="own('escape')")
    on.say(told.text)
    draw_answers(told, on)
    on.say(told.verdict, on.accent, True)
    if told.place:  # never shortened, because users copy it
        pen = on.pen().put(f" {told.place}", bold=True).put("   try it:", on.muted)
        for i, pressed in enumerate(told.pressed):
            if pen.width + cell_len(pressed) + 2 > on.width:
                pen = on.pen()
            comma = "," * (i + 1 < len(told.pressed))
            pen.put(f" {pressed}{comma}", on.muted)
    del on.lines[on.height - 1 :]
    hint = shorten(state.said or told.hint, on.width - 2)
    on.pen().put(f" {hint}", on.accent if state.said else on.muted, do="own('enter')")


def draw_answers(told: TourRecord, on: Canvas) -> None:
    """Draw the answers, as many per line as fit. Each can be clicked."""
    pen = None
    for number, answer in enumerate(told.answers, 1):
        text = shorten(f"{number} {answer}", on.width - 4)
        if pen is None or pen.width + cell_len(text) + 3 > on.width:
            pen = on.pen().put(" ")
        else:
            pen.put("   ")
        is_guess = told.guess == number
        pen.put("▸" if is_guess else " ", on.accent)
        hue = on.accent if is_guess or told.asks else on.muted
        pen.put(text, hue, is_guess, f"own('{number}')")


def keys_of(state: State) -> list[Key]:
    """Return the keys in the footer."""
    told = state.strip
    guess = [Key("", f"1-{len(told.answers)}", "", "Guess", "", 1)] if told.asks else []
    go_on = Key("", "enter", "own('enter')", "Go on", "", 1)
    return [*guess, go_on, Key("", "esc", "own('escape')", "Leave the tour", "", 1)]


def in_lines(told: TourRecord) -> list[str]:
    """Return the tour's lines for the plain log."""
    if told.answers and not told.asks:  # it runs
        return [f"  ({clean(told.hint)})"]
    lines = ["", f"{told.scene} of {told.scenes}: {told.title}"] if told.asks else []
    answers = [f"  {number} {each}" for number, each in enumerate(told.answers, 1)]
    pressed = "  ".join(told.pressed)
    lines += filter(None, [told.text, *answers, told.verdict, told.place, pressed, told.hint])
    return [clean(line) for line in lines]


PAGE = Page(
    "tour",
    "T",
    "Tour",
    "a tour of eight scenes: each asks what will happen next, runs it, and explains it",
    draw,
    obey=obey,
    pane=draw,
    own=OWN,
    poll=advance,
    is_strip=True,
    strip_keys=keys_of,
    hint="T takes a tour of eight scenes",
)
