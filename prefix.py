"""Which prompts begin alike, and which slots hold the rows of a common beginning.

The problem. Chats begin with the same system prompt, and a conversation that goes on begins with
all that was said before. Their keys and values are the same rows, so they should be computed once.
But to compare each new prompt with what every slot holds, token by token and again in every step,
takes longer than a step: with 64 slots of 16,000 tokens it took more than a second.

The way out: give each beginning a name. A prompt is cut into pieces, and each piece leads from one
`Beginning` to the next longer one. Equal pieces lead from equal beginnings to the same object, so
two prompts share n pieces exactly if their n-th beginnings are one and the same object:

    prompt A   c a t s . s i t . . . .        pieces of 4:   cats -> .sit -> ....
    prompt B   c a t s . r u n . . . .                       cats -> .run -> ....     one object, then two

A prompt's tokens are read once, when it is submitted, and an answer's when it ends: the answer goes
on where its prompt's name ends. From then on a comparison is a look at one object, and each
beginning knows the slots that hold its rows. Only behind the last common piece are tokens compared
one by one, since a conversation goes on from any row.

The invariant: a slot that holds a beginning holds all shorter ones of the same prompt.

A `Beginning` lives as long as a request or a slot refers to it. Where next: `Scheduler._chunks` in
`sched.py`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

PIECE = 16  # tokens: long enough that a beginning costs little memory, short enough to find what little is shared


class Beginning:
    """The first n pieces of a prompt. Prompts that begin alike refer to the same object."""

    __slots__ = ("__weakref__", "slots")

    def __init__(self) -> None:
        self.slots: set[int] = set()  # the slots that hold its rows


class Trail(NamedTuple):
    """A text's tokens, and its beginnings: one piece, two pieces, and so on.

    The tokens at the end that fill no piece are in no beginning.
    """

    tokens: Sequence[int] = ()
    beginnings: Sequence[Beginning] = ()
    root: Beginning | None = None  # before all beginnings; None if the text shares nothing


class Prefixes:
    """The beginnings of all prompts that are open or remembered, and the slots that hold their
    rows."""

    def __init__(self, slots: int, piece: int = PIECE):
        self.piece = piece
        self.rows = [0] * slots  # by slot: how many rows it holds of its last prompt and answer
        self.by_use = list(range(slots))  # the slot that was used longest ago stands first
        self._tokens: list[Sequence[int]] = [()] * slots  # by slot: the tokens of its rows, or more
        self._held: list[list[Beginning]] = [[] for _ in range(slots)]  # by slot, the shortest first
        self._root = Beginning()
        # (a beginning, the next piece's tokens) -> the beginning that is longer by this piece. The
        # tokens are bytes, which remember their hash: a dictionary wants it again when an entry
        # dies, and that may be inside a plan.
        self._longer: WeakValueDictionary[tuple[Beginning, bytes], Beginning]
        self._longer = WeakValueDictionary()

    def trail(self, prompt: Sequence[int], shares: bool) -> Trail:
        """A prompt and its beginnings. One that shares no rows has none."""
        if not shares:
            return Trail(prompt)
        return Trail(prompt, self._beginnings(prompt, self._root), self._root)

    def _beginnings(self, tokens: Sequence[int], last: Beginning) -> list[Beginning]:
        """The beginnings of a text that are longer than `last`, behind which these tokens stand."""
        found = []
        data = array("q", tokens).tobytes()
        width = 8 * self.piece
        for start in range(0, len(data) - width + 1, width):
            step = (last, data[start : start + width])
            last = self._longer.get(step)
            if last is None:
                last = Beginning()
                self._longer[step] = last
            found.append(last)
        return found

    def find(self, trail: Trail, slots: Sequence[int]) -> tuple[int, int | None]:
        """How many rows of this prompt the slots hold at most, and the first slot with so many.

        Never the whole prompt, because the answer's first token follows from the prompt's last.
        """
        among = set(slots)
        usable = trail.beginnings[: (len(trail.tokens) - 1) // self.piece]
        # A slot that holds a beginning holds all shorter ones, so the longest is found by halving.
        count = bisect_left(usable, True, key=lambda beginning: among.isdisjoint(beginning.slots))
        if count == 0:
            return 0, None
        most = 0
        best = None
        for slot in slots:
            if slot in usable[count - 1].slots:
                rows = self._common(trail.tokens, slot, count * self.piece)
                if rows > most:
                    most = rows
                    best = slot
        return most, best

    def _common(self, prompt: Sequence[int], slot: int, rows: int) -> int:
        """How many rows a prompt and a slot have in common, if the first `rows` are known to be."""
        held = self._tokens[slot]
        limit = min(self.rows[slot], len(prompt) - 1)
        while rows < limit and prompt[rows] == held[rows]:
            rows += 1
        return rows

    def place(self, trail: Trail, free: Sequence[int]) -> tuple[int, str]:
        """Which free slot to write such a prompt into, and in a few words why.

        Best into the slot that holds the most of it: there no row needs to be copied. But what that
        slot holds beyond the common rows is lost. If this is more than what is shared, the slot may
        be a conversation's, which has no more than the system prompt in common with this prompt,
        and goes on later. Then the slot that was used longest ago is the better one.
        """
        oldest = free[0]
        if len(free) == 1:
            return oldest, "the only free slot"
        rows, slot = self.find(trail, free)
        if slot is None:
            return oldest, "unused for longest"
        held = self.rows[slot]
        if held > 2 * rows:
            other = f"slot {slot} has {rows:,} of its rows, but {held:,} in all"
            return oldest, f"unused for longest; {other}"
        return slot, f"has its first {rows:,} rows"

    def best(self, trail: Trail, slot: int, worth: int) -> tuple[int, int | None]:
        """How many rows of this prompt a slot begins with at best, and the slot that has them.

        It is the slot itself, unless another one has `worth` rows more. To copy fewer takes longer
        than to compute them.
        """
        near = self.find(trail, (slot,))
        most = self.find(trail, range(len(self.rows)))
        return most if most[0] >= near[0] + worth else near

    def share(self, one: Trail, other: Trail, rows: int) -> bool:
        """Do two prompts begin with the same `rows` rows, as far as whole pieces tell?"""
        n = rows // self.piece
        if n * self.piece >= len(one.tokens) or n > min(len(one.beginnings), len(other.beginnings)):
            return False
        return one.beginnings[n - 1] is other.beginnings[n - 1]

    def begin(self, slot: int, source: int | None) -> None:
        """The slot gets a new prompt. `source`: the slot whose first rows it takes over, or
        None."""
        self.forget(slot)
        if source is not None:
            self.use(source)

    def hold(self, slot: int, trail: Trail, rows: int) -> None:
        """The slot's first `rows` rows are those of this prompt. (It may have held some before.)"""
        held = self._held[slot]
        for beginning in trail.beginnings[len(held) : rows // self.piece]:
            beginning.slots.add(slot)
            held.append(beginning)
        self._tokens[slot] = trail.tokens
        self.rows[slot] = rows

    def hold_answer(self, slot: int, trail: Trail, answer: Sequence[int]) -> None:
        """Behind the whole of this prompt, the slot holds the rows of these tokens of the
        answer."""
        if trail.root is None:
            return
        tokens = [*trail.tokens, *answer]
        rest = tokens[len(trail.beginnings) * self.piece :]
        last = trail.beginnings[-1] if trail.beginnings else trail.root
        longer = self._beginnings(rest, last)
        self.hold(slot, Trail(tokens, [*trail.beginnings, *longer]), len(tokens))

    def use(self, slot: int) -> None:
        """The slot was used just now, so of all slots it is written over last."""
        self.by_use.remove(slot)
        self.by_use.append(slot)

    def forget(self, slot: int) -> None:
        """The slot's rows are about to be written over, or are not to be trusted."""
        for beginning in self._held[slot]:
            beginning.slots.discard(slot)
        self._held[slot] = []
        self._tokens[slot] = ()
        self.rows[slot] = 0

    def clear(self) -> None:
        """No slot remembers anything, and none was used before another."""
        for slot in range(len(self.rows)):
            self.forget(slot)
        self.by_use.sort()
