"""Chapter 3: what runs next. The scheduler knows requests, slots and a budget, but no model, no
array and no clock.

The problem. A device is fast when it works on many sequences at once, but requests arrive at any
moment, and their answers end at any moment. *Serial* serving answers one request after the other.
*Static* batching admits as many as it has slots, and admits no more until the slowest of them has
ended. *Continuous* batching decides anew in every step: a request that has ended leaves its slot,
the next in the queue takes it, and a long prompt is cut into chunks, so that the requests that are
already decoding never wait for more than a chunk of it. Prompts that are read at the same time
share a step's budget: the shortest goes first, and the oldest keeps half.

    step | slot 0    slot 1         p  prefill: the last chunk of a prompt (P: any other chunk)
       1 | A:p       B:p            d  decode: one row, one new token
       2 | A:d       B:d
       3 | A:d       B:d            <- A ends here
       4 | C:p       B:d            <- C is admitted while B decodes

A step is planned, run and committed: plan -> run -> commit. `plan` returns a frozen `Plan`; the
engine runs it on the device; `commit` takes the sampled tokens. The engine may plan step N+1 before
it has committed step N (run-ahead, or async scheduling). So a request has two separate counters:
how many tokens are *planned*, and how many are *committed*. The end of an answer is seen one step
late (unless `max_tokens` ends it, which is known in advance). By then the next step has been
planned. It runs the ended sequence once more, as a *ghost*, and that token is dropped.

Some output can be predicted, because it repeats earlier text. This is speculative decoding. A
decode is a chunk of one row; with a *draft* of g tokens it has 1 + g rows, and each row yields a
token. The first row's token is always valid. As long as a draft token equals the token that was
sampled in its place, the next row is valid, too. So a step yields several tokens, the same ones as
without a draft: `commit` accepts draft tokens up to the first that differs. A rejected one has
wasted its row, which the correct token later overwrites. A step with draft tokens is committed
before the next one is planned.

A slot keeps its last prompt and answer, as far as their rows are proven to be finite (no NaN), even
if the request was cancelled. A new prompt with the same prefix continues from there, or has the
common rows copied from a slot that holds them. That is prefix caching (`prefix.py`): a system
prompt is computed once, and a chat's next message reads only what is new. With a slot cache on disk,
rows that would be overwritten are saved first, and a prompt whose rows are there waits in its slot
while they are read (`engine/disk_prefix_cache.py`).

The invariants, which `check` asserts:
    a slot has one owner or none; a waiting request has no slot
    0 <= committed <= planned <= max_tokens; planned is at most two steps ahead, or one with a draft
    the queue is in the order of arrival

Where next: `policies.py`, the admission policies. Then `prefix.py`, which tells the scheduler which
slot suits a new prompt, and which slot holds the rows of its prefix.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from prefix import SEGMENT, Prefixes, Remembered, Source, Trail

if TYPE_CHECKING:
    from engine.disk_prefix_cache import RestoredRows
    from prompt_lookup import PromptLookup
    from state_places import Move, Place


class QueueFull(RuntimeError):
    """The queue has reached its limit. Raised at once; other requests are not affected."""


@dataclass(eq=False, slots=True)
class Request:
    """One prompt on its way through the engine."""

    # What was asked for (`Engine.submit`)
    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    arrived: float
    prefix_cache: bool = True  # may it share rows with other prompts?
    client: str = ""  # any name for the user; all without a name are one client
    # In the queue (`policies.py`)
    came: int = 0  # steps planned before the request arrived
    turn: int = 0  # under `fair`: the last step that admitted its client while this one waited
    # Admission
    policy: str = ""  # under which it was admitted
    slot: int | None = None
    why: str = ""  # why the scheduler chose this slot
    admitted: float | None = None
    # Prefix caching (`prefix.py`)
    trail: Trail = field(default_factory=Trail)  # its prompt's path in the prefix tree
    cached: int = 0  # prompt tokens found in the prefix cache, in memory or on disk
    cached_from: str = ""  # "slot" (its own) | "other_slot" | "disk"
    reread: int = 0  # prompt tokens whose rows were there, but no state that serves so many
    own: int = 0  # of these, the tokens whose rows the same client wrote
    restored: RestoredRows | None = None  # found on disk when it was admitted
    # Progress, planned and committed
    prefilled: int = 0  # prompt tokens in the slab once all planned steps have run
    proven: int = 0  # rows of its slot, from the first on, that are known to be finite
    planned: int = 0  # output tokens of all planned steps, the newest step's draft included
    answer: list[int] = field(default_factory=list)  # output tokens read back so far
    # Speculative decoding (`prompt_lookup.py`)
    draft_source: PromptLookup | None = None  # None: nothing is drafted
    draft_tokens: int = 0  # proposed so far
    accepted_tokens: int = 0  # of these
    # The end
    ended: float | None = None
    finish_reason: str | None = None  # "stop" | "length" | "cancelled" | "error"

    @property
    def committed(self) -> int:
        return len(self.answer)

    def admit(self, now: float, policy: str, slot: int, why: str) -> None:
        """Move from the queue into a slot."""
        self.admitted = now
        self.policy = policy
        self.slot = slot
        self.why = why

    def best_source(
        self, prefixes: Prefixes, written: Collection[int], worth: int
    ) -> tuple[int, Source]:
        """The number of cached rows to start with, and where they are: in memory or, if there are at
        least `worth` more of them, on disk. `written`: as in `Prefixes.best_source`."""
        rows, source = prefixes.best_source(self.trail, self.slot, written)
        if self.restored and self.restored.rows >= rows + worth:
            return self.restored.rows, self.restored
        return rows, source

    def begin(self, chunk: Chunk, prefixes: Prefixes, worth: int) -> None:
        """Take over the cached rows before the first chunk. `worth`: as in `Prefixes.begin`.

        Clients are told of their own rows alone, because any other number would confirm a guess at
        another client's prompt.
        """
        source = chunk.source
        self.cached = chunk.start
        # Rows copied from another slot may still be in flight themselves.
        self.proven = chunk.start if source is None else 0
        own = prefixes.rows_of(self.client, self.trail)
        saved = self.restored.own if self.restored else 0
        self.own = min(chunk.start, max(own, saved))
        prefixes.begin(chunk.slot, source, chunk.start, self.client, worth)
        self.restored = None
        if source is None:
            self.cached_from = "slot" if chunk.start else ""
        else:
            self.cached_from = "other_slot" if isinstance(source, int) else "disk"

    def take(self, token: int) -> None:
        """Append a token to the answer. Its finite logits prove that all rows before it are finite.

        -1: the logits were not finite. Some row is the cause, so none counts as proven any more.
        """
        if token < 0:
            self.proven = 0
            return
        self.answer.append(token)
        self.proven = len(self.prompt) + self.committed - 1

    def settle(self, drafted: int, accepted: int) -> None:
        """Count the draft of a step. All its tokens have been read back, none is in flight."""
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.planned = self.committed

    def requeue(self) -> None:
        """Return to the queue: the slab is new. A request that has yielded a token cannot return."""
        assert self.committed == 0, self
        self.slot = self.admitted = None
        self.policy = ""
        self.cached_from = ""
        self.cached = self.reread = self.prefilled = self.proven = self.planned = 0

    def check(self) -> None:
        """Assert the invariants of a request in a slot."""
        assert self.finish_reason is None, self
        assert 0 <= self.cached <= self.prefilled <= len(self.prompt), self
        assert 0 <= self.committed <= self.planned <= self.max_tokens, self
        assert self.planned <= self.committed + 2 or self.draft_tokens, self
        assert self.planned == 0 or self.prefilled == len(self.prompt), self
        assert 0 <= self.proven <= self.prefilled + self.committed, self

    @property
    def is_reading(self) -> bool:
        """True during prefill, unless its cached rows are still loading."""
        return self.phase == "prefill" and not self.waits_for_disk

    @property
    def waits_for_disk(self) -> bool:
        """True while rows of its prompt are searched on disk and read."""
        return self.restored is not None and not self.restored.is_ready

    @property
    def next_row(self) -> int:
        """The row of the newest planned token. The prompt's last token yields the first of them."""
        return len(self.prompt) + self.planned - 1

    @property
    def phase(self) -> str:
        if self.finish_reason is not None:
            return "done"
        if self.slot is None:
            return "queued"
        return "prefill" if self.prefilled < len(self.prompt) else "decode"


class Chunk(NamedTuple):
    """A part of a prompt, prompt[start:stop], to be written into the slot's rows start..stop."""

    request: Request
    slot: int
    start: int
    stop: int
    cost: int  # of the budget: each token has a price
    source: Source  # before this chunk, rows [0:start] are copied from this slot, or from disk
    draft: tuple[int, ...] = ()  # nothing is drafted after a prompt

    @property
    def emits(self) -> bool:
        """The last chunk of a prompt yields a token, the one that follows the prompt."""
        return self.stop == len(self.request.prompt)


class Decode(NamedTuple):
    """One step of one answer: the newest token goes into row `position`.

    That token is known, even emitted, but has no row in the slab yet. The row yields the next token.
    Draft tokens go into the rows after it, and each yields the token that would follow it.
    """

    request: Request
    slot: int
    position: int
    draft: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision for one step: which requests take part, in which slots."""

    step: int
    at: float  # when it was planned, by the engine's clock
    admitted: tuple[Request, ...]
    scrubs: tuple[tuple[int, int, int], ...]  # (slot, start, stop): rows to be zeroed first
    chunks: tuple[Chunk, ...]
    decodes: tuple[Decode, ...]
    # In prefill, but without a chunk: the budget was spent, a common prefix is being written, or rows
    # are read from disk
    held: tuple[Request, ...]
    blocked: tuple[int, ...]  # free slots that the policy or a drain keeps free
    waiting: int  # requests left in the queue
    policy: str  # the policy's name at that time
    overwritten: tuple[Remembered, ...] = ()  # what this step makes slots forget
    moves: Mapping[int, Move] = field(default_factory=dict)  # of states, by slot

    @property
    def emitters(self) -> tuple[Chunk | Decode, ...]:
        """The chunks and decodes that yield tokens."""
        asked = [chunk for chunk in self.chunks if chunk.emits]
        return (*asked, *self.decodes)

    @property
    def draft_tokens(self) -> int:
        return sum(len(decode.draft) for decode in self.decodes)

    @property
    def cost(self) -> int:
        """Of the budget, in tokens."""
        rows = len(self.decodes) + self.draft_tokens
        return rows + sum(chunk.cost for chunk in self.chunks)

    def is_due(self, eager_first_token: bool) -> bool:
        """True if its tokens must be read before the next step is planned: with draft tokens, always.

        `eager_first_token`: also if one of them is the first of an answer.
        """
        if self.draft_tokens:
            return True
        return eager_first_token and any(chunk.emits for chunk in self.chunks)


class Committed(NamedTuple):
    """The outcome of a step."""

    ended: list[Request]
    ghosts: tuple[int, ...]  # slots whose request had ended before: their tokens were dropped
    drafts: tuple[tuple[int, int, int], ...]  # (slot, draft tokens, accepted)


class Policy(NamedTuple):
    """An admission policy (`policies.py`)."""

    name: str
    does: str  # a description of one sentence, for users
    room: Callable[[int, int], int]  # (free slots, running requests) -> how many to admit now
    # Yields the waiting requests in the order of admission. The scheduler takes no more than it
    # admits, so `next` may count each of them as admitted.
    next: Callable[[Scheduler], Iterator[Request]]


# Called with the decoding requests and the rows that are left in the budget. Returns draft tokens by
# request id, for requests whose tokens have all been read, and at most as many as `max_tokens` leaves.
# So no draft gets a row beyond the slot's end.
ProposeDrafts = Callable[[Sequence[Request], int], Mapping[int, tuple[int, ...]]]
# Called with a request and the fewest rows that are worth reading. Returns what is on disk.
FindSaved = Callable[[Request, int], "RestoredRows | None"]
Tokens = Sequence[Sequence[int]] | Mapping[int, Sequence[int]]  # by slot: a token for each row
Accept = Callable[[Request, int], str | None]  # delivers a token; returns why the answer ends


NARROWEST = 16  # the fewest tokens of a chunk, however late in a prompt
NEVER = 2**63  # a row that is never reached


def price_of(row: int, far: int, chunk: int) -> float:
    """What each token of a chunk that starts at this row takes from the budget: 1 at the start of a
    prompt, 2 at row `far`.

    A token late in a prompt attends to all before it. At the price of an early one, the last chunks
    of a long prompt would make the decoding requests wait several times as long. But the price
    never makes a chunk shorter than NARROWEST, because a step also has a fixed cost.
    """
    price = 1 + row / far
    return min(price, max(1, chunk / NARROWEST))


def check_positive(**limits: int) -> None:
    """Raise ValueError for a limit that would admit nothing."""
    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"{name} = {value:,}, but it must be at least 1")


class Stateless:
    """What a scheduler asks of a model's states, if it has none: all layers keep rows. Otherwise
    `state_places.py` answers."""

    checkpoints: Sequence[Place] = ()  # states that any prompt may start from

    def clear(self, prefixes: Prefixes) -> None:
        """Forget all states."""

    def end_of_chunk(self, request: Request, start: int, stop: int) -> int:
        """Where a chunk of a prompt ends, at most at `stop`."""
        return stop

    def plan(self, chunks: Sequence[Chunk], decodes: Sequence[Decode]) -> Mapping[int, Move]:
        """Where each sequence of a step continues, by slot, and where its state goes."""
        return {}

    def leave(self, request: Request) -> None:
        """A request leaves its slot."""

    def check(self) -> None:
        """Assert the invariants."""


class Scheduler:
    """The queue, the running requests, and the prefix cache of the slots.

    `slots`, `max_len`: the number of sequences that run at once, and the tokens that each may have.
    `chunk`, `budget`: the most tokens of a chunk, and of a step.
    `far`: the row at which attention costs a token as much as the rest of its layer.
    `draft`: proposes draft tokens.
    """

    def __init__(
        self,
        slots: int,
        max_len: int,
        policy: Policy,
        *,
        chunk: int = 64,
        budget: int = 200,
        far: int = NEVER,
        draft: ProposeDrafts = lambda decoding, left: {},
        max_queue: int = 10_000,
    ):
        check_positive(slots=slots, max_len=max_len, max_queue=max_queue)
        self.far = far
        self.draft = draft
        self.find_saved: FindSaved | None = None  # set by an engine with a slot cache
        self.states = Stateless()
        self.max_queue = max_queue
        self.policy = policy
        self.draining_to: Policy | None = None
        self.steps = 0
        self.submitted = 0
        self.running: dict[int, Request] = {}  # by id, in the order of admission
        self.waiting: OrderedDict[int, Request] = OrderedDict()  # by id, in the order of arrival
        self.resize(slots, max_len, chunk, budget)

    def resize(self, slots: int, max_len: int, chunk: int, budget: int) -> None:
        """Start over with a slab of this size, and these limits on chunk and step."""
        self.set_budget(budget, chunk)
        self.slots = slots
        self.max_len = max_len
        self.start_over()

    def set_budget(self, budget: int, chunk: int) -> None:
        """Bound each step that is planned from now on, and each chunk of a prompt."""
        check_positive(budget=budget, chunk=chunk)
        self.budget = budget
        self.chunk = chunk

    @property
    def free(self) -> list[int]:
        """Slots without an owner, the least recently used first."""
        taken = {request.slot for request in self.running.values()}
        return [slot for slot in self.prefixes.by_use if slot not in taken]

    # --- the queue, and the policy

    def submit(self, request: Request) -> None:
        """Queue a request. Its worst case must fit a slot, so nothing is ever evicted."""
        prompt = len(request.prompt)
        total = prompt + request.max_tokens
        if total > self.max_len:
            wanted = f"prompt {prompt:,} + max_tokens {request.max_tokens:,} = {total:,}"
            raise ValueError(f"{wanted}, but a slot holds {self.max_len:,} (max_len)")
        # Requests that the next step admits do not count
        waiting = len(self.waiting) - self._room()
        if waiting >= self.max_queue:
            limit = f"max_queue is {self.max_queue}"
            raise QueueFull(f"{waiting} requests are waiting, and {limit}; try later")
        request.trail = self.prefixes.trail(request.prompt, request.prefix_cache)
        request.came = self.steps
        self.waiting[request.id] = request
        self.submitted += 1

    def drain(self, to: Policy) -> None:
        """Change the policy once all running requests have ended; until then nothing is admitted.

        Then the prefix cache is cleared, so that runs under two policies can be compared.
        """
        self.draining_to = to
        self._end_drain()

    def _end_drain(self) -> None:
        if self.draining_to and not self.running:
            self.policy = self.draining_to
            self.draining_to = None
            self.prefixes.clear()

    # --- plan

    def plan(self, now: float) -> Plan | None:
        """Decide the next step. None if there is nothing to do."""
        admitted = self._admit(now) if self.waiting else []
        blocked = tuple(self.free) if self.waiting else ()
        running = list(self.running.values())
        decoding = [r for r in running if r.phase == "decode" and r.planned < r.max_tokens]
        chunks = self._chunks(self.reading(), self.budget - len(decoding))
        if not (chunks or decoding):
            return None
        left = self.budget - len(decoding) - sum(chunk.cost for chunk in chunks)
        drafts = self.draft(decoding, left) if decoding else {}
        decodes = [Decode(r, r.slot, r.next_row, drafts.get(r.id, ())) for r in decoding]
        self.steps += 1
        dirty = [r.slot for r in running if r.prefilled and r.slot in self._to_scrub]
        scrubs = [(slot, *self._to_scrub.pop(slot)) for slot in dirty]
        chunked = {chunk.request.id for chunk in chunks}
        plan = Plan(
            step=self.steps,
            at=now,
            admitted=tuple(admitted),
            scrubs=tuple(scrubs),
            chunks=tuple(chunks),
            decodes=tuple(decodes),
            held=tuple(r for r in running if r.phase == "prefill" and r.id not in chunked),
            blocked=blocked,
            waiting=len(self.waiting),
            policy=self.policy.name,
            overwritten=self.prefixes.take_overwritten() if chunks else (),
            moves=self.states.plan(chunks, decodes),
        )
        for member in plan.emitters:
            # From here to its commit, the request is one token ahead, or more with draft tokens.
            member.request.planned += 1 + len(member.draft)
        return plan

    def _admit(self, now: float) -> list[Request]:
        """Give free slots to waiting requests."""
        free = self.free
        # Slots of requests that have not begun are about to lose what they hold
        running = [r.slot for r in self.running.values() if r.prefilled]
        admitted = list(islice(self.policy.next(self), self._room()))
        for request in admitted:
            del self.waiting[request.id]
            chosen = self.prefixes.choose_slot(request.trail, free, running)
            request.admit(now, self.policy.name, *chosen)
            if self.find_saved:
                held, _ = self.prefixes.match(request.trail, range(self.slots))
                request.restored = self.find_saved(request, held + self.chunk)
            self.running[request.id] = request
            free.remove(request.slot)
        return admitted

    def _room(self) -> int:
        """How many requests may be admitted now."""
        if self.draining_to:
            return 0
        running = len(self.running)
        free = self.slots - running
        return max(0, min(free, self.policy.room(free, running)))

    def reading(self) -> list[Request]:
        """The requests in prefill, the oldest first, but for those that wait for rows from disk."""
        return [r for r in self.running.values() if r.is_reading]

    def _chunks(self, requests: Sequence[Request], left: int) -> list[Chunk]:
        """Share the rest of the step's budget among prompts, given oldest first.

        The prompt with the fewest tokens left goes first, so a short prompt does not wait for a
        long one. But half is kept for the oldest, as far as the oldest can use it. So the oldest
        makes progress in every step. Each prompt becomes the oldest, and none starves.

            step | budget 8 for L, a prompt of 24 tokens, and S, of 6, which arrives in step 2
               1 | L[0:8]
               2 | S[0:4] L[8:12]
               3 | S[4:6] L[12:18]
               4 | L[18:24]

        If the budget runs out, a chunk is shortened. However many requests decode, one whole
        chunk always fits. So no step costs more than max(budget, decoding rows + chunk).

        A new prompt waits while another one with a common prefix of a chunk or more is in prefill.
        So of eight prompts that arrive together with a common prefix, the oldest computes it, and
        the other seven copy its rows.
        """
        if not requests:
            return []
        left = max(left, self.chunk)
        oldest = requests[0]
        kept = 0
        if len(requests) > 1:
            kept = self._cut(oldest, left - left // 2).cost
            requests = sorted(requests, key=self._rest)
        reads = [oldest.trail]
        chunks: list[Chunk] = []
        for request in requests:
            if request is oldest:
                kept = 0
            chunk = self._cut(request, left - kept, [chunk.slot for chunk in chunks])
            is_new = request.prefilled == 0 and request is not oldest
            if is_new and self.prefixes.begin_alike(request.trail, reads, chunk.start + self.chunk):
                continue
            if chunk.stop > chunk.start:
                left -= chunk.cost
                reads.append(request.trail)
                self._note(chunk)
                chunks.append(chunk)
        return chunks

    def _cut(self, request: Request, left: int, written: Collection[int] = ()) -> Chunk:
        """The next chunk of a prompt, as long as `left` of the budget allows. It may be empty.
        `written`: the slots that this step has written so far."""
        start = request.prefilled
        source = None
        if start == 0:
            start, source = request.best_source(self.prefixes, written, self.chunk)
        price = price_of(start, self.far, self.chunk)
        tokens = min(len(request.prompt) - start, int(min(left, self.chunk) / price))
        stop = self.states.end_of_chunk(request, start, start + tokens)
        cost = math.ceil((stop - start) * price)
        return Chunk(request, request.slot, start, stop, cost, source)

    def _rest(self, request: Request) -> int:
        """The number of prompt tokens that are left to be read."""
        return len(request.prompt) - self._cut(request, 0).start

    def _note(self, chunk: Chunk) -> None:
        """Note that the slot will hold the prompt up to the end of this chunk."""
        request = chunk.request
        if request.prefilled == 0:
            request.begin(chunk, self.prefixes, worth=self.chunk)
        request.prefilled = chunk.stop
        self.prefixes.hold(chunk.slot, request.trail, chunk.stop)

    # --- commit

    def prove(self, plan: Plan, finite: Collection[int]) -> None:
        """Record that the chunks in these slots are finite, and so are all rows before them.

        A request that was cancelled in the meantime leaves its rows in the prefix cache, unless the
        slot has a new owner.
        """
        for chunk in plan.chunks:
            request = chunk.request
            if chunk.slot in finite and self.prefixes.is_held_by(chunk.slot, request.trail):
                request.proven = chunk.stop
                if request.finish_reason:
                    self._leave_slot(request)

    def commit(self, plan: Plan, tokens: Tokens, accept: Accept, now: float) -> Committed:
        """Give each request its sampled tokens, and free the slots of requests that finish.

        `tokens`: by slot, the token of each of its rows. Those after a rejected draft token are
        dropped.

        Results belong to requests, not to slots: when a token is read back, its slot may have a new
        owner.
        """
        ended = []
        ghosts = []
        drafts = []
        for member in plan.emitters:
            request = member.request
            draft = member.draft
            before = request.committed
            said = tokens[member.slot][: 1 + len(draft)]
            if request.finish_reason is not None:
                ghosts.append(member.slot)  # it ended after this step had been planned
                said = []
            elif draft and min(said) < 0:
                self._begin_again(member)
                said = []
            for token, drafted in zip(said, (*draft, None), strict=False):
                request.take(token)
                reason = accept(request, token)
                if reason is None and request.committed == request.max_tokens:
                    reason = "length"
                if reason:
                    self.finish(request, reason, now)
                    ended.append(request)
                if reason or token != drafted:
                    break
            if draft:
                # The last of its tokens is new. Those before were draft tokens
                accepted = max(0, request.committed - before - 1)
                drafts.append((member.slot, len(draft), accepted))
                request.settle(len(draft), accepted)
        return Committed(ended, tuple(ghosts), tuple(drafts))

    def _begin_again(self, decode: Decode) -> None:
        """Retry a decode without its draft, because a row is not finite. No token of it is taken.

        subtle: a row does not see the draft tokens after it: their weight is 0. But 0 x NaN is NaN. So
        a rejected token whose keys are not finite corrupts the valid rows before it in the same
        window. All rows of this decode are zeroed, and the request continues without drafts. If the
        newest token itself is the cause, that shows in the next step.
        """
        decode.request.draft_source = None
        self._to_scrub[decode.slot] = (decode.position, decode.request.next_row + 1)

    def finish(self, request: Request, reason: str, now: float) -> None:
        """End a request in any phase. Its slot is free for the next plan.

        A step in flight may still write a ghost's row into that slot. This is harmless: the device
        runs in order, so the next owner's rows are written later.
        """
        if request.finish_reason is not None:
            return  # it has ended already
        request.finish_reason = reason
        request.ended = now
        self.waiting.pop(request.id, None)
        if self.running.pop(request.id, None):
            self._leave_slot(request)
            self._end_drain()

    def _leave_slot(self, request: Request) -> None:
        """Record what the slot holds, and which of its rows are to be zeroed.

        The prefix cache keeps the rows that are proven to be finite (`prove`, `Request.take`). All
        others may hold NaN, and are zeroed before the next owner writes: the rows of a chunk in
        flight, of a ghost, or of draft tokens after the end of the answer.
        """
        slot = request.slot
        if request.prefilled == 0:
            return  # nothing was written: the slot is as it was before
        self.prefixes.use(slot)
        if request.prefix_cache:
            self.prefixes.hold_answer(slot, request.trail, request.answer, request.proven)
        self.states.leave(request)
        if request.committed == 0 or request.next_row > request.proven:
            # A GPU pads a chunk: it writes less than a chunk of rows more
            written = request.prefilled + request.planned
            self._to_scrub[slot] = (request.proven, written + self.chunk)

    # --- starting over, and checking

    def start_over(self) -> None:
        """Begin with a new slab. All requests return to the queue, in the order of arrival."""
        self.waiting = OrderedDict(sorted((self.running | self.waiting).items()))
        self.running.clear()
        self.prefixes = Prefixes(self.slots, min(SEGMENT, self.chunk))
        self.states.clear(self.prefixes)
        self._to_scrub: dict[int, tuple[int, int]] = {}  # slot -> rows that may not be finite
        for request in self.waiting.values():
            request.requeue()
            request.trail = self.prefixes.trail(request.prompt, request.prefix_cache)
        self._end_drain()

    def check(self) -> None:
        """Assert every invariant of this file."""
        owned = [r.slot for r in self.running.values()]
        assert sorted([*owned, *self.free]) == list(range(self.slots)), self.running
        for r in self.running.values():
            assert r.prefilled in (0, self.prefixes.rows[r.slot]), r
            r.check()
        self.states.check()
        for r in self.waiting.values():
            assert r.slot is None and r.planned == 0, r
        assert list(self.waiting) == sorted(self.waiting), "the queue is out of order"
