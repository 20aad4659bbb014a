"""Chapter 3, third part: what runs next. The scheduler knows requests, slots and a budget, but no model, no
array and no clock.

The problem. A device is fast when it works on many sequences at once, but requests arrive at any
moment, and their answers end at any moment. *Serial* serving answers one request after the other.
*Static* batching admits as many as it has slots, and admits no more until the slowest of them has
ended. *Continuous* batching decides again in every step: a request that has ended leaves its slot,
the next in the queue takes it, and a long prompt is cut into chunks, so that the requests that are
already decoding never wait for more than a chunk of it.

    step | slot 0    slot 1         p  prefill: the last chunk of a prompt (without run-ahead)
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

A decode may have *draft* tokens (speculative decoding, `prompt_lookup.py`). Each adds a row, and
each row yields a token. `commit` accepts draft tokens up to the first that differs from the token
sampled in its place. A step with draft tokens is committed before the next one is planned.

A slot keeps the rows of its last request for prefix caching (`prefix.py`). A new prompt with the
same prefix continues from them, or has them copied from the slot that holds them.

The invariants, which `check_invariants` asserts:
    a slot has one owner or none; a waiting request has no slot
    0 <= committed <= planned <= max_tokens; without drafts, planned is at most two tokens ahead
    the queue is in the order of arrival

Where next: `policies.py`, the admission policies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import islice

from prefix import SEGMENT, Prefixes, Trail
from request import (
    PADDING,
    Accept,
    Admission,
    Chunk,
    Committed,
    Decode,
    End,
    FindSaved,
    Plan,
    Policy,
    ProposeDrafts,
    QueueFull,
    Request,
    Stateless,
    Tokens,
)

UNLIMITED = 2**63


class Scheduler:
    """The queue, the running requests, and the prefix cache of the slots.

    `slots`, `max_len`: the number of sequences that run at once, and the tokens that each may have.
    `chunk`: the most tokens of a chunk. `budget`: the most tokens of a step, exceeded only so that all
    decoding requests and one whole chunk fit. `draft`: proposes draft tokens.
    """

    def __init__(
        self,
        slots: int,
        max_len: int,
        policy: Policy,
        *,
        chunk: int = 64,
        budget: int = 200,
        draft: ProposeDrafts = lambda decoding, left: {},
        max_queue: int = 10_000,
    ):
        check_positive(slots=slots, max_len=max_len, max_queue=max_queue)
        self.draft = draft
        self.find_saved: FindSaved | None = None  # set by the engine if it has a slot cache
        self.states = Stateless()  # replaced for a model with states
        self.max_queue = max_queue
        self.policy = policy
        self.draining_to: Policy | None = None
        self.steps = 0
        self.submitted = 0
        self.running: dict[int, Request] = {}  # by id, in the order of admission
        self.waiting: OrderedDict[int, Request] = OrderedDict()  # by id, in the order of arrival
        # Sets the other attributes (`start_over`), such as `prefixes`
        self.resize(slots, max_len, chunk, budget)

    # --- plan and commit

    def plan(self, now: float, prompt_tokens: int = UNLIMITED) -> Plan | None:
        """Decide the next step. Return None if no request can run in it.

        `prompt_tokens`: the limit on prompt and draft tokens in a step that reads a prompt while another
        request decodes.
        """
        self._admitted += self._admit(now) if self.waiting else []
        running = list(self.running.values())
        decoding = [r for r in running if r.phase == "decode" and r.has_next]
        reading = [r for r in running if r.is_reading]
        # Each decoding request takes one token of the budget. The rest is for prompts and drafts: at
        # least a whole chunk, unless the decoding requests would wait too long for it
        rest = max(self.budget - len(decoding), self.chunk)
        if decoding and reading:
            rest = min(rest, prompt_tokens)
        chunks = self._chunks(reading, rest)  # from here on, these chunks count as prefilled
        if not (chunks or decoding):
            return None
        left = rest - sum(chunk.tokens for chunk in chunks)
        drafts = self.draft(decoding, left) if decoding else {}
        decodes = [Decode(r, r.slot, r.next_row, drafts.get(r.id, ())) for r in decoding]
        chunked = {chunk.request.id for chunk in chunks}
        held = [r for r in running if r.phase == "prefill" and r.id not in chunked]
        self.steps += 1
        plan = Plan(
            step=self.steps,
            at=now,
            admitted=tuple(self._admitted),
            # after `_chunks`, which starts new owners: the last owner's unproven rows are zeroed
            scrubs=self._scrubs(running),
            chunks=tuple(chunks),
            decodes=tuple(decodes),
            held=tuple(held),
            blocked=tuple(self.free) if self.waiting else (),
            waiting=len(self.waiting),
            policy=self.policy.name,
            budget=len(decoding) + rest,
            overwritten=self.prefixes.pop_overwritten(),  # what slots lost in `_apply`
            moves=self.states.plan(chunks, decodes),
        )
        self._admitted.clear()
        for member in plan.emitters:
            # Until its commit, the request is one token ahead (two with run-ahead, more with draft tokens)
            member.request.planned += 1 + len(member.draft)
        return plan

    def commit(self, plan: Plan, tokens: Tokens, accept: Accept, now: float) -> Committed:
        """Give each request its sampled tokens, and free the slots of requests that finish.

        The engine calls `prove` before this.

        `tokens`: by slot, the token of each of its rows; -1 if its logits were not finite. Tokens
        after a rejected draft token are dropped.

        Results belong to requests, not to slots: when a token is read back, its slot may have a new
        owner.
        """
        ended = []
        ghosts = []
        drafts = []
        for member in plan.emitters:
            request, draft = member.request, member.draft
            sampled = tokens[member.slot][: 1 + len(draft)]
            accepted = 0
            if request.end:
                ghosts.append(member.slot)  # the request ended after this step was planned
            elif draft and min(sampled) < 0:
                self._retry_without_draft(member)
            else:
                accepted, reason = extend_answer(request, sampled, draft, accept)
                if reason:
                    self.finish(request, reason, now)
                    ended.append(request)
            if draft:
                drafts.append((member.slot, len(draft), accepted))
                # subtle: this resets `planned`. `finish` still needs it, to mark the draft's rows as unproven
                request.settle_draft(len(draft), accepted)
        return Committed(ended, tuple(ghosts), tuple(drafts))

    # --- admission

    def _admit(self, now: float) -> list[Request]:
        """Give free slots to waiting requests."""
        free = self.free
        # Slots whose rows stay. A request without a planned chunk is left out: its slot still has old
        # rows, but will lose them
        staying = [r.slot for r in self.running.values() if r.prefilled]
        admitted = list(islice(self.policy.next(self), self._admissible()))
        for request in admitted:
            del self.waiting[request.id]
            slot, why = self.prefixes.choose_slot(request.prefix.trail, free, staying)
            request.admission = Admission(now, self.policy.name, slot, why)
            if self.find_saved:
                # Only rows that no slot holds are loaded from disk, and only a chunk or more of them
                cached, _ = self.prefixes.match(request.prefix.trail, range(self.slots))
                request.prefix.restored = self.find_saved(request, cached + self.chunk)
            self.running[request.id] = request
            free.remove(slot)
        return admitted

    @property
    def free(self) -> list[int]:
        """Slots without an owner, the least recently used first."""
        taken = {request.slot for request in self.running.values()}
        return [slot for slot in self.prefixes.by_use if slot not in taken]

    def _admissible(self) -> int:
        """The number of requests that may be admitted now."""
        free = self.slots - len(self.running)
        count = 0 if self.draining_to else self.policy.room(free, len(self.running))
        return max(0, min(free, count))

    # --- chunks

    def _chunks(self, requests: Sequence[Request], left: int) -> list[Chunk]:
        """Share the rest of the step's budget among the prompts, which are in the order of admission. Decide
        all chunks, then apply them."""
        chunks = self._allot(requests, left) if requests else []
        for chunk in chunks:
            self._apply(chunk)
        return chunks

    def _allot(self, requests: Sequence[Request], left: int) -> list[Chunk]:
        """Decide what each prompt reads in this step.

        The prompt with the fewest tokens left goes first, so a short prompt does not wait for a
        long one. But half is reserved for the oldest, as far as the oldest can use it. So the oldest
        makes progress in every step. Each prompt becomes the oldest, and none starves.

            step | chunk and budget 8 for L, a prompt of 24 tokens, and S, of 6, which arrives in step 2
               1 | L[0:8]
               2 | S[0:4] L[8:12]
               3 | S[4:6] L[12:18]
               4 | L[18:24]

        If the budget runs out, a chunk is shortened. However many requests decode, `left` allows one
        whole chunk, unless that would take too long for them. So no step has more tokens than
        max(budget, decoding rows + chunk).
        """
        oldest = requests[0]
        unread = {request: self._tokens_left(request) for request in requests}
        reserved = min(left - left // 2, self.chunk, unread[oldest])
        chunks: list[Chunk] = []
        # Of the prompts that this step reads. The oldest is always one of them
        trails = [oldest.prefix.trail]
        for request in sorted(requests, key=unread.__getitem__):
            want = self._want(request, chunks)
            if request is oldest:
                reserved = 0
            elif self._waits_for_prefix(want, trails):
                continue
            chunk = self._cut(want, left - reserved)
            if chunk.tokens:
                left -= chunk.tokens
                chunks.append(chunk)
                trails.append(request.prefix.trail)
        return chunks

    def _waits_for_prefix(self, want: Chunk, trails: Sequence[Trail]) -> bool:
        """True if a new prompt has its next chunk in common with a prompt that this step reads: it
        waits, and will copy those rows.

        If eight prompts with a common prefix of a chunk or more arrive together, one computes its whole
        chunks, and the other seven copy them. (`start` grows with the rows that can be copied, which
        ends the wait. Less than a chunk is not waited for.)
        """
        trail, rows = want.request.prefix.trail, want.start + self.chunk
        return not want.request.prefilled and self.prefixes.begin_alike(trail, trails, rows)

    def _tokens_left(self, request: Request) -> int:
        """The number of tokens of a prompt that are neither in the slab nor on disk."""
        rows = request.prefilled
        if rows == 0:
            rows, _ = self.prefixes.match(request.prefix.trail, range(self.slots), request.slot)
            rows = max(rows, request.prefix.rows_on_disk)
        return len(request.prompt) - rows

    def _want(self, request: Request, before: Sequence[Chunk]) -> Chunk:
        """Return a chunk with the rest of a prompt, from its first row that is not cached in a slot or on disk
        (`engine/disk_prefix_cache.py`).

        `before`: the chunks of this step so far. The rows that they write can be copied, too.
        """
        start, copied_from, restored = request.prefilled, None, None
        if start == 0:
            written = {chunk.slot: (chunk.request.prefix.trail, chunk.stop) for chunk in before}
            reuse = request.prefix
            start, copied_from = self.prefixes.best_source(reuse.trail, request.slot, written)
            # Loading from disk pays off only for a chunk or more
            if reuse.rows_on_disk >= start + self.chunk:
                start, copied_from, restored = reuse.rows_on_disk, None, reuse.restored
        return Chunk(request, request.slot, start, len(request.prompt), copied_from, restored)

    def _cut(self, want: Chunk, left: int) -> Chunk:
        """Shorten a chunk to what is left of the budget, perhaps to nothing."""
        stop = min(want.stop, want.start + min(left, self.chunk))
        return want._replace(stop=self.states.end_of_chunk(want.request, want.start, stop))

    def _apply(self, chunk: Chunk) -> None:
        """Record that the slot holds the prompt up to the end of this chunk."""
        request, slot, trail = chunk.request, chunk.slot, chunk.request.prefix.trail
        if request.prefilled == 0:
            request.begin_prefill(chunk, self.prefixes.rows_of(request.client, trail))
            self.prefixes.assign(slot, request.client, chunk.rows_in_place, save_from=self.chunk)
            if chunk.copied_from is not None:
                self.prefixes.use(chunk.copied_from)
        request.prefilled = chunk.stop
        self.prefixes.record_rows(slot, trail, chunk.stop)

    # --- the end of a request

    def finish(self, request: Request, reason: str, now: float) -> None:
        """End a request in any phase. Its slot is free for the next plan.

        A step in flight may still write a ghost's row into that slot. This is harmless: the device
        runs in order, so the next owner's rows are written later.
        """
        if request.end:
            return
        request.end = End(reason, now)
        self.waiting.pop(request.id, None)
        if self.running.pop(request.id, None):
            self._keep_proven_rows(request)
            self._end_drain()

    def _keep_proven_rows(self, request: Request) -> None:
        """Leave an ended request's proven rows in the prefix cache, and mark the others to be zeroed.
        `prove` calls it again if more rows are proven after the end.

        Rows are proven when they are known to be finite (`prove`, `Request.append_token`). The
        others may hold NaN, and are zeroed before the next owner writes: the rows of a chunk in
        flight, of a ghost, or of draft tokens after the end of the answer.
        """
        slot = request.slot
        if request.prefilled == 0:
            return  # nothing was written
        self.prefixes.use(slot)
        if request.prefix_cache:
            self.prefixes.record_answer(slot, request.prefix.trail, request.answer, request.proven)
        self.states.leave(request)
        # Some rows are not proven if no token was committed, or if a planned one was not: its step is in
        # flight, its draft token was rejected, or its logits were not finite
        if request.committed == 0 or request.planned > request.committed:
            self._to_scrub[slot] = (request.proven, request.prefilled + request.planned + PADDING)

    def prove(self, plan: Plan, finite: Collection[int]) -> None:
        """Record that the chunks in these slots are finite, with the rows that were copied for them.

        The proof reads the chunk's rows of the last layer only (`Slab.proof`). For earlier chunks, it
        covers every layer but the last. So a chunk counts once the chunk before it is proven. A
        request that was cancelled in the meantime leaves its rows in the prefix cache, unless the
        slot has a new owner.
        """
        for chunk in plan.chunks:
            request = chunk.request
            is_next = chunk.slot in finite and chunk.rows_in_place <= request.proven
            if is_next and self.prefixes.is_held_by(chunk.slot, request.prefix.trail):
                request.proven = chunk.stop
                if request.end:
                    self._keep_proven_rows(request)

    def _scrubs(self, running: Sequence[Request]) -> tuple[tuple[int, int, int], ...]:
        """The rows that must be zeroed now, because a running request is about to write there."""
        dirty = [r.slot for r in running if r.prefilled and r.slot in self._to_scrub]
        return tuple((slot, *self._to_scrub.pop(slot)) for slot in dirty)

    def _retry_without_draft(self, decode: Decode) -> None:
        """Repeat a decode without its draft, because a row is not finite. None of its tokens is taken.

        subtle: a row does not see the draft tokens after it: their weight is 0. But 0 x NaN is NaN. So
        a rejected token whose keys are not finite corrupts the valid rows before it in the same
        window. The rows of this decode are zeroed, and the request continues without drafts. If the
        newest token itself is the cause, that shows in the next step.
        """
        decode.request.drafting.source = None
        self._to_scrub[decode.slot] = (decode.position, decode.position + 1 + len(decode.draft))

    # --- the queue, and the policy

    def submit(self, request: Request) -> None:
        """Queue a request. Prompt and `max_tokens` must fit a slot, so no request is ever evicted."""
        check_fits(request, self.max_len)
        # Requests that the next step admits do not count as waiting
        waiting = len(self.waiting) - self._admissible()
        if waiting >= self.max_queue:
            limit = f"max_queue is {self.max_queue}"
            raise QueueFull(f"{waiting} requests are waiting, and {limit}; try later")
        request.prefix.trail = self.prefixes.insert(request.prompt, request.prefix_cache)
        request.queued.arrival_step = self.steps
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
            self.policy, self.draining_to = self.draining_to, None
            self.prefixes.clear()
            self.states.clear(self.prefixes)

    # --- sizes, starting over, and checking

    def resize(self, slots: int, max_len: int, chunk: int, budget: int) -> None:
        """Start over with a slab of this size, and new limits on the tokens of a chunk and of a step."""
        self.set_budget(budget, chunk)
        self.slots = slots
        self.max_len = max_len
        self.start_over()

    def set_budget(self, budget: int, chunk: int) -> None:
        """Limit the tokens of each future step (as `Scheduler` says), and of each chunk."""
        check_positive(budget=budget, chunk=chunk)
        self.budget = budget
        self.chunk = chunk

    def start_over(self) -> None:
        """Start over with an empty slab. All requests return to the queue, in the order of arrival.

        None may have a committed token: the engine ends those before.
        """
        self.waiting = OrderedDict(sorted((self.running | self.waiting).items()))
        self.running.clear()
        self.prefixes = Prefixes(self.slots, min(SEGMENT, self.chunk))
        self.states.clear(self.prefixes)
        self._admitted: list[Request] = []  # since the last plan that had a step
        self._to_scrub: dict[int, tuple[int, int]] = {}  # slot -> rows that may not be finite
        for request in self.waiting.values():
            request.requeue(self.prefixes.insert(request.prompt, request.prefix_cache))
        self._end_drain()


def extend_answer(
    request: Request, sampled: Sequence[int], draft: Sequence[int], accept: Accept
) -> tuple[int, str | None]:
    """Append sampled tokens to an answer, up to and including the first one that differs from the draft,
    that ends the answer, or that follows the whole draft. Return the number of accepted draft tokens,
    and why the answer ends, or None. (`accept` ends it at -1.)

    The first row's token is always valid. Each following row was computed from a draft token, so its
    token is valid if that draft token equals the token sampled in its place.
    """
    for i, token in enumerate(sampled):
        request.append_token(token)
        reason = accept(request, token)
        if reason is None and request.committed == request.max_tokens:
            reason = "length"
        is_accepted = i < len(draft) and token == draft[i]
        if reason or not is_accepted:
            return i + is_accepted, reason
    raise AssertionError("each row yields a token")


def check_fits(request: Request, max_len: int) -> None:
    """Raise ValueError if a prompt and its `max_tokens` do not fit a slot."""
    prompt = len(request.prompt)
    total = prompt + request.max_tokens
    if total > max_len:
        wanted = f"prompt {prompt:,} + max_tokens {request.max_tokens:,} = {total:,}"
        raise ValueError(f"{wanted}, but a slot holds {max_len:,} (max_len)")


def check_positive(**limits: int) -> None:
    """Raise ValueError for a limit below 1."""
    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"{name} = {value:,}, but it must be at least 1")


def check_invariants(scheduler: Scheduler) -> None:
    """Assert every invariant of this file."""
    running = scheduler.running.values()
    owned = [r.slot for r in running]
    assert sorted([*owned, *scheduler.free]) == list(range(scheduler.slots)), running
    for r in running:
        assert r.prefilled in (0, scheduler.prefixes.rows[r.slot]), r
        r.check_invariants()
    for r in scheduler.waiting.values():
        assert r.slot is None and r.planned == 0, r
    assert list(scheduler.waiting) == sorted(scheduler.waiting), "the queue is out of order"
