"""What the experiments share. Each asks a question, and the running engine answers it.

Each is a file with the same four parts:

    question   the docstring, and the constants that fix what is asked
    run        how the engine is made to answer, and the command that starts it
    record     what was measured
    drawing    the record as lines of text, and the page

Those that submit requests derive from `Experiment`. Its `run` is a generator of records, resumed between
two steps (`LocalEngineClient.run_experiment`), so it may submit, cancel and change settings. It restores
those in a `finally`, and its requests end with it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from base.validation import read_whole
from engine.handle import Handle
from screen.draw.canvas import Canvas
from screen.draw.status import others_of
from screen.engine_client import LocalEngineClient
from screen.engine_view import ExperimentRecord, View
from screen.state import State
from screen.workload import Ask

if TYPE_CHECKING:
    from nanobatch import Engine

WAITS = "It begins when all running requests have ended."
PAUSED = "paused: space goes on"

# --- run ------------------------------------------------------------------------------------------


class Experiment:
    """An experiment: `run` yields its records."""

    what: ClassVar[str]  # in a refusal: "no race while a server runs"
    fixes: ClassVar[
        Mapping[str, str]
    ] = {}  # settings that a user may not change meanwhile, and why
    client: LocalEngineClient  # both from `start` on
    engine: Engine

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

    def submit(self, ask: Ask, prefix_cache: bool = True) -> Handle:
        """Submit one of hundreds of prompts, which a log does not show."""
        return self.client.submit(ask._replace(mute=True), prefix_cache)

    def until(self, is_so: Callable[[], bool]) -> Iterator[ExperimentRecord]:
        while not is_so():
            yield self.record

    def until_idle(self) -> Iterator[ExperimentRecord]:
        yield from self.until(lambda: not self.engine.has_work)

    def run_alone(self, submit: Callable[[], Handle]) -> Generator[ExperimentRecord, None, Handle]:
        """Submit a request until it ran alone: a user may fire or cancel something meanwhile."""
        while True:
            yield from self.until_idle()
            before = self.engine.sched.submitted
            handle = submit()
            yield from self.until_idle()
            was_alone = self.engine.sched.submitted == before + 1
            if was_alone and handle.finish_reason != "cancelled":
                return handle


def read_count(name: str) -> Callable[[str], int]:
    """A parser of the number of requests or runs that follows a command."""
    return partial(read_whole, name, least=1, most=1000)


# --- drawing --------------------------------------------------------------------------------------


def draw_title(state: State, on: Canvas, title: str, keys: str) -> None:
    """Draw the heading of a page. `keys`: those while no experiment runs."""
    on.title(title, f"{'X ends it' if state.view.experimenting else keys}  Esc back")


def progress(view: View, record: ExperimentRecord) -> str:
    """The record in a few words. An experiment that neither runs nor is over was ended."""
    if view.experiment is record:
        return disturbed(view, record.so_far)
    ended = "" if record.stage == "over" else ", and then it was ended"
    return record.so_far.rstrip(".") + ended if ended else record.so_far


def disturbed(view: View, *words: str) -> str:
    """Words about a running experiment, with what keeps it back: a pause, other programs."""
    notes = (*words, PAUSED if view.paused else "", others_of(view))
    return "; ".join(note.rstrip(".") for note in notes if note)
