"""Defer Ctrl-C to the end of a step. Python may raise KeyboardInterrupt at any line of the main thread,
which could leave a change half done.

Inside `with defer_interrupt():` our handler records the signal, and the program's own handler is called after
the block. A second Ctrl-C takes effect immediately. Other threads do not need this, because Python handles
signals in the main thread only.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


def defer_interrupt() -> AbstractContextManager:
    """Return a context manager that defers Ctrl-C to the end of the block. Outside the main thread, where
    Python handles no signals, it does nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    return DeferredInterrupt() if is_main else nullcontext()


class DeferredInterrupt:
    """Defers Ctrl-C in the main thread to the end of the block. Until then `is_pending` records it.

    `wake`: called on Ctrl-C, to wake a block that sleeps.
    """

    def __init__(self, wake: Callable[[], None] | None = None):
        self.is_pending = False
        self._wake = wake
        self._before = None  # the program's own handler, while ours is installed

    def __enter__(self) -> DeferredInterrupt:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):  # otherwise SIGINT is ignored, or handled outside Python
                self._before = before
                signal.signal(signal.SIGINT, self._defer)
        return self

    def __exit__(self, *exception) -> None:
        if self._before is None:
            return
        signal.signal(signal.SIGINT, self._before)
        if self.is_pending:
            self._before(signal.SIGINT, None)

    def _defer(self, number: int, frame) -> None:
        if self.is_pending:
            if self._before is signal.default_int_handler:
                os._exit(130)
            self._before(number, frame)  # a program's own handler decides whether to exit
        self.is_pending = True
        if self._wake is not None:
            self._wake()
