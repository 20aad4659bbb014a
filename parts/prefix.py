"""Which prompts begin alike, and which slots hold the rows of a common beginning.

The problem. Chats begin with the same system prompt, and a conversation that goes on begins with all that was said
before. Their keys and values are the same rows, so they should be computed once. But to compare each new prompt with
what every slot holds, token by token and again in every step, takes longer than a step: with 64 slots of 16,000 tokens
it took more than a second.

The way out: give each beginning a name. A prompt is cut into chunks, and each chunk leads from one `Beginning` to the
next longer one. Equal chunks lead from equal beginnings to the same object, so two prompts share n chunks exactly if
their n-th beginnings are one and the same object:

    prompt A   c a t s . s i t . . . .        chunks of 4:   cats -> .sit -> ....
    prompt B   c a t s . r u n . . . .                       cats -> .run -> ....     one object, then two

A prompt's tokens are read once, when it is submitted. From then on a comparison is a look at one object, and each
beginning knows the slots that hold its rows.

The invariant: a slot that holds a beginning holds all shorter ones of the same prompt.

A `Beginning` lives as long as a request or a slot refers to it. Where next: `Scheduler._shared` in `sched.py`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from weakref import WeakValueDictionary


class Beginning:
    """The first n chunks of a prompt. Prompts that begin alike refer to the same object."""

    __slots__ = ("__weakref__", "slots")

    def __init__(self) -> None:
        self.slots: set[int] = set()  # the slots that hold its rows


class Prefixes:
    """The beginnings of all prompts that are open or remembered, and the slots that hold their rows."""

    def __init__(self, slots: int, chunk: int):
        self.chunk = chunk
        self.rows = [0] * slots  # by slot: rows of the prompt that it was last filled with
        self.by_use = list(range(slots))  # the slot that was used longest ago stands first: it is written over next
        self._held: list[list[Beginning]] = [[] for _ in range(slots)]  # by slot: the beginnings it holds, in order
        # (a beginning, the next chunk's tokens) -> the beginning that is longer by this chunk. The tokens are bytes,
        # which remember their hash: a dictionary wants it again when an entry dies, and that may be inside a plan.
        self._longer: WeakValueDictionary[tuple[Beginning | None, bytes], Beginning] = WeakValueDictionary()

    def beginnings(self, prompt: tuple[int, ...]) -> list[Beginning]:
        """A prompt's beginnings of one chunk, two chunks, and so on. The rest that fills no chunk is left out."""
        found, last = [], None
        data, width = array("q", prompt).tobytes(), 8 * self.chunk
        for start in range(0, len(data) - width + 1, width):
            step = last, data[start : start + width]
            last = self._longer.get(step)
            if last is None:
                last = self._longer[step] = Beginning()
            found.append(last)
        return found

    def find(self, beginnings: Sequence[Beginning], slots: Sequence[int]) -> tuple[int, int | None]:
        """How many rows of these beginnings the slots hold at most, and the first slot that holds so many."""
        among = set(slots)
        count = bisect_left(beginnings, True, key=lambda beginning: among.isdisjoint(beginning.slots))
        if count == 0:
            return 0, None
        return count * self.chunk, next(slot for slot in slots if slot in beginnings[count - 1].slots)

    def hold(self, slot: int, beginnings: Sequence[Beginning], rows: int) -> None:
        """The slot's first `rows` rows are those of this prompt, as they were or with more at their end."""
        held = self._held[slot]
        for beginning in beginnings[len(held) : rows // self.chunk]:
            beginning.slots.add(slot)
            held.append(beginning)
        self.rows[slot] = rows

    def use(self, slot: int) -> None:
        """It was used just now, so of all slots it is written over last."""
        self.by_use = [other for other in self.by_use if other != slot] + [slot]

    def forget(self, slot: int) -> None:
        """The slot's rows are about to be written over, or are not to be trusted."""
        for beginning in self._held[slot]:
            beginning.slots.discard(slot)
        self._held[slot], self.rows[slot] = [], 0

    def clear(self) -> None:
        """No slot remembers anything, and none was used before another."""
        for slot in range(len(self.rows)):
            self.forget(slot)
        self.by_use.sort()
