"""Run the scheduler without a model, from known lengths and step costs.

It shows how other policies would have served the same requests, also in a web page, and needs only the
standard library. `Replay` sends requests through a scheduler in the same loop as `Engine.step`. The same
numbers of tokens are drafted and accepted as in the original run. The invariant: a replay under the original
policy has the same steps, though perhaps in other slots, because the choice of a slot depends on the tokens in
it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from request import Plan, Policy, Request, Tokens
from sched import UNLIMITED, Scheduler

if TYPE_CHECKING:
    from engine.step_time import StepTime

SAID = 2**40  # the token of all answers; no prompt contains it
WRONG = SAID + 1  # a draft token that is rejected


class Guest(NamedTuple):
    """A request to replay."""

    request: Request
    tokens: float  # length of its answer
    leaves: float = math.inf  # time in seconds at which it is cancelled
    # (drafted, accepted) for each decode step
    drafts: Sequence[tuple[int, int]] = ()


class Ran(NamedTuple):
    """A committed step."""

    plan: Plan
    began: float
    ended: float
    ghosts: tuple[int, ...]  # slots whose request had already finished
    drafts: tuple[tuple[int, int, int], ...] = ()  # (slot, drafted, accepted)


def drafts_in(
    steps: Iterable[
        tuple[Iterable[tuple[int, int]], Collection[int], Iterable[tuple[int, int, int]]]
    ],
) -> dict[int, list[tuple[int, int]]]:
    """Return request -> (drafted, accepted) for each of its decode steps.

    `steps`: for each step, the decoding (slot, request) pairs, the ghosts' slots, and the draft tokens as
    (slot, drafted, accepted).
    """
    found: dict[int, list[tuple[int, int]]] = {}
    for decodes, ghosts, drafts in steps:
        of_slot = {slot: (drafted, accepted) for slot, drafted, accepted in drafts}
        for slot, request in decodes:
            if slot not in ghosts:
                found.setdefault(request, []).append(of_slot.get(slot, (0, 0)))
    return found


class Stuck(ValueError):
    """The scheduler plans no step although requests are left."""


class Replay:
    """A replay of requests through a scheduler.

    `seconds`: returns the duration of a step.
    `run_ahead`: plan a step before the previous step's tokens are read.
    `eager_first_token`: read a step's tokens immediately if one is the first of an answer.
    `step_time`: limits steps as in an engine, and learns from `seconds`.
    """

    def __init__(
        self,
        sched: Scheduler,
        guests: Iterable[Guest] = (),
        seconds: Callable[[Plan], float] = lambda plan: 0.0,
        *,
        run_ahead: bool = True,
        eager_first_token: bool = False,
        step_time: StepTime | None = None,
    ):
        self.sched = sched
        self.seconds = seconds
        self.run_ahead = run_ahead
        self.eager_first_token = eager_first_token
        self.step_time = step_time
        self.now = 0.0
        self._coming = deque(sorted(guests, key=lambda guest: guest.request.arrived))
        self._tokens: dict[int, float] = {}  # request -> length of its answer
        self._drafts: dict[int, deque[tuple[int, int]]] = {}  # request -> its remaining drafts
        if any(guest.drafts for guest in self._coming):
            sched.draft = self._draft
        self._leaving: list[Guest] = []
        self._in_flight: deque[tuple[Plan, Tokens]] = deque()  # planned but not committed

    @classmethod
    def under(
        cls, limits: Mapping[str, Any], policy: Policy, guests: Sequence[Guest], *rest, **options
    ) -> Replay:
        """Return a replay with an engine's limits from a snapshot or a recording; old recordings lack
        some limits.

        The queue is unlimited, so that no request is refused under this policy.
        """
        made = {**limits, "max_queue": len(guests) + 1}
        made.pop("far", None)  # only in old recordings
        eager_first_token = made.pop("eager_first_token", False)
        sched = Scheduler(**made, policy=policy)
        return cls(sched, guests, *rest, eager_first_token=eager_first_token, **options)

    def __iter__(self) -> Iterator[Ran]:
        """Yield each step when it is committed."""
        sched = self.sched
        while self._coming or self._in_flight or sched.waiting or sched.running:
            yield from self.turn()

    def turn(self) -> Iterator[Ran]:
        """Run one iteration: plan -> run -> commit."""
        sched = self.sched
        self._arrive_and_leave()
        plan = sched.plan(self.now, self._prompt_tokens())
        if plan:
            self._in_flight.append((plan, self.run(plan)))
        elif self._in_flight:
            pass  # committing the step in flight may free a slot or finish a prefill
        elif self._coming:
            self.now = max(self.now, self._coming[0].request.arrived)
            self._enter()
        elif sched.waiting or sched.running:
            taken = len(sched.running) or "no"
            raise Stuck(
                f"{taken} slots are taken, {len(sched.waiting)} wait, and no step is planned"
            )
        while len(self._in_flight) > 1:
            yield self._commit()
        if self._in_flight and not self._may_stay_in_flight(plan):
            yield self._commit()

    def _prompt_tokens(self) -> int:
        if self.step_time is None:
            return UNLIMITED
        return self.step_time.prompt_tokens(self.sched.running.values())

    def _draft(self, decoding: Sequence[Request], left: int) -> dict[int, tuple[int, ...]]:
        """Return the drafts of the original run, as far as the budget allows."""
        found = {}
        for request in decoding:
            known = self._drafts.get(request.id)
            drafted, accepted = known.popleft() if known else (0, 0)
            most = min(left, request.max_tokens - request.planned - 1)
            draft = ((SAID,) * accepted + (WRONG,) * (drafted - accepted))[: max(0, most)]
            if draft and request.planned == request.committed:
                found[request.id] = draft
                left -= len(draft)
        return found

    def _may_draft(self, plan: Plan) -> bool:
        """True if a request of this step has draft tokens in its next step."""
        coming = [self._drafts.get(member.request.id) for member in plan.emitters]
        return any(known and known[0][0] for known in coming)

    def run(self, plan: Plan) -> Tokens:
        """Return slot -> tokens, in place of a device."""
        return {member.slot: [SAID] * (1 + len(member.draft)) for member in plan.emitters}

    def finite(self, plan: Plan) -> list[int]:
        """Return the slots of the chunks that yield no token, all of them finite, in place of a device."""
        return [chunk.slot for chunk in plan.chunks if not chunk.emits]

    def accept(self, request: Request, token: int) -> str | None:
        """Return the finish reason if the answer ends with this token, otherwise None."""
        return "stop" if request.committed >= self._tokens[request.id] else None

    def _may_stay_in_flight(self, plan: Plan | None) -> bool:
        """True if the next step may start before this one is read, as in `Engine._may_stay_in_flight`.
        Whether drafts follow is known from the recording."""
        if plan is None or not self.run_ahead or plan.is_due(self.eager_first_token):
            return False
        return not self._may_draft(plan)

    def _commit(self) -> Ran:
        plan, tokens = self._in_flight.popleft()
        self._arrive_and_leave()
        began = self.now
        seconds = self.seconds(plan)
        self.now += seconds
        self.sched.prove(plan, self.finite(plan))
        done = self.sched.commit(plan, tokens, self.accept, self.now)
        if self.step_time is not None:
            self.step_time.learn(plan, done, seconds)
        return Ran(plan, began, self.now, done.ghosts, done.drafts)

    def _arrive_and_leave(self) -> None:
        """Submit and cancel the requests that are due, before a step is planned or committed."""
        while self._coming and self._coming[0].request.arrived <= self.now:
            self._enter()
        for guest in self._leaving:
            if guest.leaves <= self.now:
                self.sched.finish(guest.request, "cancelled", self.now)

    def _enter(self) -> None:
        guest = self._coming.popleft()
        self._tokens[guest.request.id] = guest.tokens
        self._drafts[guest.request.id] = deque(guest.drafts)
        if guest.leaves < math.inf:
            self._leaving.append(guest)
        self.sched.submit(guest.request)
