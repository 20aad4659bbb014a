"""The interface of an engine's device side. It is implemented by `runner.Runner`, and by its replacements in
fault injection (`experiments/fault_injection.py`) and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kv import Slab
    from runner import ForwardBatch, RunningStep, SamplingRows


class RunnerProtocol(Protocol):
    slab: Slab | None  # None if the runner has no slab

    def start_forward(self, batch: ForwardBatch) -> RunningStep: ...

    def start_sampling(self, step: RunningStep, rows: SamplingRows) -> RunningStep: ...

    def reset(self) -> None: ...

    def warm_up(self) -> None: ...
