"""Decides who runs next. Knows requests, slots and a budget; knows no model, no array and no clock.

The problem. A device is fast when it works on many sequences at once, but requests arrive when they please, and their
answers end when they please. *Serial* serving takes one after the other. *Static* batching takes whoever waits, up to
its slots, and then waits for the slowest of them before it takes anybody else. *Continuous* batching decides anew in
every step: whoever has ended leaves, whoever waits takes the free slot, and a long prompt is cut into chunks, so that
those who are already decoding never wait for more than a chunk of it.

    step | slot 0    slot 1         P  prefill: a chunk of the prompt goes into the slab
       1 | A:P       B:P            d  decode: one row, one new token
       2 | A:d       B:d
       3 | A:d       B:d            <- A ends here
       4 | C:P       B:d            <- C is admitted in mid-decode of B

One turn of the wheel is plan -> run -> commit. `plan` answers with a frozen `Plan`; the engine runs it on the device;
`commit` takes the sampled tokens. The engine may plan step N+1 before it has committed step N (run-ahead), so a
request carries two numbers that are never confused: what is *planned*, and what is *committed*. An end is therefore
seen one step late (but for max_tokens, which is known before), and the token of such a *ghost* row is dropped.

A slot remembers the prompt it was last filled with. A new prompt that begins alike goes on from there, or has the
common rows copied from whichever slot holds them: that is prefix reuse, and a system prompt is computed once.

The invariants, which `check` asserts:
    a slot has one owner or none; a waiting request has no slot
    0 <= committed <= planned <= max_tokens; planned is at most two steps ahead
    requests are admitted in the order in which they came, and each ends exactly once

Where next: `nanobatch.py`, `Engine.step`, which runs the plans; `tests/test_sched.py`, which prints timelines.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

POLICIES = ("continuous", "static", "serial")
PADDING = 16  # a chunk is as wide as a multiple of this many tokens and no narrower: so the device sees few shapes


class QueueFull(RuntimeError):
    """The waiting line has reached its limit. Raised at once; nothing else is disturbed."""


@dataclass(eq=False, slots=True)
class Request:
    """One prompt on its way through the engine."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    arrived: float
    shares: bool = True  # may it take over rows that another request has written?
    slot: int | None = None
    reused: int = 0  # prompt tokens whose rows were taken over
    prefilled: int = 0  # prompt tokens whose rows are in the slab once all planned steps have run
    planned: int = 0  # output tokens that planned steps sample
    committed: int = 0  # output tokens that have been read back
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None
    finish_reason: str | None = None  # "stop" | "length" | "cancelled" | "error"

    @property
    def phase(self) -> str:
        if self.finish_reason is not None:
            return "done"
        if self.slot is None:
            return "queued"
        return "prefill" if self.prefilled < len(self.prompt) else "decode"


class Chunk(NamedTuple):
    """A piece of a prompt, prompt[start:stop], to be written into the slot's rows start..stop."""

    request: Request
    slot: int
    start: int
    stop: int
    width: int  # stop - start, and the padding: what the device computes
    cost: int  # of the budget: the width, or what it would be if looking back were free
    source: int | None  # before this chunk, rows 0..start are copied from this slot

    @property
    def emits(self) -> bool:
        """Only the last chunk of a prompt yields a token: the one that follows the prompt."""
        return self.stop == len(self.request.prompt)


class Decode(NamedTuple):
    """One step of one answer: the newest token goes into row `position`, and the next token comes out.

    The newest token is known, even emitted, but its key and value are not in the slab yet: this step writes them.
    """

    request: Request
    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step does. It names requests and slots as they were when it was made, and never changes."""

    step: int
    admitted: tuple[Request, ...]
    chunks: tuple[Chunk, ...]
    decodes: tuple[Decode, ...]
    held: tuple[Request, ...]  # in a slot, but the budget was spent, or somebody is writing what they share
    waiting: int  # how many are left in line
    policy: str  # the one that it was made under

    @property
    def emitters(self) -> tuple[Chunk | Decode, ...]:
        """The members of this step that yield a token each."""
        return tuple(chunk for chunk in self.chunks if chunk.emits) + self.decodes


class Scheduler:
    def __init__(
        self,
        slots: int,
        max_len: int,
        *,
        chunk: int = 64,
        budget: int = 200,
        far: int = sys.maxsize,  # the row at which looking back costs a token as much as all the rest
        policy: str = "continuous",
        max_queue: int = 10_000,
        reuse: bool = True,
    ):
        if policy not in POLICIES:
            raise ValueError(f"policy = {policy!r}; choose one of {', '.join(POLICIES)}")
        for name, value in (("slots", slots), ("max_len", max_len), ("chunk", chunk), ("max_queue", max_queue)):
            if value < 1:
                raise ValueError(f"{name} = {value}, but it must be at least 1")
        self.max_len, self.chunk, self.budget, self.far = max_len, chunk, budget, far
        self.policy, self.max_queue, self.reuse = policy, max_queue, reuse
        self.waiting: OrderedDict[int, Request] = OrderedDict()  # by id: first come first served, any may leave
        self.running: dict[int, Request] = {}  # by id, in the order of admission
        self.free: list[int] = list(range(slots))  # the slot that was freed longest ago stands first
        self.owners: list[Request | None] = [None] * slots
        self.memory: list[Request | None] = [None] * slots  # whose prompt a slot holds
        self.steps = self.submitted = self.finished = 0

    def submit(self, request: Request) -> None:
        """Put a request in line. Its worst case must fit a slot, so that nothing running is ever evicted."""
        need = len(request.prompt) + request.max_tokens
        if not request.prompt or request.max_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one output token")
        if need > self.max_len:
            raise ValueError(
                f"prompt of {len(request.prompt)} tokens + max_tokens {request.max_tokens} = {need}, "
                f"but a slot holds {self.max_len}"
            )
        if len(self.waiting) >= self.max_queue:
            raise QueueFull(f"{len(self.waiting)} requests are waiting, and max_queue is {self.max_queue}; try later")
        self.submitted += 1
        self.waiting[request.id] = request

    def plan(self, now: float) -> Plan | None:
        """Decide the next step, or None if there is nothing to do. Touches no array and waits for nothing."""
        admitted = self._admit(now)
        decodes = tuple(
            Decode(r, r.slot, len(r.prompt) + r.planned - 1)
            for r in self.running.values()
            if r.phase == "decode" and r.planned < r.max_tokens
        )
        chunks = tuple(self._chunks(self.budget - len(decodes)))
        if not (chunks or decodes):
            return None
        self.steps += 1
        moved = {member.request.id for member in (*chunks, *decodes)}
        held = tuple(r for r in self.running.values() if r.phase == "prefill" and r.id not in moved)
        plan = Plan(self.steps, admitted, chunks, decodes, held, len(self.waiting), self.policy)
        for member in plan.emitters:
            member.request.planned += 1
        return plan

    def _admit(self, now: float) -> tuple[Request, ...]:
        """Give free slots to those who wait, oldest first. The policies differ in these three lines alone."""
        room = {
            "continuous": len(self.free),  # whenever a slot is free
            "static": 0 if self.running else len(self.free),  # a batch at a time: when the last one has drained
            "serial": 0 if self.running else 1,  # one at a time
        }[self.policy]
        admitted = []
        while self.waiting and len(admitted) < room:
            _, request = self.waiting.popitem(last=False)
            source, shared = self._match(request, self.free)
            request.slot, request.admitted = source if shared else self.free[0], now
            self.free.remove(request.slot)
            self.owners[request.slot] = self.running[request.id] = request
            admitted.append(request)
        return tuple(admitted)

    def _match(self, request: Request, slots: Iterable[int]) -> tuple[int | None, int]:
        """The slot that remembers most of this prompt's beginning, and how many tokens of it.

        In multiples of `chunk`, because there every prompt is cut, however narrow its chunks become: so what follows is
        cut at the same places as without. And never the whole prompt, since somebody has to compute what its last
        token yields.
        """
        best: tuple[int | None, int] = (None, 0)
        for slot in slots:
            other, end = self.memory[slot], best[1]
            while other and (stop := end + self.chunk) <= other.prefilled and self._alike(request, other, stop):
                best, end = (slot, stop), stop
        return best

    def _alike(self, request: Request, other: Request, stop: int) -> bool:
        """Do both prompts begin with the same `stop` tokens, may they share, and does this one go on after them?"""
        may = self.reuse and request.shares and other.shares and stop < len(request.prompt)
        return may and request.prompt[:stop] == other.prompt[:stop]

    def _chunks(self, budget: int):
        """Cut prompts into chunks, oldest first, until the step's budget is spent.

        In each step each slot moves on by one unit: a token of its answer, or a chunk of its prompt. So one long prompt
        makes its neighbours wait for one chunk at a time; eight short ones share a step. A token costs one, a chunk its
        width, and a narrowed one as much as a wide one, since it is as much work (`_widest`). The first chunk is never
        refused: however many rows decode, somebody's prompt moves on in every step. So nobody starves, and no step
        costs more than max(budget, decoding rows + chunk).

        Which rows can be taken over is asked when a prompt's turn comes, not when it is admitted; and whoever needs
        what somebody else is writing just now lets a step pass. So of eight prompts that arrive together and begin
        alike, the first writes the common part, and seven take it over.
        """
        spent, writing = 0, []
        for request in self.running.values():
            if request.phase != "prefill":
                continue
            source, start = request.slot, request.prefilled
            if first := start == 0:  # its own slot is asked first: what it holds need not be copied
                source, start = self._match(request, (request.slot, *range(len(self.owners))))
                if any(self._alike(request, other, start + self.chunk) for other in writing):
                    continue
            widest = self._widest(start)
            width = min(widest, -(-(len(request.prompt) - start) // PADDING) * PADDING)
            cost = width * self.chunk // widest
            if spent and spent + cost > budget:
                return  # and whoever came later does not overtake
            if first:
                request.reused, self.memory[request.slot] = start, request
                if source in self.free:  # used just now, so not the next to be overwritten
                    self.free.append(self.free.pop(self.free.index(source)))
            spent += cost
            writing.append(request)
            stop = request.prefilled = min(start + widest, len(request.prompt))
            source = None if source == request.slot else source
            yield Chunk(request, request.slot, start, stop, width, cost, source)

    def _widest(self, start: int) -> int:
        """How many tokens a chunk may take that begins at `start`: fewer where each of them looks back on more.

        Else the last chunks of a long prompt would be several times the work of its first, and its neighbours would
        wait for that. At `far` a token's work has doubled. The width is halved until the work is at most one and a half
        times a first chunk's; in halves, so that every multiple of `chunk` stays a place where prompts are cut. The
        price: a long prompt takes more steps, so its own first token comes later, even if nobody waits for it: what a
        prompt computes must not depend on its company.
        """
        widest = self.chunk
        while widest % (2 * PADDING) == 0 and widest * (self.far + start) > 1.5 * self.chunk * self.far:
            widest //= 2
        return widest

    def commit(
        self, plan: Plan, tokens: Sequence[int], accept: Callable[[Request, int], str | None], now: float
    ) -> list[Request]:
        """Hand each emitter its token and free the slots of those that end; answers with the ended.

        `accept(request, token)` delivers the token and says why the answer ends there, or None if it goes on.
        Results belong to requests, not to slots: a slot may have a new owner by the time its token is read.
        """
        ended = []
        for member, token in zip(plan.emitters, tokens, strict=True):
            request = member.request
            if request.finish_reason is not None:
                continue  # a ghost: it ended after this step had been planned
            request.committed += 1
            if request.first_token is None:
                request.first_token = now
            reason = accept(request, token)
            if reason is None and request.committed == request.max_tokens:
                reason = "length"
            if reason is not None:
                self.finish(request, reason, now)
                ended.append(request)
        return ended

    def finish(self, request: Request, reason: str, now: float) -> None:
        """End a request in whatever phase it is; its slot is free for the next plan. A second end changes nothing.

        A step that is still in flight may write a ghost's row into that slot. This is harmless: the device runs in
        order, so whatever the next owner writes comes later, and it depends on no row that it has not written.
        """
        if request.finish_reason is not None:
            return
        request.finish_reason, request.ended = reason, now
        self.finished += 1
        if request.slot is None:
            del self.waiting[request.id]
        else:
            del self.running[request.id]
            self.owners[request.slot] = None
            self.free.append(request.slot)

    def start_over(self) -> None:
        """The slab is lost. Who had yielded a token was in the step that failed, and ended with it; the others prefill
        again."""
        self.memory[:] = [None] * len(self.memory)
        for request in self.running.values():
            assert request.planned == 0, request
            request.prefilled = request.reused = 0

    def clear(self, reason: str, now: float) -> list[Request]:
        """End everything that is open, and start from nothing. Right even where a step broke off half way."""
        ended = [r for r in (*self.running.values(), *self.waiting.values()) if r.finish_reason is None]
        for request in ended:
            request.finish_reason, request.ended = reason, now
        self.waiting.clear()
        self.running.clear()
        self.free[:] = range(len(self.owners))
        self.owners[:] = self.memory[:] = [None] * len(self.owners)
        self.finished = self.submitted
        return ended

    def check(self) -> None:
        """Assert every invariant of this file."""
        held = [r.slot for r in self.running.values()]
        assert sorted(held + self.free) == list(range(len(self.owners))), (held, self.free)
        for slot, owner in enumerate(self.owners):
            assert (owner is None) == (slot in self.free), (slot, owner)
            assert owner is None or (owner.slot == slot and owner.id in self.running), (slot, owner)
            assert owner is None or owner.prefilled == 0 or self.memory[slot] in (owner, None), (slot, owner)
        for r in self.running.values():
            assert r.finish_reason is None and r.admitted is not None, r
            assert 0 <= r.reused <= r.prefilled <= len(r.prompt) and r.reused % self.chunk == 0, r
            assert 0 <= r.committed <= r.planned <= min(r.max_tokens, r.committed + 2), r
            assert r.planned == 0 or r.prefilled == len(r.prompt), r
        for r in self.waiting.values():
            assert r.slot is None and r.finish_reason is None and r.planned == 0, r
        order = [*self.running, *self.waiting]
        assert order == sorted(order), f"not first come first served: {order}"
        assert len(self.waiting) <= self.max_queue
        assert self.submitted == len(self.waiting) + len(self.running) + self.finished
