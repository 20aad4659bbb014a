"""Watch it happen: slots, waiting line, timeline, charts and answers of a running engine, in a terminal.

The problem. A serving engine takes hundreds of decisions a second, and its source shows none of them. This program
shows them all: who holds which slot, how far its KV cache is filled, who waits and why, and what every slot did in
every step. One picture says what batching is about, the timeline, slots x steps (here with two slots, A to D):

    continuous  0 ▒A██████▒C████████     ▒ prefill: a chunk of the prompt goes into the slot
                1 ▒B██▒D████████████     █ decode: one more token of the answer

    static      0 ▒A██████▒C████████     ╳ blocked: the slot is empty and somebody waits, but the batch that
                1 ▒B██╳╳╳╳▒D████████       was admitted together has to drain first

How it hangs together. Three parts, and each knows only the one before:

    EngineRoom   a thread of its own. It loads the engine, steps it, and alone touches it. Wishes come in through a
                 queue; what there is to see goes out as one frozen `View`, a few times a second.
    State        all that the screen knows: the newest view, the history of steps, what the user has selected.
    draw_...     pure functions: state, colours and a size in, lines of text out. A widget does nothing but call one.

The invariant: what is on the screen depends on `State` and the size alone, and nothing that is drawn touches an engine
or an array. So the engine never waits for the screen, and every picture can be tested without a terminal.

Because `sched.py` needs no model, the policies can also be compared without one: `replay` takes the lengths and
arrival times of what just ran, and drives a second `Scheduler` through them on a clock of its own.

Read it from top to bottom: workload, engine room, state, replay, drawing, screen, plain log, command line.
Before it: `sched.py`, and `Engine.step` in `nanobatch.py`. After it: `tests/test_tui.py`, with an engine made of words.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.geometry import Region, Size
from textual.screen import ModalScreen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input

from sched import POLICIES
from screen.charts import draw_batch, draw_rate, draw_ttft
from screen.ink import _UNSAFE, DARK, Line, Palette, Pen, clean
from screen.keys import KEYS, draw_help, draw_keys
from screen.panes import (
    draw_contest,
    draw_loading,
    draw_mark,
    draw_requests,
    draw_settings,
    draw_slots,
    draw_small,
    draw_status,
    draw_step,
    draw_streams,
    draw_timeline,
)
from screen.room import BURST, EngineRoom, Settings, load_engine
from screen.session import SCRIPTED, Session, as_command, orders_of, run_plain, whole
from screen.state import State
from screen.timeline import trace_events

if TYPE_CHECKING:  # importing them for real loads MLX: that is left to the engine room, behind the first frame
    pass

# --- the workload ------------------------------------------------------------------------------------------------

_UNSAFE |= {code: 0x2400 + code for code in range(32)} | {0x7F: "␡", ord("\t"): "    ", ord("\r"): None}
del _UNSAFE[ord("\n")]


# --- the engine room ---------------------------------------------------------------------------------------------


# --- what the screen knows ---------------------------------------------------------------------------------------

# --- comparing policies ------------------------------------------------------------------------------------------


# --- how to draw: colours, a pen, figures, text ---------------------------------------------------------------------

# --- the panes: pure functions from state, colours and a size to lines ---------------------------------------------


SHEETS = {"help": draw_help, "requests": draw_requests, "contest": draw_contest}
LOWER = ("timeline", "charts", "streams", "step")


def arrange(width: int, height: int, slots: int, lower: str) -> dict[str, Region]:
    """Where each pane goes. What is not named has no room, and is not shown."""
    if width < 60 or height < 20:
        return {"small": Region(0, 0, width, height)}
    beside = max(33, width // 3)
    places = {
        "status": Region(0, 0, width, 1),
        "mark": Region(0, height - 2, 3, 1),
        "prompt": Region(3, height - 2, width - beside - 3, 1),
        "settings": Region(width - beside, height - 2, beside, 1),
        "keys": Region(0, height - 1, width, 1),
    }
    body = height - 3
    if width >= 110 and height >= 34:
        rows = min(slots, max(4, (body - 15) // 2))
        top, right = 2 * rows + 5, max(40, width * 3 // 8)
        left, tall = width - right - 2, body - top
        places |= charts(Region(left + 2, 1, right, top))
        places["slots"] = Region(0, 1, left, rows + 3)
        places["timeline"] = Region(0, rows + 4, left, rows + 2)
        places["streams"] = Region(0, 1 + top, left, tall)
        places["step"] = Region(left + 2, 1 + top, right, tall)
        return places

    rows = min(slots, (body - 5) // 2)
    places["slots"] = Region(0, 1, width, rows + 3)
    y, tall = rows + 4, body - rows - 3
    if tall >= rows + (5 if lower == "timeline" else 8):  # so tall: the timeline stays, and more stands under it
        places["timeline"] = Region(0, y, width, rows + 2)
        y, tall = y + rows + 2, tall - rows - 2
        lower = "streams" if lower == "timeline" else lower
    below = Region(0, y, width, tall)
    return places | (charts(below) if lower == "charts" else {lower: below})


def charts(place: Region) -> dict[str, Region]:
    """Side by side if there is no room to stack them."""
    x, y, wide, tall = place
    places = {}
    for i, name in enumerate(("rate", "batch", "ttft")):
        if tall < 18 and wide >= 72:
            each = (wide - 4) // 3
            places[name] = Region(x + i * (each + 2), y, each, tall)
        else:
            top, bottom = i * tall // 3, (i + 1) * tall // 3
            places[name] = Region(x, y + top, wide, bottom - top)
    return places


# --- what a user can do ------------------------------------------------------------------------------------------


# --- the screen --------------------------------------------------------------------------------------------------


class Pane(Widget):
    """Lines that a function draws from the state. Only rows that have changed are painted again."""

    def __init__(self, draw: Callable[[State, Palette, int, int], list[Line]], id: str, wheel: str = ""):
        super().__init__(id=id)
        self._draw, self._wheel = draw, wheel
        self._strips: list[Strip] = []

    def paint(self) -> None:
        width, height = self.size
        if not (self.display and width and height):
            return
        base, old = self.rich_style, self._strips
        lines = self._draw(self.app.state, self.app.palette, width, height)[:height]
        lines += [[]] * (height - len(lines))
        self._strips = [Strip(line).adjust_cell_length(width).apply_style(base) for line in lines]
        if len(old) != height:
            self.refresh()
            return
        rows = [y for y in range(height) if self._strips[y] != old[y]]
        if rows:
            self.refresh(*(Region(0, y, width, 1) for y in rows))

    def render_line(self, y: int) -> Strip:
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width, self.rich_style)

    def on_resize(self) -> None:
        self._strips = []
        self.paint()

    async def on_click(self, event: events.Click) -> None:
        if do := event.style.meta.get("do"):
            event.stop()
            await self.app.run_action(do)
        elif self.id == "timeline":
            self.app.action_point(event.x - 4, self.size.width - 4)

    async def on_mouse_scroll_up(self) -> None:
        if self._wheel:
            await self.app.run_action(f"{self._wheel}(-1)")

    async def on_mouse_scroll_down(self) -> None:
        if self._wheel:
            await self.app.run_action(f"{self._wheel}(1)")


class Prompt(Input):
    """The prompt box. What could not be fired comes back into it."""

    BINDINGS: ClassVar = [Binding("escape", "app.leave", show=False)]

    def __init__(self) -> None:
        hint = "i: type a prompt; Enter fires it"
        super().__init__(placeholder=hint, id="prompt", compact=True, select_on_focus=False)
        self.cursor_blink = False

    def validate_value(self, value: str) -> str:
        return clean(value)  # somebody may paste anything

    def on_focus(self) -> None:
        self.app.set_typing(True)

    def on_blur(self) -> None:
        self.app.set_typing(False)


class Sheet(ModalScreen):
    """One pane over all the others."""

    BINDINGS: ClassVar = [
        Binding("escape,enter,question_mark,c,r,f", "back", show=False),
        Binding("q,ctrl+c,ctrl+q", "app.quit", show=False, priority=True),
        Binding("d", "app.theme", show=False),
        Binding("up", "scroll(-1)", show=False),
        Binding("down", "scroll(1)", show=False),
        Binding("pageup", "scroll(-10)", show=False),
        Binding("pagedown", "scroll(10)", show=False),
        Binding("y", "app.copy", show=False),
        Binding("space", "app.pause", show=False),
    ]

    def __init__(self, name: str):
        super().__init__(name=name)
        self._top = 0

    def compose(self) -> Iterable[Widget]:
        yield Pane(self._window, "sheet", wheel="screen.scroll")

    def _window(self, state: State, p: Palette, width: int, height: int) -> list[Line]:
        """What is in sight. The heading stays; the help, and a long answer, can be scrolled."""
        if width < 60 or height < 20:
            return draw_small(state, p, width, height)
        title, *lines = SHEETS[self.name](state, p, width, height)
        self._top = max(0, min(self._top, len(lines) - height + 1))
        shown, below = lines[self._top : self._top + height - 1], len(lines) - self._top - height + 1
        if below > 0:
            shown[-1] = Pen().put(f" ↓ {below + 1} more lines", p.accent).line
        return [title, *shown]

    def action_scroll(self, by: int) -> None:
        if self.name == "requests":
            state = self.app.state
            state.opened = max(0, min(state.opened + by, len(state.ended) - 1))
        else:
            self._top += by
        self.app.paint()

    def action_back(self) -> None:
        self.dismiss()


class Screen(App):
    """The whole screen: places the panes, looks for news ten times a second, and turns keys into wishes."""

    TITLE = "nanobatch"
    CSS = """
    Screen { layers: panes; }
    Pane, Prompt { position: absolute; }
    Sheet { background: $background; }
    Sheet Pane { width: 100%; height: 100%; }
    #status, #keys { background: $foreground 10%; }
    #prompt, #mark, #settings { background: $surface; color: $foreground; }
    #prompt { border: none; height: 1; padding: 0; &:focus { border: none; background-tint: $foreground 0%; } }
    ToastRack { margin-bottom: 2; }
    Toast { width: 46; }
    """
    BINDINGS: ClassVar = [
        # With priority: what is typed in one breath behind `i` or `/` already goes to the prompt.
        *(Binding(k.keys, k.action, k.label, show=False, priority=k.action.startswith("prompt")) for k in KEYS),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]
    AUTO_FOCUS = None  # keys are keys, until somebody wants to type
    LOOKS = 0.1  # seconds between two looks at the engine room

    def __init__(self, session: Session, script: str = "", screenshot: str | None = None):
        super().__init__()
        self.session, self.state = session, session.state
        self._script, self._screenshot = script, screenshot
        self._looks = self._faults = 0
        self.palette = DARK

    # --- panes

    def compose(self) -> Iterable[Widget]:
        yield Pane(draw_loading, "loading")
        yield Pane(draw_small, "small")
        yield Pane(draw_status, "status")
        yield Pane(draw_slots, "slots", wheel="choose")
        yield Pane(draw_timeline, "timeline", wheel="move")
        yield Pane(draw_rate, "rate")
        yield Pane(draw_batch, "batch")
        yield Pane(draw_ttft, "ttft")
        yield Pane(draw_streams, "streams", wheel="choose")
        yield Pane(draw_step, "step", wheel="move")
        yield Pane(draw_mark, "mark")
        yield Prompt()
        yield Pane(draw_settings, "settings")
        yield Pane(draw_keys, "keys")

    def on_mount(self) -> None:
        self.begin_capture_print(self)  # a download's progress, advice about a BLAS
        self.watch_theme()
        self.place(self.size)
        self.set_interval(self.LOOKS, self.look)
        if threading.current_thread() is threading.main_thread():
            for signal_, code in ((signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 0)):
                asyncio.get_running_loop().add_signal_handler(signal_, lambda code=code: self.exit(return_code=code))
        if self._script or self._screenshot:
            self.run_worker(self.play(self._script))

    def on_print(self, event: events.Print) -> None:
        if said := re.split(r"[\r\n]", clean(event.text.strip("\r\n")))[-1].strip():
            self.state.printed = said
            self.paint("loading")

    def on_resize(self, event: events.Resize) -> None:
        self.place(event.size)

    def place(self, size: Size) -> None:
        """Give each pane its place, or hide it."""
        places = {"loading": Region(0, 0, *size)}
        if self.state.view.stage == "ready":
            places = arrange(*size, len(self.state.view.engine.slots), self.state.lower)
        for pane in self.screen_stack[0].query("Pane, Prompt"):
            region = places.get(pane.id)
            pane.display = region is not None
            if region:
                pane.styles.offset = region.x, region.y
                pane.styles.width, pane.styles.height = region.width, region.height
        self.call_after_refresh(self.paint)

    @property
    def prompt(self) -> Prompt:
        return self.screen_stack[0].query_one(Prompt)

    def look(self) -> None:
        """Ten times a second. Nothing new, nothing painted; charts and the step can wait a little longer."""
        loading = self.state.view.stage != "ready"
        if not self.session.look():
            return
        view = self.state.view
        self._looks += 1
        if loading and view.stage == "ready":
            self.place(self.size)
            self.prompt.value = self.state.prompts[0][0]  # one to try
        for fault in view.faults[self._faults :]:
            self.notify(fault.message, severity="error", markup=False)
            if fault.prompt and not self.prompt.value:
                self.prompt.value = fault.prompt
        self._faults = len(view.faults)
        slow = ("rate", "batch", "ttft", "step") if view.busy and not view.paused and self._looks % 3 else ()
        self.paint(but=slow)

    def paint(self, *names: str, but: Sequence[str] = ()) -> None:
        for pane in self.screen.query(Pane):
            if (not names or pane.id in names) and pane.id not in but:
                pane.paint()

    def watch_theme(self) -> None:
        self.palette = Palette.of(self.current_theme)
        self.call_after_refresh(self.paint)

    def set_typing(self, typing: bool) -> None:
        self.state.typing = typing
        self.paint("keys")

    def say(self, message: str) -> None:
        """What has been done, beside the prompt, for a while."""
        if len(self.screen_stack) > 1:
            self.notify(message, markup=False, timeout=3)
        elif message:
            self.state.said = message
            self.paint("settings")
            self.set_timer(4, lambda: self.hush(message))

    def hush(self, message: str) -> None:
        if self.state.said == message:
            self.state.said = ""
            self.paint("settings")

    def get_system_commands(self, screen) -> Iterable[SystemCommand]:
        yield from super().get_system_commands(screen)
        for key in KEYS:
            yield SystemCommand(f"{key.label} ({key.show})", key.help, lambda key=key: self.run_action(key.action))

    # --- actions

    def check_action(self, action: str, parameters: tuple) -> bool | None:
        """While loading, and after it has failed, there is nothing to do but to leave. Typed letters are no keys."""
        if self.state.view.stage != "ready":
            return action in ("quit", "theme", "command_palette")
        return action != "prompt" or self.focused is None

    def action_prompt(self, begin: str = "") -> None:
        self.screen.set_focus(self.prompt)  # at once: the next letter is on its way
        if begin:
            self.prompt.value, self.prompt.cursor_position = begin, len(begin)
        elif self.prompt.value == self.state.prompts[0][0]:
            self.prompt.action_select_all()  # the example: what is typed replaces it

    def action_leave(self) -> None:
        self.screen.set_focus(None)

    async def action_fire(self) -> None:
        if self.prompt.value:
            await self.prompt.action_submit()
        else:
            self.prompt.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        line = event.value.strip()
        if not line:
            return
        self.prompt.value = ""
        self.screen.set_focus(None)
        if not self.action_command(line):
            self.prompt.value, self.prompt.cursor_position = line, len(line)
            self.prompt.focus()

    def action_command(self, line: str) -> bool:
        """Do it, or tell what is wrong with it."""
        try:
            self.say(self.session.obey(line))
        except ValueError as error:
            self.notify(str(error), severity="error", markup=False)
            return False
        if line.startswith(("/race", "/compare")):
            self.action_sheet("contest")
        self.paint()
        return True

    def action_pause(self) -> None:
        self.action_command("/resume" if self.state.view.paused else "/pause")

    def action_settings(self) -> None:
        s = self.state.settings
        seed = "none" if s.seed is None else s.seed
        self.prompt.value = f"/set temperature={s.temperature:g} max={s.max_tokens} seed={seed} burst={s.burst}"
        self.prompt.focus()

    def action_choose(self, by: int) -> None:
        self.action_select((self.state.selected + by) % len(self.state.view.engine.slots))

    def action_select(self, slot: int) -> None:
        self.state.selected = slot
        self.paint()

    def action_move(self, steps: int) -> None:
        self.state.move(steps)
        self.paint()

    def action_point(self, column: int, width: int) -> None:
        """Put the cursor on a column of the timeline that has been clicked."""
        _, columns, _ = self.state.window(width)
        if 0 <= column < len(columns):
            self.state.look_at(self.state.index_of(columns[column].step))
            self.paint()

    def action_follow(self) -> None:
        self.state.cursor = None
        self.paint()

    def action_zoom(self) -> None:
        zooms = (None, 1, 2, 4, 8)
        self.state.zoom = zooms[(zooms.index(self.state.zoom) + 1) % len(zooms)]
        self.say(f"steps a column: {self.state.zoom or 'so that they fit'}")
        self.paint()

    def action_view(self) -> None:
        self.state.lower = LOWER[(LOWER.index(self.state.lower) + 1) % len(LOWER)]
        self.place(self.size)

    def action_open(self, index: int) -> None:
        self.state.opened = index
        self.action_sheet("requests")
        self.paint()

    def action_copy(self) -> None:
        """The open request's text, or the selected slot's. The terminal's own clipboard takes it (OSC 52)."""
        ended, request = self.state.ended, self.state.owner(self.state.selected)
        if self.screen.name == "requests" and ended:
            request = ended[min(self.state.opened, len(ended) - 1)]
        if request:
            self.copy_to_clipboard(request.text)
        self.say(f"r{request.id} is copied" if request else "there is nothing to copy yet")

    def action_theme(self, name: str = "") -> None:
        self.theme = name or ("textual-light" if self.current_theme.dark else "textual-dark")

    def action_sheet(self, name: str) -> None:
        if self.screen.name != name:
            self.push_screen(Sheet(name), lambda _: self.call_after_refresh(self.paint))

    # --- scripts

    async def play(self, script: str) -> None:
        """Run a script such as "static burst24 step60" or "race"; take the picture, if one is wanted, and leave."""
        state = self.state
        await self.until(lambda: state.view.stage != "loading")
        if state.view.stage == "failed":
            if self._screenshot:
                self.exit(return_code=1, message=state.view.error or state.printed)
            return
        for word, rest in orders_of(script):
            if word in SCRIPTED:
                await self.run_action(SCRIPTED[word])
            elif word != "wait":
                self.action_command(as_command(word, rest))
            await self.until(lambda: self.session.heard and not state.view.stepping)
            await self.until(lambda: state.view.paused or not state.view.switching_to)
            if word in ("race", "wait"):
                await self.until(lambda: self.session.settled)
        if self._screenshot:
            await self.until(lambda: state.view.paused or self.session.settled)
            await self.take_picture(self._screenshot)

    async def take_picture(self, path: str) -> None:
        self.screen.set_focus(None)
        self.clear_notifications()
        self.state.said = ""
        self.look()
        await asyncio.sleep(0.3)  # the last paint
        self.paint()
        await asyncio.sleep(0.1)
        Path(path).write_text(self.export_screenshot(title="nanobatch"), encoding="utf-8")
        self.exit(return_code=0)

    async def until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await asyncio.sleep(0.02)


# --- the plain log -----------------------------------------------------------------------------------------------


# --- the trace ---------------------------------------------------------------------------------------------------


# --- the command line --------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        print(f"nanobatch: {clean(message)}", file=sys.stderr)
        sys.exit(2)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Wrong values get one line and exit code 2, before any screen opens."""
    parser = Parser("tui.py", description="Watch an LLM serving engine work.")
    add = parser.add_argument
    add("--model", default="demo", help="a model folder, a hub id such as owner/name, or 'demo'")
    add("--slots", help="sequences that run at once (default: 8, or what fits)")
    add("--max-len", help="length of a slot, prompt and answer together (default: 1024, or what fits; demo: 400)")
    add("--policy", default="continuous", choices=POLICIES, help="who is admitted when")
    add("--prompts", metavar="FILE", help="prompts to fire at start, and with b: one a line")
    add("--seed", help="the same seed gives the same tokens")
    add("--plain", action="store_true", help="no screen: a line for each event (also where there is no terminal)")
    add("--script", default="", help="what to do after the start, such as 'burst8', 'static burst24 step60' or 'race'")
    add("--screenshot", metavar="FILE.svg", help="draw on no terminal, run the script, write the picture, and leave")
    add("--size", default="120x40", help="size of the screenshot in characters (default: 120x40)")
    add("--trace", metavar="FILE.json", help="at the end, write what the timeline saw as a Chrome trace (Perfetto)")
    args = parser.parse_args(arguments)
    try:
        args.slots = args.slots and whole("--slots", args.slots, 1, 4096)
        args.max_len = args.max_len and whole("--max-len", args.max_len, 1, 2**24)
        args.seed = args.seed and whole("--seed", args.seed, 0, 2**31 - 1)
        args.size = tuple(whole("--size", side, 1, 1000) for side in args.size.split("x", 1))
        if len(args.size) != 2:
            raise ValueError("--size needs two numbers, such as 120x40")
        folder = args.model == "demo" or (args.model and Path(args.model).expanduser().is_dir())
        if not folder and (args.model.count("/") != 1 or args.model[0] in "./~"):
            raise ValueError(f"--model {args.model!r} is neither a folder nor a hub id of the form owner/name")
        for order in orders_of(args.script):
            if order[0] not in (*POLICIES, *SCRIPTED, "wait") and not hasattr(Session, f"_do_{order[0]}"):
                raise ValueError(f"--script: {order[0]!r} is no command")
        lines = Path(args.prompts).read_text(encoding="utf-8").splitlines() if args.prompts else []
        args.asks = [line.strip() for line in lines if line.strip()]
        if args.prompts and not args.asks:
            raise ValueError(f"--prompts {args.prompts}: there is no prompt in it")
        for name in ("trace", "screenshot"):
            path = getattr(args, name)
            if path and not Path(path).absolute().parent.is_dir():
                raise ValueError(f"--{name} {path}: there is no such folder")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    settings = Settings(seed=args.seed)
    prompts = [(prompt, settings.max_tokens) for prompt in args.asks] or BURST
    room = EngineRoom(partial(load_engine, args))
    session = Session(room, State(args.model, settings=settings, prompts=prompts))
    if args.asks:
        room.fire(session.asks(len(prompts)))
    room.start()
    terminal = all(stream and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    code = 1
    try:
        if args.screenshot:
            app = Screen(session, args.script, args.screenshot)
            app.run(headless=True, size=args.size)
            code = app.return_code or 0
        elif args.plain or not terminal:
            code = run_plain(session, args.script)
        else:
            app = Screen(session, args.script)
            app.run()
            code = app.return_code or 0
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # whoever read the log has seen enough
        sys.stdout = None
        code = 141
    finally:
        if args.trace:
            session.look()
            events_ = {"traceEvents": trace_events(session.state.steps, session.state.history)}
            Path(args.trace).write_text(json.dumps(events_), encoding="utf-8")
        if not room.stop(patience=0.6):  # a download or a very long step: it can be left, but not be interrupted
            if sys.stdout:
                sys.stdout.flush()
            os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
