"""What all experiments on the running engine have in common.

An experiment is a generator of findings. `LocalEngineClient.run_experiment` resumes it between two
steps, so it may submit and cancel; its requests end with it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from engine.handle import Handle
from screen.engine_client import LocalEngineClient
from screen.engine_view import Finding, View

if TYPE_CHECKING:
    from nanobatch import Engine


def runs(view: View, found: Finding | None) -> bool:
    """Whether the experiment with these findings is running."""
    return view.experimenting and view.finding is found


def result(view: View, found: Finding, is_over: bool) -> str:
    """The findings in a few words. An experiment that neither runs nor is over was ended."""
    if is_over or runs(view, found):
        return found.so_far
    return f"{found.so_far.rstrip('.')}, and then it was ended"


class Experiment:
    """An experiment: `steps` yields its findings."""

    client: LocalEngineClient  # both from `run` on
    engine: Engine

    def __init__(self, found: Finding):
        self.found = found  # the findings so far

    def takes_in(self, other: Experiment) -> bool:
        """Take in another experiment that was asked for while this one runs; False: refuse it."""
        return False

    def run(self, client: LocalEngineClient) -> Iterator[Finding]:
        self.client = client
        self.engine = client.engine
        yield from self.steps()

    def steps(self) -> Iterator[Finding]:
        raise NotImplementedError

    def tell(self, **changes: object) -> Finding:
        """New findings."""
        self.found = self.found._replace(**changes)
        return self.found

    def until_idle(self) -> Iterator[Finding]:
        while self.engine.has_work:
            yield self.found

    def alone(self, fire: Callable[[], Handle]) -> Generator[Finding, None, Handle]:
        """Submit a request until it ran alone: a user may fire or cancel something meanwhile."""
        while True:
            yield from self.until_idle()
            before = self.engine.sched.submitted
            handle = fire()
            yield from self.until_idle()
            was_alone = self.engine.sched.submitted == before + 1
            if was_alone and handle.finish_reason != "cancelled":
                return handle
