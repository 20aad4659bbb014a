"""What the screen knows of an engine at one moment: a frozen `View`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from engine.server_view import ServerView
from engine.snapshot import Limits, Snapshot


class Leg(NamedTuple):
    """One part of a race: the same burst under one policy."""

    policy: str
    first_step: int
    last_step: int | None  # None while the leg runs
    requests: tuple[int, ...]

    @property
    def stop(self) -> float:
        """The step after the last one."""
        return math.inf if self.last_step is None else self.last_step + 1


class Race(NamedTuple):
    """The finding of a race."""

    legs: tuple[Leg, ...]
    to_race: tuple[str, ...]  # policies of the remaining legs
    name: str = "race"
    so_far: str = ""  # shown by the page of the race


class Fault(NamedTuple):
    """A fault, with the prompt if that could not be fired."""

    message: str
    prompt: str | None = None
    question: int = 0  # the refused question; it waits if there is no prompt


class Answer(NamedTuple):
    """The request that answers a question; with its text, if a watched server shows no texts."""

    request: int
    text: str | None = None
    is_whole: bool = False


class Finding(Protocol):
    """The findings of an experiment so far; each experiment has a frozen record of its own."""

    name: str  # of the experiment and of its page
    so_far: str  # in a few words


class View(NamedTuple):
    """All that the screen knows at one moment."""

    stage: str = "loading"  # "loading" | "ready" | "failed"
    done: tuple[str, ...] = ()  # stages of loading; the last one is running
    error: str = ""
    paused: bool = False
    stepping: int = 0  # steps left of `/step`
    slow: float = 0.0  # slow motion, steps a second; 0: full speed
    load: float = 0.0  # the steady load, requests a second
    faults: tuple[Fault, ...] = ()
    handled: int = 0  # number of commands carried out
    engine: Snapshot | None = None
    server: ServerView | None = None  # None: no server
    watches: bool = False  # the engine is a server's: this screen only fires and cancels its own
    model: str = ""  # name of a watched model
    has_chat: bool = True  # the model has a chat template
    foreign: str = ""  # modules that run in place of ours (`base/provenance.py`)
    answers: Mapping[int, Answer] = {}  # by number of the question
    temperature: float = 0.0  # the model's default
    epoch: int = 0  # changes when another process is watched, whose numbers begin again
    gone_s: float | None = None  # seconds since the server went away
    experimenting: bool = False
    finding: Finding | None = None  # of the running experiment, or of the last one
    inspected: Mapping[str, object] = {}  # by page: what it saw of the engine last
    others: float = 0.0  # cores that other programs use, while none is idle
    cores: int = 0  # of this process
    # (first step, limits), oldest first; empty if the budget was never changed
    turns: tuple[tuple[int, Limits], ...] = ()

    @property
    def made_with(self) -> Limits:
        """The limits that the engine was made with."""
        return self.turns[0][1] if self.turns else self.engine.limits

    @property
    def works(self) -> bool:
        """Whether any request waits or runs."""
        engine = self.engine
        return bool(
            engine and (engine.waiting or any(slot.request is not None for slot in engine.slots))
        )

    @property
    def busy(self) -> bool:
        return self.experimenting or self.works

    @property
    def legs(self) -> tuple[Leg, ...]:
        """The legs of the running race, or of the last one."""
        return self.finding.legs if isinstance(self.finding, Race) else ()

    @property
    def racing(self) -> bool:
        return self.experimenting and isinstance(self.finding, Race)
