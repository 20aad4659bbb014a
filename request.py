"""Chapter 3: a request, and the plan of one step. Plain records, which the other files of this chapter
make and read.

A `Request` is one prompt on its way through the engine: queued, in prefill, in decode, done. It keeps
two counters apart: how many tokens are *planned*, and how many are *committed*. `sched.py` says why.

What it knows lies in small records, by who decides about them:

    asked for    the request itself     `Engine.submit`
    Queued       its place in line      `policies.py`
    Admission    its slot               `Scheduler.plan`
    progress     the request itself     `Scheduler.plan`, `Scheduler.commit`
    PrefixState  rows it did not read   `Scheduler.plan`, from `prefix.py`
    Drafting     its draft tokens       `prompt_lookup.py`
    End          the reason             `Scheduler.finish`

A `Plan` is the decision for one step. Each of its members is a part of one request: a `Chunk` of a
prompt, or a `Decode` of an answer. Whatever yields a token has an `index`, the place of that token in
the answer. `Committed` says how the step has ended.

At the end of the file are the seams, functions that others pass to the scheduler: an admission policy,
a source of draft tokens, a search on disk, a reader of tokens, the states of a recurrent model.

Where next: `sched.py`, which decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from prefix import Prefixes, Remembered, Trail

if TYPE_CHECKING:
    from engine.disk_prefix_cache import RestoredRows
    from prompt_lookup import PromptLookup
    from sched import Scheduler


@dataclass(slots=True)
class Queued:
    """A request's place in the queue, as the policies count it."""

    came: int = 0  # steps planned before it arrived
    turn: int = 0  # under `fair`: the last step that admitted its client while this one waited


class Admission(NamedTuple):
    """The admission of a request to a slot."""

    at: float
    policy: str
    slot: int
    why: str  # why this slot


@dataclass(slots=True)
class PrefixState:
    """The part of a request that comes from the prefix cache."""

    trail: Trail = field(default_factory=Trail)  # its prompt's path in the prefix tree
    cached: int = 0  # prompt tokens found in the prefix cache, in memory or on disk
    cached_from: str = ""  # "slot" (its own) | "other_slot" | "disk"
    own: int = 0  # of these, the tokens whose rows the same client wrote
    reread: int = 0  # tokens read again, because no saved state reached as far as the cached rows
    restored: RestoredRows | None = None  # found on disk when it was admitted

    @property
    def rows_on_disk(self) -> int:
        return self.restored.rows if self.restored else 0


@dataclass(slots=True)
class Drafting:
    """The draft tokens of an answer."""

    source: PromptLookup | None = None  # None: nothing is drafted
    proposed: int = 0
    accepted: int = 0


class End(NamedTuple):
    reason: str  # "stop" | "length" | "cancelled" | "error"
    at: float


@dataclass(eq=False, slots=True)
class Request:
    """One prompt on its way through the engine."""

    # What was asked for
    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    arrived: float
    prefix_cache: bool = True  # may it share rows with other prompts?
    client: str = ""  # any name for the user; all without a name are one client
    # Progress, planned and committed
    prefilled: int = 0  # prompt tokens in the slab once all planned steps have run
    proven: int = 0  # rows of its slot, from the first on, that are known to be finite
    planned: int = 0  # output tokens of all planned steps, the newest step's draft included
    answer: list[int] = field(default_factory=list)  # output tokens read back so far
    # The others' records
    queued: Queued = field(default_factory=Queued)
    admission: Admission | None = None
    prefix: PrefixState = field(default_factory=PrefixState)
    drafting: Drafting = field(default_factory=Drafting)
    end: End | None = None

    @property
    def slot(self) -> int | None:
        return self.admission.slot if self.admission else None

    @property
    def finish_reason(self) -> str | None:
        return self.end.reason if self.end else None

    @property
    def phase(self) -> str:
        if self.end:
            return "done"
        if self.admission is None:
            return "queued"
        return "prefill" if self.prefilled < len(self.prompt) else "decode"

    @property
    def committed(self) -> int:
        return len(self.answer)

    @property
    def has_next(self) -> bool:
        """False once the last token that it may have is planned."""
        return self.planned < self.max_tokens

    @property
    def is_reading(self) -> bool:
        """True during prefill, unless its cached rows are still loading."""
        return self.phase == "prefill" and not self.waits_for_disk

    @property
    def waits_for_disk(self) -> bool:
        """True while rows of its prompt are searched on disk and read."""
        return self.prefix.restored is not None and not self.prefix.restored.is_ready

    @property
    def next_row(self) -> int:
        """The row of the newest planned token. The prompt's last token yields the first of them."""
        return len(self.prompt) + self.planned - 1

    def reuse_rows(self, chunk: Chunk, own: int) -> None:
        """Count the cached rows before the first chunk. `own`: of the rows in memory, those that the
        same client wrote.

        Clients are told of their own rows alone, because any other number would confirm a guess at
        another client's prompt.
        """
        state = self.prefix
        state.cached = chunk.start
        state.cached_from = chunk.cached_from
        saved = state.restored.own if state.restored else 0
        state.own = min(chunk.start, max(own, saved))
        state.restored = None
        # Rows copied from elsewhere may still be in flight themselves
        self.proven = chunk.rows_in_place

    def append_token(self, token: int) -> None:
        """Append a token to the answer. Its finite logits prove that all rows before it are finite.

        -1: the logits were not finite. Some row is the cause, so none counts as proven any more.
        """
        if token < 0:
            self.proven = 0
            return
        self.answer.append(token)
        self.proven = len(self.prompt) + self.committed - 1

    def settle_draft(self, proposed: int, accepted: int) -> None:
        """Count the draft of a step, and plan on from what is committed: none of its tokens is in
        flight any more."""
        self.drafting.proposed += proposed
        self.drafting.accepted += accepted
        self.planned = self.committed

    def requeue(self, trail: Trail) -> None:
        """Return to the queue: the slab is new. A request that has yielded a token cannot return."""
        assert self.committed == 0, self
        self.admission = None
        self.prefix = PrefixState(trail)
        self.prefilled = self.proven = self.planned = 0

    def check_invariants(self) -> None:
        """Assert the invariants of a request in a slot."""
        assert self.end is None, self
        assert 0 <= self.prefix.cached <= self.prefilled <= len(self.prompt), self
        assert 0 <= self.committed <= self.planned <= self.max_tokens, self
        assert self.planned <= self.committed + 2 or self.drafting.proposed, self
        assert self.planned == 0 or self.prefilled == len(self.prompt), self
        assert 0 <= self.proven <= self.prefilled + self.committed, self


# --- one step -----------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """A part of a prompt, prompt[start:stop], to be written into the slot's rows start..stop."""

    request: Request
    slot: int
    start: int
    stop: int
    # Where the rows [0:start] come from, if they are not in the slot already
    copied_from: int | None = None  # another slot
    restored: RestoredRows | None = None  # disk
    draft: tuple[int, ...] = ()  # nothing is drafted after a prompt

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def emits(self) -> bool:
        """The last chunk of a prompt yields a token, the one that follows the prompt."""
        return self.stop == len(self.request.prompt)

    @property
    def index(self) -> int:
        """The index, in the answer, of the token that it yields."""
        return 0

    @property
    def is_in_place(self) -> bool:
        return self.copied_from is None and self.restored is None

    @property
    def rows_in_place(self) -> int:
        """Of the rows before it, those that its slot holds already."""
        return self.start if self.is_in_place else 0

    @property
    def cached_from(self) -> str:
        """The source of the rows before it, as `PrefixState` names it."""
        if self.is_in_place:
            return "slot" if self.start else ""
        return "disk" if self.restored else "other_slot"


class Move(NamedTuple):
    """The change of a sequence's state in a step, in a model with states."""

    source: int  # the place to continue from; -1 at the beginning of a text
    base: int  # its matrix is that after this many tokens
    target: int  # the place where the state goes
    keep: int  # whose matrix will be that after this many tokens


class Decode(NamedTuple):
    """One step of one answer: the newest token goes into row `position`.

    That token is known, even emitted, but has no row in the slab yet. The row yields the next token.
    Draft tokens go into the rows after it, and each yields the token that would follow it.
    """

    request: Request
    slot: int
    position: int
    draft: tuple[int, ...] = ()

    @property
    def index(self) -> int:
        """The index, in the answer, of the first token that it yields."""
        return self.position + 1 - len(self.request.prompt)

    @property
    def is_known(self) -> bool:
        """True if the newest token has been read back: no step before this one is in flight."""
        return self.index == self.request.committed


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision for one step: which requests take part, in which slots. The scheduler makes it, the
    engine runs it and hands it back to `Scheduler.commit`."""

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
    budget: int  # the most tokens that it might have had
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
    def tokens(self) -> int:
        """Computed in this step."""
        rows = len(self.decodes) + self.draft_tokens
        return rows + sum(chunk.tokens for chunk in self.chunks)

    def is_due(self, eager_first_token: bool) -> bool:
        """True if its tokens must be read before the next step is planned: with draft tokens, always.

        `eager_first_token`: also if one of them is the first of an answer.
        """
        if self.draft_tokens:
            return True
        return eager_first_token and any(chunk.emits for chunk in self.chunks)


class Committed(NamedTuple):
    """The outcome of a step. `Scheduler.commit` makes it, and observers read it."""

    ended: list[Request]
    ghosts: tuple[int, ...]  # slots whose request had ended before: their tokens were dropped
    drafts: tuple[tuple[int, int, int], ...]  # (slot, draft tokens, accepted)


# --- the seams ----------------------------------------------------------------------------------


class QueueFull(RuntimeError):
    """The queue has reached its limit. Raised at once; other requests are not affected."""


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


class StateCounts(NamedTuple):
    """Counts of checkpoints, states that any prompt may start from (`state_places.py`)."""

    made: int = 0
    restored: int = 0  # a prompt has started from one
    dropped: int = 0  # for a newer one, or because it was not proven to be finite
    reread: int = 0  # prompt tokens whose rows the same client wrote, read again for want of one


class Stateless:
    """The states of a model that has none, because all layers keep rows. Otherwise
    `state_places.py` answers."""

    def clear(self, prefixes: Prefixes) -> None:
        """Forget all states."""

    def end_of_chunk(self, request: Request, start: int, stop: int) -> int:
        """The end of a chunk of a prompt, at most `stop`."""
        return stop

    def plan(self, chunks: Sequence[Chunk], decodes: Sequence[Decode]) -> Mapping[int, Move]:
        """By slot, the place from which each sequence continues, and the place for its new state."""
        return {}

    def leave(self, request: Request) -> None:
        """A request leaves its slot."""

    def view(self) -> tuple[Mapping[int, tuple[int, ...]], StateCounts]:
        """For observers: by slot the rows of its text at which there is a checkpoint, and what has
        happened so far."""
        return {}, StateCounts()
