"""What an owner's functions may do while the engine calls them, and how an error is told.

The problem. An owner's function runs in the thread that steps, in the middle of a step. If it stepped or waited, the
engine would commit the next step half-way through this one, or wait for ever.

What this file keeps. `here` says of each thread whether an owner's function runs in it, so that `step` and `wait` can
refuse.

Where next: `handle.py`, whose owners these are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Here(threading.local):
    """What is going on in this thread."""

    def __init__(self) -> None:
        self.listens = False  # does an owner's function run?
        self.owes: dict[Any, None] = {}  # ledgers in which requests have ended whose owners this thread has to tell


here = Here()


class ListenerError(RuntimeError):
    """An owner's function steps or waits, or a wish waits (`loop.py`).

    A step inside a listener would commit the next step half-way through this one, and waiting there would never end.
    """

    def __init__(self, what: str):
        super().__init__(f"{what} inside a listener or a wish: the engine waits for it; use a thread of your own")


def tell(listener: Callable, *arguments: Any) -> None:
    """Call an owner's function. The engine waits for it, so it must not wait for an engine."""
    before, here.listens = here.listens, True
    try:
        listener(*arguments)
    finally:
        here.listens = before


def is_ctrl_c(error: BaseException) -> bool:
    """Is it meant for the whole program? Python raises it in the main thread; elsewhere a function has made its own."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
