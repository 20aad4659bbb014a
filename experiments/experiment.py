"""What all experiments on the running engine have in common.

An experiment is a generator of records. `LocalEngineClient.run_experiment` resumes it between two
steps, so it may submit and cancel; its requests end with it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.handle import Handle
from screen.engine_client import LocalEngineClient
from screen.engine_view import ExperimentRecord, View

if TYPE_CHECKING:
    from nanobatch import Engine


def runs(view: View, record: ExperimentRecord | None) -> bool:
    """Whether the experiment with this record is running."""
    return record is not None and view.experiment is record


def result(view: View, record: ExperimentRecord, is_over: bool) -> str:
    """The record in a few words. An experiment that neither runs nor is over was ended."""
    if is_over or runs(view, record):
        return record.so_far
    return f"{record.so_far.rstrip('.')}, and then it was ended"


class Experiment:
    """An experiment: `run` yields its records."""

    client: LocalEngineClient  # both from `start` on
    engine: Engine
    fixes: ClassVar[
        Mapping[str, str]
    ] = {}  # settings that a user may not change meanwhile, and why

    def __init__(self, record: ExperimentRecord):
        self.record = record  # what was measured so far

    def takes_in(self, other: Experiment) -> bool:
        """Take in another experiment that was asked for while this one runs; False: refuse it."""
        return False

    def start(self, client: LocalEngineClient) -> Iterator[ExperimentRecord]:
        self.client = client
        self.engine = client.engine
        return self.run()

    def run(self) -> Iterator[ExperimentRecord]:
        raise NotImplementedError

    def update(self, **changes: object) -> ExperimentRecord:
        """The record with these changes."""
        self.record = replace(self.record, **changes)
        return self.record

    def until_idle(self) -> Iterator[ExperimentRecord]:
        while self.engine.has_work:
            yield self.record

    def alone(self, fire: Callable[[], Handle]) -> Generator[ExperimentRecord, None, Handle]:
        """Submit a request until it ran alone: a user may fire or cancel something meanwhile."""
        while True:
            yield from self.until_idle()
            before = self.engine.sched.submitted
            handle = fire()
            yield from self.until_idle()
            was_alone = self.engine.sched.submitted == before + 1
            if was_alone and handle.finish_reason != "cancelled":
                return handle
