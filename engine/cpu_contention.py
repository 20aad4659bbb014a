"""Detect whether other programs compete for the cores, which slows steps down.

Their CPU time is the busy time of all cores (`/proc/stat`) minus that of this process. It matters only if
hardly any core was idle. On other systems, such as macOS, the load average minus this process's share is
used instead. A sample reads one small file, at most once per second.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from base.machine import my_cores

EVERY = 1.0  # seconds between samples
MINUTE = 60.0  # the period of the load average
LEAST = 0.25  # fraction of all cores; less than this is normal background load
IDLE = 0.15  # fraction of all cores; if more are idle, no program waits for a core


class Worked(NamedTuple):
    """Busy and idle seconds of the cores since boot, summed."""

    busy: float
    idle: float


def counted(text: str, cores: set[int], ticks: float) -> Worked | None:
    """Sum the times of these cores in the text of `/proc/stat`. Return None if it does not list them."""
    busy = idle = 0.0
    seen = 0
    for line in text.splitlines():
        name, *fields = line.split() or [""]
        number = name.removeprefix("cpu")
        if not (name.startswith("cpu") and number.isdigit() and int(number) in cores):
            continue
        user, nice, system, unused, waits_for_disk, *others = map(int, fields[:8])
        busy += (user + nice + system + sum(others)) / ticks
        idle += (unused + waits_for_disk) / ticks
        seen += 1
    return Worked(busy, idle) if seen and busy else None


def read_worked(cores: set[int]) -> Worked | None:
    try:
        return counted(Path("/proc/stat").read_text(), cores, os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError):
        return None


class OtherPrograms:
    """Measures how many cores other programs use."""

    def __init__(
        self,
        read: Callable[[set[int]], Worked | None] = read_worked,
        now: Callable[[], float] = time.monotonic,
        mine: Callable[[], float] = time.process_time,
        load: Callable[[], float] = lambda: os.getloadavg()[0],
    ):
        self._read = read
        self._now = now
        self._mine = mine
        self._load = load
        self._cores = my_cores()
        self.cores = len(self._cores)
        self._looked = now()
        self._used = mine()
        self._worked = read(self._cores)
        self._mean = 0.0  # cores used by this process, smoothed like the load average
        self._others = 0.0

    def used_cores(self) -> float:
        """Return the number of cores that other programs used recently; 0 if they used few, or some cores were idle."""
        passed = self._now() - self._looked
        if passed >= EVERY:
            used = self._mine()
            own = (used - self._used) / passed
            worked = self._read(self._cores)
            self._others = self._share(own, worked, passed)
            self._looked += passed
            self._used = used
            self._worked = worked
        return self._others

    def _share(self, own: float, worked: Worked | None, passed: float) -> float:
        if worked and self._worked:
            others = (worked.busy - self._worked.busy) / passed - own
            idle = (worked.idle - self._worked.idle) / passed
        else:
            old = math.exp(-passed / MINUTE)
            self._mean = old * self._mean + (1 - old) * own
            others = self._load() - self._mean
            idle = self.cores - own - others
        matters = others >= LEAST * self.cores and idle <= IDLE * self.cores
        return min(others, self.cores) if matters else 0.0
