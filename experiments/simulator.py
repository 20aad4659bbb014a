"""The scheduler without a model: lengths and step costs in, steps out. So other policies can be tried on
the same requests, also in a web page. It needs the standard library only.

`Replay` sends requests of known lengths through a scheduler, in the loop of `Engine.step`. Tokens that
were drafted are drafted again, and as many of them are accepted. The invariant: a run that is replayed
under its own policy has the same steps, perhaps in other slots: a slot is chosen by the tokens that it holds.
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

SAID = 2**40  # the only token of all answers: no prompt has it
WRONG = SAID + 1  # a draft token that is rejected


class Guest(NamedTuple):
    """A request to replay: its output length, and when it is cancelled."""

    request: Request
    tokens: float  # the length of its answer
    leaves: float = math.inf  # when it is cut short, in seconds
    # Of each step in which it decodes: how many tokens are drafted, and how many of these are right
    drafts: Sequence[tuple[int, int]] = ()


class Ran(NamedTuple):
    """A step, committed."""

    plan: Plan
    began: float
    ended: float
    ghosts: tuple[int, ...]  # slots whose request had ended before
    drafts: tuple[tuple[int, int, int], ...] = ()  # (slot, drafted, accepted)


def drafts_in(
    steps: Iterable[
        tuple[Iterable[tuple[int, int]], Collection[int], Iterable[tuple[int, int, int]]]
    ],
) -> dict[int, list[tuple[int, int]]]:
    """By request: of each step in which it decodes, how many tokens were drafted, and how many of
    these were accepted.

    `steps`: of each (slot, request) that decode, the slots of ghosts, and the draft tokens.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    for decodes, ghosts, drafts in steps:
        of_slot = {slot: (drafted, accepted) for slot, drafted, accepted in drafts}
        for slot, request in decodes:
            if slot not in ghosts:
                found.setdefault(request, []).append(of_slot.get(slot, (0, 0)))
    return found


class Stuck(ValueError):
    """Requests are left, and no step is planned for them."""


class Replay:
    """A scheduler and its requests.

    `seconds`: how long a step takes.
    `run_ahead`: a step is planned before the tokens of the one before have been read.
    `eager_first_token`: but they are read at once if one of them is the first of an answer.
    `step_time`: bounds steps as in an engine, and learns from `seconds`.
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
        self._tokens: dict[int, float] = {}  # by request
        self._drafts: dict[int, deque[tuple[int, int]]] = {}  # by request, of the steps to come
        if any(guest.drafts for guest in self._coming):
            sched.draft = self._draft
        self._leaving: list[Guest] = []
        self._in_flight: deque[tuple[Plan, Tokens]] = deque()  # planned, and not committed

    @classmethod
    def under(
        cls, limits: Mapping[str, Any], policy: Policy, guests: Sequence[Guest], *rest, **options
    ) -> Replay:
        """With an engine's limits, as snapshots and recordings have them: old ones lack some.

        No request is refused, however long the queue is under this policy.
        """
        made = {**limits, "max_queue": len(guests) + 1}
        made.pop("far", None)  # of old recordings
        eager_first_token = made.pop("eager_first_token", False)
        sched = Scheduler(**made, policy=policy)
        return cls(sched, guests, *rest, eager_first_token=eager_first_token, **options)

    def __iter__(self) -> Iterator[Ran]:
        """Yield every step as soon as it has been committed."""
        sched = self.sched
        while self._coming or self._in_flight or sched.waiting or sched.running:
            yield from self.turn()

    def turn(self) -> Iterator[Ran]:
        """One iteration: plan -> run -> commit."""
        sched = self.sched
        self._arrive_and_leave()
        plan = sched.plan(self.now, self._prompt_tokens())
        if plan:
            self._in_flight.append((plan, self.run(plan)))
        elif self._in_flight:
            pass  # a step that is read may free a slot, or end a prompt
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
        """The drafts of the real run, as far as the budget allows."""
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
        """True if one of these answers has draft tokens in the next step."""
        coming = [self._drafts.get(member.request.id) for member in plan.emitters]
        return any(known and known[0][0] for known in coming)

    def run(self, plan: Plan) -> Tokens:
        """Stands in for a device: by slot, a token for each row that yields one."""
        return {member.slot: [SAID] * (1 + len(member.draft)) for member in plan.emitters}

    def finite(self, plan: Plan) -> list[int]:
        """The slots of the chunks that are finite, in place of a device."""
        return [chunk.slot for chunk in plan.chunks if not chunk.emits]

    def accept(self, request: Request, token: int) -> str | None:
        """The reason for which an answer ends with this token; None if it goes on."""
        return "stop" if request.committed >= self._tokens[request.id] else None

    def _may_stay_in_flight(self, plan: Plan | None) -> bool:
        """As in `Engine`."""
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
        """Before a step is planned or read: arrivals and cancels."""
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
