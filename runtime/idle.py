"""What becomes of an engine that nobody asks: its weights are let go of.

The problem. A server that runs all day is asked for minutes of it, and holds gigabytes meanwhile.

The way out. `Idle` is a loop's `between`, so it runs in the thread that steps, and between two steps.
When nothing has come for so many seconds, the engine releases weights and slab. The next request
brings the weights back by itself, in its first step.

What this file keeps. No request is lost: one that comes just then stands in line, and waits for the
weights.

Where next: `Engine.release` in `nanobatch.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from runtime.cli import say
from runtime.engine_protocol import AnyEngine


class Idle:
    """Releases an engine after so many seconds without work, and says so: a loop's `between`."""

    def __init__(
        self,
        engine: AnyEngine,
        seconds: float,
        say: Callable[[str], None] = say,
        now: Callable[[], float] = time.monotonic,
    ):
        self._engine = engine
        self._seconds = seconds
        self._say = say
        self._now = now
        self._since = now()  # nothing has come since
        self._submitted = 0
        self._is_away = False

    def __call__(self) -> float | None:
        """The seconds after which to look again; None: when something happens."""
        engine = self._engine
        if self._is_away and not engine.is_released:
            self._is_away = False
            self._say("the weights are back")
        submitted = engine.sched.submitted
        if engine.has_work or submitted != self._submitted:
            self._submitted = submitted
            self._since = self._now()
        if engine.is_released or engine.has_work:
            return None
        left = self._since + self._seconds - self._now()
        if left > 0:
            return left
        with suppress(RuntimeError):  # a request has just come
            engine.release()
            self._is_away = True
            idle = f"idle for {self._seconds:g} s"
            self._say(f"{idle}: weights and slab are let go of, until the next request")
        return None
