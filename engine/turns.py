"""Fair sharing of one device by several engines: a step is a turn, and the engine with the least time is next.

A step of a large model takes as long as many steps of a small one. So turns are shared by measured time,
not round robin. When an idle engine becomes active, its time is raised to the least time of the active
engines, because it has no claim to time that it did not need.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

GRACE_S = 0.002  # how long to wait for an engine that has had less time and is between two steps
IDLE_S = 0.5  # an engine that ran no step for longer counts as idle


class Turns:
    """Decides whose turn it is. Shared by the loops of all engines."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._changed = threading.Condition()
        self._spent: dict[Hashable, float] = {}  # total seconds of all turns
        self._left: dict[Hashable, float] = {}  # when the last turn ended
        self._waiting: set[Hashable] = set()
        self._running: Hashable | None = None

    @contextmanager
    def turn(self, who: Hashable) -> Iterator[bool]:
        """Wait for a turn, which lasts until the end of the block. Yield True if other engines are active:
        then the turn must leave no work on the device, because that time would not be charged."""
        with self._changed:
            own = self._spent.setdefault(who, 0.0)
            others = self._others(who, IDLE_S)
            if others and self._now() - self._left.get(who, -math.inf) > IDLE_S:
                self._spent[who] = max(own, min(self._spent[other] for other in others))
            self._waiting.add(who)
            while self._running is not None or self._is_behind(who):
                self._changed.wait(GRACE_S if self._running is None else None)
            self._waiting.discard(who)
            self._running = who
            is_shared = bool(self._others(who, IDLE_S))
        began = self._now()
        try:
            yield is_shared
        finally:
            with self._changed:
                ended = self._now()
                self._spent[who] += ended - began
                self._left[who] = ended
                self._running = None
                self._changed.notify_all()

    def forget(self, who: Hashable) -> None:
        """Remove an engine whose loop has stopped."""
        with self._changed:
            self._spent.pop(who, None)
            self._left.pop(who, None)

    def _others(self, who: Hashable, seconds: float) -> set[Hashable]:
        """Return the other engines that wait, run, or had a turn within the last `seconds`."""
        since = self._now() - seconds
        here = self._waiting | {other for other, left in self._left.items() if left >= since}
        if self._running is not None:
            here.add(self._running)
        return here - {who}

    def _is_behind(self, who: Hashable) -> bool:
        """Return True if another active engine has had less time. With equal times, either may run."""
        own = self._spent[who]
        return any(self._spent[other] < own for other in self._others(who, GRACE_S))
