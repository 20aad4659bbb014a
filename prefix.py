"""Chapter 3, fourth part: prefix caching. Which prompts share a prefix, which slots hold its rows?

The problem. Chats begin with the same system prompt, and a conversation that goes on begins with
everything that was said before. Their keys and values are the same rows, so they should be computed
once. But to compare each new prompt with what every slot holds, token by token and again in every
step, takes longer than a step: with 64 slots of 16,000 tokens it took more than a second.

The solution: a prefix tree, a trie. (SGLang's radix cache is one, too.) A prompt is cut into
segments of 16 tokens. Each segment is an edge of the tree, from one `Node` to the next. Prompts
with a common prefix pass through the same nodes. So two prompts share n segments if and only if
their n-th nodes are the same object:

    prompt A   c a t s _ s i t _ d o w n        segments of 4:   cats -> _sit -> _dow
    prompt B   c a t s _ r u n _ a w a y                         cats -> _run -> _awa

Both pass through one node, `cats`, and then diverge.

A prompt is inserted once, when it is submitted, and its answer when the request ends: the answer
continues from the last node of its prompt. From then on a comparison looks at one node, and each node
knows the slots that hold its rows. Only after the last common segment are tokens compared one by one,
because a conversation may go on from any row.

The invariant: a slot that holds a node holds all nodes before it on the same path.

A `Node` lives as long as a request or a slot refers to it.

Where next: `sampling.py`, chapter 4.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

SEGMENT = 16  # tokens: longer segments find less, shorter ones take more memory
# The age of slots rises by the rows that are lost, divided by this. 1 forgets an unused slot soon, and
# rereads more when many conversations take turns
AGING = 8
COPIED = 64  # to copy this many rows counts as much as to lose one


class Node:
    """The first n segments of a prompt: one object for all prompts with this prefix."""

    __slots__ = ("__weakref__", "slots")

    def __init__(self) -> None:
        self.slots: set[int] = set()  # the slots with its rows


class Trail(NamedTuple):
    """The tokens of a text, and its path through the tree.

    An incomplete last segment has no node.
    """

    tokens: Sequence[int] = ()
    nodes: Sequence[Node] = ()


class Remembered(NamedTuple):
    """The content of a slot: the tokens of its rows, and whose prompt it was."""

    slot: int
    tokens: Sequence[int]
    client: str
    place: int = 0  # of its state, in a model with states (`state_places.py`)
    base: int = 0  # the tokens before that state's matrix


class Served(NamedTuple):
    """The number of a prompt's first rows that can be used, and the state for them."""

    rows: int
    place: int = -1  # of the state (`state_places.py`); -1: none is needed
    base: int = 0  # the tokens before its matrix


# Called with a text, rows of it that a slot holds, and the slot that it is in or goes into: which of these
# rows can be used, by each state that there is
Serving = Callable[[Trail, int, "int | None"], Sequence[Served]]


class Prefixes:
    """The prefix tree: the paths of all open and cached prompts, and the slots with their rows."""

    def __init__(self, slots: int, segment: int = SEGMENT):
        self.segment = segment
        # Rows are not all that some models need (`state_places.py`)
        self.serving: Serving = lambda trail, rows, slot: [Served(rows)]
        self.rows = [0] * slots  # by slot: the rows of its last prompt and answer
        self.by_use = list(range(slots))  # the least recently used slot is first
        self.clients = [""] * slots  # by slot: whose prompt it holds
        self._age = 0.0  # in rows (`choose_slot`)
        self._used_at = [0.0] * slots  # by slot: the age at its last use
        self._trails = [Trail()] * slots  # by slot: the text of these rows, or more
        self._nodes: list[list[Node]] = [[] for _ in range(slots)]  # by slot, the shortest first
        self._overwritten: list[Remembered] = []
        self._root = Node()
        # (a node, the tokens of the next segment) -> the next node. The
        # tokens are bytes, since bytes remember their hash: when an entry dies, perhaps inside a
        # plan, the dictionary needs the hash again.
        self._children: WeakValueDictionary[tuple[Node, bytes], Node]
        self._children = WeakValueDictionary()

    def trail(self, prompt: Sequence[int], prefix_cache: bool) -> Trail:
        """A prompt and its path. Without prefix caching it has none."""
        if not prefix_cache:
            return Trail(prompt)
        return Trail(prompt, self._walk(prompt, self._root))

    def _walk(self, tokens: Sequence[int], last: Node) -> list[Node]:
        """The nodes after `last`, along these tokens."""
        found = []
        data = array("q", tokens).tobytes()
        width = 8 * self.segment
        for start in range(0, len(data) - width + 1, width):
            key = (last, data[start : start + width])
            last = self._children.get(key)
            if last is None:
                last = Node()
                self._children[key] = last
            found.append(last)
        return found

    def match(
        self, trail: Trail, slots: Sequence[int], into: int | None = None
    ) -> tuple[int, int | None]:
        """The most rows of this prompt that one of the slots holds and that can be used, and the first
        slot with them. `into`: the slot that the prompt goes into.

        Never the whole prompt, because the answer's first token follows from the prompt's last.
        """
        rows, slot = self._longest(trail, len(trail.tokens) - 1, slots)
        rows = self.reach(trail, rows, into).rows
        return rows, slot if rows else None

    def reach(self, trail: Trail, rows: int, slot: int | None) -> Served:
        """How many of a text's first rows can be used: as many as the best state serves."""
        return max(
            self.serving(trail, rows, slot), key=lambda served: served.rows, default=Served(0)
        )

    def longest(self, trail: Trail) -> int:
        """The most rows of this prompt that a slot holds, whether they can be used or not."""
        return self._longest(trail, len(trail.tokens) - 1, range(len(self.rows)))[0]

    def _longest(self, trail: Trail, limit: int, slots: Sequence[int]) -> tuple[int, int | None]:
        """The most rows of a text, up to `limit`, that one of the slots holds, and the first slot
        with them."""
        among = set(slots)
        nodes = trail.nodes
        usable = min(len(nodes), limit // self.segment)
        # A slot that holds a node holds all before it, so bisection finds the last common one.
        count = bisect_left(nodes, True, hi=usable, key=lambda node: among.isdisjoint(node.slots))
        if count == 0:
            return 0, None
        most = 0
        best = None
        for slot in slots:
            if slot in nodes[count - 1].slots:
                rows = self._common(trail.tokens, slot, count * self.segment, limit)
                if rows > most:
                    most = rows
                    best = slot
        return most, best

    def rows_of(self, client: str, trail: Trail) -> int:
        """The most rows of this prompt that a slot of this client holds."""
        slots = [slot for slot, name in enumerate(self.clients) if name == client]
        return self._longest(trail, len(trail.tokens) - 1, slots)[0]

    def _common(self, tokens: Sequence[int], slot: int, rows: int, limit: int) -> int:
        """The number of rows that a text and a slot have in common: at least `rows`, up to `limit`."""
        return common(tokens, self._trails[slot].tokens, rows, min(limit, self.rows[slot]))

    def choose_slot(
        self, trail: Trail, free: Sequence[int], running: Sequence[int] = ()
    ) -> tuple[int, str]:
        """The free slot to write this prompt into, and a short reason. `running`: the slots of
        running requests.

        The slot that loses least: rows that are neither common with the prompt nor in another slot.
        An empty slot loses nothing, and neither does the slot with this conversation so far. Among
        equals, the one with the most common rows is best, because the others have to copy them, and
        then the least recently used.

        If every slot loses something, the rows alone do not decide: a long conversation that has
        ended would keep its slot forever. Slots therefore age. (The algorithm is GreedyDual: Young,
        1994.) The price of a slot is the age at its last use plus the rows that it would lose. To
        give it up raises the age, to that of its last use plus the rows lost / AGING.
        """
        choices = []
        for slot in free:
            common, _ = self.match(trail, (slot,), slot)
            lost = self._rows_lost(slot, common, (*free, *running))
            price = self._used_at[slot] + lost - common / COPIED if lost else -math.inf
            choices.append((price, -common, lost, slot))
        # Equal ones stay in the order of use
        _, common, lost, slot = min(choices, key=lambda choice: choice[:2])
        if lost:
            self._age = max(self._age, self._used_at[slot] + lost / AGING)
        return slot, self._reason(slot, -common, lost, len(free))

    def _reason(self, slot: int, common: int, lost: int, free: int) -> str:
        """Why a slot was chosen, for the screen."""
        if free == 1:
            return "the only free slot"
        if common and lost:
            return f"has its first {common:,} rows; loses {lost:,}, the fewest"
        if common:
            return f"has its first {common:,} rows"
        if lost:
            return f"loses {lost:,} row{'s' * (lost > 1)}, the fewest"
        return "nothing is lost" if self.rows[slot] else "empty"

    def _rows_lost(self, slot: int, common: int, slots: Iterable[int]) -> int:
        """The number of rows that no slot holds any more if a prompt with `common` rows takes this one."""
        held = self.rows[slot] if self._nodes[slot] else 0
        if held <= common:
            return 0
        others = [other for other in slots if other != slot]
        copied, _ = self._longest(self._trails[slot], held, others)
        return held - max(common, copied)

    def best_source(
        self, trail: Trail, slot: int, written: Mapping[int, tuple[Trail, int]]
    ) -> tuple[int, int | None]:
        """The number of cached rows to start this prompt with, and the slot to copy them from.

        None: the slot itself holds them. Another slot is used only if it holds at least a segment
        more: copying fewer rows takes about as long as computing them. `written`: what slots will
        hold that are written in this very step. They must hold two segments more, because to copy
        from them takes a forward pass of its own.
        """
        rows, _ = self.match(trail, (slot,), slot)
        source = None
        others = [other for other in range(len(self.rows)) if other not in written]
        most, other = self.match(trail, others, slot)
        if most >= rows + self.segment:
            rows, source = most, other
        if written:
            shared = {
                other: self.reach(trail, self._shared(trail, *text), slot).rows
                for other, text in written.items()
            }
            other = max(shared, key=shared.__getitem__)
            if shared[other] >= rows + 2 * self.segment:
                rows, source = shared[other], other
        return rows, source

    def _shared(self, trail: Trail, other: Trail, rows: int) -> int:
        """The number of first rows of another text that a prompt can use; 0 if less than a segment."""
        limit = min(rows, len(trail.tokens) - 1)
        usable = min(len(trail.nodes), len(other.nodes), limit // self.segment)
        # Texts with a common node have all before it in common, so bisection finds the last one
        differs = lambda i: trail.nodes[i] is not other.nodes[i]  # noqa: E731
        count = bisect_left(range(usable), True, key=differs)
        return common(trail.tokens, other.tokens, count * self.segment, limit) if count else 0

    def begin_alike(self, one: Trail, others: Iterable[Trail], rows: int) -> bool:
        """True if a prompt shares its first `rows` rows with one of the others. Compared in whole
        segments only, and in at least one."""
        n = max(1, rows // self.segment)
        if n * self.segment >= len(one.tokens) or n > len(one.nodes):
            return False
        node = one.nodes[n - 1]
        return any(node in other.nodes[n - 1 : n] for other in others)

    def assign(self, slot: int, client: str, kept: int, worth: int) -> None:
        """Give the slot to a new prompt, which keeps its first `kept` rows.

        `worth`: a slot that forgets at least as many rows is worth saving (`pop_overwritten`).
        """
        self._overwritten += self.remembered([slot], kept + worth)
        self.clients[slot] = client
        self.forget(slot)

    def pop_overwritten(self) -> tuple[Remembered, ...]:
        """The content that slots have lost since the last call."""
        overwritten = tuple(self._overwritten)
        self._overwritten.clear()
        return overwritten

    def remembered(self, slots: Iterable[int], least: int) -> list[Remembered]:
        """The content of those of these slots that hold at least `least` rows, once for each state of it,
        without requests that have no prefix caching."""
        found = []
        for slot in slots:
            trail, held = self._trails[slot], self.rows[slot]
            for rows, place, base in self.serving(trail, held, slot) if self._nodes[slot] else ():
                if rows >= least:
                    tokens = trail.tokens[:rows]
                    found.append(Remembered(slot, tokens, self.clients[slot], place, base))
        return found

    def record_rows(self, slot: int, trail: Trail, rows: int) -> None:
        """Record that the slot holds the first `rows` rows of this text, and nothing else. (It may
        have held some of them before.)"""
        known = self._nodes[slot]
        count = rows // self.segment
        for node in known[count:]:
            node.slots.discard(slot)
        del known[count:]
        for node in trail.nodes[len(known) : count]:
            node.slots.add(slot)
            known.append(node)
        self._trails[slot] = trail
        self.rows[slot] = rows

    def record_answer(self, slot: int, trail: Trail, answer: Sequence[int], rows: int) -> None:
        """Record that the slot holds the first `rows` rows of this prompt and its answer."""
        if answer:
            tokens = [*trail.tokens, *answer]
            rest = tokens[len(trail.nodes) * self.segment :]
            last = trail.nodes[-1] if trail.nodes else self._root
            trail = Trail(tokens, [*trail.nodes, *self._walk(rest, last)])
        self.record_rows(slot, trail, rows)

    def text_of(self, slot: int) -> Trail:
        """The text of a slot's rows, or more."""
        return self._trails[slot]

    def is_held_by(self, slot: int, trail: Trail) -> bool:
        """True if the slot holds the rows of this request's own prompt, not of an equal one."""
        return self._trails[slot] is trail

    def use(self, slot: int) -> None:
        """Mark the slot as the most recently used: it will be overwritten last."""
        self.by_use.remove(slot)
        self.by_use.append(slot)
        self._used_at[slot] = self._age

    def forget(self, slot: int) -> None:
        """Forget what the slot holds."""
        self.record_rows(slot, Trail(), 0)

    def clear(self) -> None:
        """Forget what all slots hold, and in which order they were used."""
        for slot in range(len(self.rows)):
            self.forget(slot)
        self.by_use.sort()
        self._age = 0.0
        self._used_at = [0.0] * len(self.rows)


def common(tokens: Sequence[int], others: Sequence[int], rows: int, limit: int) -> int:
    """The length of the common prefix of two texts: at least `rows`, up to `limit`."""
    while rows < limit and tokens[rows] == others[rows]:
        rows += 1
    return rows
