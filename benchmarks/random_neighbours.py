"""Ask questions in random batches, with neighbours that arrive, finish and are cancelled.

`verify.py` and `experiments/same_answer.py` use it, and compare the answers with answers to the same
questions asked alone (`answer_diff.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from engine.handle import Handle

if TYPE_CHECKING:
    from nanobatch import Engine

WAVE = 20  # steps after which the maximum number of concurrent requests is drawn again
CANCELLED = 0.25  # fraction of neighbours that are cancelled


class OpenQuestion:
    """A question that is not answered yet."""

    def __init__(self, handle: Handle):
        self.handle = handle
        self.steps = 0
        self.beside = 0  # number of other running requests, summed over the steps


class RandomBatch:
    """Questions and neighbours that arrive at random. Call `arrive` before each step, and `leave` after it.

    `ask` submits the next question. `meet` submits a neighbour, or returns None.
    """

    def __init__(
        self,
        engine: Engine,
        dice: Random,
        ask: Callable[[], Handle],
        meet: Callable[[], Handle | None],
    ):
        self.engine = engine
        self.dice = dice
        self.ask = ask
        self.meet = meet
        self.open: list[OpenQuestion] = []
        self.others: dict[Handle, int] = {}  # neighbour -> steps until it is cancelled (1e6: never)
        self.came = 0  # number of neighbours so far
        self.cancelled = 0
        self.beside = 0  # maximum number of requests that ran next to a question in a step
        self._ran = 0  # number of steps
        self._at_once = 1  # maximum number of concurrent questions
        self._neighbours = 0

    def arrive(self, left: int) -> None:
        """Submit a question, a neighbour, both or neither, at random. Sometimes few requests are open, and
        sometimes more than there are slots. `left`: the number of questions not asked yet."""
        dice = self.dice
        slots = self.engine.sched.slots
        if self._ran % WAVE == 0:
            self._at_once = dice.randint(max(1, slots // 4), max(1, slots * 3 // 4))
            self._neighbours = dice.randint(1, slots)
        self._ran += 1
        if left and len(self.open) < self._at_once and dice.random() < 0.5:
            self.open.append(OpenQuestion(self.ask()))
        if len(self.others) < self._neighbours and dice.random() < 0.5:
            handle = self.meet()
            if handle is not None:
                stays = dice.random() >= CANCELLED
                self.others[handle] = 1_000_000 if stays else dice.randint(0, 30)
                self.came += 1

    def leave(self) -> list[OpenQuestion]:
        """Record which requests ran together, cancel some neighbours, and return the finished
        questions."""
        running = self.engine.sched.running.keys()
        for asked in self.open:
            if asked.handle.id in running:
                asked.steps += 1
                asked.beside += len(running) - 1
                self.beside = max(self.beside, len(running) - 1)
        for handle, left in list(self.others.items()):
            self.others[handle] = left - 1
            if left == 0 and not handle.finish_reason:
                handle.cancel()
                self.cancelled += 1
            if handle.finish_reason:
                del self.others[handle]
        ended = [asked for asked in self.open if asked.handle.finish_reason]
        self.open = [asked for asked in self.open if asked not in ended]
        return ended
