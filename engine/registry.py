"""The handles of all open requests, and recent events for observers, in bounded memory. A `Log` keeps
the newest entries and counts all entries, so that an observer knows how many it missed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Generic, TypeVar

from base.error_reports import describe, show_fault
from base.validation import GrammarError
from engine.handle import Handle
from engine.prefill_progress import UNREAD
from engine.snapshot import (
    Limits,
    RanksView,
    RequestView,
    Seen,
    SlotView,
    Snapshot,
    StepTimes,
    StepView,
)
from models.forward_cost import ModelCost, Roof
from request import Committed, Plan, Request
from step_output import StepOutput

if TYPE_CHECKING:
    from nanobatch import Engine
    from runner import RunningStep


T = TypeVar("T")


class Log(Generic[T]):
    """A list that keeps only its newest entries, and counts all that were added.

    `kept`: the maximum number of entries. `room`: their maximum total size in bytes, measured by `size`.
    The newest entry is always kept.
    """

    def __init__(
        self, kept: int, room: float = math.inf, size: Callable[[T], int] = lambda entry: 0
    ):
        self.count = 0
        self._entries: deque[T] = deque()
        self._kept = kept
        self._room = room
        self._size = size
        self._taken = 0  # total size of the entries in bytes

    def add(self, entry: T) -> None:
        self._entries.append(entry)
        self._taken += self._size(entry)
        self.count += 1
        while self._is_full and len(self._entries) > 1:
            self._taken -= self._size(self._entries.popleft())

    @property
    def _is_full(self) -> bool:
        return len(self._entries) > self._kept or self._taken > self._room

    def since(self, count: int) -> tuple[T, ...]:
        """Return the entries added after the first `count`, oldest first, as far as they are kept."""
        new = min(self.count - count, len(self._entries))
        return tuple(reversed(tuple(islice(reversed(self._entries), new))))


class RequestRegistry:
    """The handles of all open requests, and recent events for observers, in bounded memory."""

    QUEUE = 32  # number of waiting requests in a snapshot
    TEXTS = 2**22  # bytes of prompts and answers kept for ended requests

    def __init__(self, model: ModelCost) -> None:
        self.model = model
        self.roof = Roof()  # not measured yet
        self.open: dict[int, Handle] = {}
        self._news: dict[int, Handle] = {}  # handles with new output since the last `notify`
        self.steps: Log[StepView] = Log(4096)
        self.ended: Log[RequestView] = Log(500, self.TEXTS, lambda view: view.size)
        self.faults: Log[str] = Log(100)
        self.output_tokens = 0
        self._recorded_tokens = 0  # how many of `output_tokens` are in recorded steps
        self.prompt_tokens = 0
        self.steps_s = 0.0
        self.blocked: tuple[int, ...] = ()  # slots that the newest plan kept free

    def record_fault(self, what: str, error: BaseException) -> None:
        """Record a failure outside any request: one line for snapshots, the traceback on stderr."""
        self.faults.add(f"{what}: {describe(error)}")
        show_fault(what, error)

    def deliver(
        self,
        outputs: Mapping[tuple[int, int], StepOutput],
        clock: Callable[[], float],
        request: Request,
        token: int,
    ) -> str | None:
        """Deliver a token to its request. Return the finish reason if the token ends it, else None, as
        `Handle.append_token` does.

        An exception fails only this request. `outputs`: outputs with more than a token, such as log
        probabilities, by slot and index in the answer."""
        handle = self.open[request.id]
        self.output_tokens += not handle.sampling.embeds
        self._news[handle.id] = handle
        try:
            output = outputs.get((request.slot, len(request.answer) - 1), StepOutput(token))
            return handle.append_token(output._replace(token=token), clock())
        except BaseException as error:  # a Rust panic in the tokenizer is not an Exception
            handle.error = describe(error)
            handle.exception = error
            if not isinstance(error, GrammarError):  # a GrammarError is the client's mistake
                show_fault(f"request {request.id} failed when its token became text", error)
            return "error"

    def record(self, plan: Plan, run: RunningStep, done: Committed, times: StepTimes) -> float:
        """Record a committed step, and retire the requests that it ended. Return the step's seconds."""
        for request in done.ended:
            self.retire(request.id)
        tokens = self.output_tokens - self._recorded_tokens
        self._recorded_tokens = self.output_tokens
        step = StepView.from_commit(plan, run, done, tokens, times)
        self.steps.add(step)
        self.steps_s += step.seconds
        for _, id, start, stop in step.prefill:
            self.prompt_tokens += stop - start
            if handle := self.open.get(id):  # it may have ended during the step
                handle.prefill_clock.record_chunk(start, stop, step.began, step.ended)
        return step.seconds

    def record_time_left(self, left_s: Mapping[int, float]) -> None:
        """Record the estimated seconds of prefill left, by request."""
        for id, seconds in left_s.items():
            self.open[id].prefill_clock.left_s = seconds

    def lost_with(self, plans: Sequence[Plan], all_end: bool) -> list[Handle]:
        """Return the handles of the open requests that are lost with these failed steps: those with a chunk in
        one of them, those with planned tokens, which cannot be restarted, and those that have already ended.
        `all_end`: all requests."""
        failed = {chunk.request.id for plan in plans for chunk in plan.chunks}
        found = []
        for handle in self.open.values():
            request = handle.request
            if all_end or request.planned or request.finish_reason or request.id in failed:
                found.append(handle)
        return found

    def retire(self, id: int) -> None:
        """Drop the handle of a request that ended, and keep a view of the request for observers."""
        handle = self.open.pop(id, None)
        if handle is not None:
            # A view, because the handle would keep the engine and all log probabilities alive
            self.ended.add(handle.view())
            self._news[id] = handle
            handle.grammar = None  # it takes megabytes, and the owner may keep the handle
            handle.request.drafting.source = None  # takes megabytes, too
            handle.request.prefix.restored = None

    def notify(
        self, on_commit: Callable[[list[Handle]], None] | None, lock: AbstractContextManager
    ) -> None:
        """Call `on_commit`, outside the lock, with the handles that got output or ended since the last call.
        Its exceptions are recorded and affect no request, except KeyboardInterrupt, which is raised."""
        with lock:
            news = list(self._news.values())
            self._news.clear()
        if on_commit is None or not news:
            return
        try:
            on_commit(news)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.record_fault("on_commit failed", error)

    def snapshot(self, engine: Engine, since: Snapshot | None) -> Snapshot:
        """Return the snapshot for `Engine.snapshot`."""
        sched = engine.sched
        now = engine.clock()
        seen = Seen() if since is None else since.seen
        owners = {request.slot: request for request in sched.running.values()}
        blocked = self.blocked if sched.waiting else ()
        if since is None:
            arrived = list(islice(sched.waiting, self.QUEUE))
        else:
            arrived = list(takewhile(lambda id: id > seen.request, reversed(sched.waiting)))
        slots = []
        checkpoints, states = sched.states.view()
        for slot in range(sched.slots):
            owner = owners.get(slot)
            prefill = UNREAD if owner is None else self.open[owner.id].prefill_at(now)
            marks = checkpoints.get(slot, ())
            slots.append(
                SlotView.from_scheduler(slot, owner, sched, slot in blocked, prefill, marks)
            )
        steps = self.steps.since(seen.steps)
        ended = self.ended.since(seen.ended)
        newest = max(seen.request, next(reversed(sched.waiting), -1))
        return Snapshot(
            now=now,
            limits=Limits.from_scheduler(sched, engine.eager_first_token),
            policy=sched.policy.name,
            draining_to=sched.draining_to.name if sched.draining_to else None,
            slots=tuple(slots),
            waiting=len(sched.waiting),
            queue=tuple(
                (r.id, now - r.arrived) for r in islice(sched.waiting.values(), self.QUEUE)
            ),
            requests=tuple(self.open[id].view() for id in sorted([*sched.running, *arrived])),
            ended=ended,
            missed_ends=self.ended.count - seen.ended - len(ended),
            steps=steps,
            missed=self.steps.count - seen.steps - len(steps),
            faults=self.faults.since(seen.faults),
            planned=sched.steps,
            submitted=sched.submitted,
            finished=sched.submitted - len(sched.waiting) - len(sched.running),
            output_tokens=self.output_tokens,
            prompt_tokens=self.prompt_tokens,
            steps_s=self.steps_s,
            seen=Seen(self.steps.count, self.ended.count, self.faults.count, newest),
            ranks=RanksView(engine.ranks.backend, engine.ranks.memory),
            model=self.model,
            roof=self.roof,
            states=states,
            step_s=0.0 if math.isinf(step_s := engine.step_time.limit_s) else step_s,
        )
