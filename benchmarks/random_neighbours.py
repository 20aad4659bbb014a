"""Ask questions in random batches: among neighbours that arrive, finish and are cancelled.

`verify.py` and the page of `experiments/same_answer.py` ask through this, and compare the answers with
those of the same questions alone (`answer_diff.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from engine.handle import Handle

if TYPE_CHECKING:
    from nanobatch import Engine

WAVE = 20  # steps after which the number of concurrent requests is drawn again
CANCELLED = 0.25  # share of the neighbours


class OpenQuestion:
    """A question that has not been answered yet."""

    def __init__(self, handle: Handle):
        self.handle = handle
        self.steps = 0
        self.beside = 0  # other running requests, summed over these steps


class RandomBatch:
    """Call `arrive` before each step of the engine, and `leave` after it.

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
        self.others: dict[Handle, int] = {}  # neighbours, with the steps until it is cancelled
        self.came = 0  # neighbours
        self.cancelled = 0
        self.beside = 0  # most others in one step
        self._ran = 0  # steps
        self._at_once = 1  # questions
        self._neighbours = 0

    def arrive(self, left: int) -> None:
        """Submit a question, of which `left` have not been asked, and a neighbour: sometimes few,
        sometimes more than there are slots."""
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
        """Note who ran together in the step, cancel some neighbours, and return the questions whose
        requests have ended."""
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
