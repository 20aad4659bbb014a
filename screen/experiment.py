"""An experiment: an experiment on the engine that runs.

The problem. A page of the screen can show how an engine behaves only if something happens that
seldom happens by itself: a crowd of random neighbours, a failure, a prompt without end.

What this file keeps. An experiment is a generator of findings (`LocalEngineClient.run_experiment`). The room asks for
the next finding between two steps, so there an experiment may fire and cancel. All requests of an experiment
end with the experiment. Here stands what experiments do alike.

Where next: `pages/same.py` and `pages/breakage.py`, two of the experiments.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from runtime.engine_protocol import AnyEngine
from runtime.handle import Handle
from screen.engine_client import AnyExperiment, LocalEngineClient
from screen.view import Finding, View


def runs(view: View, found: Finding | None) -> bool:
    """Does the experiment with these findings run?"""
    return view.experimenting and view.finding is found


class Experiment:
    """An experiment: `steps` is the experiment itself."""

    client: LocalEngineClient  # both from `run` on
    engine: AnyEngine

    def __init__(self, found: Finding):
        self.found = found  # the findings so far

    def takes_in(self, other: AnyExperiment) -> bool:
        """Another one is wished for while this one runs. Is the wish fulfilled with that?"""
        return False

    def run(self, client: LocalEngineClient) -> Iterator[Finding]:
        self.client = client
        self.engine = client.engine
        yield from self.steps()

    def steps(self) -> Iterator[Finding]:
        raise NotImplementedError

    def tell(self, *lines: str, **changes: object) -> Finding:
        """New findings, and lines for a log."""
        self.found = self.found._replace(lines=(*self.found.lines, *lines), **changes)
        return self.found

    def until_idle(self) -> Iterator[Finding]:
        while self.engine.has_work:
            yield self.found

    def alone(self, fire: Callable[[], Handle]) -> Generator[Finding, None, Handle]:
        """A request, fired until it was really alone: a user may fire or cancel something
        meanwhile."""
        while True:
            yield from self.until_idle()
            before = self.engine.sched.submitted
            handle = fire()
            yield from self.until_idle()
            was_alone = self.engine.sched.submitted == before + 1
            if was_alone and handle.finish_reason != "cancelled":
                return handle
