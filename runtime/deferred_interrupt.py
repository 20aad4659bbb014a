"""Ctrl-C takes effect between two steps, and never inside one.

The problem. Python raises KeyboardInterrupt in the main thread at any line. If the main thread
steps the engine, that line may stand between two halves of a change: a slot is taken, and its
request is not yet noted. No code can be right at every line.

The way out. While something is changed, a handler of ours notes the signal. The program's own
handler, which raises KeyboardInterrupt unless the program has chosen another, is called right
after. A step takes a moment; if it takes too long for the person who waits, a second Ctrl-C ends
the process at once, or is the program's own handler's business at once.

The invariant: a `with defer_interrupt():` block is left as if Ctrl-C had come after it.

Where next: `Engine.step` in `nanobatch.py`.
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
    """Inside this block, in the main thread, Ctrl-C is noted (`came`) and takes effect at the end.

    `wake`: called when Ctrl-C comes, for a block that sleeps.
    """

    def __init__(self, wake: Callable[[], None] | None = None):
        self.came = False
        self._wake = wake
        self._before = None  # the program's own handler, while ours is in its place

    def __enter__(self) -> DeferredInterrupt:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):  # else the signal is ignored, or ends the process without Python
                self._before = before
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception) -> None:
        if self._before is None:
            return
        signal.signal(signal.SIGINT, self._before)
        if self.came:
            self._before(signal.SIGINT, None)

    def _note(self, number: int, frame) -> None:
        if self.came:
            if self._before is signal.default_int_handler:
                os._exit(130)
            self._before(number, frame)  # a program that counts signals decides for itself
        self.came = True
        if self._wake is not None:
            self._wake()
