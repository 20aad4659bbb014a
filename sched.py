"""Decides what runs next. Knows requests, slots and a budget; knows no model, no array and no clock.

The problem. A device is fast when it works on many sequences at once, but requests arrive at any moment, and their
answers end at any moment. *Serial* serving answers one request after the other. *Static* batching admits as many as it
has slots, and admits no more until the slowest of them has ended. *Continuous* batching decides anew in every step: a
request that has ended leaves its slot, the next in line takes it, and a long prompt is cut into chunks, so that the
requests that are already decoding never wait for more than a chunk of it.

    step | slot 0    slot 1         P  prefill: a chunk of the prompt goes into the slab
       1 | A:P       B:P            d  decode: one row, one new token
       2 | A:d       B:d
       3 | A:d       B:d            <- A ends here
       4 | C:P       B:d            <- C is admitted in mid-decode of B

One turn of the wheel is plan -> run -> commit. `plan` answers with a frozen `Plan`; the engine runs it on the device;
`commit` takes the sampled tokens. The engine may plan step N+1 before it has committed step N (run-ahead). So a request
carries two numbers that are never confused: what is *planned*, and what is *committed*. The end of an answer is seen
one step late (unless it ends by `max_tokens`, which is known before). That step runs its sequence once more, as a
*ghost*, and drops the token.

A slot remembers the prompt that it was last filled with, and the answer. A new prompt that begins alike goes on from
there, or has the common rows copied from a slot that holds them. That is prefix reuse (`prefix.py`): a system
prompt is computed once, and a chat's next turn reads only what is new.

The invariants, which `check` asserts:
    a slot has one owner or none; a waiting request has no slot
    0 <= committed <= planned <= max_tokens; planned is at most two steps ahead
    requests are admitted in the order in which they came

Where next: `nanobatch.py`, `Engine.step`, which runs the plans; `tests/book/test_sched.py`, which prints timelines.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prefix import PIECE, Prefixes, Trail

# What each policy does. How it does it stands in `Scheduler._room`, a line for each.
POLICIES = {
    "continuous": "the next in line takes a slot as soon as one is free.",
    "static": "a batch is admitted together; the next one waits until all of it has ended.",
    "serial": "one request at a time.",
}
DEFAULT = next(iter(POLICIES))
NARROWEST = 16  # tokens of a chunk, however far in its prompt it begins


class QueueFull(RuntimeError):
    """The waiting line has reached its limit. Raised at once; nothing else is disturbed."""


@dataclass(eq=False, slots=True)
class Request:
    """One prompt on its way through the engine."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    arrived: float
    shares: bool = True  # it may take over rows of other prompts that begin alike, and give its own
    trail: Trail = field(default_factory=Trail)  # its prompt's beginnings, which it may share with others
    policy: str = ""  # the one that admitted it
    slot: int | None = None
    why: str = ""  # it was given this slot
    reused: int = 0  # prompt tokens whose rows were taken over
    prefilled: int = 0  # prompt tokens whose rows are in the slab once all planned steps have run
    planned: int = 0  # output tokens that planned steps sample
    answer: list[int] = field(default_factory=list)  # output tokens that have been read back
    admitted: float | None = None
    ended: float | None = None
    finish_reason: str | None = None  # "stop" | "length" | "cancelled" | "error"

    @property
    def committed(self) -> int:
        return len(self.answer)

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
    # What it takes of the budget: its tokens, each at the price of its place in the prompt (`Scheduler._price`).
    cost: int
    source: int | None  # before this chunk, rows 0..start are copied from this slot
    emits: bool  # only the last chunk of a prompt yields a token: the one that follows the prompt


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
    at: float  # the moment
    admitted: tuple[Request, ...]
    scrubs: tuple[tuple[int, int, int], ...]  # (slot, start, stop): rows to be zeroed before anything else
    chunks: tuple[Chunk, ...]
    decodes: tuple[Decode, ...]
    # In prefill, but without a chunk: the budget was spent, or what it shares is being written.
    held: tuple[Request, ...]
    blocked: tuple[int, ...]  # slots that are free but shut: requests wait, but the policy or a drain keeps them out
    waiting: int  # how many are left in line
    policy: str  # the one that it was made under
    emitters: tuple[Chunk | Decode, ...]  # the members of this step that yield a token each
    read_at_once: bool  # its tokens are read before the next step is planned: a first token is among them


Accept = Callable[[Request, int], str | None]  # delivers a token; says why the answer ends there, or None


class Scheduler:
    def __init__(
        self,
        slots: int,
        max_len: int,
        *,
        chunk: int = 64,
        budget: int = 200,
        far: int = 2**63,  # from this row on, attention costs a token more than the rest of its layer
        policy: str = DEFAULT,
        max_queue: int = 10_000,
        hurry: bool = False,  # a first token is read before the next step is planned
    ):
        for name, value in (("slots", slots), ("max_len", max_len), ("chunk", chunk), ("max_queue", max_queue)):
            if value < 1:
                raise ValueError(f"{name} = {value}, but it must be at least 1")
        self.slots, self.max_len, self.chunk, self.budget, self.far = slots, max_len, chunk, budget, far
        self.max_queue, self.hurry, self.draining_to = max_queue, hurry, None
        self.steps = self.submitted = 0
        self.start_over(())
        self.drain(policy)

    @property
    def free(self) -> list[int]:
        """Slots without an owner. The one that was used longest ago stands first."""
        taken = {request.slot for request in self.running.values()}
        return [slot for slot in self.prefixes.by_use if slot not in taken]

    def submit(self, request: Request) -> None:
        """Put a request in line. Its worst case must fit a slot, so that nothing running is ever evicted."""
        n, more, most = len(request.prompt), request.max_tokens, self.max_len
        if n + more > most:
            raise ValueError(f"prompt {n:,} + max_tokens {more:,} = {n + more:,}, but a slot holds {most:,} (max_len)")
        # Those that the next step admits do not wait: an idle engine takes as many more as it has slots.
        if (waiting := len(self.waiting) - self._room(len(self.free))) >= self.max_queue:
            raise QueueFull(f"{waiting} requests are waiting, and max_queue is {self.max_queue}; try later")
        request.trail = self.prefixes.read(request.prompt, request.shares)
        self.waiting[request.id] = request
        self.submitted += 1

    def drain(self, to: str) -> None:
        """Change the policy once all that runs has ended; until then nothing is admitted.

        The new policy finds slots that remember nothing. So runs under two policies can be compared.
        """
        if to not in POLICIES:
            raise ValueError(f"policy = {to!r}; choose one of {', '.join(POLICIES)}")
        self.draining_to = to
        self._end_drain()

    def _end_drain(self) -> None:
        if self.draining_to and not self.running:
            self.policy, self.draining_to = self.draining_to, None
            self.prefixes.clear()

    def plan(self, now: float) -> Plan | None:
        """Decide the next step, or None if there is nothing to do. Touches no array and waits for nothing."""
        admitted = self._admit(now)
        blocked = tuple(self.free) if self.waiting else ()
        decoding = [r for r in self.running.values() if r.phase == "decode" and r.planned < r.max_tokens]
        decodes = tuple(Decode(r, r.slot, len(r.prompt) + r.planned - 1) for r in decoding)
        prefilling = [r for r in self.running.values() if r.phase == "prefill"]
        chunks = self._chunks(prefilling, self.budget - len(decodes))
        if not (chunks or decodes):
            return None
        self.steps += 1
        scrubs = tuple((r.slot, *self._unproven.pop(r.slot)) for r in admitted if r.slot in self._unproven)
        held = tuple(r for r in prefilling if all(r is not chunk.request for chunk in chunks))
        emitters = tuple(chunk for chunk in chunks if chunk.emits) + decodes
        for member in emitters:
            member.request.planned += 1
        seen = blocked, len(self.waiting), self.policy
        read_at_once = self.hurry and any(chunk.emits for chunk in chunks)
        return Plan(self.steps, now, admitted, scrubs, chunks, decodes, held, *seen, emitters, read_at_once)

    def _admit(self, now: float) -> tuple[Request, ...]:
        """Give free slots to requests in line, oldest first."""
        free, admitted, room = self.free, [], self._room(len(self.free))
        while self.waiting and free and len(admitted) < room:
            _, request = self.waiting.popitem(last=False)
            request.slot, request.why = self.prefixes.place(request.trail, free)
            request.admitted, request.policy = now, self.policy
            self.running[request.id] = request
            free.remove(request.slot)
            admitted.append(request)
        return tuple(admitted)

    def _room(self, free: int) -> int:
        """How many requests may be admitted now, if so many slots are free. The policies differ in this alone."""
        room = {
            "continuous": free,  # whenever a slot is free
            "static": 0 if self.running else free,  # a batch at a time: when the last one has drained
            "serial": 0 if self.running else 1,  # one at a time
        }[self.policy]
        return 0 if self.draining_to else room

    def _chunks(self, requests: Iterable[Request], left: int) -> tuple[Chunk, ...]:
        """Cut prompts into chunks, oldest first, until what is left of the step's budget is spent.

        A long prompt makes its neighbours wait for one chunk at a time, and short prompts share a step. The last chunk
        of a step is cut where the budget ends. A whole chunk is let in always: however many rows decode, some prompt
        moves on in every step. So no request starves, and no step costs more than max(budget, decoding rows + chunk).
        """
        left = max(left, self.chunk)
        chunks: list[Chunk] = []
        for request in requests:
            start, source = request.prefilled, None
            if start == 0:
                # The prefix is matched when prefill starts. A request that shares a chunk which this step is writing
                # waits one step, and takes it over then. So of eight prompts that arrive together and begin alike,
                # the first writes the common part, and seven take it over.
                start, source = self.prefixes.best(request.trail, request.slot, self.chunk)
                if any(self.prefixes.share(request.trail, chunk.request.trail, start + self.chunk) for chunk in chunks):
                    continue  # it waits for rows, not for the budget, so later prompts may have that
            price = self._price(start)
            fitting = int(min(left, self.chunk) / price)
            if fitting < 1:
                break  # later requests do not overtake
            stop = min(start + fitting, len(request.prompt))
            cost = math.ceil((stop - start) * price)
            left -= cost
            self._fill(request, start, stop, source)
            copied = None if source == request.slot else source  # rows in the request's own slot need no copy
            ends = stop == len(request.prompt)
            chunks.append(Chunk(request, request.slot, start, stop, cost, copied, ends))
        return tuple(chunks)

    def _price(self, start: int) -> float:
        """What a token takes of the budget if its chunk begins at this row: more, the more rows it looks back on.

        At `far` a token's work has doubled. If a token cost the same everywhere, the last chunks of a long prompt would
        be several times the work of its first, and its neighbours would wait for that. But no chunk is cut narrower
        than NARROWEST for it, since a step has a price of its own, too.
        """
        return min(1 + start / self.far, max(1, self.chunk / NARROWEST))

    def _fill(self, request: Request, start: int, stop: int, source: int | None) -> None:
        """Keep account of what the slot holds. Once this step has run, it is the prompt's first `stop` rows."""
        if request.prefilled == 0:
            request.reused = start
            self.prefixes.begin(request.slot, source)
        request.prefilled = stop
        self.prefixes.hold(request.slot, request.trail, stop)

    def commit(self, plan: Plan, tokens: Sequence[int], accept: Accept, now: float) -> list[Request]:
        """Hand each emitter its token and free the slots of those that end. Returns the ended.

        Results belong to requests, not to slots: a slot may have a new owner by the time its token is read.
        """
        ended = []
        for member, token in zip(plan.emitters, tokens, strict=True):
            request = member.request
            if request.finish_reason is not None:
                continue  # a ghost: it ended after this step had been planned
            request.answer.append(token)
            if reason := accept(request, token) or ("length" if request.committed == request.max_tokens else None):
                self.finish(request, reason, now)
                ended.append(request)
        return ended

    def finish(self, request: Request, reason: str, now: float) -> None:
        """End a request in whatever phase it is; its slot is free for the next plan. A second end changes nothing.

        A step that is still in flight may write a ghost's row into that slot. This is harmless: the device runs in
        order, so the next owner's rows are written later, and it depends on no row that it has not written.
        """
        if request.finish_reason is not None:
            return
        request.finish_reason, request.ended = reason, now
        self.waiting.pop(request.id, None)
        if self.running.pop(request.id, None):
            self.prefixes.use(request.slot)
            self._doubt(request)
            self._end_drain()

    def _doubt(self, request: Request) -> None:
        """Note which of its rows may hold numbers that are not finite: those that no token has vouched for.

        If a token's logits were finite, so were all rows before it, since they were computed from them. (Others come
        back as token -1, and end the request with an error.) No token vouches for a prompt whose first token never
        came, nor for anything after an error, nor for a ghost's row, if a step that was planned before the end is in
        flight. A device may write some rows more, if it pads a chunk; a whole chunk more covers them.
        """
        proven, written = len(request.prompt) + request.committed - 1, len(request.prompt) + request.planned
        if request.finish_reason == "error" or request.committed == 0:
            proven = 0
            self.prefixes.forget(request.slot)  # no other prompt may take these rows over
        else:
            # The newest token's row is not written yet, unless by a ghost.
            self.prefixes.hold_answer(request.slot, request.trail, request.answer[:-1])
        if request.prefilled and (proven == 0 or request.planned > request.committed):
            self._unproven[request.slot] = proven, written + self.chunk

    def start_over(self, still_open: Iterable[Request]) -> None:
        """Begin with a new slab, and with these requests in line, in the order in which they came.

        After a failure this is what remains. None of them has yielded a token yet: one that has cannot begin again.
        """
        self.prefixes = Prefixes(self.slots, min(PIECE, self.chunk))
        self._unproven: dict[int, tuple[int, int]] = {}  # slot -> its rows that may hold numbers that are not finite
        self.running: dict[int, Request] = {}  # by id, in the order of admission; each knows its slot
        # By id: first come, first served; any may leave.
        self.waiting = OrderedDict((r.id, r) for r in sorted(still_open, key=lambda r: r.id))
        for request in self.waiting.values():
            assert request.committed == 0, request
            request.slot, request.admitted, request.policy = None, None, ""
            request.reused = request.prefilled = request.planned = 0
            request.trail = self.prefixes.read(request.prompt, request.shares)
        self._end_drain()

    def check(self) -> None:
        """Assert every invariant of this file."""
        assert sorted([*(r.slot for r in self.running.values()), *self.free]) == list(range(self.slots)), self.running
        for r in self.running.values():
            assert r.finish_reason is None and 0 <= r.reused <= r.prefilled <= len(r.prompt), r
            assert r.prefilled in (0, self.prefixes.rows[r.slot]), r
            assert 0 <= r.committed <= r.planned <= min(r.max_tokens, r.committed + 2), r
            assert r.planned == 0 or r.prefilled == len(r.prompt), r
        assert all(r.slot is None and r.planned == 0 for r in self.waiting.values()), self.waiting
        assert [*self.running, *self.waiting] == sorted([*self.running, *self.waiting]), "not first come first served"
