"""The scheduler without a model: lengths and step costs in, steps out.

The problem. How would these requests have fared under another policy? Asking a model again would take
as long as the first time, and in a web page or a test there is no model.

The solution. A scheduler decides by lengths, common prefixes and a budget. `Replay` sends requests of
known lengths through it, in the loop of `Engine.step`: plan -> run -> commit. All that is left of the
run is its duration.

Tokens that were guessed are guessed again, and as many of them are right: a replay knows lengths, and
cannot know what another policy's steps would have guessed.

The invariant: a run that is replayed under its own policy has the same steps. Only the standard
library is needed.

Where next: `screen/latency_breakdown.py` and `web/simulate.py`, which use it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sched import Plan, Policy, Request, Scheduler, Tokens

SAID = 2**40  # the only token that is ever said: no prompt begins like an answer
WRONG = SAID + 1  # and a guess that is wrong


class Guest(NamedTuple):
    """A request, and what became of it. Times are seconds, or steps that are planned or read."""

    request: Request
    tokens: float  # the length of its answer
    comes: float
    leaves: Sequence[
        float
    ] = ()  # if it is cut short: before this plan, and before this step is read
    # Of each step in which it decodes: how many tokens are guessed, and how many of these are right
    guesses: Sequence[tuple[int, int]] = ()
    begins: int = 0  # before this step it waits for rows that another prompt writes
    behind: int = 0  # and in this step it comes after a prompt with this many tokens left


class Ran(NamedTuple):
    """A step, committed."""

    plan: Plan
    began: float
    ended: float
    ghosts: tuple[int, ...]  # slots whose request had ended before
    guesses: tuple[tuple[int, int, int], ...] = ()  # (slot, guessed, right)


def guesses_in(
    steps: Iterable[
        tuple[Iterable[tuple[int, int]], Collection[int], Iterable[tuple[int, int, int]]]
    ],
) -> dict[int, list[tuple[int, int]]]:
    """By request: of each step in which it decodes, how many tokens were guessed, and how many of
    these were right.

    `steps`: of each (slot, request) that decode, the slots of ghosts, and the guesses.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    for decodes, ghosts, guesses in steps:
        of_slot = {slot: (guessed, right) for slot, guessed, right in guesses}
        for slot, request in decodes:
            if slot not in ghosts:
                found.setdefault(request, []).append(of_slot.get(slot, (0, 0)))
    return found


class Retold(Scheduler):
    """A scheduler without texts: it is given how long a request waited for shared rows.

    The step that writes the last of these may have given them to the request, too. When the order
    of that step's chunks was decided, the request had more tokens left than a replay knows.
    """

    begins: Mapping[int, int] = {}  # by request: the step that reads its first chunk
    behind: Mapping[int, int] = {}  # by request: the tokens left of the prompt before it there

    def reading(self) -> list[Request]:
        now = self.steps + 1
        return [r for r in super().reading() if self.begins.get(r.id, 0) <= now]

    def _rest(self, request: Request) -> float:
        rest = super()._rest(request)
        if self.begins.get(request.id) == self.steps + 1:
            return max(rest, self.behind[request.id] + 0.5)
        return rest


class Stuck(ValueError):
    """Requests are left, and no step is planned for them."""


class Replay:
    """A scheduler, and those who come to it.

    `seconds`: how long a step takes.
    `run_ahead`: a step is planned before the tokens of the one before have been read.
    `hurries`: but they are read at once if one of them is the first of an answer.
    `halting`: and before these steps are planned.
    `by_steps`: guests come and leave at steps, and no clock decides.
    """

    def __init__(
        self,
        sched: Scheduler,
        guests: Iterable[Guest] = (),
        seconds: Callable[[Plan], float] = lambda plan: 0.0,
        *,
        run_ahead: bool = True,
        hurries: bool = False,
        halting: Collection[int] = (),
        by_steps: bool = False,
    ):
        self.sched = sched
        self.seconds = seconds
        self.run_ahead = run_ahead
        self.hurries = hurries
        self.halting = halting
        self.by_steps = by_steps
        self.now = 0.0
        self._coming = deque(sorted(guests, key=lambda guest: guest.comes))
        self._tokens: dict[int, float] = {}  # by request
        self._guesses: dict[int, deque[tuple[int, int]]] = {}  # by request, of the steps to come
        if any(guest.guesses for guest in self._coming):
            sched.guess = self._guess
        self._leaving: list[Guest] = []
        self._flights: deque[tuple[Plan, Tokens]] = deque()  # planned, and not committed

    @classmethod
    def under(
        cls, limits: Mapping[str, Any], policy: Policy, guests: Sequence[Guest], *rest, **options
    ) -> Replay:
        """With an engine's limits, as snapshots and recordings have them: old ones lack some.

        No request is refused, however long the queue is under this policy.
        """
        made = {**limits, "max_queue": len(guests) + 1}
        hurries = made.pop("hurry", False)
        sched = Retold(**made, policy=policy)
        sched.begins = {guest.request.id: guest.begins for guest in guests}
        sched.behind = {guest.request.id: guest.behind for guest in guests}
        return cls(sched, guests, *rest, hurries=hurries, **options)

    def __iter__(self) -> Iterator[Ran]:
        """Yield every step as soon as it has been committed."""
        sched = self.sched
        while self._coming or self._flights or sched.waiting or sched.running:
            yield from self.turn()

    def turn(self) -> Iterator[Ran]:
        """One iteration: plan -> run -> commit."""
        sched = self.sched
        self._look(sched.steps + 1, is_read=False)
        plan = sched.plan(self.now)
        if plan:
            self._flights.append((plan, self.run(plan)))
        elif self._flights:
            pass  # a step that is read may free a slot, or end a prompt
        elif self._coming:
            self.now = max(self.now, self._coming[0].request.arrived)
            self._enter()
        elif sched.waiting or sched.running:
            taken = len(sched.running) or "no"
            raise Stuck(
                f"{taken} slots are taken, {len(sched.waiting)} wait, and no step is planned"
            )
        while len(self._flights) > self._may_fly(plan):
            yield self._commit()

    def _guess(self, decoding: Sequence[Request], left: int) -> dict[int, tuple[int, ...]]:
        """What was guessed, as far as there is room."""
        found = {}
        for request in decoding:
            known = self._guesses.get(request.id)
            guessed, right = known.popleft() if known else (0, 0)
            most = min(left, request.max_tokens - request.planned - 1)
            guess = ((SAID,) * right + (WRONG,) * (guessed - right))[: max(0, most)]
            if guess and request.planned == request.committed:
                found[request.id] = guess
                left -= len(guess)
        return found

    def _may_guess(self, plan: Plan) -> bool:
        """Are there guesses in the next step of one of these answers?"""
        coming = [self._guesses.get(member.request.id) for member in plan.emitters]
        return any(known and known[0][0] for known in coming)

    def run(self, plan: Plan) -> Tokens:
        """Stands in for a device: by slot, a token for each row that yields one."""
        return {member.slot: [SAID] * (1 + len(member.guess)) for member in plan.emitters}

    def finite(self, plan: Plan) -> list[int]:
        """Stands in for a device: the slots of the chunks that were finite."""
        return [chunk.slot for chunk in plan.chunks if not chunk.emits]

    def accept(self, request: Request, token: int) -> str | None:
        """Why an answer ends with this token; None if it goes on."""
        return "stop" if request.committed >= self._tokens[request.id] else None

    def _may_fly(self, plan: Plan | None) -> int:
        """How many steps may stay in flight, as `Engine._may_fly` says."""
        if plan is None or not self.run_ahead or plan.step + 1 in self.halting:
            return 0
        is_due = plan.is_due(self.hurries) or self._may_guess(plan)
        return 0 if is_due else 1

    def _commit(self) -> Ran:
        plan, tokens = self._flights.popleft()
        self._look(plan.step, is_read=True)
        began = self.now
        self.now += self.seconds(plan)
        self.sched.prove(plan, self.finite(plan))
        done = self.sched.commit(plan, tokens, self.accept, self.now)
        return Ran(plan, began, self.now, done.ghosts, done.tried)

    def _look(self, step: int, is_read: bool) -> None:
        """Before a step is planned or read: arrivals and cancels."""
        now = step if self.by_steps else self.now
        while self._coming and self._coming[0].comes <= now:
            self._enter()
        for guest in self._leaving:
            if guest.leaves[is_read] <= now:
                self.sched.finish(guest.request, "cancelled", self.now)

    def _enter(self) -> None:
        guest = self._coming.popleft()
        self._tokens[guest.request.id] = guest.tokens
        self._guesses[guest.request.id] = deque(guest.guesses)
        if guest.leaves:
            self._leaving.append(guest)
        self.sched.submit(guest.request)
