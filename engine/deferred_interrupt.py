"""Defer Ctrl-C to the end of a step: Python raises KeyboardInterrupt at any line of the main thread, also
between the two halves of a change.

Inside `with defer_interrupt():` our handler notes the signal, and the program's own handler is called after the
block. A second Ctrl-C takes effect at once. Other threads do not need this, because Python handles
signals in the main thread only.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


def defer_interrupt() -> AbstractContextManager:
    """Until the end of the block, Ctrl-C is only noted. Python handles signals in the main thread
    alone, so in other threads there is nothing to do."""
    is_main = threading.current_thread() is threading.main_thread()
    return DeferredInterrupt() if is_main else nullcontext()


class DeferredInterrupt:
    """Inside this block, in the main thread, Ctrl-C is noted (`is_pending`) and takes effect at the end.

    `wake`: called at Ctrl-C, for a block that sleeps.
    """

    def __init__(self, wake: Callable[[], None] | None = None):
        self.is_pending = False
        self._wake = wake
        self._before = None  # the program's own handler, while ours is in its place

    def __enter__(self) -> DeferredInterrupt:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):  # else the signal is ignored, or ends the process without Python
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
            self._before(number, frame)  # a program that counts signals decides for itself
        self.is_pending = True
        if self._wake is not None:
            self._wake()
