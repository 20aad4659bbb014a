"""Decide when to unload an idle engine's weights, with `Engine.release`. The first step of the next request
loads them again (`model_lifecycle.py`); requests wait in the queue until then."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanobatch import Engine


class Idle:
    """A loop's `between` callback that releases the engine after `seconds` without work, and reports it."""

    def __init__(
        self,
        engine: Engine,
        seconds: float,
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ):
        self._engine = engine
        self._seconds = seconds
        self._say = say
        self._now = now
        self._since = now()  # when the engine became idle
        self._submitted = 0
        self._is_away = False

    def __call__(self) -> float | None:
        """Return the seconds until the next check, or None to wait for an event."""
        engine = self._engine
        if self._is_away and not engine.lifecycle.is_unloaded:
            self._is_away = False
            self._say("the weights are loaded again")
        submitted = engine.sched.submitted
        if engine.has_work or submitted != self._submitted:
            self._submitted = submitted
            self._since = self._now()
        if engine.lifecycle.is_unloaded or engine.has_work:
            return None
        left = self._since + self._seconds - self._now()
        if left > 0:
            return left
        with suppress(RuntimeError):  # a request has just arrived
            engine.release()
            self._is_away = True
            idle = f"idle for {self._seconds:g} s"
            self._say(f"{idle}: weights and slab are unloaded until the next request")
        return None
