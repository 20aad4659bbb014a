"""Watch it happen: slots, waiting line, timeline, charts and answers of a running engine, in a
terminal.

The problem. A serving engine takes hundreds of decisions a second, and its source shows none of
them. This program shows them all: which request holds which slot, how far its KV cache is filled,
what waits and why, and what every slot did in every step.

How it hangs together. The folder `screen/` holds the parts, and each part knows only those before
it:

    machine.py   whether other programs take the cores.
    room.py      owns the engine. It fulfils wishes between two steps, and shows what happens as a frozen `View`.
    remote.py    the same for an engine elsewhere: it reads a server's `/watch`.
    runs.py      races and replays on a clock that interruptions do not reach. trace.py is a trace for Perfetto.
    life.py      a request's life in parts that add up, and what it would have been in another company.
    state.py     all that the screen knows: the newest view, past steps and requests, what is selected.
    paper.py     what panes and pages write their lines on.
    panes.py     pure functions from the state to lines. So are steps.py and charts.py.
    places.py    where each pane goes, on a screen of any size.
    terminal.py  a terminal that may send anything, and go away.
    widgets.py   what Textual needs of a pane and of the prompt box.
    record.py    a run as a file, from which a page is made.
    session.py   what a user can say: commands, scripts, and the same run as a plain log.
    pages/       a page that a key opens, in a file each: what it tries out, and how that is drawn.

This file makes a screen of them: which function draws which pane (`PANES`), what each key does (the
`action_...` methods of `Screen`), and the command line.

The invariant: the picture depends only on `State` and on the size. The engine never waits for the
screen, and every picture can be tested without a terminal.

Before this: `sched.py`, and `Engine.step` in `nanobatch.py`. After it: `tests/screen`, with an
engine of words.
"""

from __future__ import annotations

try:
    # `program` comes first, so that Ctrl-C is quiet during the other imports, too.
    from parts import program
except KeyboardInterrupt:
    raise SystemExit(130) from None

import argparse
import asyncio
import logging
import math
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from typing import NoReturn

from textual import events
from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.command import CommandPalette
from textual.geometry import Region, Size
from textual.screen import ModalScreen
from textual.widget import Widget

from parts.api import faults
from parts.api.engine import AnyEngine
from parts.api.views import RequestView
from parts.checks import one_line, read_whole, shown
from parts.device import rows
from parts.files import LineFile, check_writable, write_whole
from parts.program import BROWSER, about, on_a_terminal
from screen import charts, keys, panes, record, steps
from screen.ink import DARK, Palette, clean, count
from screen.life import at_percent, place_of, ranked
from screen.pages import (
    bill,
    breakage,
    clients,
    elephant,
    errors,
    race,
    requests,
    same,
    totals,
    why,
)
from screen.pages.tour import Tour, draw_tour, refuse, run_plain_tour
from screen.paper import Paper
from screen.places import LOWER, STACKS, arrange, arrange_loading, arrange_tour, is_small, is_wide
from screen.remote import RemoteRoom, address_of, base_of
from screen.room import BURST, CHUNK, Ask, EngineRoom, Room, Settings
from screen.session import (
    POLICIES,
    SCRIPT,
    SCRIPTED,
    Session,
    as_command,
    orders_of,
    run_plain,
    trace_of,
)
from screen.state import State, verdict
from screen.terminal import HUNG_UP, Terminal
from screen.widgets import NEWLINE, Commands, Pane, Prompt, thrifty

PANES = {  # by name: what draws it
    "loading": panes.draw_loading,
    "small": panes.draw_small,
    "status": panes.draw_status,
    "slots": panes.draw_slots,
    "timeline": panes.draw_timeline,
    "rate": charts.draw_rate,
    "batch": charts.draw_batch,
    "ttft": charts.draw_ttft,
    "cost": charts.draw_cost,
    "queue": charts.draw_queue,
    "waits": charts.draw_waits,
    "streams": panes.draw_streams,
    "step": steps.draw_step_pane,
    "request": requests.draw_request,
    "clients": clients.draw_clients,
    "mark": panes.draw_mark,
    "settings": panes.draw_settings,
    "keys": keys.draw_keys,
    "tour": draw_tour,
}
# What the wheel does there
WHEEL = {"slots": "choose", "timeline": "move", "streams": "choose", "step": "nudge"}
SHEETS = {
    "help": keys.draw_help,
    "requests": requests.draw,
    "contest": race.draw,
    "errors": errors.draw,
    "totals": totals.draw,
    "clients": clients.draw,
    "step": steps.draw_step,
    "why": why.draw,
    "bill": bill.draw,
    "same": same.draw,
    "elephant": elephant.draw,
    "break": breakage.draw,
}
# Commands whose page stays open when they are given once more
STAYS = {"/why": "why", "/same": "same", "/elephant": "elephant", "/break": "break"}
# While something runs, they are painted less often
SLOW = (*chain(*STACKS.values()), "step", "request", "sheet")
# On a small screen, the pane in which is seen what a command does; a prompt's is its answer
BRINGS = {"/pause": "step", "/step": "step", "/resume": "timeline", "/burst": "timeline"}
# Before anything has been asked, these pages are empty
EMPTY = ("open", "sheet('totals')", "sheet('clients')", "sheet('errors')")
# Keys of the tour, while it speaks; and the actions that would take the engine out of its hands
TOUR_KEYS = {str(number): f"guess({number})" for number in range(1, 5)}
TOUR_KEYS |= {"enter": "go_on", "space": "go_on", "escape": "leave_tour"}
WRITTEN = ("screenshot", "trace", "record")  # options that name a file, which is written at the end
OF_A_USER = ("command", "prompt", "fire", "pause", "settings", "tour")
WARNINGS = 4  # so many are shown at a time
WITHOUT_A_MODEL = ("help", "errors")  # pages that say something while the model loads
TRACEBACKS = 100  # so many are kept, the newest


# --- the screen ---------------------------------------------------------------------------------


class Tracebacks(logging.Handler):
    """Where tracebacks go while the screen has the terminal: to the page that `E` opens."""

    def __init__(self, state: State):
        super().__init__()
        self.count = 0  # of all so far
        self._state = state

    def emit(self, record: logging.LogRecord) -> None:
        self._state.tracebacks.append(clean(self.format(record)).removeprefix("nanobatch: "))
        del self._state.tracebacks[:-TRACEBACKS]
        self.count += 1


class Sheet(ModalScreen):
    """One pane over all the others. A key of another page opens that one; `i`, `/` and `e` lead to
    the prompt box."""

    SCROLLS = (("up", -1), ("down", 1))
    PAGES = (("pageup", -1), ("pagedown", 1), ("home", -1000), ("end", 1000))
    BINDINGS = (
        Binding("escape,enter", "dismiss", show=False),
        Binding("q,ctrl+c,ctrl+q", "app.quit", show=False, priority=True),
        *(
            Binding(k.keys, f"app.{k.action}", show=False)
            for k in keys.KEYS
            if k.action in keys.ON_A_SHEET
        ),
        *(Binding(key, f"scroll({by})", show=False) for key, by in SCROLLS),
        *(Binding(key, f"page({by})", show=False) for key, by in PAGES),
        *(Binding(key, f"lead({by})", show=False) for key, by in (("left", -1), ("right", 1))),
        Binding("tab", "mark", show=False),
        *(Binding(str(number), f"number({number})", show=False) for number in range(1, 5)),
    )

    top = 0  # the first line in sight

    def compose(self) -> Iterable[Widget]:
        yield Pane(self._window, "sheet", wheel="screen.scroll")

    def _window(self, state: State, on: Paper) -> None:
        """The lines in sight. The heading stays; what is under it can be scrolled."""
        if is_small(on.width, on.height):
            panes.draw_small(state, on)
            return
        if state.view.engine is None and self.name not in WITHOUT_A_MODEL:
            panes.draw_loading(state, on)
            return
        SHEETS[self.name](state, on)
        hidden = max(0, -on.room)
        self.top = max(0, min(self.top, hidden))
        del on.lines[1 : 1 + self.top]
        on.cut("", "")

    def action_scroll(self, by: int) -> None:
        if self.name == "requests" and abs(by) == 1:
            self.top = 0
            self.app.state.browse(by)
        else:
            self.top += by

    def action_page(self, by: int) -> None:
        """By as many lines as are in sight; the last of them is then the first. The film of a race
        has no pages, only an end."""
        self.app.state.film = None
        self.top += by * max(1, self.size.height - 3)

    def action_lead(self, by: int) -> None:
        """From a request to the one whose first token came next sooner, or next later; from a step
        to its neighbour."""
        state = self.app.state
        if self.name == "why" and state.open:
            place = place_of(state.open, ranked(state.ended))
            state.lead(0 if place is None else place + by)
        elif self.name == "bill":
            state.move(by)

    def action_number(self, number: int) -> None:
        """What a page numbers: the ways to break an engine."""
        if self.name == "break":
            self.app.action_command(f"/break {[*breakage.BREAKS][number - 1]}")

    def action_mark(self) -> None:
        """To the first of the percentiles that is beyond the request; then from the start."""
        state = self.app.state
        order = ranked(state.ended)
        if self.name == "why" and order:
            marks = [place_of(at_percent(mark, order), order) for mark in why.MARKS]
            now = place_of(state.open, order)
            beyond = [place for place in marks if now is None or place > now]
            state.lead((beyond or marks)[0])


class Screen(App):
    """The whole screen. It places the panes, looks for news up to ten times a second, and turns
    keys into wishes."""

    TITLE = "nanobatch"
    CSS = """
    Screen { layers: panes; }
    Pane, Prompt { position: absolute; }
    Sheet { background: $background; }
    Sheet Pane { width: 100%; height: 100%; }
    #status, #keys { background: $foreground 10%; }
    #tour { background: $foreground 5%; }
    #prompt, #mark, #settings { background: $surface; color: $foreground; }
    #prompt { border: none; height: 1; padding: 0; color: $foreground 60%; }
    #prompt:focus { border: none; background-tint: $foreground 0%; color: $foreground; }
    ToastRack { margin-bottom: 2; }
    Toast { width: 46; }
    """
    BINDINGS = (
        # `i` and `/` have priority, so the letters that are typed right behind them already go to
        # the prompt.
        *(
            Binding(k.keys, k.action, k.label, show=False, priority=k.action.startswith("prompt"))
            for k in keys.KEYS
        ),
        Binding("ctrl+c", "quit", show=False, priority=True),
    )
    AUTO_FOCUS = None  # letters are keys until the user wants to type
    LOOKS = 0.1  # seconds between two looks at the engine room
    FILM = (4.0, 10.0)  # seconds for which the two legs of a race are shown, at least and at most

    def __init__(
        self,
        session: Session,
        script: str = "",
        screenshot: bool = False,
        tours: bool = False,
        note: Path | None = None,
    ):
        """`screenshot`: when the script is done, take a picture and leave. `tours`: the tour begins
        when the model is there. `note`: a file that says, once it is there, that the tour need not
        be offered any more."""
        super().__init__(driver_class=None if BROWSER else Terminal)
        self.tour: Tour | None = None
        self._tours, self._note = tours, note
        session.state.offers_tour = bool(note and not tours and not note.exists())
        self.session, self.state = session, session.state
        self._script, self._screenshot = script, screenshot
        self.picture = ""
        self._looks = self._faults = self._told = 0
        self._warned: list[float] = []  # when the warnings came that are still shown
        self._untold: list[str] = []  # warnings that have not found room yet
        self._tracebacks = Tracebacks(self.state)
        self._raced = self.state.raced  # the race whose film has been begun
        self._filmed = 0.0  # when the film was moved on last
        self._misread = -math.inf  # when a letter was pressed last that was meant as text
        self.palette, self.prompt = DARK, Prompt()

    # --- panes

    def compose(self) -> Iterable[Widget]:
        yield from (Pane(draw, name, WHEEL.get(name, "")) for name, draw in PANES.items())
        yield self.prompt

    def on_mount(self) -> None:
        faults.LOG.addHandler(self._tracebacks)
        self.begin_capture_print(self)  # a download's progress, or advice about a BLAS
        self.watch_theme()
        self.watch(self.screen, "focused", self.note_focus)
        self.prompt.put(self.state.prompts[0][0])  # an example to fire
        self.place(self.size)
        self.set_interval(self.LOOKS, thrifty(self.look))
        # After Ctrl-Z and fg
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))
        if threading.current_thread() is threading.main_thread():
            for signal_, code in ((signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 0)):
                asyncio.get_running_loop().add_signal_handler(
                    signal_, lambda code=code: self.exit(return_code=code)
                )
        self.run_worker(self.play(self._script))

    def on_unmount(self) -> None:
        faults.LOG.removeHandler(self._tracebacks)

    def on_print(self, event: events.Print) -> None:
        if said := re.split(r"[\r\n]", clean(event.text.strip("\r\n")))[-1].strip():
            self.state.printed = said
            self.paint()

    def on_resize(self, event: events.Resize) -> None:
        self.place(event.size)

    def place(self, size: Size) -> None:
        """Give each pane its place, or hide it."""
        view = self.state.view
        places = {"loading": Region(0, 0, *size)}
        if view.stage == "loading":
            places = arrange_loading(*size)
        elif view.stage == "ready":
            slots = len(view.engine.slots)
            places = arrange(*size, slots, self.state.lower, bool(view.door))
            if self.state.tour:
                places = arrange_tour(*size, slots, self.state.lower)
        for pane in self.screen_stack[0].query("Pane, Prompt"):
            pane.display = pane.id in places
            if region := places.get(pane.id):
                pane.styles.offset = region.offset
                pane.styles.width, pane.styles.height = region.size
        self.call_after_refresh(self.paint)

    def look(self) -> None:
        """Without news nothing is painted; charts and the step are painted less often than the
        rest."""
        before = self.state.view
        self.roll()
        news = self._tracebacks.count - self._told
        self._told += news
        blocks = self.state.tracebacks[-news:] if news else []
        self.warn([f"{block.partition(chr(10))[0]}; E shows where" for block in blocks])
        if self.screen_stack and self.screen.name == "bill":
            self.session.ask_experts()
        has_news = self.session.look()
        self.look_at_tour()
        if not has_news:
            return
        view = self.state.view
        self._looks += 1
        if (before.stage, before.life) != (view.stage, view.life):
            self.place(self.size)
        if view.stage == "ready" and self._tours:
            self.action_tour()
        if view.stage == "failed":  # the reason stands on the main screen, and q leaves it
            self.action_main()
            self.screen.set_focus(None)
        faults = self.state.faults[self._faults :]
        self._faults += len(faults)
        self.warn([fault.message for fault in faults])
        for fault in faults:
            if fault.prompt and not self.prompt.value:
                self.prompt.put(fault.prompt)
        self.paint(but=SLOW if self.state.hurries and self._looks % 3 else ())

    def look_at_tour(self) -> None:
        """The tour goes on by itself. Once anything has been fired, it is not offered any more."""
        if self.tour:
            before = self.state.tour
            self.tour.look()
            if self.state.tour is not before:
                self.paint()
        elif self.state.offers_tour and self.session.room.posted:
            self.decline_tour()

    def decline_tour(self) -> None:
        """It was taken or declined: note it, as far as that is possible."""
        self.state.offers_tour = False
        if self._note:
            with suppress(OSError):
                self._note.touch()

    def warn(self, messages: Sequence[str]) -> None:
        """Tell what went wrong. With ten thousand messages on it a screen would stand still: of
        those for which there is no room, the newest is told, and how many there are. The tour tells
        itself what went wrong, and sometimes that was meant."""
        if self.tour:
            return
        now = time.monotonic()
        self._warned = [told for told in self._warned if now - told < self.NOTIFICATION_TIMEOUT]
        self._untold += messages
        room = WARNINGS - len(self._warned)
        if not self._untold or room < 1:
            return
        if len(self._untold) > room:
            others = count(len(self._untold) - 1, "other fault")
            self._untold = [f"{self._untold[-1]} (and {others})"]
        for message in self._untold:
            self.notify(message, severity="error", markup=False)
            self._warned.append(now)
        self._untold = []

    def roll(self) -> None:
        """A race that has ended is shown once more: both legs side by side, on one clock."""
        state, now = self.state, time.monotonic()
        raced = state.raced
        if raced is not self._raced:
            self._raced = raced
            # Not if a comparison has been asked for meanwhile
            shows_race = self.screen.name == "contest" and state.contest is None
            if raced and shows_race and verdict(raced.runs):
                state.contest = raced
                state.film = 0.0
        elif state.film is not None and raced:
            longest = max(run.makespan for run in raced.runs)
            least, most = self.FILM
            speed = longest / min(max(longest, least), most)
            state.film += speed * (now - self._filmed)
            if state.film >= longest or self.screen.name != "contest":
                state.film = None
            self.paint()
        self._filmed = now

    def paint(self, but: Sequence[str] = ()) -> None:
        if not self.screen_stack:  # a timer has run out while the program ends
            return
        for pane in self.screen.query(Pane):
            if pane.id not in but:
                pane.paint()

    def watch_theme(self) -> None:
        self.palette = Palette.of(self.current_theme)
        self.call_after_refresh(self.paint)

    def note_focus(self, focused: Widget | None) -> None:
        self.state.typing = focused is not None
        self.state.has_typed |= self.state.typing
        self.paint()

    def say(self, message: str) -> None:
        """Tell the user what has been done: beside the prompt, for a while."""
        if message and len(self.screen_stack) > 1:
            self.notify(message, markup=False, timeout=3)
        elif message:
            self.state.said = message
            self.paint()
            self.set_timer(4, lambda: self.hush(message))

    def hush(self, message: str) -> None:
        if self.state.said == message:
            self.state.said = ""
            self.paint()

    def get_system_commands(self, screen) -> Iterable[SystemCommand]:
        yield from super().get_system_commands(screen)
        for key in keys.KEYS:
            yield SystemCommand(
                f"{key.label} ({key.show})", key.help, lambda key=key: self.run_action(key.action)
            )

    # --- keys

    async def on_event(self, event: events.Event) -> None:
        """All keys come through here first. Each one has done its work before the next one is
        looked at.

        subtle: Textual hands a key to a widget, which hands it back if the key is no letter. A
        letter that is typed meanwhile would overtake Backspace and Enter.
        """
        is_new = isinstance(event, (events.Key, events.Paste)) and not event.is_forwarded
        is_ours = all(isinstance(page, Sheet) for page in self.screen_stack[1:])
        if not (is_new and is_ours):
            await super().on_event(event)
        elif self.return_code is None:  # else the screen is left
            self.app_focus = True
            await (self.press(event) if isinstance(event, events.Key) else self.paste(event))

    async def press(self, event: events.Key) -> None:
        # Enter is a newline, if it was pressed before the terminal was ours
        key = "enter" if event.key == "ctrl+j" else event.key
        on_main = len(self.screen_stack) == 1
        if on_main and self.is_for_tour(key):
            await self.run_action(TOUR_KEYS[key])
        elif (on_main and self.is_text(event)) or await self._check_bindings(key, priority=True):
            return
        elif self.focused and event.is_printable:
            self.prompt.take(event.character)
        else:
            await self._check_bindings(key)

    async def paste(self, event: events.Paste) -> None:
        """All lines of it. The box itself would take the first one alone."""
        if self.focused:
            self.prompt.take("\n".join(event.text.splitlines()))

    def is_for_tour(self, key: str) -> bool:
        """While the tour speaks, some keys are its own. Esc declines it where it is offered."""
        is_offered = self.state.offers_tour and self.state.view.stage == "ready"
        is_declined = is_offered and key == "escape" and not self.focused
        return key in TOUR_KEYS and bool(self.tour or self._tours or is_declined)

    def is_text(self, event: events.Key) -> bool:
        """Was this key meant as text, though the prompt box has not got the keyboard?

        So are letters that are no keys, and at the start the keys that would do nothing yet. What
        follows within a second belongs to the same words.
        """
        state, now = self.state, time.monotonic()
        if self.focused or state.view.stage == "failed":
            return False
        is_rest = now - self._misread < 1 and (event.is_printable or event.key == "enter")
        actions = [key.action for key in keys.KEYS if event.key in key.keys.split(",")]
        is_letter = event.is_printable and event.character.isalpha()
        others = state.view.door or state.view.watches or state.tracebacks
        is_idle = not (self.session.room.posted or others)
        is_first = is_letter and (not actions or (is_idle and actions[0] in EMPTY))
        if is_rest or is_first:
            self._misread = now
            if not is_rest:
                self.notify(
                    f"{event.character} is not typed: letters are keys here. "
                    "Press i to type a prompt, ? for the keys.",
                    markup=False,
                )
        return is_rest or is_first

    # --- actions

    async def run_action(self, *arguments, **options) -> bool:
        """Every key, click and turn of the wheel comes through here. Whatever it does, the screen
        is painted after. While the tour speaks, the engine is the tour's."""
        action = str(arguments[0]).removeprefix("app.")
        if (self.tour or self._tours) and action.partition("(")[0] in OF_A_USER:
            self.say("the tour has the engine; esc leaves it")
            return True
        done = await super().run_action(*arguments, **options)
        self.paint()
        return done

    def check_action(self, action: str, parameters: tuple) -> bool | None:
        """If no model could be loaded, only a few actions make sense. Typed letters are no keys."""
        if self.state.view.stage == "failed":
            return action in ("quit", "theme", "command_palette", "suspend_process")
        return action != "prompt" or self.focused is None

    def action_main(self) -> None:
        """Back to the main screen."""
        while len(self.screen_stack) > 1:
            self.screen.dismiss()

    def action_prompt(self, begin: str = "") -> None:
        self.action_main()  # the box is there
        self.screen.set_focus(self.prompt)  # at once, since the next letter is on its way
        if begin:
            self.prompt.put(begin)
        elif self.prompt.value == self.state.prompts[0][0]:
            self.prompt.action_select_all()  # this is the example, and typing replaces it

    def action_leave(self) -> None:
        """A command that was not given goes; a prompt that was not fired stays."""
        if self.prompt.value.startswith("/"):
            self.prompt.value = ""
        self.prompt.screen.set_focus(None)

    def action_complete(self) -> None:
        """What is in the box, made longer as far as only one thing can be meant."""
        found = keys.completions(self.prompt.value)
        if found:
            first, last = min(found), max(found)
            alike = sum(takewhile(bool, map(str.__eq__, first, last)))
            self.prompt.put(first[:alike])
        if len(found) > 1:
            self.say(" ".join(line.split()[-1] for line in found))

    def action_fire(self) -> None:
        if self.prompt.value:
            self.submit()
        else:
            self.action_prompt()

    def submit(self) -> None:
        """Do what the prompt box says."""
        line = self.prompt.value.replace(NEWLINE, "\n").strip()
        if line and self.action_command(line):  # a wrong command stays in the box
            self.prompt.value = ""
            self.action_leave()
            if not line.startswith("/"):
                self.bring("streams")

    def action_command(self, line: str) -> bool:
        """Do what a line says, or tell the user what is wrong with it; False then."""
        name, posted = line.strip().partition(" ")[0], self.session.room.posted
        if name in ("/quit", "/exit"):
            self.exit()
            return True
        if name == "/help":
            self.action_sheet("help")
            return True
        try:
            said = self.session.obey(line)
        except ValueError as error:
            self.notify(str(error), severity="error", markup=False)
            return False
        if self.state.view.stage == "loading" and self.session.room.posted > posted:
            self.state.waiting.append(line)
        self.bring(BRINGS.get(line.partition(" ")[0], self.state.lower))
        if line == "/race last" and verdict(self.state.raced.runs):
            self.state.film = 0.0
        if line.startswith(("/race", "/compare")):
            self.action_sheet("contest")
        elif line.startswith("/bill"):
            self.action_sheet("bill")
        elif page := STAYS.get(line.partition(" ")[0]):
            if self.screen.name != page:
                self.action_sheet(page)
        elif line.startswith("/budget") and self.screen.name == "elephant":
            said = ""  # the page shows it
        elif self.screen.name in SHEETS and self.screen.name not in ("bill", "elephant"):
            # The page hides what the engine does
            said = said or f"done behind this page: {line}"
        self.say(said)
        return True

    def action_tour(self) -> None:
        self._tours = False
        try:
            refuse(self.session)
            if self.state.view.stage == "ready":
                self.tour = Tour(self.session)
        except ValueError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        if self.tour is None:
            self._tours = True
            self.say("the tour begins when the model is there")
        self.decline_tour()
        self.action_leave()
        self.action_main()
        self.place(self.size)

    def action_guess(self, answer: int) -> None:
        if self.tour:
            self.tour.guess(answer)

    def action_go_on(self) -> None:
        if self.tour:
            self.tour.go_on()
            self.end_tour()

    def action_leave_tour(self) -> None:
        if self.tour:
            self.tour.leave()
            self.end_tour()
        elif self._tours or self.state.offers_tour:
            self._tours = False
            self.decline_tour()
            self.say("T begins the tour, whenever you like")

    def end_tour(self) -> None:
        """The panes go back to their places, once the tour is over."""
        if self.tour and self.tour.is_over:
            self.tour = None
            self.place(self.size)

    def action_pause(self) -> None:
        self.action_command("/resume" if self.session.coming.paused else "/pause")

    def action_settings(self) -> None:
        self.action_prompt(f"/set {self.state.settings.words}")

    def action_choose(self, by: int) -> None:
        self.action_select(self.state.selected + by)

    def action_select(self, slot: int) -> None:
        self.state.select(slot)

    def action_move(self, columns: int) -> None:
        """By what is visible: a column of the timeline may be several steps. Without a timeline, by
        a step."""
        timeline = self.query_one("#timeline")
        self.state.move(
            columns * (self.state.zoom_for(timeline.size.width - 4) if timeline.display else 1)
        )

    def action_nudge(self, steps: int) -> None:
        self.state.move(steps)

    def action_point(self, column: int, row: int, width: int, height: int) -> None:
        """Put the cursor on a column of the timeline that has been clicked, and select the slot
        there."""
        _, columns, _ = self.state.window(width)
        if 0 <= column < len(columns):
            self.state.look_at(self.state.index_of(columns[column].step))
            slots = panes.fit_slots(self.state, height)
            if 0 <= row < len(slots):
                self.action_select(slots[row])

    def action_go(self) -> None:
        """From a step to the request in the selected slot; from a request to its first step."""
        state = self.state
        if self.screen.name in ("requests", "why"):
            if steps := state.steps_of(state.open) if state.open else []:
                state.look_at(steps[0])
                self.action_select(state.open.slot)
                self.screen.dismiss()
            else:
                self.say("its steps are not remembered")
        elif request := state.owner(state.selected):
            state.opened = request.id
            self.action_sheet("requests")
        else:
            self.say(f"slot {state.selected} has had no request yet")

    def action_why(self) -> None:
        """Why the request waited that is open, or that is in the selected slot."""
        state = self.state
        if self.screen.name == "why":
            self.screen.dismiss()
            return
        request = state.open if self.screen.name == "requests" else state.owner(state.selected)
        self.action_command(f"/why {request.id}" if request else "/why")

    def action_percentile(self, mark: int) -> None:
        self.action_command(f"/why p{mark}")

    def action_follow(self) -> None:
        self.state.cursor = None

    def action_zoom(self) -> None:
        zooms = (None, 1, 2, 4, 8)
        self.state.zoom = zooms[(zooms.index(self.state.zoom) + 1) % len(zooms)]
        self.say(f"steps a column: {self.state.zoom or 'so that they fit'}")

    def action_view(self) -> None:
        panes = (
            tuple(STACKS) if is_wide(*self.size) else LOWER if self.state.view.door else LOWER[:-1]
        )
        now = self.state.lower if self.state.lower in panes else panes[0]
        self.state.lower = panes[(panes.index(now) + 1) % len(panes)]
        self.state.has_chosen = True
        self.place(self.size)

    def bring(self, pane: str) -> None:
        """Where panes take turns, show this one, unless the user has chosen with `v`."""
        state = self.state
        if not state.has_chosen and pane != state.lower and not is_wide(*self.size):
            state.lower = pane
            self.place(self.size)

    def action_open(self) -> None:
        """The newest request that has ended."""
        self.state.opened = self.state.ended[-1].id if self.state.ended else None
        self.action_sheet("requests")

    def action_copy(self) -> None:
        """Copy the open request's text, or the selected slot's, to the terminal's own clipboard
        (OSC 52)."""
        request = (
            self.state.open
            if self.screen.name in ("requests", "why")
            else self.state.owner(self.state.selected)
        )
        if request:
            self.copy_to_clipboard(request.text)
        self.say(f"r{request.id} is copied" if request else "there is nothing to copy yet")

    async def action_suspend_process(self) -> None:
        """Ctrl-Z. The engine pauses meanwhile, so its clock stands still."""
        room, view = self.session.room, self.state.view
        runs = view.stage == "ready" and not (view.paused or view.watches)
        if runs:
            room.pause(True)
            await self.until(lambda: room.look(view).paused)
        super().action_suspend_process()
        if runs:
            room.pause(False)

    def export_screenshot(self, *, title: str | None = None, simplify: bool = False) -> str:
        """Blanks that every viewer keeps and counts: of the exporter's own, some viewers make too
        few."""
        svg = super().export_screenshot(title=title, simplify=simplify)
        return svg.replace("&#160;", " ").replace("<text ", '<text xml:space="preserve" ')

    def deliver_screenshot(
        self, filename: str | None = None, path: str | None = None, time_format: str | None = None
    ) -> str | None:
        """The palette's picture goes to where the screen was started: Textual's own place may not
        exist. A browser gets it as a download."""
        if BROWSER:
            return super().deliver_screenshot(filename, path, time_format)
        file = os.path.join(
            path or "", filename or f"nanobatch-{datetime.now():%F-%H-%M-%S-%f}.svg"
        )
        try:
            write_whole(file, self.export_screenshot())
            self.notify(f"Saved screenshot to {file!r}", markup=False)
        except OSError as error:
            words = f"no picture: {file!r}: {error.strerror}"
            self.notify(words, severity="error", markup=False)
        return None

    def action_command_palette(self) -> None:
        if not CommandPalette.is_open(self):
            self.push_screen(Commands())

    def action_theme(self, name: str = "") -> None:
        self.theme = name or ("textual-light" if self.current_theme.dark else "textual-dark")

    def action_sheet(self, name: str) -> None:
        """Open a page. The key of the page that is open closes it, unless the key runs or compares
        something anew."""
        before = self.screen.name
        if before in SHEETS and (name != "contest" or before != name):
            self.screen.dismiss()
        if before != name:
            self.push_screen(Sheet(name=name), lambda _: self.left(name))

    def left(self, page: str) -> None:
        self.session.leave(page)
        self.call_after_refresh(self.paint)

    # --- scripts

    async def play(self, script: str) -> None:
        """Run a script such as "static burst24 step60" or "race". If a picture is wanted, take it
        and leave."""
        state = self.state
        await self.until(lambda: state.view.stage != "loading")
        if state.view.stage == "failed":
            if self._screenshot:
                self.exit()
            return
        for word, rest in orders_of(script):
            if word in SCRIPTED:
                await self.run_action(SCRIPTED[word])
            elif word != "wait":
                self.action_command(as_command(word, rest))
            await self.until(lambda: self.session.heard and not state.view.stepping)
            await self.until(lambda: state.view.paused or not state.view.engine.draining_to)
            if word in ("race", "elephant"):
                await self.until(lambda: self.session.settled)
            if word == "wait":  # while paused, nothing would ever come to an end
                await self.until(lambda: state.view.paused or self.session.settled)
        if self._screenshot:
            await self.until(lambda: state.view.paused or self.session.settled)
            await self.take_picture()
        self.session.stays = True  # from now on a user is there, who leaves pages

    async def take_picture(self) -> None:
        """And leave. It is written when all has ended."""
        self.screen.set_focus(None)
        self.state.film = None
        self.clear_notifications()
        self.state.said = ""
        self.look()
        await asyncio.sleep(0.3)  # for the last paint
        self.paint()
        await asyncio.sleep(0.1)
        self.picture = self.export_screenshot(title="nanobatch")
        self.exit(return_code=0)

    async def until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await asyncio.sleep(0.02)


# --- the command line ---------------------------------------------------------------------------


def options() -> program.Parser:
    parser = program.Parser("tui.py", description="Watch an LLM serving engine work.")
    add = parser.add_argument
    add("--model", default="demo", help="a model folder, a hub id such as owner/name, or 'demo'")
    add("--slots", help="sequences that run at once (default: 8, or what fits)")
    says = "(default: 1024; demo: 400; with --serve: 8192; less if the model or the memory allows less)"
    add("--max-len", help=f"length of a slot, prompt and answer together {says}")
    add(
        "--policy",
        default=next(iter(POLICIES)),
        choices=POLICIES,
        help="when the next in line is admitted",
    )
    add("--prompts", metavar="FILE", help="prompts to fire at start, and with b: one a line")
    add("--seed", help="the same seed gives the same tokens")
    add(
        "--plain",
        action="store_true",
        help="no screen: prompts are read, and events written, as lines (as if there is no terminal)",
    )
    add("--tour", action="store_true", help="begin with the tour: it asks before it shows")
    add("--script", default="", help=SCRIPT)
    add(
        "--screenshot",
        metavar="FILE.svg",
        help="draw on no terminal, run the script, write the picture, and leave",
    )
    add("--size", default="120x40", help="size of the screenshot in characters (default: 120x40)")
    add(
        "--trace",
        metavar="FILE.json",
        help="at the end, write what the timeline saw as a Chrome trace (Perfetto)",
    )
    add(
        "--record",
        metavar="FILE.json",
        help=f"at the end, write what ran last, for docs/make/page.py to make a page of: {record.HOLDS}",
    )
    add(
        "--serve",
        metavar="[HOST:]PORT",
        help="let programs ask that speak OpenAI's protocol (default: 4 slots)",
    )
    parser.add_keys()
    add(
        "--watch",
        metavar="URL",
        help="watch a server, such as http://127.0.0.1:8000, instead of an engine in here",
    )
    add(
        "--key",
        default="",
        help="with --watch: the server's watch key, or its API key (--api-key fires prompts)",
    )
    return parser


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """A wrong value gets one line and exit code 2 before any screen opens."""
    parser = options()
    args = parser.parse_args(arguments)
    args.max_queue = 256
    try:
        args.serve = None if args.serve is None else address_of(args.serve)
        args.watch = None if args.watch is None else base_of(args.watch)
        if args.serve and args.watch:
            raise ValueError("--serve opens a door and --watch looks through another; choose one")
        check_tour(args)
        args.slots = args.slots and read_whole("--slots", args.slots, 1, 4096)
        args.max_len = args.max_len and read_whole("--max-len", args.max_len, 1, 2**24)
        args.seed = args.seed and read_whole("--seed", args.seed, 0, 2**31 - 1)
        args.size = tuple(read_whole("--size", side, 1, 1000) for side in args.size.split("x", 1))
        if len(args.size) != 2:
            raise ValueError("--size needs two numbers, such as 120x40")
        program.check_model(args.model)
        if args.screenshot and not args.screenshot.endswith(".svg"):
            raise ValueError(
                f"--screenshot {shown(args.screenshot)} will be an SVG; give a name that ends in .svg"
            )
        args.plain = not args.screenshot and (args.plain or not on_a_terminal())
        with about("--script", "tui.py --help says more"):
            orders_of(args.script, args.plain)
        args.asks = read_prompts(args.prompts)
        for option in WRITTEN:
            remedy = "name a file in a folder that is there and can be written"
            if file := getattr(args, option):
                with about(f"--{option} {shown(file)}", remedy):
                    check_writable(file)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def check_tour(args: argparse.Namespace) -> None:
    """The tour fires prompts of its own, at an engine that is its own."""
    others = ("script", "prompts", "screenshot", "serve", "watch")
    given = [name for name in others if getattr(args, name)]
    if args.tour and given:
        raise ValueError(f"--tour fires prompts of its own; leave --{given[0]} out")


def tour_note() -> Path | None:
    """The file that says that the tour was taken or declined. It lies beside the compiled product;
    None if nothing can be kept there."""
    folder, _ = rows.cache_folder()
    return folder and folder / "tour"


def read_prompts(file: str | None) -> list[str]:
    """The lines of the file that `--prompts` names."""
    if not file:
        return []
    with about(f"--prompts {shown(file)}", "name a text file with a prompt in each line"):
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        prompts = [line.strip() for line in lines if line.strip()]
        if not prompts:
            raise ValueError("there is no prompt in it")
        return prompts


def load_engine(
    args: argparse.Namespace, report: Callable[[str], None], clock: Callable[[], float]
) -> AnyEngine:
    """How the room gets its engine. This is the first code to import MLX."""
    report("starting MLX")
    from parts.device import blas

    blas.say = report  # before MLX is imported, its matrix product may have to be compiled
    from nanobatch import Engine
    from parts.device import mlx as device

    options = {"policy": args.policy, "slots": args.slots, "max_len": args.max_len}
    # Its prompts and answers are short: so they fill more of a slot, and some take two chunks
    if args.model == "demo":
        options |= {"max_len": args.max_len or 400, "chunk": CHUNK}
    engine = Engine.load(args.model, report=report, clock=clock, **options)
    report(f"warming up with {device.named()}")
    with faults.shown("the first step failed"):
        engine.runner.warm_up()
    return engine


def open_room(args: argparse.Namespace) -> Room:
    """A room with an engine in it or elsewhere. A door's port is bound here, before anything is
    loaded."""
    if args.watch:
        return RemoteRoom(
            args.watch, args.key or args.watch_key or args.api_key, args.api_key or args.key
        )
    if not args.serve:
        return EngineRoom(partial(load_engine, args))
    import serve
    from door.door import Door
    from door.http import Options

    host, port = args.serve
    try:
        door = Door(Options(host, port, args.api_key, args.watch_key, tuple(args.allow_host)))
    except OSError as error:  # the port is taken
        raise ValueError(f"--serve {host}:{port}: {error.strerror or error}") from None
    if door.warning:
        print(f"nanobatch: {door.warning}", file=sys.stderr)
    args.slots = args.slots or 4
    load = lambda report, clock: serve.load(args, report=report, clock=clock)  # noqa: E731
    return EngineRoom(load, door.start(), program.name_of(args.model))


def failed(state: State) -> int:
    """The exit code of a screen that was left: 2 if its model could not be loaded, and then it says
    why once more."""
    if state.view.stage != "failed":
        return 0
    print(f"nanobatch: {state.view.error or state.printed}", file=sys.stderr)
    return 2


def recording_of(args: argparse.Namespace, session: Session) -> tuple[str, str]:
    """What ran last, and what a reader needs to run it again: as a file, and what it holds."""
    session.look()
    engine = session.room.engine if isinstance(session.room, EngineRoom) else None
    about = {
        "command": command_of(args),
        "version": program.version(),
        "processor": program.processor(),
        "model": program.name_of(session.state.model).partition(" @ ")[0],
        "engine": engine.summary if engine else "",
    }

    def ids(request: RequestView) -> Sequence[int]:
        is_ours = engine and isinstance(request.origin, Ask)
        return engine.text.ask(request.origin.prompt) if is_ours else ()

    recording = record.record(session.state, about, ids)
    return record.as_text(recording), record.contents(recording)


def write_files(args: argparse.Namespace, session: Session, picture: str) -> bool:
    """Write what the options ask for. False, and a line for each reason, if not all could be."""
    makers = {
        "screenshot": lambda: (picture, ""),
        "trace": lambda: (trace_of(session), ""),
        "record": lambda: recording_of(args, session),
    }
    is_done = True
    for option in WRITTEN:
        file = getattr(args, option)
        if not file or (option == "screenshot" and not picture):  # the model could not be loaded
            continue
        try:
            text, holds = makers[option]()
            write_whole(file, text)
            said = holds and f"{shown(file, 200)} holds {holds}"
        except (
            ValueError,
            OSError,
        ) as error:  # nothing has run; its folder is gone; the disk is full
            is_done = False
            said = f"--{option} {shown(file, 200)}: {getattr(error, 'strerror', None) or error}"
        if said:
            print(f"nanobatch: {said}", file=sys.stderr)
    return is_done


def command_of(args: argparse.Namespace) -> str:
    """The command that runs the same again, as far as options say it. It names no folder and no
    key."""
    words = ["python", "tui.py"]
    if args.model != "demo":
        words += ["--model", program.name_of(args.model)]
    for option in ("slots", "max_len", "seed"):
        value = getattr(args, option)
        words += [f"--{option.replace('_', '-')}", str(value)] if value is not None else []
    if args.policy != next(iter(POLICIES)):
        words += ["--policy", args.policy]
    if args.script:
        words += ["--script", args.script]
    if args.watch:
        words += ["--watch", "URL"]
    return shlex.join([*words, "--record", "run.json"])


def leave(*_) -> NoReturn:
    raise KeyboardInterrupt


def run_screen(args: argparse.Namespace, session: Session) -> tuple[int, str]:
    """The screen, to its end. Answers with the exit code, and the picture if one was asked for."""
    note = tour_note() if session.eases else None
    app = Screen(session, args.script, bool(args.screenshot), args.tour, note)
    app.run(headless=bool(args.screenshot), size=args.size if args.screenshot else None)
    code = app.return_code or 0
    if app.return_code is None and not BROWSER:  # a browser ends it without a word
        print("nanobatch: the screen has ended by itself, a mistake in it", file=sys.stderr)
        code = 1
    for block in session.state.tracebacks[-5:]:
        print(f"nanobatch: {block}", file=sys.stderr)
    if session.state.periods and not (args.screenshot or BROWSER or code == HUNG_UP):
        print("\n".join(totals.farewell(session.state, shutil.get_terminal_size().columns)))
    return code or failed(session.state), app.picture


def run_log(args: argparse.Namespace, session: Session) -> int:
    """The same as a plain log."""
    signal.signal(signal.SIGTERM, leave)
    # A server goes on without its log
    write = LineFile(sys.stdout).write if args.serve else partial(print, flush=True)
    try:
        if args.tour:
            return run_plain_tour(session)
        stays = bool(args.serve or args.watch)
        return run_plain(session, args.script, write, stays)
    except BrokenPipeError:  # the program that read the log has seen enough
        sys.stdout = None
        return 141
    except OSError as error:  # a full disk
        sys.stdout = None
        print(f"nanobatch: the log cannot be written: {one_line(error)}", file=sys.stderr)
        return 1


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if program.rank() and not args.watch:  # rank 0 has the screen
        import serve

        return serve.follow(args)
    if args.record:
        print(f"nanobatch: {shown(args.record)} will hold {record.HOLDS}", file=sys.stderr)
    settings = Settings(seed=args.seed)
    prompts = [(prompt, settings.max_tokens) for prompt in args.asks] or BURST
    try:
        room = open_room(args)
        room.start()
    except ValueError as error:
        print(f"nanobatch: {error}", file=sys.stderr)
        return 2
    session = Session(room, State(args.model, settings=settings, prompts=prompts))
    if args.asks:
        room.fire(session.asks(len(prompts)))
    # A first burst of the demo model is watched slowly, but not by a script or in a log.
    scripted = args.script or args.asks or args.screenshot or args.serve or args.watch
    session.eases = args.model == "demo" and not args.plain and not scripted
    code = 1
    picture = ""
    try:
        if args.plain:
            code = run_log(args, session)
        else:
            code, picture = run_screen(args, session)
    except KeyboardInterrupt:
        code = 130
    finally:
        code = 0 if args.serve and code in (130, 143) else code  # for a server, this is how it ends
        room.drain()
        if not write_files(args, session, picture):
            code = code or 1
        # A download or a very long step cannot be interrupted, but it can be left
        if not room.stop(patience=0.6):
            if sys.stdout:
                sys.stdout.flush()
            os._exit(code)
    return code


if __name__ == "__main__":
    program.run(main)
