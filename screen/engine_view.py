"""A frozen `View`: everything that the screen knows about an engine at one moment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from engine.server_snapshot import ServerView
from engine.snapshot import Limits, Snapshot


class ExperimentRun(NamedTuple):
    """One run within an experiment: some requests under one policy."""

    policy: str
    first_step: int
    last_step: int | None  # None while it runs
    requests: tuple[int, ...]

    @property
    def stop(self) -> float:
        """The step after the last one; infinity while the run is in progress."""
        return math.inf if self.last_step is None else self.last_step + 1


class Fault(NamedTuple):
    """A fault, with the prompt if it could not be fired."""

    message: str
    prompt: str | None = None
    question: int = 0  # number of the refused question; it keeps waiting if `prompt` is None


class AnswerRef(NamedTuple):
    """The request that answers a question, with the text if a watched server's frames have none."""

    request: int
    text: str | None = None
    is_whole: bool = False


@dataclass(frozen=True)
class ExperimentRecord:
    """The measurements of an experiment so far. Each experiment has a subclass."""

    name: ClassVar[str]  # name of the experiment and of its page
    doing: ClassVar[str] = ""  # shown in the status line while it runs
    is_one_run: ClassVar[bool] = True  # False: each part is a busy period
    stage: str = field(default="waits", kw_only=True)  # "over" at the end

    @property
    def so_far(self) -> str:
        """A summary of the record in a few words."""
        return ""

    @property
    def parts(self) -> Sequence[ExperimentRun]:
        """The runs to compare, each with its own requests."""
        return ()


class View(NamedTuple):
    """The state of an engine at one moment."""

    stage: str = "loading"  # "loading" | "ready" | "failed"
    done: tuple[str, ...] = ()  # stages of loading; the last one is running
    error: str = ""
    paused: bool = False
    stepping: int = 0  # steps left of `/step`
    slow: float = 0.0  # limit in steps per second; 0: full speed
    load: float = 0.0  # the steady load, in requests per second
    faults: tuple[Fault, ...] = ()
    handled: int = 0  # number of commands that have run
    engine: Snapshot | None = None
    server: ServerView | None = None  # None: no server
    watches: bool = False  # a server's engine: this screen only fires and cancels its own
    model: str = ""  # name of a watched model
    has_chat: bool = True  # the model has a chat template
    foreign: str = ""  # modules that run in place of ours (`base/foreign_modules.py`)
    answers: Mapping[int, AnswerRef] = {}  # question number -> the request that answers it
    temperature: float = 0.0  # the model's default
    epoch: int = 0  # changes with the watched engine, because another one counts from 1 again
    is_new: bool = False  # the watched engine was loaded while this screen watched
    gone_s: float | None = None  # seconds since the server went away
    experimenting: bool = False
    record: ExperimentRecord | None = None  # record of the running or the last experiment
    inspected: Mapping[str, object] = {}  # page -> its last measurement
    others: float = 0.0  # cores used by other programs; 0 if they use few, or some cores are idle
    cores: int = 0  # cores that this process may use
    # (first step, limits), oldest first; empty if the budget was never changed
    turns: tuple[tuple[int, Limits], ...] = ()

    @property
    def made_with(self) -> Limits:
        """The limits that the engine was created with."""
        return self.turns[0][1] if self.turns else self.engine.limits

    @property
    def works(self) -> bool:
        """True if any request waits or runs."""
        engine = self.engine
        return bool(
            engine and (engine.waiting or any(slot.request is not None for slot in engine.slots))
        )

    @property
    def busy(self) -> bool:
        return self.experimenting or self.works

    @property
    def experiment(self) -> ExperimentRecord | None:
        """The record of the running experiment."""
        return self.record if self.experimenting else None
