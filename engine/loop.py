"""The thread that steps an engine, and runs the commands of other threads between two steps.

The problem. An engine is stepped by one thread at a time, but many threads use it: clients submit and
cancel, and the screen pauses, runs single steps, and changes the policy. If each of them called the
engine during a step, it would wait for the step each time, and a pause in the middle of a step would
show half a step.

The solution. A loop has its own thread. Commands of other threads are queued, and the loop runs them
between two steps. While there is nothing to do, the thread sleeps on the engine's condition,
`engine.changed`. So a `submit` from any thread wakes it, and an idle engine costs nothing.

    turn:  commands -> one step, unless paused -> the `between` callback -> sleep until something changes

A user may pause the loop, run single steps, or limit the steps per second (`slow`). Then each step is
read back before the next one is planned, and the engine's clock stops between steps. So a view shows a
single step, and the metrics do not include pauses.

The invariant: while a loop runs, a thread that waits for a request sleeps, and does not step the
engine itself.

Where next: `Engine.step` in `nanobatch.py`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from engine.deferred_interrupt import DeferredInterrupt, defer_interrupt
from engine.turns import Turns

if TYPE_CHECKING:
    from nanobatch import Engine


class Stopwatch:
    """An engine's clock: seconds since the start without pauses, so that TTFT and tokens/s do not depend
    on pauses."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._began = now()
        self._lost = 0.0  # total seconds of earlier pauses
        self._stopped = None  # when the current pause began
        self._lock = threading.Lock()  # other threads may read the clock while it is being stopped

    def __call__(self) -> float:
        with self._lock:
            return (self.real if self._stopped is None else self._stopped) - self._lost

    @property
    def real(self) -> float:
        """Seconds since the clock was created, including pauses."""
        return self._now() - self._began

    @property
    def stopped_s(self) -> float:
        """The total seconds of all pauses."""
        with self._lock:
            return self._lost + (0.0 if self._stopped is None else self.real - self._stopped)

    @property
    def is_stopped(self) -> bool:
        return self._stopped is not None

    def stop(self) -> None:
        with self._lock:
            if self._stopped is None:
                self._stopped = self.real

    def resume(self) -> None:
        with self._lock:
            if self._stopped is not None:
                self._lost += self.real - self._stopped
                self._stopped = None


class Driver:
    """Decides which thread steps an engine: the loop's or, without a loop, a thread that waits for a request."""

    def __init__(self, changed: threading.Condition):
        self.is_closed = False  # True once the engine is closed; no loop may start then
        self._changed = changed
        self._loop: Loop | None = None

    def attach(self, loop: Loop | None) -> None:
        """Let this loop step the engine, while waiting threads sleep. With None,
        waiting threads step it themselves."""
        with self._changed:
            if loop and self.is_closed:
                raise RuntimeError("the engine is closed")
            if loop and self._loop:
                raise RuntimeError("the engine is already serving")
            self._loop = loop
            self._changed.notify_all()

    def wait(
        self, ready: Callable[[], bool], step: Callable[[], object], timeout: float | None = None
    ) -> bool:
        """Wait until `ready()`: sleep if a loop steps the engine, otherwise step it here. Return False after
        `timeout` seconds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not ready():
            loop = self._loop
            if loop is not None and loop.is_here:
                raise RuntimeError("the thread that steps the engine cannot wait for it")
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if loop is None:
                step()
            else:
                loop.sleep(lambda: ready() or not self._loop, left)
        return True

    def stop(self) -> None:
        """Stop the loop if there is one."""
        if (loop := self._loop) is not None:
            loop.stop()


class Loop:
    """Steps an engine in its own thread, from `start` to `stop` or inside a `with` block.

    `between` is called after each step, and whenever the loop wakes up. It returns the seconds after
    which it must be called again, or None. `clock` is the engine's clock if it can be stopped.
    `turns` is shared with the loops of other engines; None if this is the only engine.
    """

    def __init__(
        self,
        engine: Engine,
        between: Callable = lambda: None,
        clock: Stopwatch | None = None,
        turns: Turns | None = None,
    ):
        self.engine = engine
        self.paused = False
        self.stepping = 0  # remaining single steps while paused
        self.slow = 0.0  # slow motion in steps per second; 0: full speed
        self._next = 0.0  # when the next step of slow motion is due
        self._between = between
        self._clock = clock or Stopwatch()
        self._turns = turns
        self._commands: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> Loop:
        with defer_interrupt():  # an engine must not have a loop without a running thread
            self.engine.driver.attach(self)
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name="nanobatch", daemon=True)
            try:
                self._thread.start()
            except BaseException:  # no more threads can be started
                self._thread = None
                self.engine.driver.attach(None)
                raise
        return self

    def stop(self, patience: float | None = None) -> bool:
        """Ask the thread to stop, and wait for it, unless called in it. Return False if it is still running after
        `patience` seconds, because a step cannot be interrupted."""
        with defer_interrupt(), self.engine.changed:
            self._stopping = True
            self.engine.changed.notify_all()
        thread = self._thread
        if thread is None or self.is_here:
            return True
        thread.join(patience)
        return not thread.is_alive()

    def sleep(self, until: Callable[[], bool], seconds: float) -> None:
        """Put the calling thread, not the loop's, to sleep until `until()` is true or `seconds` have passed."""
        changed = self.engine.changed

        def wake() -> None:
            with changed:
                changed.notify_all()

        with DeferredInterrupt(wake) as interrupt, changed:
            changed.wait_for(
                lambda: interrupt.is_pending or until(), min(seconds, threading.TIMEOUT_MAX)
            )

    @property
    def is_here(self) -> bool:
        """True in the loop's own thread."""
        return threading.current_thread() is self._thread

    def __enter__(self) -> Engine:
        try:
            self.start()
            return self.engine
        except BaseException:  # on Ctrl-C nothing else would stop the thread
            self.stop()
            raise

    def __exit__(self, *exception) -> None:
        with defer_interrupt():
            self.stop()

    @property
    def is_alive(self) -> bool:
        return bool(self._thread and self._thread.is_alive())

    @property
    def paused_s(self) -> float:
        """The total seconds of all pauses."""
        return self._clock.stopped_s

    # --- for any thread; these return immediately

    def call(self, act: Callable[[], None]) -> None:
        """Queue a function to run between two steps. It may step the engine, but not wait for a request."""
        with self.engine.changed:
            self._commands.append(act)
            self.engine.changed.notify_all()

    def pause(self) -> None:
        """Pause after the current step."""
        self._set_pace(True, 0)

    def resume(self) -> None:
        self._set_pace(False, 0)

    def step(self, count: int = 1) -> None:
        """Run this many more steps, then pause."""
        self._set_pace(True, self.stepping + count)

    def _set_pace(self, paused: bool, stepping: int) -> None:
        with self.engine.changed:
            self.paused = paused
            self.stepping = stepping
            self.call(lambda: None)  # wakes the loop, which stops or starts the clock

    # --- the thread

    def _run(self) -> None:
        rest: float | None = 0.0
        try:
            while True:
                with self.engine.changed:
                    self.engine.changed.wait_for(self._is_awake, rest)
                    if self._stopping:
                        return
                rest = self.turn()
        finally:
            self.engine.driver.attach(None)
            if self._turns:
                self._turns.forget(self)

    def _is_awake(self) -> bool:
        due = self._due()
        # Single steps wake the loop even if there is nothing to do, so that `_step` drops them
        must_step = due == 0 and (self.stepping or self.engine.has_work)
        # In slow motion, the clock stops until the next step is due
        must_stop_clock = due and not self._clock.is_stopped
        return bool(self._stopping or self._commands or must_step or must_stop_clock)

    def _due(self) -> float | None:
        """Return the seconds until the next step is due; None while paused."""
        if self.paused and not self.stepping:
            return None
        if self.slow and self.engine.has_work:
            return max(0.0, self._next - self._clock.real)
        return 0.0

    def turn(self) -> float | None:
        """Run the commands, a step, and `between`. Return the seconds until the next turn, or None to sleep
        until something changes."""
        while self._commands:
            self._guarded(self._commands.popleft())
        if self.paused or self.slow:
            self._guarded(self._read_back)
        if self._due() == 0:
            self._clock.resume()
            self._guarded(self._step)
        if (due := self._due()) != 0:
            self._clock.stop()
        rests = (due or None, self._guarded(self._between))
        return min((rest for rest in rests if rest is not None), default=None)

    def _step(self) -> None:
        if self.slow:
            self._next = self._clock.real + 1 / self.slow
        if not self._turns:
            worked = self.engine.step()
        else:
            with self._turns.turn(self) as is_shared:
                worked = self.engine.step()
                if is_shared:
                    self._read_back()
        if self.paused or self.slow:
            self._read_back()
        with self.engine.changed:
            self.stepping = max(0, self.stepping - 1) if worked else 0

    def _read_back(self) -> None:
        """Commit the step in flight, if there is one, so that the slots match the committed steps."""
        self.engine.step(plan=False)

    def _guarded(self, act: Callable[[], float | None]) -> float | None:
        """Call a function. Record an exception instead of raising it, because other threads rely on this
        one."""
        try:
            return act()
        except BaseException as error:
            with suppress(BaseException):
                self.engine.registry.record_fault("something failed between two steps", error)
            return None
