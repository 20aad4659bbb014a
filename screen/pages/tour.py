"""The tour: a few scenes. Each asks a question, lets the engine answer, and explains the answer.

The problem. A tour of mere words is skipped, and a tour over the whole screen hides its subject.
And a person leaves a tour at any moment, wants everything back as before, and never waits.

The way out. The tour is a script over the actions of any user: pauses, prompts, steps and policies
come by the same lines as from a keyboard (`Session.obey`), and the tour names the keys. The player
is a generator (`Tour._play`), and so is each scene. `Tour.look` is called as often as the screen is
looked at, goes on as far as possible, and never waits. The tour's words are a `Telling` in the
state, and `draw` draws a strip of a few lines under the panes, so the engine's work is seen.

    stage -> ask -> a guess -> run -> tell -> the next scene

What this file keeps. Whatever happens, `leave` puts back all changes of the tour: policy, budget,
pause, slow motion, settings and selection; and ends all requests of the tour. No
part of a scene takes longer than `LONGEST`: then the scene goes on with less, or says: it did not
come off. Each line of code is looked up in the source, so no line is stale.

Where next: `scenes.py`, the scenes.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from rich.cells import cell_len

from runtime.cli import command
from runtime.errors import describe, show_fault
from screen.draw.canvas import Paper
from screen.draw.panes import others_of
from screen.draw.style import clean, shorten
from screen.engine_client import Fault, Settings
from screen.page import Desk, Page
from screen.pages.tour_scenes import SCENES, STOP, WAIT, Explanation, Question, Scene, Sight
from screen.state import State, Telling

ROOT = Path(__file__).parents[2]
HURRY = 8.0  # seconds: then a scene's run goes on at full speed
LONGEST = 14.0  # and then it is cut short
LEAST_SLOTS = 4  # with fewer there is nothing to see
# The begin of every scene: nothing runs, and no slot remembers anything
CLEARED = ("/pause", "/cancel all", "/slow off", "/budget off", "/policy continuous")
# Of the state, under the tour's hands
FIELDS = ("settings", "prompts", "lower", "has_chosen", "zoom", "cursor", "selected")
RUNS = "enter: at full speed · esc: leave"
COMES = "the tour begins when the model is there"
FAREWELL = (
    "That was the tour. b fires a burst, r runs a race, w says why a request waited, ? explains "
    "every key and word; and course/ladder climbs from one token to an engine in six short programs."
)


# --- playing ------------------------------------------------------------------------------------


@contextmanager
def lent(desk: Desk) -> Iterator[None]:
    """The engine and the screen are in the tour's hands. Afterwards everything is as before."""
    room = desk.room
    state = desk.state
    view = state.view
    limits = view.engine.limits
    policy = view.engine.draining_to or view.engine.policy
    budget = None if limits == view.made_with else limits.budget
    eases = desk.eases
    is_fresh = not state.history
    fields = {name: getattr(state, name) for name in FIELDS}
    desk.eases = False
    desk.stays = False  # a trial ends by itself
    try:
        yield
    finally:
        room.cancel(None)
        room.switch(policy)
        room.set_budget(budget)
        room.slow(view.slow)
        room.pause(view.paused)
        desk.eases = eases
        desk.stays = True  # the user is there, who has left the tour
        if is_fresh:
            state.begin_anew()
        for name, value in fields.items():
            setattr(state, name, value)


def refuse(desk: Desk) -> None:
    """A ValueError says why there can be no tour now."""
    view = desk.state.view
    desk.check_alone("tour")
    if not desk.heard:  # else stale values would be put back
        raise ValueError("the engine has yet to hear the last keys; press T again")
    if view.busy or view.load:
        raise ValueError(
            "the tour begins when nothing runs: X cancels all requests, l ends a steady load"
        )
    slots = view.engine.limits.slots if view.engine else LEAST_SLOTS
    if slots < LEAST_SLOTS:
        raise ValueError(
            f"the tour needs {LEAST_SLOTS} slots, and there are {slots}; start with --slots {LEAST_SLOTS}"
        )


class Tour:
    """Plays scenes, one after the other. No method waits.

    `now`: a clock, in seconds.
    """

    def __init__(
        self,
        desk: Desk,
        now: Callable[[], float] = time.monotonic,
        scenes: Sequence[Scene] = SCENES,
    ):
        self.desk = desk
        self.state = desk.state
        self.waits = False  # nothing happens before the user says something
        self._runs = False  # a scene runs, and can hurry
        self._now = now
        self._scenes = scenes
        self._right = 0  # true guesses
        self._playing = self._play()
        self.look()

    # --- the user's words

    def guess(self, answer: int) -> None:
        """From 1. Nothing happens if there is no such answer, or nothing was asked."""
        if self.state.tour.asks and 1 <= answer <= len(self.state.tour.answers):
            self.seen.guess = answer
            self.go_on()

    def go_on(self) -> None:
        """Without a guess; or to the next scene. While a scene runs: at full speed."""
        if self.waits:
            self.waits = False
            self.look()
        elif self._runs:
            self.seen.hurries = True
            self.desk.obey("/slow off")
            self.desk.obey("/resume")

    def leave(self) -> None:
        """At once; everything is as before."""
        self._playing.close()
        self.state.tour = None

    # --- going on by itself

    def look(self) -> None:
        """Go on as far as possible."""
        has_failed = self.state.view.stage == "failed"
        if has_failed or not (self.waits or next(self._playing, "over") is None):
            self.leave()

    def _play(self) -> Iterator[None]:
        """The whole tour. Each `yield` lets the screen and the user act."""
        refuse(self.desk)
        self.state.tour = Telling(0, 0, "", "", hint=COMES)
        while self.state.view.stage != "ready":
            yield
        refuse(self.desk)
        with lent(self.desk):
            for number, scene in enumerate(self._scenes, 1):
                self._number = number
                self.scene = scene
                try:
                    yield from self._play_scene()
                except ValueError as error:
                    self._give_up(str(error))
                except Exception as error:  # a mistake in the scene
                    show_fault(f"the scene {self.scene.title!r} failed", error)
                    self._give_up(f"{describe(error)}; E shows where")
                yield from self._until_a_word()
            self._end()
            yield from self._until_a_word()

    def _play_scene(self) -> Iterator[None]:
        """Obey the story's lines. If it is late, nothing is obeyed, and nothing waited for."""
        self._set_stage()
        yield from self._until_a_look()
        for line in self.scene.story(self.seen):
            if isinstance(line, Question):
                yield from self._ask(line)
            elif isinstance(line, Explanation):
                self._tell(line)
            elif line in (WAIT, STOP):
                if line == STOP:
                    self._runs = False
                    self.desk.obey("/pause")
                yield from self._until_quiet()
            elif not self.seen.late:
                self._do(line)

    def _until_a_word(self) -> Iterator[None]:
        self._runs = False
        self.waits = True
        while self.waits:
            yield

    def _until_quiet(self) -> Iterator[None]:
        """Until the view shows the effect of all lines."""
        while not self.seen.late:
            yield from self._until_a_look()
            if self.desk.heard and not self.state.view.stepping:
                return

    def _until_a_look(self) -> Iterator[None]:
        yield
        spent = self._now() - self._began
        self.seen.late = spent >= LONGEST
        if spent >= HURRY and not self.seen.hurries:
            self.go_on()
        if self._runs and self.seen.found:
            self._hint(f"{self.seen.found.so_far} · {RUNS}")
        faults = self.state.faults[self._faults :]
        if faults:  # a prompt was not fired
            raise ValueError(faults[0].message)

    def _do(self, line: str) -> None:
        if len(line) > 1:
            self.desk.obey(line)
        word = self.desk.pressed(line)
        if word not in self._pressed:
            self._pressed.append(word)

    def _set_stage(self) -> None:
        for line in CLEARED:
            self.desk.obey(line)
        self.state.settings = Settings(speculate=False)
        self.state.prompts = self.scene.prompts
        self.state.cursor = None
        self.state.selected = 0
        self.state.zoom = None
        self.seen = Sight(self.state)
        self._faults = len(self.state.faults)
        self._pressed: list[str] = []
        self._began = self._now()
        self._say("The stage is being set …", "esc: leave")

    # --- the tour's words

    def _ask(self, question: Question) -> Iterator[None]:
        answers = tuple(question.answers)
        hint = f"1–{len(answers)}: your guess · enter: no guess · esc: leave"
        self._say(question.text, hint, answers=answers, asks=True)
        yield from self._until_a_word()
        self._began = self._now()  # however late the stage was, the run has time of its own
        self._runs = True
        self._hint(f"it runs … · {RUNS}", asks=False, guess=self.seen.guess)
        yield from self._until_a_look()

    def _tell(self, told: Explanation) -> None:
        guess = self.seen.guess
        self._right += guess == told.right
        self._explain(
            told.text,
            verdict=judged(told.right, guess, self.state.tour.answers),
            place=line_of(*self.scene.place),
            pressed=tuple(self._pressed),
        )

    def _give_up(self, why: str) -> None:
        """The scene did not come off, but the tour goes on."""
        late = f" within {LONGEST:g} s" if self.seen.late else ""
        self._explain(f"This scene did not come off{late}: {clean(why)}.")

    def _explain(self, text: str, **more: object) -> None:
        # Other programs make steps slow: then the figures are not only the engine's
        others = others_of(self.state.view)
        note = f" · {others}" if others else ""
        self._say(text, f"enter: go on · esc: leave{note}", **more)

    def _end(self) -> None:
        came = f"{self._right} of your guesses came true." if self._right else ""
        hint = "enter, esc: settings and policy as they were before"
        self._say(FAREWELL, hint, title="the end", verdict=came)

    def _say(self, text: str, hint: str, title: str = "", **more: object) -> None:
        title = title or self.scene.title
        self.state.tour = Telling(self._number, len(self._scenes), title, text, hint=hint, **more)

    def _hint(self, hint: str, **more: object) -> None:
        self.state.tour = self.state.tour._replace(hint=hint, **more)


def judged(right: int, guess: int | None, answers: Sequence[str]) -> str:
    """The right answer, and whether the user's was the same."""
    if not 1 <= right <= len(answers):
        return "None of the answers came true."
    said = f"{right}, {answers[right - 1]}."
    if guess is None:
        return f"It was {said}"
    return f"As you said: {said}" if guess == right else f"You said {guess}; it was {said}"


def line_of(file: str, name: str) -> str:
    """Where a function begins: "sched.py:234  Scheduler._admit"."""
    begins = None
    with suppress(OSError, UnicodeError):  # somebody is changing the file just now
        text = (ROOT / file).read_text(encoding="utf-8")
        begins = re.search(rf"^ *(def|static void) {name.rpartition('.')[2]}\(", text, re.MULTILINE)
    line = f":{text.count(chr(10), 0, begins.start()) + 1}" if begins else ""
    return f"{file}{line}  {name}"


# --- the strip ----------------------------------------------------------------------------------


def draw(state: State, on: Paper) -> None:
    """The tour's words: a heading, a text, and as much of the rest as there is room for."""
    told = state.tour
    if told is None:
        return
    title = f"Tour {told.scene} of {told.scenes}: {told.title}"
    on.heading(title, "esc leaves, and puts all back", do="own('escape')")
    on.say(told.text)
    draw_answers(told, on)
    on.say(told.verdict, on.accent, True)
    if told.place:
        where = on.pen().put(f" {told.place}   ", bold=True)
        words = f"by hand: {', '.join(told.pressed)}"
        where.put(shorten(words, on.width - where.width - 1), on.muted)
    del on.lines[on.height - 1 :]
    hint = shorten(state.said or told.hint, on.width - 2)
    on.pen().put(f" {hint}", on.accent if state.said else on.muted, do="own('enter')")


def draw_answers(told: Telling, on: Paper) -> None:
    """As many answers in a line as find room. Each can be clicked."""
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


# --- the page -----------------------------------------------------------------------------------


def obey(desk: Desk, rest: str) -> str:
    if not desk.talks:
        raise ValueError(
            f"the tour needs a screen; {command('tui.py')} --plain --tour tells it in lines"
        )
    desk.state.kept["tour"] = Tour(desk)
    desk.state.offers_tour = False
    desk.state.talking = False
    return COMES if desk.state.view.stage == "loading" else ""


def look(desk: Desk) -> bool:
    """The tour goes on. A wish from before the model was there may be refused now."""
    state = desk.state
    told = state.tour
    try:
        state.kept["tour"].look()
    except ValueError as error:
        state.tour = None
        state.faults.append(Fault(str(error)))
    return state.tour is not told


def press(state: State, act: Callable[[Tour], None]) -> None:
    """A key: the tour does something."""
    act(state.kept["tour"])


OWN = {
    "enter": partial(press, act=Tour.go_on),
    "space": partial(press, act=Tour.go_on),
    "escape": partial(press, act=Tour.leave),
}
for number in range(1, 5):
    OWN[str(number)] = partial(press, act=partial(Tour.guess, answer=number))

PAGE = Page(
    "tour",
    "T",
    "Tour",
    "scenes of a minute: each asks what will happen next, lets it happen, and explains it",
    draw,
    obey=obey,
    pane=draw,
    own=OWN,
    look=look,
    is_strip=True,
)


# --- without a screen ---------------------------------------------------------------------------


def run_plain_tour(desk: Desk) -> int:
    """The tour as lines: each question, a guess from standard input, and the explanation."""
    tour = Tour(desk)
    told: Telling | None = None
    while desk.state.tour:
        now = desk.state.tour._replace(hint="")  # it changes with each token of a run
        if now != told:
            told = now
            print("\n".join(in_lines(desk.state.tour)), flush=True)
        elif tour.waits:
            answer(tour, sys.stdin.readline())
        time.sleep(0.05)
        desk.look()
        tour.look()
    if desk.state.view.stage == "failed":
        print(f"nanobatch: {desk.state.view.error}", file=sys.stderr)
        return 2
    return 0


def in_lines(told: Telling) -> list[str]:
    """The tour's words, for the plain log."""
    if told.answers and not told.asks:  # it runs
        return [f"  ({clean(told.hint)})"]
    lines = ["", f"{told.scene} of {told.scenes}: {told.title}"] if told.asks else []
    answers = [f"  {number} {each}" for number, each in enumerate(told.answers, 1)]
    pressed = "  ".join(told.pressed)
    lines += filter(None, [told.text, *answers, told.verdict, told.place, pressed, told.hint])
    return [clean(line) for line in lines]


def answer(tour: Tour, line: str) -> None:
    """A line of standard input: a number is a guess, q leaves, and an empty one goes on."""
    word = line.strip().lower()
    if word in ("q", "quit", "/quit", "esc", "\x1b"):
        tour.leave()
    elif word.isdecimal() and tour.state.tour.asks:
        tour.guess(int(word))
    else:
        tour.go_on()
