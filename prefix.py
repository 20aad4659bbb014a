"""Chapter 3, second part: prefix caching. Which prompts share a prefix, and which slots hold its rows?

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
continues from the last node of its prompt. From then on a comparison bisects the path, and each node
knows the slots that hold its rows. Only after the last common segment are tokens compared one by one,
because a conversation may go on from any row.

The invariant: a slot that holds a node holds all nodes before it on the same path.

A `Node` lives as long as a request, a slot, a saved state or a later node refers to it.

The questions that it answers differ in what counts:
    longest        rows that any slot holds
    match          and that can be reused: from some slots, and with a state if the model needs one
    rows_of        rows in this client's slots
    begin_alike    whole segments that prompts share, wherever they are

Where next: `sched.py`, which asks it for slots and sources.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

SEGMENT = 16  # tokens: longer segments find fewer matches, shorter ones take more memory
# The rows lost, divided by this, advance the clock (`choose_slot`). At 1, unused slots are given up
# sooner, and more tokens are prefilled again when many conversations take turns
AGING = 8
COPIED = 64  # copying this many rows counts as much as losing one


class Node:
    """The first n segments of a prompt, shared by all prompts with this prefix."""

    __slots__ = ("__weakref__", "slots")

    def __init__(self) -> None:
        self.slots: set[int] = set()  # the slots that hold its rows


class Trail(NamedTuple):
    """The tokens of a text, and its path through the tree.

    An incomplete last segment has no node.
    """

    tokens: Sequence[int] = ()
    nodes: Sequence[Node] = ()


class Remembered(NamedTuple):
    """The content of a slot: the tokens of its rows, and the client who sent them."""

    slot: int
    tokens: Sequence[int]
    client: str
    place: int = 0  # where its state is, in a model with states (`state_places.py`)
    base: int = 0  # tokens that the state's matrix includes


class Reusable(NamedTuple):
    """The number of a prompt's first rows that can be reused, and the state that goes with them. Most
    models have no states (skip them on a first reading): all rows that a slot holds can be reused."""

    rows: int
    place: int = (
        -1
    )  # where the state is (`state_places.py`); -1: none is needed, or no rows can be reused
    base: int = 0  # tokens that the state's matrix includes


# Called with a text, the number of its rows that a slot holds, and the slot that it is in or goes into.
# Returns how many of these rows can be reused with each saved state
FindReusable = Callable[[Trail, int, "int | None"], Sequence[Reusable]]


class Prefixes:
    """The prefix tree: the paths of all open and cached prompts, and the slots that hold them."""

    def __init__(self, slots: int, segment: int = SEGMENT):
        self.segment = segment
        # Replaced for models that also need a saved state (`state_places.py`)
        self.find_reusable: FindReusable = lambda trail, rows, slot: [Reusable(rows)]
        self.rows = [0] * slots  # by slot: the rows of its last prompt and answer
        self.by_use = list(range(slots))  # the least recently used slot is first
        self.clients = [""] * slots  # by slot: the client whose prompt it holds
        self._clock = 0.0  # counts lost rows (`choose_slot`)
        self._last_use = [0.0] * slots  # by slot: the clock at its last use
        self._trails = [Trail()] * slots  # by slot: the text of these rows, or more
        self._nodes: list[list[Node]] = [[] for _ in range(slots)]  # by slot, the shortest first
        self._overwritten: list[Remembered] = []
        self._root = Node()
        # (node, tokens of the next segment) -> next node. The tokens are bytes, because bytes cache
        # their hash, which the dictionary needs again to remove an entry, perhaps during a plan.
        self._children: WeakValueDictionary[tuple[Node, bytes], Node]
        self._children = WeakValueDictionary()

    def insert(self, prompt: Sequence[int], prefix_cache: bool) -> Trail:
        """Insert a prompt into the tree and return its path. Without prefix caching it has no path."""
        if not prefix_cache:
            return Trail(prompt)
        return Trail(prompt, self._walk(prompt, self._root))

    def _walk(self, tokens: Sequence[int], last: Node) -> list[Node]:
        """Follow these tokens from the node `last`, adding nodes where there are none."""
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
        """Return the longest reusable prefix of this prompt that one of the slots holds, in rows, and
        that slot. `into`: the slot that the prompt goes into, which has its own state (`state_places.py`).

        It is never the whole prompt, because the answer's first token is computed from the prompt's
        last one.
        """
        rows, slot = self._longest(trail, len(trail.tokens) - 1, slots)
        rows = self.most_reusable(trail, rows, into).rows
        return rows, slot if rows else None

    def most_reusable(self, trail: Trail, rows: int, slot: int | None) -> Reusable:
        """Return how many of these rows can be reused, with the state that allows the most."""
        return max(
            self.find_reusable(trail, rows, slot),
            key=lambda reusable: reusable.rows,
            default=Reusable(0),
        )

    def longest(self, trail: Trail) -> int:
        """The longest prefix of this prompt that a slot holds, in rows, reusable or not."""
        return self._longest(trail, len(trail.tokens) - 1, range(len(self.rows)))[0]

    def _longest(self, trail: Trail, limit: int, slots: Sequence[int]) -> tuple[int, int | None]:
        """Return the longest prefix of a text that one of the slots holds, in rows up to `limit`, and
        that slot."""
        among = set(slots)
        nodes = trail.nodes
        usable = min(len(nodes), limit // self.segment)
        # A slot that holds a node holds all nodes before it, so bisection finds the last common one.
        # So the key is False up to that node, then True
        count = bisect_left(nodes, True, hi=usable, key=lambda node: among.isdisjoint(node.slots))
        if count == 0:
            return 0, None
        most = 0
        best = None
        for slot in slots:
            if slot in nodes[count - 1].slots:
                rows = self._common_with_slot(trail.tokens, slot, count * self.segment, limit)
                if rows > most:
                    most = rows
                    best = slot
        return most, best

    def rows_of(self, client: str, trail: Trail) -> int:
        """The longest prefix of this prompt that a slot of this client holds, in rows."""
        slots = [slot for slot, name in enumerate(self.clients) if name == client]
        return self._longest(trail, len(trail.tokens) - 1, slots)[0]

    def _common_with_slot(self, tokens: Sequence[int], slot: int, rows: int, limit: int) -> int:
        """The length of the prefix that a text shares with a slot, up to `limit`; at least `rows`."""
        return common_length(tokens, self._trails[slot].tokens, rows, min(limit, self.rows[slot]))

    def choose_slot(
        self, trail: Trail, free: Sequence[int], staying: Sequence[int] = ()
    ) -> tuple[int, str]:
        """Choose the free slot to write this prompt into, and say why. `staying`:
        other slots, whose rows stay.

        A row is lost if it is neither part of the prompt nor in another slot. An empty slot loses
        nothing, and neither does the slot with this conversation so far. Such a slot is best: the one
        with the most rows of the prompt, because any other has to copy them.

        If every slot loses something, the one with the lowest cost is given up:

            cost  = last use + rows lost - common rows / COPIED
            clock = max(clock, last use + rows lost / AGING)    afterwards

        Both are in rows. Last use is the clock when the slot was last used: a slot that is unused for
        long has a lower one than the others, so in the end it is the cheapest, however much it holds.
        For example, slot 0 was last used at 500 and would lose 100 rows, slot 1 at 0 and 400. Slot 1 is
        given up: 400 is less than 600. The clock was 500, and stays: 0 + 400 / 8 is less.
        (This is GreedyDual, Young 1994, but its clock would advance by all rows lost.) Ties go to the
        least recently used slot.
        """
        choices = []
        for slot in free:
            common, _ = self.match(trail, (slot,), slot)
            lost = self._rows_lost(slot, common, (*free, *staying))
            cost = self._last_use[slot] + lost - common / COPIED if lost else -math.inf
            choices.append((cost, -common, lost, slot))
        # `min` takes the first of equal costs: the least recently used
        _, negated, lost, slot = min(choices, key=lambda choice: choice[:2])
        if lost:
            self._clock = max(self._clock, self._last_use[slot] + lost / AGING)
        return slot, self._reason(slot, -negated, lost, len(free))

    def _reason(self, slot: int, common: int, lost: int, free: int) -> str:
        """Say why a slot was chosen, for the screen."""
        if free == 1:
            return "the only free slot"
        if common and lost:
            return f"has its first {common:,} rows; loses {lost:,}"
        if common:
            return f"has its first {common:,} rows"
        if lost:
            return f"loses {lost:,} row{'s' * (lost > 1)}"
        return "nothing is lost" if self.rows[slot] else "empty"

    def _rows_lost(self, slot: int, common: int, slots: Iterable[int]) -> int:
        """The rows that no slot would hold any more if a prompt that shares `common` rows took this one."""
        rows = self.rows[slot] if self._nodes[slot] else 0
        if rows <= common:
            return 0
        others = [other for other in slots if other != slot]
        copied, _ = self._longest(self._trails[slot], rows, others)
        return rows - max(common, copied)

    def best_source(
        self, trail: Trail, slot: int, written: Mapping[int, tuple[Trail, int]]
    ) -> tuple[int, int | None]:
        """Return the number of cached rows to start this prompt with, and the slot to copy them from.
        None: the prompt's own slot holds them.

        Another slot is used only if it holds at least a segment more, because copying fewer rows
        takes about as long as computing them. `written`: the slots that this step writes, and what
        they will hold. These must hold two segments more, because copying from them takes a second
        forward pass.
        """
        rows, _ = self.match(trail, (slot,), slot)
        source = None
        others = [other for other in range(len(self.rows)) if other not in written]
        most, other = self.match(trail, others, slot)
        if most >= rows + self.segment:
            rows, source = most, other
        if written:
            shared = {
                other: self.most_reusable(trail, self._common_with(trail, *text), slot).rows
                for other, text in written.items()
            }
            other = max(shared, key=shared.__getitem__)
            if shared[other] >= rows + 2 * self.segment:
                rows, source = shared[other], other
        return rows, source

    def _common_with(self, trail: Trail, other: Trail, rows: int) -> int:
        """The length of the prefix that a prompt shares with another text; 0 if less than a segment."""
        limit = min(rows, len(trail.tokens) - 1)
        usable = min(len(trail.nodes), len(other.nodes), limit // self.segment)
        # Texts that share a node share all nodes before it, so bisection finds the last one
        differs = lambda i: trail.nodes[i] is not other.nodes[i]  # noqa: E731
        count = bisect_left(range(usable), True, key=differs)
        return (
            common_length(trail.tokens, other.tokens, count * self.segment, limit) if count else 0
        )

    def begin_alike(self, one: Trail, others: Iterable[Trail], rows: int) -> bool:
        """True if a prompt shares its first `rows` rows with one of the others. Only whole segments are
        compared, and at least one."""
        n = max(1, rows // self.segment)
        # A prompt's last chunk does not wait. Without prefix caching there are no nodes
        if n * self.segment >= len(one.tokens) or n > len(one.nodes):
            return False
        node = one.nodes[n - 1]
        return any(node in other.nodes[n - 1 : n] for other in others)

    def assign(self, slot: int, client: str, kept: int, save_from: int) -> None:
        """Give the slot to a new prompt, and forget its old text. `record_rows` then records the new one,
        with the first `kept` rows, which stay.

        If the slot loses at least `save_from` rows, its old content is to be saved
        (`pop_overwritten`).
        """
        self._overwritten += self.remembered([slot], kept + save_from)
        self.clients[slot] = client
        self.forget(slot)

    def pop_overwritten(self) -> tuple[Remembered, ...]:
        """Return what slots have lost since the last call."""
        overwritten = tuple(self._overwritten)
        self._overwritten.clear()
        return overwritten

    def remembered(self, slots: Iterable[int], least: int) -> list[Remembered]:
        """Return the content of the slots that hold at least `least` rows, once for each of its states.
        Requests without prefix caching are left out."""
        found = []
        for slot in slots:
            if not self._nodes[slot]:
                continue
            trail = self._trails[slot]
            for rows, place, base in self.find_reusable(trail, self.rows[slot], slot):
                if rows >= least:
                    tokens = trail.tokens[:rows]
                    found.append(Remembered(slot, tokens, self.clients[slot], place, base))
        return found

    def record_rows(self, slot: int, trail: Trail, rows: int) -> None:
        """Record that the slot holds exactly the first `rows` rows of this text. What it held before must
        be a prefix of the same text; `assign` forgets anything else."""
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
        """A text that begins with a slot's rows. It may be longer."""
        return self._trails[slot]

    def is_held_by(self, slot: int, trail: Trail) -> bool:
        """True if the slot holds this very prompt, not an equal one of another request."""
        return self._trails[slot] is trail

    def use(self, slot: int) -> None:
        """Mark the slot as the most recently used."""
        self.by_use.remove(slot)
        self.by_use.append(slot)
        self._last_use[slot] = self._clock

    def forget(self, slot: int) -> None:
        """Forget what the slot holds."""
        self.record_rows(slot, Trail(), 0)

    def clear(self) -> None:
        """Forget what all slots hold, and the order in which they were used."""
        for slot in range(len(self.rows)):
            self.forget(slot)
        self.by_use.sort()
        self._clock = 0.0
        self._last_use = [0.0] * len(self.rows)


def common_length(tokens: Sequence[int], others: Sequence[int], rows: int, limit: int) -> int:
    """The length of the common prefix of two texts, up to `limit`. They are known to share `rows`."""
    while rows < limit and tokens[rows] == others[rows]:
        rows += 1
    return rows
