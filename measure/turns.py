"""Two ways of doing one thing, in turn: how a sample compares them on a machine that is never quiet.

The problem. Whoever measures one way, and then the other, has measured what else ran meanwhile.

What this file keeps. The ways take turns, so that a noisy machine is noisy for all of them. No
process that is started here outlives ours.

Where next: `Sample.busy` in `sample.py`; `door_price.py` and `screen_price.py`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from measure.figures import Figures
from parts.device.cores import my_cores

RESTLESS = "import os; ours = os.getppid()\nwhile os.getppid() == ours: pass"


def in_turn(*ways: Callable[[], list]) -> list[list]:
    """All that each way has found in three turns."""
    found: list[list] = [[] for _ in ways]
    for _ in range(3):
        for way, of_way in zip(ways, found, strict=True):
            of_way += way()
    return found


def median_ms(seconds: Iterable[float]) -> float:
    return 1e3 * statistics.median(seconds)


def compared(ways: dict[str, Callable[[], list[float]]]) -> Figures:
    """What each way takes in turn, and how many times as long as the first."""
    medians = dict(zip(ways, map(median_ms, in_turn(*ways.values())), strict=True))
    first, *others = medians
    figures = {f"{name} ms": medians[name] for name in medians}
    return figures | {f"{name} / {first}": medians[name] / medians[first] for name in others}


def beside(others: Callable[[], AbstractContextManager], way: Callable[[], list]):
    """The same way, while others run."""

    def both() -> list:
        with others():
            return way()

    return both


@contextmanager
def processes(code: str, count: int) -> Iterator[None]:
    """So many processes that run this code."""
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        time.sleep(0.2)  # so long a process takes to begin
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


# One restless process on each core. Each ends when this process does, too.
busy_cores = partial(processes, RESTLESS, len(my_cores()))
