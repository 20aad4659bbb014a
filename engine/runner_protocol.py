"""The device half of an engine as a protocol: `runner.Runner`, or what stands in for it in a fault injection
(`experiments/fault_injection.py`) and in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kv import Slab
    from runner import ForwardBatch, RunningStep, SamplingRows


class RunnerProtocol(Protocol):
    slab: Slab | None  # None for a runner without one

    def start_forward(self, batch: ForwardBatch) -> RunningStep: ...

    def start_sampling(self, step: RunningStep, rows: SamplingRows) -> RunningStep: ...

    def reset(self) -> None: ...

    def warm_up(self) -> None: ...
