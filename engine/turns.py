"""Several engines on one machine take turns by time: a step is a turn, and who has had least goes next.

A step of a large model takes as long as many of a small one, so the engines are not called in a circle,
but each turn is measured. An engine that was idle begins with as much as the one that is furthest behind:
it has no claim to the time that it did not want.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

GRACE_S = 0.002  # between two of its steps an engine that is behind is waited for this long
IDLE_S = 0.5  # an engine that was away for longer has no claim to the time meanwhile


class Turns:
    """Shared by the loops of all engines."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._changed = threading.Condition()
        self._spent: dict[Hashable, float] = {}  # seconds of all turns
        self._left: dict[Hashable, float] = {}  # when the last turn ended
        self._waiting: set[Hashable] = set()
        self._running: Hashable | None = None

    @contextmanager
    def turn(self, who: Hashable) -> Iterator[bool]:
        """Wait for a turn. The value says whether others are waiting or were just here, so that this
        turn must not leave work on the device that it is not charged for."""
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
        """Its engine has been closed."""
        with self._changed:
            self._spent.pop(who, None)
            self._left.pop(who, None)

    def _others(self, who: Hashable, seconds: float) -> set[Hashable]:
        """Who else waits, runs, or was here so many seconds ago."""
        since = self._now() - seconds
        here = self._waiting | {other for other, left in self._left.items() if left >= since}
        if self._running is not None:
            here.add(self._running)
        return here - {who}

    def _is_behind(self, who: Hashable) -> bool:
        """True if somebody else has had less time. Of two with equal times both may go."""
        own = self._spent[who]
        return any(self._spent[other] < own for other in self._others(who, GRACE_S))
