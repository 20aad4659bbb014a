"""A trial: an experiment on the engine that runs.

The problem. A page of the screen can show how an engine behaves only if something happens that
seldom happens by itself: a crowd of random neighbours, a failure, a prompt without end.

What this file keeps. A trial is a generator of findings (`EngineRoom.try_out`). The room asks for
the next finding between two steps, so there a trial may fire and cancel. All requests of a trial
end with the trial. Here stands what trials do alike.

Where next: `pages/same.py` and `pages/breakage.py`, two of the trials.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from runtime.engine_protocol import AnyEngine
from runtime.handle import Handle
from screen.engine_client import AnyTrial, EngineRoom, Finding, View


def runs(view: View, found: Finding | None) -> bool:
    """Does the trial with these findings run?"""
    return view.trying and view.trial is found


class Trial:
    """A trial: `steps` is the experiment itself."""

    room: EngineRoom  # both from `run` on
    engine: AnyEngine

    def __init__(self, found: Finding):
        self.found = found  # the findings so far

    def takes_in(self, other: AnyTrial) -> bool:
        """Another one is wished for while this one runs. Is the wish fulfilled with that?"""
        return False

    def run(self, room: EngineRoom) -> Iterator[Finding]:
        self.room = room
        self.engine = room.engine
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
