"""The Textual app: place the panes, poll the engine, and run actions.

The drawing depends only on `State` and on the terminal's size. Every key calls `Session.obey` or
an `action_...` method. Pages are records (`page.py`), listed in `keys.py` and `tui.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from rich.cells import cell_len
from textual import events
from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.geometry import Region
from textual.theme import BUILTIN_THEMES
from textual.widget import Widget

from base import error_reports as faults
from base.atomic_write import write_whole
from base.status_line import CLEARS
from cli.options import BROWSER
from cli.terminal_chat import History
from engine.snapshot import RequestView
from screen.commands import SCRIPTED, Session, as_command, orders_of
from screen.draw import answers, charts, slots, status, timeline
from screen.draw import step as steps
from screen.draw.canvas import Canvas
from screen.draw.layout import (
    CHARTS,
    LOWER,
    arrange,
    arrange_chat,
    arrange_loading,
    arrange_strip,
    is_small,
    is_wide,
)
from screen.draw.slots import fit_slots
from screen.draw.style import DARK, Palette, clean, count
from screen.keys import PROMPT_KEYS, REQUEST, Menu, split_command
from screen.page import Page
from screen.state import State
from screen.widgets import Pane, PromptBox, thrifty

PANES = {  # name -> draw function
    "loading": status.draw_loading,
    "small": status.draw_small,
    "status": status.draw_status,
    "slots": slots.draw_slots,
    "timeline": timeline.draw_timeline,
    "rate": charts.draw_rate,
    "batch": charts.draw_batch,
    "ttft": charts.draw_ttft,
    "batching": charts.draw_cost,
    "streams": answers.draw_streams,
    "step": steps.draw_step_pane,
    "mark": status.draw_mark,
    "settings": status.draw_settings,
}
# Pane -> the action of the mouse wheel
WHEEL = {"slots": "choose", "timeline": "move", "streams": "choose", "step": "nudge"}
# Panes that are painted less often while the engine is busy
SLOW = ("rate", "batch", "ttft", "batching", "step", "requests", "sheet")
# On a small screen: command -> the pane that shows its effect
BRINGS = {
    "json": "streams",
    "pause": "step",
    "step": "step",
    "resume": "timeline",
    "burst": "timeline",
}
# Keys that work on every page, in addition to the page's own
ON_A_PAGE = {"escape": "close", "enter": "close", "pageup": "leaf(-1)", "pagedown": "leaf(1)"}
ON_A_PAGE |= {"up": "scroll(-1)", "down": "scroll(1)"}
ON_A_PAGE |= {"home": "scroll(-100000)", "end": "scroll(100000)"}
# Actions on panes, disabled while a page is open
OF_PANES = ("move", "nudge", "zoom", "view")
# Actions that are disabled while a page with a strip is open
OF_A_USER = ("command", "prompt", "fire", "pause", "settings")
# Black on white: Textual's own light theme is grey on grey
PAPER = replace(BUILTIN_THEMES["textual-light"], background="#ffffff", surface="#ffffff")
HUNG_UP = 129  # the exit code after SIGHUP
WARNINGS = 4  # maximum number of notifications on the screen
TRACEBACKS = 100  # number of newest tracebacks kept


def panes_of(menu: Menu) -> dict[str, Callable[[State, Canvas], None]]:
    """Return the draw function of every pane, by name."""
    return PANES | {"keys": menu.draw_keys} | menu.panes


# --- the screen ---------------------------------------------------------------------------------


class Offer(NamedTuple):
    """An offer to open the page with the strip, made once to a new user."""

    words: str
    declined: str  # shown when Esc declines it
    file: Path  # exists once the offer has been accepted or declined, or a prompt has been fired


class Tracebacks(logging.Handler):
    """A log handler that sends tracebacks to the errors page while the app owns the terminal."""

    def __init__(self, state: State):
        super().__init__()
        self.news: list[str] = []  # first lines of tracebacks not shown yet
        self._state = state

    def emit(self, record: logging.LogRecord) -> None:
        block = clean(self.format(record)).removeprefix("nanobatch: ")
        self._state.tracebacks.append(block)
        del self._state.tracebacks[:-TRACEBACKS]
        self.news.append(f"{block.partition(chr(10))[0]}; E shows where")


class Screen(App):
    """The Textual app that shows a `Session`."""

    TITLE = "nanobatch"
    CSS = """
    Screen { layers: panes; }
    Pane, PromptBox { position: absolute; }
    #status, #keys { background: $foreground 10%; }
    #strip { background: $foreground 5%; }
    #prompt, #mark, #settings { background: $surface; color: $foreground; }
    #prompt { padding: 0; scrollbar-size: 0 0; color: $foreground 60%; }
    #prompt:focus { color: $foreground; }
    ToastRack { margin-bottom: 2; }
    Toast { width: 46; }
    """
    BINDINGS = (
        # With priority, so that letters typed right after these keys go to the prompt
        *(Binding(k.keys, k.action, k.label, show=False, priority=True) for k in PROMPT_KEYS),
        Binding("ctrl+c", "quit", show=False, priority=True),
    )
    AUTO_FOCUS = None  # letters are shortcuts until the user opens the prompt box
    POLL_S = 0.1  # seconds between two polls of the engine client

    def __init__(
        self,
        session: Session,
        script: str = "",
        screenshot: bool = False,
        starts_strip: bool = False,
        offer: Offer | None = None,
        earlier: History | None = None,
    ):
        """`screenshot`: take a screenshot after the script, then quit. `starts_strip`: start with
        the page that has a strip. `earlier`: prompts to recall."""
        super().__init__()
        self.register_theme(PAPER)
        self.session = session
        self.menu = session.menu
        self.state = session.state
        self.offer = None if starts_strip or (offer and offer.file.exists()) else offer
        self.state.offer = self.offer.words if self.offer else ""
        session.has_chats = True
        self._starts_strip = starts_strip
        self._script = script
        self._screenshot = screenshot
        self._places: dict[str, Region] = {}  # pane -> its region, if it is visible
        self.picture = ""
        self._polls = 0
        self._faults = 0  # number of faults already shown
        self._untold: list[str] = []  # warnings that wait until older ones disappear
        self._shown_until: list[float] = []  # when each visible warning disappears
        self._tracebacks = Tracebacks(self.state)
        self.palette = DARK
        for key in self.menu.keys[len(PROMPT_KEYS) :]:
            self.bind(key.keys, key.action, description=key.label, show=False)
        self.prompt = PromptBox(earlier or History())
        self._returns = False  # leave the prompt box after a command
        self.page: Page | None = None  # the open page, which replaces all panes
        self._top = 0  # number of the page's lines scrolled off the top
        self._was_typing = False  # the page was opened from the prompt box

    @property
    def strip(self) -> Page | None:
        """The page whose strip is shown below the panes, if any."""
        return self.menu.strip if self.state.strip else None

    # --- panes

    def compose(self) -> Iterable[Widget]:
        wheel = WHEEL | {page.name: "roll" for page in self.menu.pages.values() if page.is_view}
        panes = panes_of(self.menu).items()
        yield from (Pane(draw, name, wheel.get(name, "")) for name, draw in panes)
        yield Pane(self.draw_page, "sheet", wheel="scroll")
        yield self.prompt

    def draw_page(self, state: State, on: Canvas) -> None:
        """Draw the visible lines of the open page. The heading does not scroll."""
        self.page.draw(state, on)
        self._top = max(0, min(self._top, -on.lines_left))
        del on.lines[1 : 1 + self._top]
        on.cut("", "")

    def on_mount(self) -> None:
        faults.LOG.addHandler(self._tracebacks)
        self.begin_capture_print(self)  # for example download progress, or advice about a BLAS
        self.watch_theme()
        self.watch(self.screen, "focused", self.note_focus)
        self.prompt.put(self.state.prompts[0][0])  # an example prompt
        self.set_interval(self.POLL_S, thrifty(self.poll))
        # Redraw after Ctrl-Z and fg
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for signal_, code in ((signal.SIGTERM, 143), (signal.SIGINT, 0)):
                loop.add_signal_handler(signal_, self.exit, None, code)
            signal.signal(signal.SIGHUP, lambda *_: self.hang_up(loop))
        if self._starts_strip:
            self.action_command(f"/{self.menu.strip.name}")
        self.run_worker(self.play(self._script))

    def hang_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """Quit after SIGHUP.

        Textual cannot quit if the terminal is gone: its writer thread has failed, and the event
        loop may be waiting for that thread.
        """

        def leave() -> None:
            try:
                self.session.client.drain()
            finally:
                os._exit(HUNG_UP)

        if os.isatty(0):
            loop.call_soon_threadsafe(self.exit, None, HUNG_UP)
        else:
            threading.Thread(target=leave).start()

    def on_unmount(self) -> None:
        faults.LOG.removeHandler(self._tracebacks)

    def on_print(self, event: events.Print) -> None:
        text = event.text.replace(CLEARS, "").strip("\r\n")
        if said := re.split(r"[\r\n]", clean(text))[-1].strip():
            self.state.printed = said
            self.paint()

    def on_resize(self) -> None:
        self.call_later(self.paint)  # once the size is known

    def places(self) -> dict[str, Region]:
        """Return the region of each visible pane."""
        view = self.state.view
        slots = len(view.engine.slots) if view.engine else 0
        if is_small(*self.size) or view.stage == "failed":
            return {"small" if view.stage == "ready" else "loading": Region(0, 0, *self.size)}
        if self.page and (view.engine or self.page.is_early):
            return {"sheet": Region(0, 0, *self.size)}
        if view.stage == "loading":
            places = arrange_loading(*self.size)
        elif self.state.strip:
            places = arrange_strip(*self.size, slots, self.state.lower)
        elif self.state.chatting:
            places = arrange_chat(*self.size, slots)
        else:
            places = arrange(*self.size, slots, self.state.lower, bool(view.server))
        tall = min(self.prompt.tall, self.size.height // 3)
        for name in ("mark", "prompt"):
            if name in places:
                x, y, wide, _ = places[name]
                places[name] = Region(x, y + 1 - tall, wide, tall)
        return places

    def place(self) -> None:
        """Move, show and hide panes if the layout has changed."""
        places = self.places()
        if places == self._places:
            return
        self._places = places
        for pane in self.screen_stack[0].query("Pane, PromptBox"):
            pane.display = pane.id in places
            if region := places.get(pane.id):
                pane.styles.offset = region.offset
                pane.styles.width, pane.styles.height = region.size
        self.call_after_refresh(self.paint)

    def poll(self) -> None:
        """Poll the client and paint if needed. While steps are fast, paint `SLOW` less often."""
        before = self.state.view
        news = self._tracebacks.news
        self._tracebacks.news = []
        self.warn(news)
        has_news = self.session.refresh()
        for page in (self.page, self.strip) if self.screen_stack else ():
            if page and page.poll:
                has_news |= page.poll(self.session)
        self.note_offer()
        if not has_news:
            return
        view = self.state.view
        self._polls += 1
        if before.stage != view.stage and self.state.leads:
            self.state.chatting = self.state.typing or bool(self.state.chats.open.turns)
        if view.stage == "failed":  # the main screen shows the reason, and q quits
            self.turn_to(None)
            self.screen.set_focus(None)
        faults = self.state.faults[self._faults :]
        self._faults += len(faults)
        # No warning for a question that did not fit: it waits, and the conversation page says why
        self.warn([fault.message for fault in faults if fault.prompt or not fault.question])
        for fault in faults:
            if fault.prompt and not self.prompt.value:
                self.prompt.put(fault.prompt)
        self.paint(but=SLOW if self.state.hurries and self._polls % 3 else ())

    def note_offer(self) -> None:
        """Do not repeat the offer once it has been accepted or declined, or a prompt has been fired."""
        if self.session.client.posted:
            self.state.offer = ""
        if self.offer and not self.state.offer:
            with suppress(OSError):
                self.offer.file.touch()
            self.offer = None

    def warn(self, messages: Sequence[str]) -> None:
        """Show faults as notifications.

        Ten thousand notifications would freeze the app. If there are too many, show only the
        newest, with the number of the others. The page with the strip reports faults itself.
        """
        if self.strip:
            return
        self._untold += messages
        now = time.monotonic()
        self._shown_until = [moment for moment in self._shown_until if moment > now]
        room = WARNINGS - len(self._shown_until)
        if not self._untold or room < 1:
            return
        if len(self._untold) > room:
            others = count(len(self._untold) - 1, "other fault")
            self._untold = [f"{self._untold[-1]} (and {others})"]
        for message in self._untold:
            self.notify(message, severity="error", markup=False)
            self._shown_until.append(now + self.NOTIFICATION_TIMEOUT)
        self._untold = []

    def paint(self, but: Sequence[str] = ()) -> None:
        if not self.screen_stack:  # a timer fired during shutdown
            return
        self.place()
        for pane in self.screen.query(Pane):
            if pane.id not in but:
                pane.paint()

    def watch_theme(self) -> None:
        self.palette = Palette.from_theme(self.current_theme)
        self.call_after_refresh(self.paint)

    def note_focus(self, focused: Widget | None) -> None:
        self.state.typing = focused is not None
        self.state.has_typed |= self.state.typing
        self.prompt.fold(self.state.typing)

    def say(self, message: str) -> None:
        """Show a message next to the prompt for a few seconds, or as a notification."""
        beside = self._places.get("settings")
        is_long = beside and cell_len(message) > beside.width - 2
        if message and (is_long or self.page):
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
        for key in self.menu.keys:
            yield SystemCommand(
                f"{key.label} ({key.show})", key.help, lambda key=key: self.run_action(key.action)
            )

    # --- keys

    async def on_event(self, event: events.Event) -> None:
        """Handle each key completely before the next one.

        subtle: Textual passes a key to the focused widget, which passes it back if it is not a
        letter. A letter typed in the meantime would overtake Backspace and Enter.
        """
        is_new = isinstance(event, (events.Key, events.Paste)) and not event.is_forwarded
        is_ours = len(self.screen_stack) == 1  # otherwise the command palette has the focus
        if not (is_new and is_ours):
            await super().on_event(event)
        elif self.return_code is None:  # otherwise the app is quitting
            self.app_focus = True
            await (self.press(event) if isinstance(event, events.Key) else self.paste(event))

    async def press(self, event: events.Key) -> None:
        # Outside the prompt box, a line feed is an Enter that was typed before the app started
        key = "enter" if event.key == "ctrl+j" and not self.focused else event.key
        if await self.action_own(key):
            return
        if self.page and key in ON_A_PAGE:
            await self.run_action(ON_A_PAGE[key])
            return
        if not self.page and self.is_text(event):
            await self.run_action("prompt")
            if self.focused:  # false if a page with a strip controls the engine
                self.prompt.insert_text(event.character)
        elif await self._check_bindings(key, priority=True):
            return
        elif self.focused and event.is_printable:
            self.prompt.insert_text(event.character)
        elif not (self.page and key in ("tab", "shift+tab")):  # these would focus the prompt box
            await self._check_bindings(key)

    async def paste(self, event: events.Paste) -> None:
        """Insert a paste into the prompt box, with line ends normalized."""
        if self.focused:
            self.prompt.insert_text("\n".join(event.text.splitlines()))

    async def action_own(self, key: str) -> bool:
        """Run the open page's own action for a key. Return False if it has none."""
        page = self.page or self.strip
        do = page.own.get(key) if page else None
        if isinstance(do, str):
            await self.run_action(do)
        elif do:
            do(self.state)
            self._top = 0
            self.paint()
        return do is not None

    def is_text(self, event: events.Key) -> bool:
        """True if a key begins a prompt outside the box: a letter that is not a shortcut."""
        if self.focused or self.state.view.stage == "failed":
            return False
        is_key = any(event.key in key.keys.split(",") for key in self.menu.keys)
        return event.is_printable and event.character.isalpha() and not is_key

    # --- actions

    async def run_action(self, *arguments, **options) -> bool:
        """Run the action of a key, a click or the wheel, then paint.

        While a page with a strip is open, refuse actions that affect the engine.
        """
        action = str(arguments[0]).removeprefix("app.")
        name = action.partition("(")[0]
        is_taken = name in OF_A_USER or (name == "page" and not self.menu.is_harmless(action))
        if self.strip and is_taken:
            self.say(f"the {self.strip.name} has the engine; esc leaves it")
            return True
        done = await super().run_action(*arguments, **options)
        self.paint()
        return done

    def check_action(self, action: str, parameters: tuple) -> bool | None:
        """Textual's hook: return whether an action is enabled. The panes' actions are off while a page is
        open, all but a few are off if loading has failed, and `prompt` is off while a widget has the focus."""
        if self.page and action in OF_PANES:
            return False
        if self.state.view.stage == "failed":
            return action in ("quit", "theme", "command_palette", "suspend_process")
        return action != "prompt" or self.focused is None

    def action_prompt(self, begin: str = "") -> None:
        self.turn_to(None)  # close the page, which hides the prompt box
        self.screen.set_focus(self.prompt)  # before the next letter arrives
        self._returns = bool(begin)
        if begin:
            self.prompt.put(begin)
            return
        is_example = self.prompt.value == self.state.prompts[0][0]
        if self.state.leads or self.state.chatting:
            self.prompt.put("" if is_example else self.prompt.value)
            self.state.chatting = True
        elif is_example:
            self.prompt.select_all()  # typing replaces it

    def action_escape(self) -> None:
        """Handle Esc in the prompt box.

        Stop the running answer and take back the waiting question, or leave the box. While the
        engine is paused, always leave, because its keys are needed.
        """
        if self.state.view.paused or not (self.state.chatting and self.session.stop()):
            self.action_leave()
        else:
            self.prompt.put(self.prompt.value or self.state.chats.open.take_back())

    def action_back(self) -> None:
        """Go to the newest step or, from there, back to the panes. Decline a pending offer."""
        if self.offer and self.state.offer:
            self.state.offer = ""
            self.say(self.offer.declined)
        if self.state.cursor is None:
            self.state.chatting = False
        self.state.cursor = None

    def action_leave(self) -> None:
        """Leave the prompt box. Delete an unfinished command, but keep a prompt."""
        if self.prompt.value.startswith("/"):
            self.prompt.put("")
        self.prompt.screen.set_focus(None)

    def action_complete(self) -> None:
        """Complete the command in the box up to the longest unambiguous prefix."""
        found = self.menu.completions(self.prompt.value)
        if found:
            alike = sum(takewhile(bool, map(str.__eq__, min(found), max(found))))
            self.prompt.put(found[0][:alike])
        if len(found) > 1:
            self.say(" ".join(line.split()[-1] for line in found))

    def action_fire(self) -> None:
        if self.prompt.value:
            self.action_submit()
        else:
            self.action_prompt()

    def action_submit(self) -> None:
        """Run the text of the prompt box, or replace a backslash before the cursor with a line break.

        The box keeps the focus unless `/` opened it for one command.
        """
        if self.prompt.continues():
            return
        line = self.prompt.value.strip()
        if not (line and self.action_command(line)):  # a wrong command stays in the box
            return
        self.prompt.fired()
        if self._returns:
            self.action_leave()
        if not line.startswith("/"):
            self.bring("streams")

    def action_command(self, line: str) -> bool:
        """Run a prompt or a command. If it is wrong, show a notification and return False."""
        name, _ = split_command(line.strip())
        posted = self.session.client.posted
        if name in ("quit", "exit"):
            self.exit()
            return True
        try:
            said = self.session.obey(line)
        except ValueError as error:
            self.notify(str(error), severity="error", markup=False)
            return False
        if self.state.view.stage == "loading" and self.session.client.posted > posted:
            self.state.waiting.append(line)
        self.state.chatting &= name != "json"  # the answer appears in the panes
        if not (name == "step" and self.state.inspected):  # keep the token inspector
            self.bring(BRINGS.get(name, self.state.lower))
        if name in self.menu.pages:
            self.show_page(self.menu.pages[name])
        if self.page:  # live pages show the effect, others hide it
            said = "" if self.page.is_live else said
            if name != self.page.name and not self.page.is_live:
                said = said or f"done behind this page: {line}"
        self.say(said)
        self.paint()
        return True

    def action_pause(self) -> None:
        self.action_command("/resume" if self.session.coming.paused else "/pause")

    def action_settings(self) -> None:
        self.action_prompt(f"/set {self.state.settings.words}")

    def action_choose(self, by: int) -> None:
        self.action_select(self.state.selected + by)

    def action_select(self, slot: int) -> None:
        self.state.select(slot)

    def action_move(self, columns: int) -> None:
        """Move by columns of the timeline, or by steps if the timeline is not visible."""
        timeline = self._places.get("timeline")
        zoom = self.state.zoom_for(timeline.width - 4) if timeline else 1
        self.state.move(columns * zoom)

    def action_leaf(self, by: int) -> None:
        """Scroll a page by a screen, so that its last visible line becomes the first. Without a page, scroll
        the conversation or move in the timeline."""
        if self.page:
            self._top += by * max(1, self.size.height - 3)
        elif self.state.chatting:
            self.action_roll(by * 4)
        else:
            self.action_move(40 * by)

    def action_scroll(self, by: int) -> None:
        self._top += by

    def action_roll(self, by: int) -> None:
        """Scroll the conversation by three lines."""
        self.state.chats.open.below -= 3 * by

    def action_nudge(self, steps: int) -> None:
        self.state.move(steps)

    def action_point(self, column: int, row: int) -> None:
        """Move the cursor to the clicked column of the timeline, and select the clicked slot."""
        timeline = self._places["timeline"]
        _, columns, _ = self.state.window(timeline.width - 4)
        if 0 <= column < len(columns):
            self.state.look_at(self.state.index_of(columns[column].step))
            slots = fit_slots(self.state, timeline.height - 2)
            if 0 <= row < len(slots):
                self.action_select(slots[row])

    def action_go(self) -> None:
        """Go from a step to the selected slot's request, or from a request to its first step."""
        state = self.state
        request = self.request()
        if not (self.page and self.page.has_request):
            if request:
                state.opened = request.id
                self.show_page(REQUEST)
            else:
                self.say(f"slot {state.selected} has had no request yet")
        elif steps := state.steps_of(request) if request else []:
            state.look_at(steps[0])
            self.action_select(request.slot)
            self.turn_to(None)
        else:
            self.say("its steps are not remembered")

    def action_follow(self) -> None:
        self.state.cursor = None

    def action_zoom(self) -> None:
        zooms = (None, 1, 2, 4, 8)
        self.state.zoom = zooms[(zooms.index(self.state.zoom) + 1) % len(zooms)]
        self.say(f"steps a column: {self.state.zoom or 'so that they fit'}")

    def action_view(self) -> None:
        panes = LOWER if self.state.view.server else LOWER[:-1]
        if is_wide(*self.size):
            panes = CHARTS
        now = self.state.lower if self.state.lower in panes else panes[0]
        self.state.lower = panes[(panes.index(now) + 1) % len(panes)]
        self.state.has_chosen = True

    def bring(self, pane: str) -> None:
        """If panes take turns, show this one, unless the user has chosen one with `v`."""
        state = self.state
        if not state.has_chosen and pane != state.lower and not is_wide(*self.size):
            state.lower = pane

    def request(self) -> RequestView | None:
        """Return the request on the open page, or the one in the selected slot."""
        has_request = self.page and self.page.has_request
        return self.state.open if has_request else self.state.owner(self.state.selected)

    def action_copy(self) -> None:
        """Copy a request's text to the terminal's own clipboard (OSC 52)."""
        request = self.request()
        if self.state.chatting and not self.page:
            turns = self.state.chats.open.turns
            request = turns[-1].request if turns else None
        if request:
            self.copy_to_clipboard(request.text)
        self.say(f"r{request.id} is copied" if request else "there is nothing to copy yet")

    async def action_suspend_process(self) -> None:
        """Suspend the app (Ctrl-Z). Pause the engine first, so that its clock stops."""
        client = self.session.client
        view = self.state.view
        runs = view.stage == "ready" and not (view.paused or view.watches)
        if runs:
            client.pause(True)
            await self.until(lambda: client.view_since(view).paused)
        super().action_suspend_process()
        if runs:
            client.pause(False)

    def export_screenshot(self, *, title: str | None = None, simplify: bool = False) -> str:
        """Return the screen as an SVG, titled with page, model and policy.

        Spaces are preserved by `xml:space`, because some viewers collapse the exporter's
        non-breaking spaces.
        """
        engine = self.state.view.engine
        policy = f", {engine.policy}" if engine else ""
        page = f": {self.page.label}" if self.page else ""
        title = title or f"nanobatch{page} ({clean(self.state.model)}{policy})"
        svg = super().export_screenshot(title=title, simplify=simplify)
        return svg.replace("&#160;", " ").replace("<text ", '<text xml:space="preserve" ')

    def deliver_screenshot(
        self, filename: str | None = None, path: str | None = None, time_format: str | None = None
    ) -> str | None:
        """Save the screenshot in the current folder; in a browser, download it.

        Textual's default folder may not exist.
        """
        if BROWSER:
            return super().deliver_screenshot(filename, path, time_format)
        name = filename or f"nanobatch-{datetime.now():%F-%H-%M-%S-%f}.svg"
        file = os.path.join(path or "", name)
        try:
            write_whole(file, self.export_screenshot())
            self.notify(f"Saved screenshot to {file!r}", markup=False)
        except OSError as error:
            words = f"no screenshot: {file!r}: {error.strerror}"
            self.notify(words, severity="error", markup=False)
        return None

    def action_theme(self, name: str = "") -> None:
        self.theme = name or ("textual-light" if self.current_theme.dark else "textual-dark")

    def action_page(self, name: str) -> None:
        """Open or close a page. If the page repeats, its key runs the command again instead."""
        page = self.menu.pages[name]
        if self.page is page and not page.repeats:
            self.turn_to(None)
            return
        if page.is_view and self.state.chatting and not self.page:
            self.state.chatting = False
            self.action_leave()
            return
        if page.has_request and (request := self.request()):
            self.state.opened = request.id
        self.action_command(f"/{name}")

    def show_page(self, page: Page) -> None:
        if page.is_view or page.is_strip:
            self.turn_to(None)
            self.state.chatting = page.is_view
            if page.is_view:  # a conversation invites a question, so focus the prompt box
                self.action_prompt()
            else:
                self.action_leave()
        elif self.page is not page:
            self.turn_to(page)

    def action_close(self) -> None:
        self.turn_to(None)

    def turn_to(self, page: Page | None) -> None:
        """Replace the open page with another; None returns to the panes or the prompt box."""
        before = self.page
        if not before:
            self._was_typing = self.state.typing
        elif before.leave:
            before.leave(self.session)
        self.page = page
        self._top = 0
        if page:
            self.screen_stack[0].set_focus(None)
        self.paint()
        if before and not page and self._was_typing:
            self.screen_stack[0].set_focus(self.prompt)

    # --- scripts

    async def play(self, script: str) -> None:
        """Run a script such as "static burst24 step60". With `screenshot`, take it and quit."""
        state = self.state
        self.session.stays = not (script or self.strip)  # a user may type while the model loads
        client = self.session.client
        await self.until(lambda: state.view.stage != "loading" or client.asleep)
        if state.view.stage == "failed":
            if self._screenshot:
                self.exit()
            return
        for word, rest in orders_of(script, self.menu):
            if word in SCRIPTED:
                await self.run_action(SCRIPTED[word])
            elif word != "wait":
                self.action_command(as_command(word, rest))
            await self.until(lambda word=word: self.is_done(word))
        if self._screenshot:
            await self.until(lambda: state.view.paused or self.session.settled)
            await self.take_picture()
        self.session.stays = not self.strip  # experiments now run until their page is closed

    def is_done(self, word: str) -> bool:
        """True if a script word has taken effect, and its experiment, if any, has finished."""
        view = self.state.view
        page = self.menu.pages.get(word)
        if not self.session.handled or view.stepping:
            return False
        if page and page.disturbs:
            return self.session.settled
        if view.paused:  # a paused engine never finishes
            return True
        is_draining = view.engine and view.engine.draining_to
        return self.session.settled if word == "wait" else not is_draining

    async def take_picture(self) -> None:
        """Take the screenshot and quit. The file is written at exit."""
        self.picture = await self.draw_picture()
        self.exit(return_code=0)

    async def draw_picture(self) -> str:
        """Return the screen as an SVG, once everything is painted."""
        self.screen.set_focus(None)
        self.clear_notifications()
        self.state.said = ""
        self.poll()
        if self.page:  # skip to the end of an animation
            await self.action_own("end")
        await asyncio.sleep(0.3)  # wait for the last paint
        self.paint()
        await asyncio.sleep(0.1)
        return self.export_screenshot()

    async def until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await asyncio.sleep(0.02)
