"""The base of the experiments. Each experiment asks a question that the running engine answers.

Each experiment is a file with the same four parts:

    question   the docstring and the constants
    run        what the engine does, and the command that starts it
    record     what was measured
    drawing    the record as text, and the page

Experiments that submit requests derive from `Experiment`. Their `run` is a generator of records that is
resumed between two steps (`LocalEngineClient.run_experiment`), so it may submit and cancel requests and
change settings. It restores the settings in a `finally`, and its requests are cancelled when it ends.
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
    """An experiment, whose `run` yields its records."""

    what: ClassVar[str]  # its name in error messages, such as "no race while a server runs"
    fixes: ClassVar[
        Mapping[str, str]
    ] = {}  # settings that the user may not change while it runs -> the reason
    client: LocalEngineClient  # `client` and `engine` are set by `start`
    engine: Engine

    def __init__(self, record: ExperimentRecord):
        self.record = record  # the measurements so far

    def takes_in(self, other: Experiment) -> bool:
        """Merge an experiment that the user starts while this one runs. Return False to refuse it."""
        return False

    def start(self, client: LocalEngineClient) -> Iterator[ExperimentRecord]:
        self.client = client
        self.engine = client.engine
        return self.run()

    def run(self) -> Iterator[ExperimentRecord]:
        raise NotImplementedError

    def update(self, **changes: object) -> ExperimentRecord:
        """Change fields of the record and return it."""
        self.record = replace(self.record, **changes)
        return self.record

    def submit(self, ask: Ask, prefix_cache: bool = True) -> Handle:
        """Submit a prompt that the log does not show, because there may be hundreds."""
        return self.client.submit(ask._replace(mute=True), prefix_cache)

    def until(self, is_so: Callable[[], bool]) -> Iterator[ExperimentRecord]:
        while not is_so():
            yield self.record

    def until_idle(self) -> Iterator[ExperimentRecord]:
        yield from self.until(lambda: not self.engine.has_work)

    def run_alone(self, submit: Callable[[], Handle]) -> Generator[ExperimentRecord, None, Handle]:
        """Submit a request, and repeat it until it has run alone, because the user may submit or
        cancel requests at any time."""
        while True:
            yield from self.until_idle()
            before = self.engine.sched.submitted
            handle = submit()
            yield from self.until_idle()
            was_alone = self.engine.sched.submitted == before + 1
            if was_alone and handle.finish_reason != "cancelled":
                return handle


def read_count(name: str) -> Callable[[str], int]:
    """Return a parser for a command's number of requests or runs."""
    return partial(read_whole, name, least=1, most=1000)


# --- drawing --------------------------------------------------------------------------------------


def draw_title(state: State, on: Canvas, title: str, keys: str) -> None:
    """Draw the heading of a page. `keys`: the keys to show while no experiment runs."""
    on.title(title, f"{'X ends it' if state.view.experimenting else keys}  Esc back")


def progress(view: View, record: ExperimentRecord) -> str:
    """Summarize the record. Say so if the user ended the experiment early."""
    if view.experiment is record:
        return disturbed(view, record.so_far)
    ended = "" if record.stage == "over" else ", and then it was ended"
    return record.so_far.rstrip(".") + ended if ended else record.so_far


def disturbed(view: View, *words: str) -> str:
    """Join words about a running experiment, and add what slows it down: a pause or other programs."""
    notes = (*words, PAUSED if view.paused else "", others_of(view))
    return "; ".join(note.rstrip(".") for note in notes if note)
