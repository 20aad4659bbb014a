"""What the screen costs the engine: the time of a token in a burst, without the screen and with it.

The problem. A screen draws while the engine computes, and on a CPU both want the same cores.

The way out. The screen runs as a user's does, 120 columns wide and 40 lines high. It writes to
standard error, which the benchmark's own process reads. The same burst runs again and again, in
turn with and without the screen looking at the engine.

What this file keeps. Both ways have the same engine, the same prompts, and as many requests in line.

Where next: `screen/room.py`, which the screen looks into; `thrifty` in `screen/widgets.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import tui
from measure.figures import Figures
from measure.turns import compared
from screen.room import EngineRoom
from screen.session import Session
from screen.state import State
from screen.widgets import thrifty


def screen_figures(model: str, policy: str, prompts: int, queue: int) -> Figures:
    """Of a burst of so many prompts; behind them, `queue` more wait meanwhile."""
    os.environ.update(COLUMNS="120", LINES="40")
    args = tui.parse_arguments(["--model", model, "--policy", policy])
    room = EngineRoom(partial(tui.load_engine, args))
    app = tui.Screen(Session(room, State(model)))
    app.LOOKS = 3600  # the interval below looks, or does not
    look = app.look

    def burst(looks: bool) -> list[float]:
        """The seconds of a token, all of them together."""
        app.look = look if looks else lambda: None
        asks = app.session.asks(prompts)
        before = room.look().engine
        room.pause(True)
        room.fire([*asks, *asks[:1] * queue])
        until(lambda: room.look().heard == room.posted)
        room.pause(False)
        began = room.clock()
        last = before.submitted + len(asks)
        until(lambda: all(id > last for id in list(room.own)))
        took = room.clock() - began
        after = room.look().engine
        room.cancel(None)
        until(lambda: room.look().heard == room.posted and not room.look().busy)
        return [took / (after.output_tokens - before.output_tokens)]

    def measure() -> None:
        until(lambda: room.look().stage == "ready")
        ways = {"token": partial(burst, False), "token with the screen": partial(burst, True)}
        app.call_from_thread(app.exit, compared(ways))

    def begin() -> None:
        app.set_interval(0.1, thrifty(lambda: app.look()))
        app.run_worker(measure, thread=True)

    app.call_later(begin)
    room.start()
    figures = app.run()
    room.stop(10)
    if not figures:
        raise RuntimeError("the screen has ended by itself")
    return figures


def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.02)
