"""The engine as a protocol, for the server, the screen and loops: they start before MLX is loaded, and
`nanobatch.Engine` cannot be imported without MLX."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from engine.handle import Handle
from engine.protocols import Grammar, RunnerProtocol, TokenizerProtocol
from engine.sampling_params import SamplingParams
from engine.snapshot import Snapshot
from sched import Scheduler


class AnyEngine(Protocol):
    """The part of `nanobatch.Engine` that the server, the screen and a loop use."""

    text: TokenizerProtocol
    sched: Scheduler
    clock: Callable[[], float]  # seconds, without pauses
    model: Any
    runner: RunnerProtocol | None  # None: the weights are unloaded
    registry: Any  # handles and records (`engine/registry.py`)
    driver: Any  # who steps it (`engine/loop.py`)
    steps: int  # that have been run
    summary: str
    has_work: bool
    is_batch_invariant: bool  # whether a request's bits are independent of its neighbours
    is_released: bool  # whether its weights are unloaded
    # Called after each commit and each end from elsewhere, with the handles that have new output
    on_commit: Callable[[list[Handle]], None] | None
    changed: threading.Condition  # notified when there is something new: work, a command, an end

    def submit(
        self,
        prompt: Any,
        sampling: SamplingParams | None = None,
        *,
        client: str = "",
        origin: Any = None,
        grammar: Grammar | None = None,
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
def running_on(engine: AnyEngine, runner: RunnerProtocol) -> Iterator[None]:
    """Inside, another runner runs the steps, such as one that fails."""
    with engine.changed:
        own = engine.runner
        engine.runner = runner
    try:
        yield
    finally:
        with engine.changed:
            engine.runner = own
