"""What the door, the screen and a loop need of an engine, as a protocol.

The problem. Door and screen are open before MLX is loaded, and an engine cannot be imported without
MLX. A handle and a loop know their engine by these names, too.

What this file keeps. What uses an engine through these names runs with `nanobatch.Engine`, and with
a fake of a test.

Where next: `handle.py`, what `submit` answers with; `views.py`, what `snapshot` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from runtime.handle import Handle
from runtime.sampling_params import SamplingParams
from runtime.snapshot import Snapshot
from sched import Scheduler


class AnyEngine(Protocol):
    """The public face of `nanobatch.Engine`, as far as the door, the screen, a loop and a
    handle use it."""

    text: Any  # makes tokens of text, and text of tokens (`text/tokenizer.py`)
    sched: Scheduler
    clock: Callable[[], float]  # seconds; stands still while the engine is paused
    model: Any
    runner: Any  # the device half
    registry: Any  # handles and records (`runtime/registry.py`)
    driver: Any  # who steps it (`runtime/loop.py`)
    steps: int  # that have been run
    summary: str
    has_work: bool
    is_batch_invariant: bool  # whether a request's bits are independent of its company
    is_released: bool  # whether its weights have been let go of
    # Called after each commit and each end from elsewhere, with the handles that have new output
    on_commit: Callable[[list[Handle]], None] | None
    changed: threading.Condition  # notified when there is something new: work, a wish, an end

    def submit(
        self,
        prompt: Any,
        sampling: SamplingParams | None = None,
        *,
        client: str = "",
        origin: Any = None,
        grammar: Any = None,
        ends: Callable[[str], bool] | None = None,
        prefix_cache: bool = True,
        speculate: bool = True,
    ) -> Handle: ...

    def cancel(self, handle: Handle) -> None: ...

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool: ...

    def step(self, plan: bool = True) -> bool: ...

    def snapshot(self, since: Snapshot | None = None) -> Snapshot: ...

    def drain(self, to: str) -> None: ...

    def set_budget(self, budget: int, chunk: int) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None: ...


@contextmanager
def running_on(engine: AnyEngine, runner: Any) -> Iterator[None]:
    """Inside, steps are run by another runner in place of the engine's, such as one that fails."""
    with engine.changed:
        own = engine.runner
        engine.runner = runner
    try:
        yield
    finally:
        with engine.changed:
            engine.runner = own
