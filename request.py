"""Chapter 3: a request, and the plan of one step. Plain records, which the other files of this chapter
create and use.

A `Request` is one prompt on its way through the engine: queued, in prefill, in decode, done. It keeps
two counters apart: how many tokens are *planned*, and how many are *committed*. `sched.py` says why.

Its data is in small records, one for each part of the engine that decides about it:

    prompt, ...  the request itself     `Engine.submit`
    Queued       its place in line      `Scheduler.submit`, `policies.py`
    Admission    its slot               `Scheduler.plan`
    progress     the request itself     `Scheduler.plan`, `Scheduler.commit`
    PrefixReuse  its cached rows        `Scheduler.plan`, from `prefix.py`
    Drafting     its source of drafts   `Engine.submit`, `Scheduler.commit`
    End          the reason             `Scheduler.finish`

A `Plan` is the decision for one step. Each of its members is a part of one request: a `Chunk` of a
prompt, or a `Decode` of an answer. A member that yields a token has an `index`, the position of that
token in the answer. `Committed` is the outcome of the step.

At the end of the file are the seams, functions that others pass to the scheduler: an admission policy,
a source of draft tokens, a search on disk, a receiver of tokens, the states of a recurrent model.

Where next: `prefix.py`, which finds the rows that a prompt can reuse; then `sched.py`, which decides.
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

PADDING = 16  # on a GPU, a chunk is padded to a multiple of this many tokens


@dataclass(slots=True)
class Queued:
    """When a request joined the queue, for the admission policies."""

    arrival_step: int = 0  # number of steps planned before it arrived
    fairness_turn: int = 0  # under `fair`: the last step that admitted its client while it waited


class Admission(NamedTuple):
    """The admission of a request to a slot."""

    at: float
    policy: str
    slot: int
    why: str  # why this slot was chosen


@dataclass(slots=True)
class PrefixReuse:
    """What a request reuses from the prefix cache. A `Trail` (`prefix.py`) is a text and its path in the
    prefix tree; until then, read it as the prompt."""

    trail: Trail = field(default_factory=Trail)  # its prompt's path in the prefix tree
    cached: int = 0  # prompt tokens found in the prefix cache, in memory or on disk
    cached_from: str = ""  # "slot" (its own) | "other_slot" | "disk"
    own: int = 0  # the cached tokens whose rows the same client wrote
    reread: int = 0  # tokens prefilled again, because no saved state reached as far as the rows
    restored: RestoredRows | None = None  # the search on disk; without rows until it has found some

    @property
    def rows_on_disk(self) -> int:
        return self.restored.rows if self.restored else 0


@dataclass(slots=True)
class Drafting:
    """The source of an answer's draft tokens, and how many were proposed and accepted."""

    source: PromptLookup | None = None  # None: nothing is drafted
    proposed: int = 0
    accepted: int = 0


class End(NamedTuple):
    reason: str  # "stop" | "length" | "cancelled" | "error"
    at: float


@dataclass(eq=False, slots=True)
class Request:
    """One prompt on its way through the engine."""

    # What the client asked for
    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    arrived: float
    prefix_cache: bool = True  # False: it shares no rows with other prompts
    client: str = ""  # any name for the user; requests without a name count as one client
    # Progress in tokens: planned, committed, and proven. Only proven rows stay for other prompts; the
    # rest are zeroed before the next owner writes into the slot
    prefilled: int = 0  # prompt tokens in the slab once all planned steps have run
    proven: int = 0  # the first rows of its slot that are known to be finite
    planned: int = 0  # output tokens of all planned steps, the newest step's draft included
    answer: list[int] = field(default_factory=list)  # output tokens read back so far
    # Records of other parts of the engine
    queued: Queued = field(default_factory=Queued)
    admission: Admission | None = None
    prefix: PrefixReuse = field(default_factory=PrefixReuse)
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
        """False once the last of its `max_tokens` is planned."""
        return self.planned < self.max_tokens

    @property
    def is_reading(self) -> bool:
        """True during prefill, except while cached rows are still loading from disk."""
        return self.phase == "prefill" and not self.waits_for_disk

    @property
    def waits_for_disk(self) -> bool:
        """True while rows of its prompt are loading from disk."""
        return self.prefix.restored is not None and not self.prefix.restored.is_ready

    @property
    def next_row(self) -> int:
        """The row that the next decode writes: that of the newest planned token.

        After a prompt of 5 tokens, rows 0 to 4, token 0 of the answer goes into row 5, and yields token 1.
        """
        return len(self.prompt) + self.planned - 1

    def begin_prefill(self, chunk: Chunk, own: int) -> None:
        """Record the cached rows before the first chunk, and which of them are proven.

        `own`: the rows in memory that the same client wrote.

        Clients are told only of their own rows, because any other number would confirm a guess at
        another client's prompt.
        """
        reuse = self.prefix
        reuse.cached = chunk.start
        reuse.cached_from = chunk.cached_from
        saved = reuse.restored.own if reuse.restored else 0
        reuse.own = min(chunk.start, max(own, saved))
        reuse.restored = None
        # Rows copied from another slot are not proven yet: the step that writes them may be in flight
        self.proven = chunk.rows_in_place

    def append_token(self, token: int) -> None:
        """Append a token to the answer. Its finite logits prove that all rows before it are finite.

        -1 means that the logits were not finite. Any row may be the cause, so no row counts as proven.
        """
        if token < 0:
            self.proven = 0
            return
        self.answer.append(token)
        self.proven = len(self.prompt) + self.committed - 1

    def settle_draft(self, proposed: int, accepted: int) -> None:
        """Count the draft tokens of a step. Planning continues from the committed tokens, because a
        step with a draft is the only one in flight."""
        self.drafting.proposed += proposed
        self.drafting.accepted += accepted
        self.planned = self.committed

    def requeue(self, trail: Trail) -> None:
        """Return to the queue, because the slab is new. Not possible once a token has been committed."""
        assert self.committed == 0, self
        self.admission = None
        self.prefix = PrefixReuse(trail)
        self.prefilled = self.proven = self.planned = 0

    def check_invariants(self) -> None:
        """Assert the invariants of a request in a slot, while no draft is in flight."""
        assert self.end is None, self
        assert 0 <= self.prefix.cached <= self.prefilled <= len(self.prompt), self
        assert 0 <= self.committed <= self.planned <= self.max_tokens, self
        assert self.planned <= self.committed + 2, self
        assert self.planned == 0 or self.prefilled == len(self.prompt), self
        assert 0 <= self.proven <= self.prefilled + self.committed, self


# --- one step -----------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """A part of a prompt, prompt[start:stop], that goes into the slot's rows [start:stop]."""

    request: Request
    slot: int
    start: int
    stop: int
    # Where the rows [0:start] come from, if they are not in the slot already
    copied_from: int | None = None  # another slot
    restored: RestoredRows | None = None  # disk
    draft: tuple[int, ...] = ()  # always empty: drafts begin with the second token of an answer

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def emits(self) -> bool:
        """True for the last chunk of a prompt, which yields the answer's first token."""
        return self.stop == len(self.request.prompt)

    @property
    def index(self) -> int:
        """The index in the answer of the token that it yields."""
        return 0

    @property
    def is_in_place(self) -> bool:
        return self.copied_from is None and self.restored is None

    @property
    def rows_in_place(self) -> int:
        """The rows before it that are already in its slot."""
        return self.start if self.is_in_place else 0

    @property
    def cached_from(self) -> str:
        """The source of the rows before it, as in `PrefixReuse.cached_from`."""
        if self.is_in_place:
            return "slot" if self.start else ""
        return "disk" if self.restored else "other_slot"


class Move(NamedTuple):
    """What a step does with a sequence's state, in a model with states (`state_places.py`)."""

    source: int  # the place to continue from; -1 at the beginning of a text
    base: int  # tokens that the matrix in that place includes
    target: int  # the place where the new state goes
    keep: int  # tokens that the matrix there will include


class Decode(NamedTuple):
    """One step of one answer: the newest token goes into row `position`.

    That token has no row in the slab yet. With run-ahead, it may still be on the device (`is_known`).
    The row yields the next token.
    Draft tokens go into the rows after it, and each yields the token that would follow it.
    """

    request: Request
    slot: int
    position: int
    draft: tuple[int, ...] = ()

    @property
    def index(self) -> int:
        """The index in the answer of the first token that it yields."""
        return self.position + 1 - len(self.request.prompt)

    @property
    def is_known(self) -> bool:
        """True if the newest token has been read back: no earlier step of this request is in flight."""
        return self.index == self.request.committed


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision for one step: which requests take part, in which slots. The scheduler makes it, the
    engine runs it and hands it back to `Scheduler.commit`."""

    step: int
    at: float  # when it was planned, by the engine's clock
    admitted: tuple[Request, ...]  # since the last plan
    scrubs: tuple[tuple[int, int, int], ...]  # (slot, start, stop): rows to be zeroed first
    chunks: tuple[Chunk, ...]
    decodes: tuple[Decode, ...]
    # Requests in prefill that get no chunk: the budget is spent, another prompt writes a common
    # prefix, or rows are loading from disk
    held: tuple[Request, ...]
    blocked: tuple[int, ...]  # slots that stay free because of the policy or a drain
    waiting: int  # requests left in the queue
    policy: str  # the name of the policy in force
    budget: int  # the most tokens it could have had
    overwritten: tuple[Remembered, ...] = ()  # content that this step overwrites
    moves: Mapping[int, Move] = field(default_factory=dict)  # by slot, in a model with states

    @property
    def emitters(self) -> tuple[Chunk | Decode, ...]:
        """The chunks and decodes that yield tokens."""
        last_chunks = [chunk for chunk in self.chunks if chunk.emits]
        return (*last_chunks, *self.decodes)

    @property
    def draft_tokens(self) -> int:
        return sum(len(decode.draft) for decode in self.decodes)

    @property
    def tokens(self) -> int:
        """The number of tokens computed in this step."""
        rows = len(self.decodes) + self.draft_tokens
        return rows + sum(chunk.tokens for chunk in self.chunks)

    def is_due(self, eager_first_token: bool) -> bool:
        """True if its tokens must be read before the next step is planned, as always with draft tokens.

        `eager_first_token`: also if one of them is the first of an answer.
        """
        if self.draft_tokens:
            return True
        return eager_first_token and any(chunk.emits for chunk in self.chunks)


class Committed(NamedTuple):
    """The outcome of a step. `Scheduler.commit` returns it, and observers read it."""

    ended: list[Request]
    ghosts: tuple[int, ...]  # slots whose request had already ended: their tokens were dropped
    drafts: tuple[tuple[int, int, int], ...]  # (slot, draft tokens, accepted)


# --- the seams ----------------------------------------------------------------------------------


class QueueFull(RuntimeError):
    """The queue is full. Raised by `submit`; other requests are not affected."""


class Policy(NamedTuple):
    """An admission policy (`policies.py`)."""

    name: str
    does: str  # a one-sentence description for users
    room: Callable[[int, int], int]  # (free slots, running requests) -> how many to admit now
    # Yields the waiting requests in the order of admission. The scheduler admits each request that it
    # takes from the iterator, so `next` may count them as admitted.
    next: Callable[[Scheduler], Iterator[Request]]


# Called with the decoding requests and the rows left in the budget. Returns draft tokens by request id,
# only for requests whose tokens have all been read back. A draft is shorter than what is left of
# `max_tokens`, so it gets no row beyond the slot's end.
ProposeDrafts = Callable[[Sequence[Request], int], Mapping[int, tuple[int, ...]]]
# Called with a request and the fewest rows that are worth loading. Starts a search on disk, and returns it.
FindSaved = Callable[[Request, int], "RestoredRows | None"]
Tokens = Sequence[Sequence[int]] | Mapping[int, Sequence[int]]  # by slot, the token of each row
Accept = Callable[
    [Request, int], str | None
]  # delivers a token; returns why the answer ends, or None


class StateCounts(NamedTuple):
    """Counts of checkpoints: saved states that any prompt may start from (`state_places.py`)."""

    made: int = 0
    restored: int = 0  # prompts that started from one
    dropped: int = 0  # replaced by a newer one, or not proven to be finite
    reread: int = 0  # tokens prefilled again without one, although the client's own rows were there


class Stateless:
    """What the scheduler asks about states, for a model without any: all its layers keep rows.
    `state_places.py` has the other implementation."""

    def clear(self, prefixes: Prefixes) -> None:
        """Forget all states."""

    def end_of_chunk(self, request: Request, start: int, stop: int) -> int:
        """Where a chunk of a prompt should end, at or before `stop`."""
        return stop

    def plan(self, chunks: Sequence[Chunk], decodes: Sequence[Decode]) -> Mapping[int, Move]:
        """Return by slot the place that each sequence continues from, and the place for its new state."""
        return {}

    def leave(self, request: Request) -> None:
        """Called when a request leaves its slot."""

    def view(self) -> tuple[Mapping[int, tuple[int, ...]], StateCounts]:
        """Return, for observers, the rows at which each slot's text has a checkpoint, and the counts."""
        return {}, StateCounts()
