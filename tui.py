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
import gc
import json
import math
import os
import queue
import random
import re
import select
import signal
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import cycle, groupby, pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.color import Color
from textual.geometry import Region, Size
from textual.screen import ModalScreen
from textual.strip import Strip
from textual.theme import Theme
from textual.widget import Widget
from textual.widgets import Input

from sched import PADDING, POLICIES, Plan, Request, Scheduler

if TYPE_CHECKING:  # importing them for real loads MLX: that is left to the engine room, behind the first frame
    from nanobatch import Engine, Handle, Metrics, SlotView, Snapshot, StepView

# --- the workload ------------------------------------------------------------------------------------------------

# Two prompts that begin alike, and the beginning is longer than a chunk: the second takes its rows over from the first.
EVENING = (
    "It is late, and the children are in bed. They have had their supper, they have brushed their teeth, and the lamp "
    "by the window is still on. They want to hear one more story before they go to sleep, and it should be a story "
    "with a good end."
)

# Short answers between long ones: that is where the policies differ. (prompt, longest answer in tokens)
BURST = (
    ("Tell me a story about a fox and a lantern.", 320),
    ("What is 3 + 4?", 16),
    ("Count from 7 to 19.", 64),
    ("What is a slot?", 48),
    ("Spell the word lantern.", 32),
    (f"{EVENING} Tell me a long story about a fox.", 320),
    ("Is fox in this list: owl, fox, bee?", 24),
    ("Say the alphabet from f.", 64),
    ("Why batch?", 48),
    ("Reverse the word stone.", 32),
    ("Tell me a long story about a girl and a kite.", 320),
    ("Name the days from Tuesday.", 32),
    ("Repeat: the cat sat on the mat.", 24),
    ("What is 12 + 9?", 24),
    (f"{EVENING} Tell me a story about a cat and a drum.", 320),
    ("Count from 30 to 41.", 64),
)


class Ask(NamedTuple):
    """A prompt, and how it wants to be answered."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int | None


@dataclass(frozen=True)
class Settings:
    """What is fired next is fired like this. `/set` changes it."""

    temperature: float = 0.0
    max_tokens: int = 320
    seed: int | None = None
    burst: int = 24
    rate: float = 2.0  # of the steady load, requests a second


# Prompts and answers come from anywhere. A terminal would obey control characters, and characters without a width of
# their own would shift what stands beside them. The former are shown as pictures (␛), the latter left out.
_INVISIBLE = (*range(0x80, 0xA0), 0xAD, *range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF)
_UNSAFE = dict.fromkeys((*_INVISIBLE, *range(0xFE00, 0xFE10), *range(0xD800, 0xE000), *range(0xE0000, 0xE0080)))
_UNSAFE |= {code: 0x2400 + code for code in range(32)} | {0x7F: "␡", ord("\t"): "    ", ord("\r"): None}
del _UNSAFE[ord("\n")]


def clean(text: str) -> str:
    """Text that may stand in a cell of the screen."""
    return text.translate(_UNSAFE)


# --- the engine room ---------------------------------------------------------------------------------------------


class Stopwatch:
    """The engine's clock: seconds since the start. It stands still while the engine is paused.

    So TTFT and tokens/s tell what the engine does, not how long somebody looked at it.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now, self._lost = now, now()
        self._stopped: float | None = None

    def __call__(self) -> float:
        return (self._now() if self._stopped is None else self._stopped) - self._lost

    def stop(self) -> None:
        if self._stopped is None:
            self._stopped = self._now()

    def go(self) -> None:
        if self._stopped is not None:
            self._lost += self._now() - self._stopped
            self._stopped = None


@dataclass(frozen=True)
class RequestView:
    """One request at one moment, its text included."""

    id: int
    prompt: str
    policy: str  # the one in force when it came
    arrived: float
    metrics: Metrics
    ended: float | None = None
    text: str = ""
    reason: str | None = None
    error: str | None = None


class Leg(NamedTuple):
    """One half of a race: the same burst under one policy."""

    policy: str
    first_step: int
    last_step: int | None  # None while it runs
    requests: tuple[int, ...]


class Fault(NamedTuple):
    """Something went wrong. If a prompt could not be fired, here it is again."""

    message: str
    prompt: str | None = None


@dataclass(frozen=True)
class View:
    """What the screen may know of the engine at one moment."""

    stage: str = "loading"  # "loading" | "ready" | "failed"
    done: tuple[str, ...] = ()  # what loading has done so far; the last line is what it does now
    error: str = ""
    now: float = 0.0
    since: float = 0.0  # when loading was over: warming up is not shown
    max_len: int = 0
    chunk: int = 0
    budget: int = 0
    far: int = 0
    policy: str = "continuous"
    switching_to: str | None = None
    paused: bool = False
    stepping: int = 0  # steps that are still to be run by hand
    load: float = 0.0  # requests a second that come by themselves
    engine: Snapshot | None = None
    planned: int = 0  # steps; the newest of them is still on the device, and in no record yet
    requests: tuple[RequestView, ...] = ()  # oldest first
    racing: bool = False
    legs: tuple[Leg, ...] = ()
    faults: tuple[Fault, ...] = ()
    heard: int = 0  # how many wishes have been fulfilled

    @property
    def busy(self) -> bool:
        engine = self.engine
        return self.racing or bool(engine and (engine.queue or any(s.request is not None for s in engine.slots)))


def wish(method: Callable) -> Callable:
    """What anybody may call: it is written down and returns at once; the engine room does it between two steps."""

    def post(self: EngineRoom, *arguments) -> None:
        self.posted += 1
        self._wishes.put((method, arguments))
        self._wake.set()

    return post


Loader = Callable[[Callable[[str], None], Callable[[], float]], "Engine"]  # it is given `report` and a clock


class EngineRoom:
    """The one thread that owns the engine. Everything else has wishes, and looks at `view`."""

    REMEMBERED = 500  # requests that have ended and can still be opened

    def __init__(self, load: Loader, period: float = 0.08):
        self.view = self._draft = View()  # what the others see; the next one, while the thread works on it
        self.clock = Stopwatch()
        self.engine: Engine | None = None
        self.posted = 0  # wishes
        self._wishes: queue.SimpleQueue = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._live, name="engine room")  # no daemon: MLX would abort at exit
        self._load, self._period, self._published = load, period, 0.0
        self._open: dict[int, tuple[Handle, RequestView]] = {}
        self._ended: deque[RequestView] = deque(maxlen=self.REMEMBERED)
        self._next_arrival = 0.0
        self._dice = random.Random(0)
        self._crowd: Sequence[Ask] = ()  # those whom the steady load picks from
        self._race: Sequence[Ask] = ()

    def start(self) -> None:
        self._thread.start()

    def stop(self, patience: float) -> bool:
        """Ask the thread to end; True if it has. A download, or a step of seconds, cannot be interrupted."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(patience)
        return not self._thread.is_alive()

    # --- the thread

    def _live(self) -> None:
        try:
            self.load()
            while not self._stopping and self.view.stage == "ready":
                self._wake.wait(self.turn())
        finally:
            if self.engine:
                self.engine.close()

    def load(self) -> None:
        try:
            self.engine = self._load(self._report, self.clock)
        except BaseException as error:  # a thread that raises is invisible; and a missing backend exits
            said = "" if isinstance(error, SystemExit) else str(error) or type(error).__name__
            self.view = replace(self.view, stage="failed", error=clean(said))
            return
        gc.collect()
        gc.freeze()  # what loading has left is never garbage: the collector need not look at it in mid-step
        sched = self.engine.sched
        self._note(stage="ready", since=self.clock(), policy=sched.policy)
        self._note(max_len=sched.max_len, chunk=sched.chunk, budget=sched.budget, far=sched.far)
        self.publish()

    def _report(self, stage: str) -> None:
        if self._stopping:
            raise SystemExit
        self._note(done=(*self._draft.done, clean(stage)))
        self.view = self._draft

    def _note(self, **changes) -> None:
        self._draft = replace(self._draft, **changes)

    def _fault(self, message: str, prompt: str | None = None) -> None:
        self._note(faults=(*self._draft.faults, Fault(clean(message), prompt)))

    def publish(self) -> None:
        self._published = time.perf_counter()
        requests = (*self._ended, *(self._look(*entry) for entry in self._open.values()))
        self._note(now=self.clock(), engine=self.engine.snapshot(), planned=self.engine.sched.steps)
        self._note(requests=requests, racing=bool(self._race))
        self.view = self._draft

    def turn(self) -> float | None:
        """Do what is wished, fire what the load wants, run a step, show it. Answers with how long to sleep then."""
        self._wake.clear()
        while not self._wishes.empty():
            method, arguments = self._wishes.get()
            method(self, *arguments)
            self._note(heard=self._draft.heard + 1)
        now = self._draft
        if now.paused and not now.stepping:
            self.clock.stop()
            self.publish()
            return None
        self.clock.go()
        self._arrive()
        self._run_race()
        worked = self._step()
        self._note(stepping=max(0, now.stepping - 1) if worked else 0)
        if not worked or now.paused or time.perf_counter() - self._published >= self._period:
            self.publish()
        if worked or self._race:
            return 0
        return self._next_arrival - self.clock() if now.load else None

    def _step(self) -> bool:
        """One step of the engine. It runs ahead: after a rest its first call starts a step and records none yet."""
        before = self._newest() if self._draft.stepping else None
        try:
            worked = self.engine.step()
            if worked and self._newest() == before:
                worked = self.engine.step()
        except BaseException as error:  # all that was open has ended with this error; the next request is welcome
            self._fault(f"the engine failed: {type(error).__name__}: {error}")
            worked = False
        for handle, view in list(self._open.values()):
            if handle.finish_reason:
                self._ended.append(self._look(handle, view))
                del self._open[handle.id]
                if handle.error:
                    self._fault(f"r{handle.id} failed: {handle.error}")
        self._switch_if_drained()
        return worked

    def _newest(self) -> int:
        steps = self.engine.snapshot().steps
        return steps[-1].step if steps else 0

    def _look(self, handle: Handle, view: RequestView) -> RequestView:
        """The request as it is now. Those who still wait have not changed."""
        if not handle.tokens and handle.finish_reason is None:
            return view
        ended = self.clock() if handle.finish_reason else None
        view = replace(view, text=clean(handle.text), metrics=handle.metrics, reason=handle.finish_reason, ended=ended)
        return replace(view, error=clean(handle.error)) if handle.error else view

    # --- firing and cancelling

    def _fire(self, asks: Sequence[Ask], policy: str = "") -> list[int]:
        fired = []
        for ask in asks:
            try:
                handle = self._submit(ask)
            except (ValueError, RuntimeError) as error:  # it does not fit a slot, or the line is full
                self._fault(f"not fired: {error}", ask.prompt)
                break
            policy = policy or self._draft.policy
            view = RequestView(handle.id, clean(ask.prompt), policy, self.clock(), handle.metrics)
            self._open[handle.id] = handle, view
            fired.append(handle.id)
        return fired

    fire = wish(_fire)

    def _submit(self, ask: Ask) -> Handle:
        """`max_tokens` is a wish: where a slot has not that much room, the answer may be as long as the room."""
        from nanobatch import Sampling

        text = self.engine.text
        chat = text.has_template and ask.prompt
        ids = text.encode_chat([{"role": "user", "content": ask.prompt}]) if chat else text.encode(ask.prompt)
        longest = max(1, min(ask.max_tokens, self.engine.sched.max_len - len(ids)))
        return self.engine.submit(ids, Sampling(max_tokens=longest, temperature=ask.temperature, seed=ask.seed))

    @wish
    def cancel(self, request: int | None) -> None:
        """One request, or all."""
        if request is None:
            self._end_race()
        for handle, _ in self._open.values():
            if request in (None, handle.id):
                handle.cancel()

    @wish
    def set_load(self, rate: float, asks: Sequence[Ask] = ()) -> None:
        self._note(load=rate)
        self._crowd = asks
        if rate:
            self._next_arrival = self.clock() + self._dice.expovariate(rate)

    def _arrive(self) -> None:
        """A steady load is a Poisson process: the gaps between its arrivals are exponentially distributed."""
        rate = self._draft.load
        while rate and not self._race and self.clock() >= self._next_arrival:
            self._fire([self._dice.choice(self._crowd)])
            self._next_arrival += self._dice.expovariate(rate)

    # --- stopping and going

    @wish
    def pause(self, paused: bool) -> None:
        self._note(paused=paused, stepping=0)

    @wish
    def step(self, count: int) -> None:
        """Run so many steps, and pause."""
        self._note(paused=True, stepping=self._draft.stepping + count)

    # --- policies

    @wish
    def switch(self, policy: str) -> None:
        """Drain, then switch. While draining the policy is `static`: it admits nobody while anybody runs."""
        if self._race:
            self._fault("a race is running; it sets the policies itself")
            return
        self._note(switching_to=policy)
        self.engine.sched.policy = "static"
        self._switch_if_drained()

    def _switch_if_drained(self) -> None:
        target = self._draft.switching_to
        if target and not self.engine.sched.running:
            self.engine.sched.policy = target
            self._note(policy=target, switching_to=None)

    @wish
    def race(self, asks: Sequence[Ask]) -> None:
        """Once everything has ended: these asks under static, then again under continuous. It ends a pause."""
        self._note(paused=False, stepping=0)
        if not self._race:
            self._race = asks
            self._note(legs=())

    def _run_race(self) -> None:
        """Between two steps, with nobody in the house: one leg is over, and the next begins."""
        sched, legs = self.engine.sched, self._draft.legs
        if not self._race or sched.running or sched.waiting or self._draft.switching_to:
            return
        if legs:
            legs = (*legs[:-1], legs[-1]._replace(last_step=sched.steps))
        if len(legs) < 2:
            sched.reuse = False  # else the second leg would find the first one's prompts in the slots
            sched.policy = ("static", "continuous")[len(legs)]
            first, fired = sched.steps + 1, self._fire(self._race, sched.policy)
            legs = (*legs, Leg(sched.policy, first, None, tuple(fired)))
        self._note(legs=legs)
        if legs[-1].last_step or not legs[-1].requests:
            self._end_race()

    def _end_race(self) -> None:
        self._race, self.engine.sched.reuse = (), True
        if not self._draft.switching_to:
            self.engine.sched.policy = self._draft.policy


# --- what the screen knows ---------------------------------------------------------------------------------------

# What a slot did in a step. The glyphs tell them apart without any colour.
PREFILL, DECODE, HELD, BLOCKED, GHOST, EMPTY = range(6)
GLYPHS = "▒█┈╳▚·"
NAMES = ("prefill", "decode", "held", "blocked", "ghost", "empty")
REUSED, REMEMBERED = "▓", "░"  # rows of a slot that came from, or still belong to, an earlier request


class Cell(NamedTuple):
    kind: int
    request: int | None = None


class Column(NamedTuple):
    """One step of the timeline, or several steps merged into one."""

    step: int
    began: float
    ended: float
    cells: tuple[Cell, ...]  # by slot
    tokens: int  # delivered
    useful: int  # cells that did work: in a merged column, of all its steps
    steps: int = 1


Pairs = Iterable[tuple[int, ...]]  # (slot, request, ...)


def cells_of(slots: int, shut: bool, held: Pairs, prefill: Pairs, decode: Pairs, ghosts: Sequence[int]) -> list[Cell]:
    """What each slot did in a step. `shut`: somebody waits, and the policy keeps the free slots from them."""
    cells = [Cell(BLOCKED if shut else EMPTY)] * slots
    for slot, request, *_ in held:
        cells[slot] = Cell(HELD, request)
    for slot, request, *_ in prefill:
        cells[slot] = Cell(PREFILL, request)
    for slot, request in decode:
        cells[slot] = Cell(GHOST if slot in ghosts else DECODE, request)
    return cells


def column(step: int, began: float, ended: float, cells: Sequence[Cell], tokens: int) -> Column:
    return Column(step, began, ended, tuple(cells), tokens, sum(cell.kind in (PREFILL, DECODE) for cell in cells))


SHUTTING = ("static", "serial")  # the policies that keep a free slot from those who wait


def is_shut(step: StepView | Plan) -> bool:
    return step.waiting > 0 and step.policy in SHUTTING


def merge(columns: Sequence[Column]) -> Column:
    """Several steps as one column. A prefill is short and must not get lost; else what is most frequent is shown."""
    if len(columns) == 1:
        return columns[0]
    cells = []
    for slot in zip(*(column.cells for column in columns), strict=True):
        prefill = next((cell for cell in slot if cell.kind == PREFILL), None)
        cells.append(prefill or Counter(slot).most_common(1)[0][0])
    first, last = columns[0], columns[-1]
    totals = sum(c.tokens for c in columns), sum(c.useful for c in columns), sum(c.steps for c in columns)
    return Column(first.step, first.began, last.ended, tuple(cells), *totals)


def useful_of(columns: Sequence[Column]) -> float:
    """The share of slots x steps that computed something for somebody, in percent."""
    cells = sum(column.steps * len(column.cells) for column in columns)
    return 100 * sum(column.useful for column in columns) / cells if cells else 0.0


@dataclass
class State:
    """All that is drawn. `absorb` brings it up to date; the rest is what the user has chosen."""

    model: str = "demo"
    view: View = field(default_factory=View)
    settings: Settings = field(default_factory=Settings)
    prompts: Sequence[tuple[str, int]] = BURST
    history: list[Column] = field(default_factory=list)  # a column for each step, oldest first
    steps: list[StepView] = field(default_factory=list)  # the same steps as the engine tells them
    tokens: list[int] = field(default_factory=list)  # delivered up to and with each of them
    owners: dict[int, int] = field(default_factory=dict)  # slot -> who holds it, or held it last
    printed: str = ""  # what a library printed last while loading: a download's progress
    selected: int = 0  # a slot
    cursor: int | None = None  # a step; None follows the newest
    edge: int = 0  # the newest column in sight when the cursor was set
    zoom: int | None = None  # steps a column; None fits what is running
    lower: str = "timeline"  # the pane that is shown where there is room for one only
    opened: int = 0  # which of the requests is open, counted from the newest
    contest: Contest | None = None  # the comparison that is shown; None: the race
    typing: bool = False  # the prompt has the keyboard
    said: str = ""  # an answer to what was done last
    woke: int = 0  # index of the first step of the latest busy time
    _merged: dict[int, list[Column]] = field(default_factory=dict)

    KEPT = 20_000  # steps

    def absorb(self, view: View) -> None:
        self.view = view
        for step in view.engine.steps if view.engine else ():
            if step.began >= view.since and (not self.steps or step.step > self.steps[-1].step):
                self._add(step, len(view.engine.slots))
        for slot in view.engine.slots if view.engine else ():
            if slot.request is not None:
                self.owners[slot.slot] = slot.request
        if len(self.history) > self.KEPT:
            gone = self.KEPT // 4
            del self.history[:gone], self.steps[:gone], self.tokens[:gone]
            self.woke, self._merged = max(0, self.woke - gone), {}

    def _add(self, step: StepView, slots: int) -> None:
        cells = cells_of(slots, is_shut(step), step.held, step.prefill, step.decode, step.ghosts)
        # A busy time begins where nobody works who was there before. (To look for a rest is not enough: behind the last
        # token of one leg of a race its ghost is still in flight when the next leg is fired.)
        working, before = {cell.request for cell in cells} - {None}, self.steps[-1].began if self.steps else 0.0
        came = [r.arrived for r in self.view.requests if r.id in working] if len(step.admitted) == len(working) else []
        if came and min(came) > before:
            self.woke = len(self.steps)
        self.history.append(column(step.step, step.began, step.ended, cells, step.tokens))
        self.tokens.append((self.tokens[-1] if self.tokens else 0) + step.tokens)
        self.steps.append(step)
        self.owners |= {slot: cell.request for slot, cell in enumerate(cells) if cell.request is not None}

    def delivered(self, moment: float) -> float:
        """Tokens delivered up to a moment. Within a step they are spread evenly: else slow steps would make spikes."""
        i = bisect_left(self.history, moment, key=lambda column: column.ended)
        if i == len(self.history):
            return self.tokens[-1] if self.tokens else 0
        step = self.history[i]
        began = max(step.began, self.history[i - 1].ended) if i else step.began
        part = (moment - began) / (step.ended - began) if step.ended > began else 1.0
        return self.tokens[i] - step.tokens * min(1.0, 1.0 - part)

    def tokens_per_s(self) -> float:
        """Over the last second of the engine's clock, or since it woke up."""
        if not self.history:
            return 0.0
        began = max(self.history[self.woke].began, self.view.now - 1)
        return (self.tokens[-1] - self.delivered(began)) / max(1e-3, self.view.now - began)

    def columns(self, zoom: int) -> list[Column]:
        """The history with `zoom` steps to a column. What has been merged once is kept."""
        if zoom == 1:
            return self.history
        merged = self._merged.setdefault(zoom, [])
        while (len(merged) + 1) * zoom <= len(self.history):
            merged.append(merge(self.history[len(merged) * zoom : (len(merged) + 1) * zoom]))
        rest = self.history[len(merged) * zoom :]
        return [*merged, merge(rest)] if rest else merged

    def zoom_for(self, width: int) -> int:
        """Steps a column: as chosen, or so many that the latest busy time fits, up to 8."""
        if self.zoom:
            return self.zoom
        return next((zoom for zoom in (1, 2, 4) if len(self.history) - self.woke <= zoom * width), 8)

    def window(self, width: int) -> tuple[int, list[Column], int | None]:
        """Zoom, the columns in sight, and which of them the cursor is on."""
        zoom = self.zoom_for(width)
        columns = self.columns(zoom)
        if self.cursor is None:
            return zoom, columns[-width:], None
        at = self.index_of(self.cursor) // zoom
        stop = max(min(self.edge // zoom + 1, at + width), at + 1, min(width, len(columns)))
        start = max(0, stop - width)
        return zoom, columns[start:stop], at - start

    def index_of(self, step: int) -> int:
        """Where a step stands in the history."""
        return min(bisect_left(self.history, step, key=lambda c: c.step), len(self.history) - 1)

    def move(self, steps: int) -> None:
        """Move the cursor back or forth; beyond the newest step it lets go and follows again."""
        at = len(self.history) - 1 if self.cursor is None else self.index_of(self.cursor)
        self.look_at(max(0, at + steps))

    def look_at(self, index: int) -> None:
        if self.cursor is None:
            self.edge = len(self.history) - 1
        self.cursor = self.history[index].step if index < len(self.history) else None
        self.edge = max(self.edge, index)

    @property
    def step(self) -> StepView | None:
        """The step that the inspector shows: the cursor's, or the newest."""
        if not self.steps:
            return None
        return self.steps[-1 if self.cursor is None else self.index_of(self.cursor)]

    @property
    def ended(self) -> list[RequestView]:
        """Newest first."""
        return [request for request in reversed(self.view.requests) if request.reason]

    def request(self, number: int | None) -> RequestView | None:
        return next((r for r in reversed(self.view.requests) if r.id == number), None)

    def owner(self, slot: int) -> RequestView | None:
        return self.request(self.owners.get(slot))


# --- comparing policies ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A workload under one policy, measured or simulated: its timeline, and what people ask about it."""

    policy: str
    how: str  # "measured" | "simulated" | "running …"
    columns: Sequence[Column]
    began: float
    ttfts: Sequence[float]

    @property
    def makespan(self) -> float:
        return self.columns[-1].ended - self.began if self.columns else 0.0

    @property
    def ttft_mean(self) -> float | None:
        return sum(self.ttfts) / len(self.ttfts) if self.ttfts else None

    @property
    def ttft_p95(self) -> float | None:
        return sorted(self.ttfts)[math.ceil(0.95 * len(self.ttfts)) - 1] if self.ttfts else None

    @property
    def tokens_per_s(self) -> float:
        return sum(c.tokens for c in self.columns) / self.makespan if self.makespan else 0.0


@dataclass(frozen=True)
class Contest:
    """Two runs of one workload, one above the other."""

    title: str
    runs: Sequence[Run]
    note: str = ""


def measured(policy: str, columns: Sequence[Column], requests: Sequence[RequestView], how: str = "measured") -> Run:
    ttfts = [r.metrics.ttft_s for r in requests if r.metrics.ttft_s is not None]
    return Run(policy, how, columns, min((r.arrived for r in requests), default=0.0), ttfts)


def replay(view: View, requests: Sequence[RequestView], policy: str, start: float, costs: tuple[float, float]) -> Run:
    """The same requests through the same scheduler under another policy, on a clock that ticks as the device did.

    All that the scheduler has to know are lengths and arrival times: no text, no model. As the engine does, this runs
    ahead: a step is planned before the one before is committed. `start` is when the first step was planned: what had
    come by then, had come together. `costs` are the seconds of a decode step and of a chunk.
    """
    slots = len(view.engine.slots)
    sched = Scheduler(
        slots, view.max_len, chunk=view.chunk, budget=view.budget, far=view.far, policy=policy, reuse=False
    )
    everybody = [
        Request(
            r.id,
            (0,) * r.metrics.prompt_tokens,
            r.metrics.output_tokens,
            r.arrived,
            prefilled=r.metrics.cached_tokens,
        )
        for r in requests
    ]
    coming, now, columns, flight = deque(everybody), start, [], None
    while coming or sched.waiting or sched.running:
        while coming and coming[0].arrived <= now:
            sched.submit(coming.popleft())
        plan = sched.plan(now)
        if flight:
            sched.commit(flight, [0] * len(flight.emitters), lambda request, token: None, now)
        if plan:
            began, now = now, now + costs[0] * bool(plan.decodes) + costs[1] * len(plan.chunks)
            held, prefill, decode = (
                [(m.slot, m.id) for m in plan.held],
                [(m.slot, m.request.id) for m in plan.chunks],
                [(m.slot, m.request.id) for m in plan.decodes],
            )
            cells = cells_of(slots, is_shut(plan), held, prefill, decode, ())
            columns.append(column(plan.step, began, now, cells, len(plan.emitters)))
        elif not flight and coming:
            now = coming[0].arrived
        flight = plan
    return Run(policy, "simulated", columns, requests[0].arrived, [r.first_token - r.arrived for r in everybody])


def costs_of(steps: Sequence[StepView]) -> tuple[float, float]:
    """Seconds that a decode step and a prefill chunk took here: the median of the one, what remains for the other."""
    plain = sorted(seconds(step) for step in steps if not step.prefill)
    decode = plain[len(plain) // 2] if plain else 0.0
    chunks = sum(len(step.prefill) for step in steps)
    rest = sum(map(seconds, steps)) - decode * sum(bool(step.decode) for step in steps)
    return decode, max(rest / chunks if chunks else 0.0, decode / 10, 1e-6)


def seconds(step: StepView) -> float:
    """What a step took of the engine's time. From `began` to `ended` is longer: the next is planned meanwhile."""
    return step.plan_s + step.build_s + step.wait_s + step.commit_s


def compare(state: State) -> Contest:
    """What just ran, replayed under its own policy and another: two simulations, so that like is measured by like.

    ValueError says why there is nothing to compare.
    """
    steps, columns = state.steps[state.woke :], state.history[state.woke :]
    if not steps:
        raise ValueError("nothing has run yet; b fires a burst")
    seen = {cell.request for column in columns for cell in column.cells}
    requests = sorted((r for r in state.view.requests if r.id in seen and r.metrics.output_tokens), key=lambda r: r.id)
    if len(requests) < 2:
        raise ValueError("one request alone takes as long under every policy; b fires a burst")
    policies = Counter(step.policy for step in steps)  # more than one, if it was changed meanwhile
    ran, costs = policies.most_common(1)[0][0], costs_of(steps)
    other = "static" if ran == "continuous" else "continuous"
    runs = [replay(state.view, requests, policy, steps[0].began, costs) for policy in (ran, other)]
    real = measured(", then ".join(policies), columns, requests)
    note = (
        f"Both are simulated: {span(costs[0])} a decode step, {span(costs[1])} a chunk of prefill, as measured. "
        f"What really ran ({real.policy}) took {span(real.makespan)}, and {span(real.ttft_mean)} to the first token."
    )
    return Contest(f"Compare: {ran} and {other}, {len(requests)} requests", runs, note)


def race(state: State) -> Contest:
    """The race as far as it has come, measured. A request has the same number in both runs."""
    runs, legs = [], state.view.legs
    for leg in legs:
        number = {request: i + 1 for i, request in enumerate(leg.requests)}
        columns = [
            c._replace(cells=tuple(Cell(kind, number.get(request)) for kind, request in c.cells))
            for c in state.history
            if leg.first_step <= c.step <= (leg.last_step or math.inf)
        ]
        requests = [r for r in state.view.requests if r.id in number]
        runs.append(measured(leg.policy, columns, requests, "measured" if leg.last_step else "running …"))
    title = "Race: static and continuous" + (f", {len(legs[0].requests)} requests" if legs else "")
    note = "" if runs else "The race begins when everything that runs now has ended."
    return Contest(title, runs, "Paused: space goes on." if state.view.paused else note)


def verdict(runs: Sequence[Run]) -> str:
    """One sentence, once both runs are there."""
    if len(runs) < 2 or any(run.how == "running …" or not run.makespan for run in runs):
        return ""
    slow, fast = sorted(runs, key=lambda run: -run.makespan)
    times = f"{span(fast.makespan)} instead of {span(slow.makespan)}: {slow.makespan / fast.makespan:.2f} times as fast"
    words = f"{fast.policy} takes {times} as {slow.policy}"
    if slow.ttft_mean and fast.ttft_mean:
        words += f"; the first token comes after {span(fast.ttft_mean)} instead of {span(slow.ttft_mean)} on average"
    return words + "."


# --- how to draw: colours, a pen, figures, text ---------------------------------------------------------------------

# Okabe and Ito's hues, which colour-blind people can tell apart, without grey and black. They fill; words have the
# theme's own colour, since yellow on white cannot be read.
HUES = ("#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#0072b2", "#f0e442", "#d55e00")


@lru_cache(4096)
def style(ink: str | None, back: str | None = None, bold: bool = False, reverse: bool = False, do: str = "") -> Style:
    """`do` is the action of a click."""
    return Style(color=ink, bgcolor=back, bold=bold, reverse=reverse, meta={"do": do} if do else None)


@dataclass(frozen=True)
class Palette:
    """The colours of a theme, as drawing needs them."""

    text: str
    muted: str
    faint: str
    accent: str
    bad: str
    back: str
    bar: str  # behind the status line and the footer

    @staticmethod
    def of(theme: Theme) -> Palette:
        """From a theme, with its words moved towards black or white: some themes' own are hard to read."""
        variables = theme.to_color_system().generate()
        names = ("foreground", "background", "text-accent", "text-error")
        text, back, accent, bad = (Color.parse(variables.get(name, "ansi_default")) for name in names)
        if any(color.ansi is not None for color in (text, back, accent, bad)):
            return DARK if theme.dark else LIGHT  # the terminal's own colours: there are no numbers to mix
        far = Color.parse("white" if theme.dark else "black")
        text, accent, bad = (color.blend(far, 0.3) for color in (text, accent, bad))
        inks = (text, back.blend(text, 0.7), back.blend(text, 0.3), accent, bad, back, back.blend(text, 0.1))
        return Palette(*(color.hex6.lower() for color in inks))

    def fill(self, request: int | None) -> str:
        number = request or 0  # neighbours in a slot are often as many numbers apart as there are hues
        return HUES[(number + number // len(HUES)) % len(HUES)]

    def cell(self, kind: int, request: int | None, reverse: bool = False) -> Style:
        if kind == EMPTY:
            return style(self.faint, reverse=reverse)
        if kind == BLOCKED:
            return style(self.bad, mixed(self.back, self.bad, 0.18), reverse=reverse)
        hue = self.fill(request)
        # A full block on its own colour has no seams, whatever the font.
        return style(hue, {DECODE: hue, PREFILL: mixed(self.back, hue, 0.3)}.get(kind), reverse=reverse)


DARK = Palette("#e0e0e0", "#949494", "#505050", "#ffc473", "#d17e92", "#121212", "#272727")
LIGHT = Palette("#202020", "#6c6c6c", "#b0b0b0", "#8a5a17", "#77263a", "#ffffff", "#e4e4e4")


@lru_cache(256)
def mixed(back: str, fill: str, part: float) -> str:
    return Color.parse(back).blend(Color.parse(fill), part).hex6.lower()


@lru_cache(16)
def ink_on(fill: str) -> str:
    """What can be read on a hue."""
    return "#000000" if Color.parse(fill).brightness > 0.4 else "#ffffff"


Line = list[Segment]


class Pen:
    """Writes a line from left to right, and knows how far it has come."""

    def __init__(self) -> None:
        self.line: Line = []
        self.width = 0

    def put(self, text: str, ink: str | Style | None = None, bold: bool = False, do: str = "") -> Pen:
        how = ink if isinstance(ink, Style) else style(ink, bold=bold, do=do)
        if self.line and self.line[-1].style is how:
            text_before = self.line.pop().text
            self.line.append(Segment(text_before + text, how))
        else:
            self.line.append(Segment(text, how))
        self.width += cell_len(text)
        return self

    def to(self, column: int) -> Pen:
        return self.put(" " * max(0, column - self.width))


def number(value: float | None) -> str:
    """Three digits that matter, and no more: 0.82, 12.6, 340, 1,799."""
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def span(seconds: float | None) -> str:
    """A duration with its unit."""
    if seconds is None:
        return "–"
    return f"{number(1000 * seconds)} ms" if seconds < 1 else f"{number(seconds)} s"


def shorten(text: str, width: int) -> str:
    """One line of at most `width` cells; an ellipsis where it was cut."""
    text = " ".join(text.split())
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…" * (width > 0)


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells, broken between words where that is possible."""
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for word in re.findall(r"\s*\S+|\s+$", paragraph):
            if cell_len(line + word) <= width:
                line += word
                continue
            if line:
                lines.append(line)
            *full, line = chop_cells(word.lstrip(), max(1, width)) or [""]
            lines += full
        lines.append(line)
    return lines


Legend = Iterable[tuple[str, str | Style, str]]  # (glyph, ink, meaning)


def legend(p: Palette, *kinds: int) -> Legend:
    inks = {BLOCKED: p.bad, EMPTY: p.muted}
    return [(GLYPHS[kind], inks.get(kind, p.text), NAMES[kind]) for kind in kinds]


def heading(p: Palette, width: int, title: str, note: str = "", legend: Legend = (), do: str = "") -> Line:
    """A rule with a title at its left, and at its right a note and what the glyphs mean: as much as finds room."""
    pen, right = Pen().put("── ", p.faint).put(shorten(title, width - 8), p.text, True).put(" "), Pen()
    room = width - pen.width - 3
    if note and cell_len(note) < room:
        right.put(f" {note}", p.muted, do=do)
    for glyph, ink, meaning in legend:
        if right.width + cell_len(meaning) + 2 <= room:
            right.put(f" {glyph}", ink).put(meaning, p.muted)
    right.put(" " * bool(right.line)).put("──", p.faint)
    return [*pen.put("─" * (width - pen.width - right.width), p.faint).line, *right.line]


def entry(p: Palette, width: int, name: str, text: str, ink: str = "", names: int = 9) -> list[Line]:
    """A name, and beside it a text of as many lines as it needs."""
    lines = []
    for part in wrap(text, width - names - 2) if text else ():
        lines.append(Pen().put(f" {name:<{names}}", p.muted).put(part, ink or p.text).line)
        name = ""
    return lines


def axis(p: Palette, *labels: tuple[int, str]) -> Line:
    """Labels under a picture, each at its column."""
    pen = Pen()
    for column, label in labels:
        pen.to(column).put(label, p.muted)
    return pen.line


def fit_slots(state: State, rows: int) -> range:
    """Which of the slots are shown, if not all find room: those around the selected one."""
    count = len(state.view.engine.slots)
    first = min(max(0, state.selected - rows // 2), max(0, count - rows))
    return range(first, min(count, first + rows))


# --- the panes: pure functions from state, colours and a size to lines ---------------------------------------------


def draw_status(state: State, p: Palette, width: int, height: int) -> list[Line]:
    view = state.view
    doing = "⚑ racing" if view.racing else "▶ running" if view.busy else "■ idle"
    if view.switching_to:
        doing = f"▮▮ paused, draining → {view.switching_to}" if view.paused else f"⇣ draining → {view.switching_to}"
    elif view.paused:
        doing = "▮▮ paused"
    newest = state.steps[-20:]
    parts = [
        ("nanobatch", p.text, True, ""),
        (shorten(state.model.rstrip("/").rsplit("/", 1)[-1], 28), p.muted, False, ""),
        (doing, p.accent if view.busy else p.muted, True, "pause"),
        ("" if view.switching_to else policy_of(view), p.text, True, "command('/policy')"),
        (f"{number(state.tokens_per_s()) if view.busy else '–':>5} tok/s", p.text, False, ""),
        (f"{len(state.ended)} done", p.text, False, "open(0)"),
        (f"step {state.steps[-1].step if state.steps else 0:,}", p.muted, False, ""),
        (
            f"{number(1000 * sum(map(seconds, newest)) / len(newest) if newest else None):>5} ms/step",
            p.muted,
            False,
            "",
        ),
        (f"load {view.load:g}/s" if view.load else "", p.text, False, "command('/load')"),
        ("space: go on" if view.paused else "", p.accent, False, "pause"),
    ]
    pen = Pen().put(" ")
    for text, *how in parts:
        if text and pen.width + cell_len(text) + 1 <= width:
            pen.put(text, *how).put("  ")
    return [pen.line]


def policy_of(view: View) -> str:
    """The policy in force; a race has its own."""
    return view.legs[-1].policy if view.racing and view.legs else view.policy


def why_waiting(view: View) -> str:
    """One reason for all of the line: it is first come, first served."""
    if view.paused:
        return "paused"
    if view.switching_to:
        return "wait: the slots are being drained"
    if all(slot.request is not None for slot in view.engine.slots):
        return "wait: every slot is taken"
    return {"static": "wait: the batch must drain first", "serial": "wait: one at a time"}.get(policy_of(view), "wait")


def draw_slots(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """A line for each slot: who holds it, and how far its rows of the KV cache are filled, and with what."""
    slots = state.view.engine.slots
    rows = fit_slots(state, height - 3)
    names = ("used/rows", "TTFT ms", "tok/s") if width >= 70 else ("used/rows",)
    right = "".join(f"{name:>{size}}" for name, size in zip(names, FIGURES, strict=False))
    bar = width - 18 - len(right)
    title = "Slots" if len(rows) == len(slots) else f"Slots {rows[0]}–{rows[-1]} of {len(slots)}"
    if state.view.paused and state.steps and state.view.planned > state.steps[-1].step:
        title += f", one step ahead: {state.view.planned:,}"  # it is in flight: planned, and not yet read back
    glyphs = [(REUSED, p.text, "reused"), *legend(p, PREFILL, DECODE), (REMEMBERED, p.text, "remembered")]
    labels = ((2, "#"), (4, "phase   req"), (18, shorten("rows of the KV cache", bar)), (18 + bar, right))
    lines = [heading(p, width, title, legend=glyphs), axis(p, *labels)]
    lines += [draw_slot(state, p, slots[row], bar, len(names)) for row in rows]
    return [*lines, draw_queue(state.view, p, width)]


FIGURES = (11, 9, 7)  # how wide the columns at the right of the slots are


def draw_slot(state: State, p: Palette, slot: SlotView, bar: int, figures: int) -> Line:
    view, request = state.view, state.request(slot.request)
    here, do = slot.slot == state.selected, f"select({slot.slot})"
    phase, ink = slot.phase, p.text
    if request is None:
        shut = view.engine.queue and (view.switching_to or policy_of(view) in SHUTTING)
        phase, ink = "blocked" if shut else "free", p.muted
    pen = Pen().put("▌" if here else " ", p.accent).put(f"{slot.slot:>2} ", ink, here, do)
    pen.put(f"{phase:<8}", p.bad if phase == "blocked" else ink, here, do)
    pen.put(f"r{request.id}" if request else "", ink, here, do).to(18)
    draw_rows(pen, p, slot, view.max_len, bar)
    if request is None:  # what it remembers is nobody's: it may be taken over, or written over
        wide, room = f"({slot.remembered:,} remembered)", sum(FIGURES[:figures])
        right = f"{wide if len(wide) < room else f'({slot.remembered:,})':>{room}}" if slot.remembered else ""
    else:
        ttft, rate = request.metrics.ttft_s, request.metrics.tokens_per_s
        used = f"{slot.used:,}/{view.max_len:,}"
        values = (used, "–" if ttft is None else f"{1000 * ttft:,.0f}", "–" if rate is None else f"{rate:,.0f}")
        right = "".join(f"{value:>{size}}" for value, size in zip(values[:figures], FIGURES, strict=False))
    return pen.put(right, ink, here, do).line


def draw_queue(view: View, p: Palette, width: int) -> Line:
    waiting, why = view.engine.queue, why_waiting(view)
    pen = Pen().put(f" queue {len(waiting)}", p.text, True)
    if waiting:
        pen.put(f"  {why}", p.bad if "batch" in why else p.muted)
    for i, (request, waited) in enumerate(waiting):
        text, left = f"  r{request} {span(waited)}", len(waiting) - i
        if pen.width + len(text) + 10 > width and left > 1:
            return pen.put(f"  +{left} more", p.muted).line
        pen.put(text, p.text)
    return pen.line


def draw_rows(pen: Pen, p: Palette, slot: SlotView, max_len: int, width: int) -> None:
    """The rows of one slot as a bar. Whatever there is at all gets a cell at least."""
    if slot.request is None:
        parts = [(slot.remembered, REMEMBERED, p.muted)]
    else:
        hue, prompt = p.fill(slot.request), min(slot.used, slot.prompt_tokens)
        parts = [
            (min(slot.reused, prompt), REUSED, style(mixed(p.back, hue, 0.6), mixed(p.back, hue, 0.15))),
            (prompt, GLYPHS[PREFILL], p.cell(PREFILL, slot.request)),
            (slot.used, GLYPHS[DECODE], p.cell(DECODE, slot.request)),
        ]
    start = drawn = 0
    for stop, glyph, ink in parts:
        cells = min(width, max(round(stop * width / max_len), drawn + 1)) - drawn if stop > start else 0
        pen.put(glyph * cells, ink)
        start, drawn = max(start, stop), drawn + cells
    pen.put(GLYPHS[EMPTY] * (width - drawn), p.faint)


def draw_cells(pen: Pen, p: Palette, columns: Sequence[Column], slot: int, cursor: int | None = None) -> None:
    """One slot's line of a timeline. Each request carries its number behind its first cell, which stays as it is.

    So a prefill of one step can be seen, and neighbours' numbers never touch. Where there is no room, there is none.
    """
    i = 0
    for request, stretch in groupby(columns, key=lambda column: column.cells[slot].request):
        cells = [column.cells[slot] for column in stretch]
        label = "" if request is None else f" {request}"
        for cell, digit in zip_longest(cells, label if len(label) <= len(cells) else ""):
            ink = p.cell(cell.kind, request, i == cursor)
            if digit and digit != " ":  # on the colour of what it covers
                fill = p.fill(request) if cell.kind == DECODE else mixed(p.back, p.fill(request), 0.3)
                pen.put(digit, style(ink_on(fill), fill, True, i == cursor))
            else:
                pen.put(GLYPHS[cell.kind], ink)
            i += 1


def draw_timeline(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """Slots x steps: what each slot did in each step. This is the picture that says what batching is about."""
    zoom, columns, cursor = state.window(width - 4)
    kinds = legend(p, PREFILL, DECODE, BLOCKED, HELD, GHOST, EMPTY)
    lines = [heading(p, width, "Timeline", f"useful {useful_of(columns):.0f} %", kinds)]
    for slot in fit_slots(state, height - 2):
        pen = Pen().put(f"{slot:>3} ", p.text if slot == state.selected else p.muted, do=f"select({slot})")
        draw_cells(pen, p, columns, slot, cursor)
        lines.append(pen.put(GLYPHS[EMPTY] * (width - pen.width), p.faint).line)
    if cursor is not None:
        label = f" step {state.cursor:,}  End: follow "
        fits = 5 + cursor + len(label) <= width
        pen = Pen().to(4 + cursor if fits else max(0, 4 + cursor - len(label)))
        return [*lines, pen.put(f"▲{label}" if fits else f"{label}▲", p.accent, True).line]
    unit, every = ("step", 20) if zoom == 1 else (f"1 column = {zoom} steps", 16)
    ticks = [
        (4 + i, f"╵{columns[i].step:,}") for i in range(0, min(len(columns), width - 3 - len(unit) - every), every)
    ]
    return [*lines, axis(p, *ticks, (width - len(unit) - 1, unit))]


EIGHTHS = " ▁▂▃▄▅▆▇█"


def nice(top: float) -> float:
    """A little more, and a number that can be read on an axis."""
    scale = 10 ** math.floor(math.log10(max(top, 1e-9)))
    return next(n * scale for n in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if n * scale >= top * 0.999)


def draw_area(
    p: Palette, values: Sequence[float], top: float, width: int, height: int, hue: str, ends: tuple[str, str]
) -> list[Line]:
    """Values as columns over a zero line; the scale at the left, and under it what the first and last column mean."""
    label = max(len(f"{top:,.0f}"), 2)
    room = width - label - 2
    values = list(values)[-room:]
    lines, solid = [], style(hue, hue)
    for row in range(height - 1, -1, -1):
        mark = f"{top:,.0f}" if row == height - 1 else "0" if row == 0 else ""
        pen = Pen().put(f"{mark:>{label}} ", p.muted).put("┤" if mark else "│", p.faint)
        for value in values:
            eighths = round(8 * (value / top * height - row))
            eighths = max(eighths, 1) if value and row == 0 else eighths
            pen.put(EIGHTHS[max(0, min(8, eighths))], solid if eighths >= 8 else hue)
        lines.append(pen.line)
    left, right = ends
    last = max(label + 2 + len(values) - len(right), label + 3 + len(left))
    return [*lines, axis(p, (label + 2, left), (min(last, width - len(right)), right))]


def draw_rate(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """Tokens a second, over the latest busy time or the last ten seconds of it."""
    bins, last = width - 8, state.history[-1].ended if state.history else 0.0
    began = max(state.history[state.woke].began if state.history else 0.0, last - 10)
    tick = max(last - began, 0.05) / bins
    totals = [state.delivered(began + i * tick) for i in range(bins + 1)]
    values = [(b - a) / tick for a, b in pairwise(totals)]
    ends = (f"−{span(last - began)}", "0 s") if last else ("", "")
    lines = [heading(p, width, "tokens/s", f"peak {max(values):,.0f}")]
    return lines + draw_area(p, values, nice(max(1.0, *values)), width, height - 2, HUES[2], ends)


def draw_batch(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """How many of the slots did useful work in each step."""
    slots = len(state.view.engine.slots)
    columns = state.columns(state.zoom_for(width))[-width:]
    working = [column.useful / column.steps for column in columns]
    mean = f"mean {sum(working) / len(working):.1f} " if working else ""
    ends = (f"step {columns[0].step:,}", f"{columns[-1].step:,}") if columns else ("step", "")
    lines = [heading(p, width, "batch size", f"{mean}of {slots} slots")]
    return lines + draw_area(p, working, slots, width, height - 2, HUES[1], ends)


EDGES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 10**9)  # ms
TEXTURES = {  # glyphs of their own: a policy is no phase
    "continuous": ("█", style(HUES[2], HUES[2])),
    "static": ("▒", style(HUES[0])),
    "serial": ("░", style(HUES[3])),
}
OTHER = ("▓", style(HUES[1]))  # a policy of yours


def draw_ttft(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """How long people waited for their first token: a histogram, a texture for each policy."""
    requests = [r for r in state.view.requests if r.metrics.ttft_s is not None]
    if not requests:
        return [heading(p, width, "TTFT"), Pen().put(" time to first token: nothing yet", p.muted).line]
    used = [policy for policy in POLICIES if any(r.policy == policy for r in requests)]
    mean = sum(r.metrics.ttft_s for r in requests) / len(requests)
    names = Pen()
    for policy in used:
        names.put(" ").put(*TEXTURES.get(policy, OTHER)).put(f" {policy} ", p.muted)
    lines = [heading(p, width, "TTFT", f"mean {span(mean)}"), names.line]
    bins = Counter((bisect_left(EDGES, 1000 * r.metrics.ttft_s), r.policy) for r in requests)
    low, high = min(b for b, _ in bins), max(b for b, _ in bins)
    low = max(low, high - height + len(lines) + 1)  # the shortest ones are counted together, where there is no room
    rows: dict[int, Counter] = {b: Counter() for b in range(low, high + 1)}
    for (b, policy), count in bins.items():
        rows[max(low, b)][policy] += count
    most = max(sum(row.values()) for row in rows.values())
    labels = [f"{f'≤ {EDGES[b]:,}' if b == low else f'{EDGES[b - 1]:,}–{EDGES[b]:,}'} ms" for b in rows]
    left = max(map(len, labels)) + 2
    for row, label in zip(rows.values(), labels, strict=True):
        pen, room = Pen().put(f"{label:>{left - 1}} ", p.muted), width - left - 5
        for policy in used:
            glyph, ink = TEXTURES.get(policy, OTHER)
            cells = math.ceil(row[policy] * room / most)
            pen.put(glyph * max(0, min(cells, left + room - pen.width)), ink)
        lines.append(pen.put(f" {sum(row.values())}" if row else "", p.text).line)
    return lines


def draw_stream(state: State, p: Palette, width: int, height: int, slot: int) -> list[Line]:
    """One slot's request: its prompt, and the end of its text, which is where it grows."""
    request, here, title = state.owner(slot), slot == state.selected, f"slot {slot}"
    if request is None:
        return [Pen().put(f"{title}  ", p.muted, here).put("nothing yet", p.muted).line]
    pen = Pen().put(f"{title} r{request.id}", p.text if here else p.muted, True, f"select({slot})")
    pen.put(f" {request.reason}" if request.reason else "", p.muted)
    pen.put(f"  {shorten(request.prompt, width - pen.width - 3)}", p.muted)
    text = wrap(request.text + ("" if request.reason else "▏"), width - 1)[-(height - 1) :] if height > 1 else []
    return [pen.line, *(Pen().put(line, p.text).line for line in text)]


def draw_streams(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """All slots' texts side by side, where there are two lines for each; else the selected slot's alone."""
    count = len(state.view.engine.slots)
    across = max(1, min(count, (width + 2) // 30))
    tall, wide, shown = (height - 1) // -(-count // across), width // across, range(count)
    if tall < 2:
        across, tall, wide, shown = 1, height - 1, width, [state.selected]
    lines = [heading(p, width, "Answers", "y copies" if len(shown) == 1 else "")]
    for first in shown[::across]:
        texts = [draw_stream(state, p, wide - 2, tall, slot) for slot in range(first, min(count, first + across))]
        for row in range(tall):
            parts = (Strip(text[row] if row < len(text) else []).adjust_cell_length(wide - 1) for text in texts)
            lines.append([segment for part in parts for segment in (Segment(" "), *part)])
    return lines


def draw_step(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """One turn of the wheel: what was planned, how many tokens it computed, and where its time went."""
    step = state.step
    title, which = f"Step {step.step:,}" if step else "Step", "newest" if state.cursor is None else "End: follow"
    lines = [heading(p, width, title, which)]
    if step is None:
        return [*lines, Pen().put(" plan → run → commit: nothing has run yet", p.muted).line]
    prefill, decode = sum(stop - start for *_, start, stop in step.prefill), len(step.decode)
    stages = {"plan": step.plan_s, "build": step.build_s, "wait": step.wait_s, "commit": step.commit_s}
    total = seconds(step) or 1e-9
    held = step.held and ", ".join(f"r{r}" for _, r in step.held)
    entries = {
        "admitted": ", ".join(f"r{r} → slot {s}" for s, r in step.admitted) or "nobody",
        "prefill": ", ".join(f"r{r} {a:,}–{b:,} → slot {s}" for s, r, a, b in step.prefill) or "no chunk",
        "decode": f"slots {', '.join(str(s) for s, _ in step.decode)}" if decode else "no slot",
        "tokens": f"{prefill} prefill + {decode} decode = {prefill + decode} in one step; {step.tokens} delivered",
        "budget": f"cost {step.cost - decode} + {decode} of {state.view.budget} (chunks count in {PADDING}s)",
        "held": step.held and f"{held}: over the budget, or another writes what they share",
        "ghosts": step.ghosts and f"slots {', '.join(map(str, step.ghosts))}: had ended, seen one step late",
        "in line": str(step.waiting or ""),
        "time": f"{1000 * total:.2f} ms = " + " + ".join(f"{name} {1000 * s:.2f}" for name, s in stages.items()),
    }
    for name, text in entries.items():
        lines += entry(p, width, name, text)
    pen = Pen().to(10)
    for (name, spent), hue in zip(stages.items(), (HUES[0], HUES[1], HUES[2], HUES[3]), strict=True):
        cells = max(1, round(spent / total * (width - 15)))  # of its own name: these are no phases of a request
        pen.put(f"{name:─^{cells}}"[:cells] if cells > len(name) else name[:cells], style(ink_on(hue), hue))
    return [*lines[: height - 1], pen.line] if len(lines) < height else lines[:height]


def draw_requests(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """One of those that have ended: prompt, text, why it ended, and its figures."""
    if not state.ended:
        return [heading(p, width, "Requests"), Pen().put(" Nothing has ended yet. Esc goes back.", p.muted).line]
    opened = min(state.opened, len(state.ended) - 1)
    r = state.ended[opened]
    m = r.metrics
    figures = (
        f"{r.reason}; {r.policy}; {m.prompt_tokens} prompt tokens, {m.cached_tokens} of them reused; "
        f"{m.output_tokens} new tokens; TTFT {span(m.ttft_s)}; {number(m.tokens_per_s)} tokens/s; "
        f"in all {span(r.ended - r.arrived)}"
    )
    title = f"r{r.id}, {opened + 1} of {len(state.ended)} that have ended"
    return [
        heading(p, width, title, "↓ earlier  ↑ later  y copy  Esc back", do="screen.back"),
        *entry(p, width, "figures", figures),
        *entry(p, width, "prompt", r.prompt, p.muted),
        *entry(p, width, "error", r.error or "", p.bad),
        *entry(p, width, "text", r.text),
    ]


def draw_contest(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """Two timelines on one scale of time, each under its figures, and a sentence that says who won."""
    contest = state.contest or race(state)
    kinds = legend(p, PREFILL, DECODE, BLOCKED, HELD, EMPTY)
    widths = (21, 12, 12, 12, 9, 9) if width >= 78 else (12, 11, 12, 0, 9, 0)
    titles = zip(("", "makespan", "TTFT mean", "TTFT p95", "useful", "tok/s"), widths, strict=True)
    titles = "".join(f"{name:>{size}}" for name, size in titles if size)
    longest = max([run.makespan for run in contest.runs], default=0) or 1.0
    words = [Pen().put(f" {line}", p.text, True).line for line in wrap(verdict(contest.runs), width - 2) if line]
    words += [Pen().put(f" {line}", p.muted).line for line in wrap(contest.note, width - 2) if line]
    slots, room = len(state.view.engine.slots), (height - 7 - len(words)) // 2
    shown = fit_slots(state, max(1, room + 1))
    part = f"slots {shown[0]}–{shown[-1]}" if len(shown) < slots else ""
    names = axis(p, (1, part), (len(titles) - len(titles.lstrip()), titles.lstrip()))
    lines = [heading(p, width, contest.title, "Esc back", kinds, do="screen.back"), names]
    for run in contest.runs:
        title = f" {run.policy}, {run.how}" if width >= 78 else f" {run.policy}"
        figures = span(run.makespan), span(run.ttft_mean), span(run.ttft_p95), f"{useful_of(run.columns):.0f} %"
        values = zip((*figures, number(run.tokens_per_s)), widths[1:], strict=True)
        pen = Pen().put(title, p.text, True).to(widths[0])
        lines.append(pen.put("".join(f"{value:>{size}}" for value, size in values if size), p.text).line)
        columns = in_time(run, width - 5, longest)
        for slot in shown:
            pen = Pen().put(f"{slot:>3} ", p.muted)
            draw_cells(pen, p, columns, slot)
            lines.append(pen.line)
        if room > slots:
            lines.append([])
    half, whole_ = f"{longest / 2:.2f} s", f"{longest:.2f} s"
    middle, end = 4 + (width - 5) // 2 - len(half) // 2, width - 1 - len(whole_)
    return [*lines, axis(p, (4, "0 s"), (middle, half), (end, whole_)), *words]


def in_time(run: Run, width: int, longest: float) -> list[Column]:
    """A run's columns on a scale of time: `width` cells are `longest` seconds."""
    out, first = [], 0
    for x in range(round(run.makespan / longest * width)):
        stop = bisect_left(run.columns, run.began + (x + 1) * longest / width, key=lambda c: c.ended)
        stop = min(max(stop, first), len(run.columns))
        out.append(merge(run.columns[first:stop]) if stop > first else run.columns[min(first, len(run.columns) - 1)])
        first = stop
    return out


def draw_loading(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """What is being done before there is anything to see, or what went wrong and what helps."""
    view, indent = state.view, " " * max(2, (width - 70) // 2)
    room = width - 2 * len(indent)
    text = [Pen().put(f"{indent}nanobatch", p.text, True).line]

    def say(words: str, ink: str, first: str = "", bold: bool = False, do: str = "") -> None:
        for i, part in enumerate(wrap(words, room - 2)):
            text.append(Pen().put(f"{indent}{first if i == 0 else ' ' * len(first)}{part}", ink, bold, do).line)

    say("watch an LLM serving engine work\n", p.muted)
    *before, last = view.done or ("starting",)
    for stage in before:
        say(stage, p.muted, "✓ ")
    say(last, p.text, "✗ " if view.stage == "failed" else "… ")
    if state.printed and not view.error:
        say(state.printed, p.muted, "  ")
    if view.error:
        say(f"\n{view.error}", p.bad, bold=True)
    text.append([])
    say("q quits", p.muted, do="quit")
    return [[]] * max(0, (height - len(text)) // 3) + text


def draw_small(state: State, p: Palette, width: int, height: int) -> list[Line]:
    return [Pen().put(part, p.text).line for part in wrap("nanobatch needs 60×20 characters; q quits", width)][:height]


def draw_mark(state: State, p: Palette, width: int, height: int) -> list[Line]:
    return [Pen().put(" ❯", p.accent, True).line]


def draw_settings(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """How the next prompt is fired; for a while after a key, what that key has done."""
    s = state.settings
    text = f"temp {s.temperature:g} · max {s.max_tokens} tok · seed {'–' if s.seed is None else s.seed}"
    text = shorten(state.said or text, width - 2)
    return [Pen().to(width - 1 - cell_len(text)).put(text, p.accent if state.said else p.muted, do="settings").line]


class Key(NamedTuple):
    keys: str  # as Textual names them
    show: str
    action: str
    label: str
    help: str  # of a pair of keys, the first speaks for both
    footer: int = 0  # its rank where not all of them find room; 0: never shown there


KEYS = (
    Key("i", "i", "prompt", "Prompt", "type a prompt: Enter fires it, Esc leaves the box", 3),
    Key("slash", "/", "prompt('/')", "Command", "type a command; the last line of this page names some"),
    Key("enter", "enter", "fire", "Fire", "fire the prompt that is in the box, or type one", 10),
    Key("b", "b", "command('/burst')", "Burst", "fire a burst: prompts of different lengths, all at once", 1),
    Key("space", "space", "pause", "Pause", "stop the engine between two steps; again: go on", 7),
    Key("s", "s", "command('/step')", "Step", "run one step, then pause", 9),
    Key("p", "p", "command('/policy')", "Policy", "the next policy: drain the slots, then switch", 6),
    Key(
        "c",
        "c",
        "command('/compare')",
        "Compare",
        "what just ran, simulated: its policy against static, or continuous",
        4,
    ),
    Key("r", "r", "command('/race')", "Race", "the same burst under static, then continuous (measured)", 5),
    Key("x", "x", "command('/cancel')", "Cancel", "cancel the selected slot's request", 9),
    Key("X", "X", "command('/cancel all')", "Cancel all", "cancel all requests, waiting ones too", 14),
    Key("l", "l", "command('/load')", "Load", "a steady load of random prompts: on, off (/load 8: 8 a second)", 11),
    Key("e", "e", "settings", "Settings", "change temperature, longest answer, seed, burst", 12),
    Key("up", "↑ ↓", "choose(-1)", "Slot above", "select a slot"),
    Key("down", "↓", "choose(1)", "Slot below", ""),
    Key("left", "← →", "move(-1)", "Earlier", "go back in time on the timeline, a step at a time, and forth"),
    Key("right", "→", "move(1)", "Later", ""),
    Key("pageup", "PgUp PgDn", "move(-40)", "Much earlier", "forty steps back, or on"),
    Key("pagedown", "PgDn", "move(40)", "Much later", ""),
    Key("home", "Home", "move(-100000)", "Oldest", "the oldest step that is remembered"),
    Key("end,escape", "End", "follow", "Newest", "follow the newest step again"),
    Key("z", "z", "zoom", "Zoom", "steps in a column of the timeline: 1, 2, 4, 8, to fit"),
    Key("v", "v", "view", "View", "the next pane, where there is room for one only", 8),
    Key("f", "f", "open(0)", "Requests", "requests that have ended: read and copy them", 10),
    Key("y", "y", "copy", "Copy", "copy the selected slot's text"),
    Key("d", "d", "theme", "Theme", "dark or light; more themes in the palette, ctrl+p", 15),
    Key("question_mark", "?", "sheet('help')", "Help", "this page", 1),
    Key("q,ctrl+c", "q", "quit", "Quit", "quit at once (Ctrl-C always)", 2),
)
TYPING = (Key("", "enter", "fire", "Fire", "", 1), Key("", "esc", "leave", "Keys:", "", 1))

EXPLAINED = (
    ("slot", "one request's place in the KV cache, so many rows long. A request owns one from admission to its end."),
    ("row", "one token's place in a slot: its key and its value, in every layer."),
    ("prefill ▒", "the prompt goes into the slot, a chunk a step. After the last chunk comes the first token."),
    ("decode █", "one more token for every slot that has got that far, all of them in one pass through the weights."),
    ("reused ▓", "rows taken over from another prompt that begins alike: they are not computed again."),
    ("remembered ░", "rows of its last prompt that a free slot still holds, until they are reused or written over."),
    ("blocked ╳", "the slot is free and somebody waits, but the policy keeps it shut until the batch has drained."),
    ("held ┈", "in a slot, but the budget left no room for its next chunk, or somebody is writing what they share."),
    ("ghost ▚", "computed for nothing: the end of its request is seen one step late."),
    ("chunk", "a piece of a prompt. The further it looks back, the fewer tokens it takes, for its neighbours' sake."),
    ("budget", "what a step may cost: a token 1, a chunk its length, or more far back. One chunk is always let in."),
    ("run-ahead", "a step starts before the one before is read back: Slots may be one step ahead of Timeline."),
    ("batch size", "how many slots did useful work in a step."),
    ("useful", "the share of slots × steps in which a slot prefilled or decoded for somebody."),
    ("TTFT", "time to first token: from firing a prompt to the first token of its answer."),
    ("makespan", "from the first arrival to the last token of all."),
    ("continuous", "a policy: whoever waits takes a slot as soon as one is free."),
    ("static", "a policy: a batch is admitted together; the next one waits until all of it has ended."),
    ("serial", "a policy: one request at a time."),
    ("commands", "in the prompt box: /burst 8  /policy static  /load 2  /cancel 7  /set temperature=0.8 max=64 seed=7"),
)


def draw_keys(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """The footer. Each entry can be clicked, whether the prompt has the keyboard or not."""
    keys = [*TYPING, *KEYS[3:]] if state.typing else KEYS
    if state.view.paused:  # the ways out come first
        ways = {"pause": "Go on", "command('/step')": "Step"}
        keys = [key._replace(label=ways[key.action], footer=1) if key.action in ways else key for key in keys]
    shown, left = set(), width - 1
    for key in sorted((key for key in keys if key.footer), key=lambda key: key.footer):
        need = cell_len(key.show) + cell_len(key.label) + 2
        if need <= left + 1:
            shown.add(key)
            left -= need
    pen = Pen().put(" ")
    for key in keys:
        if key in shown:
            pen.put(key.show, p.accent, True, key.action).put(" ").put(key.label, p.text, do=key.action).put(" ")
    return [pen.line]


def draw_help(state: State, p: Palette, width: int, height: int) -> list[Line]:
    """Keys, then words; where not all of it finds room, it can be scrolled."""
    lines = [heading(p, width, "Help: keys", "↑↓ scroll  Esc back", do="screen.back")]
    keys, across = [key for key in KEYS if key.help], 2 if width >= 140 else 1
    wide, tall = width // across, -(-len(keys) // across)
    for row in range(tall):
        pen = Pen()
        for column, key in enumerate(keys[row::tall]):
            pen.to(column * wide).put(f" {key.show:<10}", p.accent, True, key.action)
            pen.put(shorten(key.help, wide - 13), p.text, do=key.action)
        lines.append(pen.line)
    lines.append(heading(p, width, "Words"))
    for name, text in EXPLAINED:
        lines += entry(p, width, name, text, names=13)
    return lines


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


def whole(name: str, text: str, least: int, most: int) -> int:
    if not re.fullmatch(r"[+-]?\d{1,12}", text) or not least <= int(text) <= most:
        raise ValueError(f"{name} = {text!r}, but it must be a whole number from {least:,} to {most:,}")
    return int(text)


def real(name: str, text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise ValueError(f"{name} = {text!r}, but it must be a number from {least:g} to {most:,g}")
    return value


SETTABLE = {  # what /set takes: the field, and its limits
    "temperature": ("temperature", real, 0, 100),
    "max": ("max_tokens", whole, 1, 2**20),
    "seed": ("seed", whole, 0, 2**31 - 1),
    "burst": ("burst", whole, 1, 1000),
    "rate": ("rate", real, 0.01, 1000),
}


class Session:
    """An engine room and what is known of it. Keys, clicks, commands, scripts and the plain log all end up here."""

    def __init__(self, room: EngineRoom, state: State):
        self.room, self.state = room, state

    @property
    def heard(self) -> bool:
        """The view tells of everything that has been wished for."""
        return self.state.view.heard == self.room.posted

    @property
    def settled(self) -> bool:
        """Nothing is left to do."""
        return self.heard and not self.state.view.busy and not self.state.view.stepping

    def look(self) -> bool:
        """Take the newest view; True if there is something new."""
        view = self.room.view
        if view is self.state.view:
            return False
        self.state.absorb(view)
        return True

    def asks(self, count: int) -> list[Ask]:
        """So many of the prompts, again and again if need be. Each has a seed of its own, if there is one."""
        s, asks = self.state.settings, []
        for i, (prompt, longest) in zip(range(count), cycle(self.state.prompts)):
            seed = None if s.seed is None else s.seed + i
            asks.append(Ask(prompt, min(longest, s.max_tokens), s.temperature, seed))
        return asks

    def obey(self, line: str) -> str:
        """A line of text: a prompt, or a command. Answers with what to tell the user; ValueError if it cannot be."""
        if not line.startswith("/") or line.startswith("//"):
            s = self.state.settings
            self.room.fire([Ask(line.removeprefix("/"), s.max_tokens, s.temperature, s.seed)])
            return ""
        name, _, rest = line.removeprefix("/").partition(" ")
        command = getattr(self, f"_do_{name}", None)
        if command is None:
            known = " ".join(f"/{method[4:]}" for method in dir(self) if method.startswith("_do_"))
            raise ValueError(f"/{name} is no command; there are {known}")
        return command(rest.strip()) or ""

    def _do_burst(self, rest: str) -> str:
        count = whole("burst", rest or str(self.state.settings.burst), 1, 1000)
        self.room.fire(self.asks(count))
        return f"{count} prompts fired"

    def _do_race(self, rest: str) -> None:
        count = whole("race", rest or str(self.state.settings.burst), 1, 1000)
        seed = self.state.settings.seed or 0  # both legs roll the same dice
        self.state.contest = None
        self.room.race([ask._replace(seed=seed + i) for i, ask in enumerate(self.asks(count))])

    def _do_compare(self, rest: str) -> None:
        self.state.contest = compare(self.state)

    def _do_policy(self, rest: str) -> None:
        """The one that is named, or the next."""
        view = self.state.view
        now = POLICIES.index(view.switching_to or view.policy)
        policy = rest or POLICIES[(now + 1) % len(POLICIES)]
        if policy not in POLICIES:
            raise ValueError(f"policy = {policy!r}; choose one of {', '.join(POLICIES)}")
        self.room.switch(policy)

    def _do_load(self, rest: str) -> None:
        """So many requests a second; without a number: on or off."""
        off = rest == "off" or (not rest and self.state.view.load)
        rate = 0.0 if off else real("load", rest or str(self.state.settings.rate), 0, 1000)
        self.room.set_load(rate, self.asks(len(self.state.prompts)))

    def _do_cancel(self, rest: str) -> str:
        """All, or the one that is named, or that of the selected slot."""
        slot = self.state.selected
        owner = self.state.view.engine.slots[slot].request
        if rest == "all":
            owner = None
        elif rest:
            owner = whole("request", rest.removeprefix("r"), 0, 2**31)
        elif owner is None:
            return f"slot {slot} is free"
        self.room.cancel(owner)
        return "all requests are cancelled" if owner is None else f"r{owner} is cancelled"

    def _do_pause(self, rest: str) -> None:
        self.room.pause(True)

    def _do_resume(self, rest: str) -> None:
        self.state.cursor = None
        self.room.pause(False)

    def _do_step(self, rest: str) -> None:
        self.state.cursor = None
        self.room.step(whole("step", rest or "1", 1, 100_000))

    def _do_set(self, rest: str) -> str:
        changes = {}
        for pair in rest.split():
            name, _, value = pair.partition("=")
            if name not in SETTABLE:
                raise ValueError(f"{name!r} cannot be set; temperature, max, seed, burst and rate can")
            knob, check, least, most = SETTABLE[name]
            changes[knob] = None if pair in ("seed=", "seed=none") else check(name, value, least, most)
        self.state.settings = replace(self.state.settings, **changes)
        return f"set {rest}"


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


# What a script may say besides the commands, and the action that it stands for.
SCRIPTED = {
    "help": "sheet('help')",
    "requests": "open(0)",
    "view": "view",
    "zoom": "zoom",
    "light": "theme('textual-light')",
    "dark": "theme('textual-dark')",
}


def orders_of(script: str) -> list[tuple[str, str]]:
    """ "static burst24 step60" -> [("static", ""), ("burst", "24"), ("step", "60")]"""
    return re.findall(r"([a-z]+)[=:]?([0-9.]*)", script)


def as_command(word: str, rest: str) -> str:
    return f"/policy {word}" if word in POLICIES else f"/{word} {rest}"


# --- the plain log -----------------------------------------------------------------------------------------------


class PlainLog:
    """The same run as a line for each event: for pipes, for logs, and for those who listen to their screen."""

    def __init__(self, session: Session, write: Callable[[str], None]):
        self.session, self.write = session, write
        self._told = View()  # what has been told
        self._step = self._legs = 0

    def look(self) -> None:
        if not self.session.look():
            return
        state, view, before = self.session.state, self.session.state.view, self._told
        self._told = view
        for stage in view.done[len(before.done) :]:
            self.write(f"loading: {stage}")
        known = {r.id: r for r in before.requests}
        news = [event for r in view.requests for event in self._news(known.get(r.id), r)]
        for step in state.steps:
            if step.step > self._step:
                news += [(step.began, f"r{r} is admitted to slot {s} in step {step.step}") for s, r in step.admitted]
        self._step = state.steps[-1].step if state.steps else 0
        for moment, line in sorted(news, key=lambda event: event[0]):
            self.write(f"{moment:8.3f} s  {line}")
        if view.stage == "ready" and (before.stage, before.policy) != ("ready", view.policy):
            self.write(f"{view.now:8.3f} s  policy {view.policy}")
        for fault in view.faults[len(before.faults) :]:
            self.write(f"{view.now:8.3f} s  {fault.message}")
        done = sum(leg.last_step is not None for leg in view.legs)
        if done > self._legs:
            self.tell(race(state), self._legs)
        self._legs = done

    def _news(self, before: RequestView | None, r: RequestView) -> Iterable[tuple[float, str]]:
        """What has happened to a request since: (when, what)."""
        if before is None:
            yield r.arrived, f"r{r.id} waits: {shorten(r.prompt, 60)}"
        if r.metrics.ttft_s is not None and (before is None or before.metrics.ttft_s is None):
            yield r.arrived + r.metrics.ttft_s, f"r{r.id} has its first token after {span(r.metrics.ttft_s)}"
        if r.reason and (before is None or before.reason is None):
            rate = f", {number(r.metrics.tokens_per_s)} tokens/s" if r.metrics.tokens_per_s else ""
            text = " ".join(r.text.split())
            end = f"{r.metrics.output_tokens} tokens, TTFT {span(r.metrics.ttft_s)}{rate}: {text}"
            yield r.ended, f"r{r.id} ends ({r.reason}): {end}"

    def obey(self, line: str) -> None:
        """A prompt, or a command."""
        try:
            answer = self.session.obey(line)
        except ValueError as error:
            answer = str(error)
        if answer:
            self.write(answer)
        elif line.startswith("/compare"):
            self.tell(self.session.state.contest)

    def tell(self, contest: Contest, first: int = 0) -> None:
        for run in contest.runs[first:]:
            if run.how != "running …":
                figures = (
                    f"TTFT mean {span(run.ttft_mean)}, p95 {span(run.ttft_p95)}, useful {useful_of(run.columns):.0f} %"
                )
                self.write(f"{run.policy}, {run.how}: makespan {span(run.makespan)}, {figures}")
        if words := verdict(contest.runs):
            self.write(words)


def run_plain(session: Session, script: str) -> int:
    """Prompts and commands come from standard input, a line each. At its end, with nothing left to do, we leave."""
    log = PlainLog(session, lambda line: print(line, flush=True))
    state = session.state
    orders = deque(as_command(*order) for order in orders_of(script) if order[0] not in (*SCRIPTED, "wait"))
    if not script and not session.room.posted:
        orders.append("/burst 8")
    listening, rest = not script, b""
    while True:
        time.sleep(0.02)
        log.look()
        if state.view.stage == "failed":
            print(f"nanobatch: {state.view.error}", file=sys.stderr)
            return 2
        if state.view.stage != "ready":
            continue
        if listening:
            rest, lines, listening = read_lines(rest)
            if lines:
                orders.clear()  # somebody knows what to ask: no need for the burst
            for line in lines:
                if line in ("/quit", "/exit"):
                    return 0
                log.obey(line)
        elif session.settled:
            log.look()
            if not orders:
                return 0
            log.obey(orders.popleft())


def read_lines(rest: bytes) -> tuple[bytes, list[str], bool]:
    """Lines that have come on standard input, without waiting for more; False when there will be none."""
    if not select.select([0], [], [], 0)[0]:
        return rest, [], True
    data = os.read(0, 65536)
    *lines, rest = (rest + data).split(b"\n")
    if not data and rest:
        lines, rest = [rest], b""
    texts = [line.decode(errors="replace").strip() for line in lines]
    return rest, [text for text in texts if text], bool(data)


# --- the trace ---------------------------------------------------------------------------------------------------


def trace_events(steps: Sequence[StepView], history: Sequence[Column]) -> list[dict]:
    """What the timeline saw, as Chrome's trace format has it: open it in Perfetto or chrome://tracing.

    Process 1 has a track for each slot, with a span for each stretch of steps in which it did the same; process 2 has
    the stages of each step. Times are microseconds.
    """
    out: list[dict] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for pid, name in ((1, "slots"), (2, "engine"))
    ]
    for slot in range(len(history[0].cells) if history else 0):
        out.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": slot, "args": {"name": f"slot {slot}"}})
        for (kind, request), stretch in groupby(history, key=lambda column: column.cells[slot]):
            columns = list(stretch)
            if kind != EMPTY:
                name = NAMES[kind] if request is None else f"r{request} {NAMES[kind]}"
                args = {"first step": columns[0].step, "last step": columns[-1].step}
                out.append(_span(1, slot, name, columns[0].began, columns[-1].ended, args))
    for step in steps:
        args = {"step": step.step, "policy": step.policy, "decoding": len(step.decode), "chunks": len(step.prefill)}
        run, read = step.began + step.plan_s, step.ended - step.commit_s
        for name, began, ended in (("plan", step.began, run), ("run", run, read), ("commit", read, step.ended)):
            # A step is planned while the one before still runs: every other one has a track of its own.
            out.append(_span(2, step.step % 2, name, began, ended, args))
        counters = {"in line": step.waiting, "batch size": len(step.decode) + len(step.prefill)}
        out.append({"ph": "C", "name": "load", "pid": 2, "ts": round(1e6 * step.began), "args": counters})
    return out


def _span(pid: int, tid: int, name: str, began: float, ended: float, args: dict) -> dict:
    times = {"ts": round(1e6 * began, 1), "dur": round(1e6 * (ended - began), 1)}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": "nanobatch", "args": args} | times


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


def load_engine(args: argparse.Namespace, report: Callable[[str], None], clock: Callable[[], float]) -> Engine:
    """How the engine room gets its engine. Nothing before this has imported MLX."""
    report("starting MLX")
    from nanobatch import Engine, Sampling

    # The demo's answers are short: in shorter slots more can be seen.
    sizes = {"slots": args.slots, "max_len": args.max_len or (400 if args.model == "demo" else None)}
    engine = Engine.load(args.model, report=report, policy=args.policy, clock=clock, **sizes)
    report("warming up")
    engine.generate([[0]], Sampling(max_tokens=2, ignore_eos=True))
    engine.sched.start_over()  # what this has left in a slot is nobody's prompt
    engine.sched.free.sort()
    engine.sched.steps = 0
    return engine


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
