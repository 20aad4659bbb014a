"""The states of delta nets: which place holds the state of which text, as a snapshot and a log.

The problem. A layer with a gated delta net keeps one matrix per head, which each token overwrites. So a prompt
that shares its first 1,000 tokens with a conversation of 3,000 finds the rows of other layers in a slot, but
no state after 1,000 tokens.

The solution. Each slot has a place for the state of its sequence, and there are extra places, the
checkpoints. A place holds the state after `base` tokens, and a log of what the tokens from `base` to
`newest` change, so it can yield the state after any number of tokens in this range. A decode keeps the state before its
first token, so rejected draft tokens and ghosts leave no trace. A chunk keeps the state before its last token.
A chunk whose end is worth keeping writes into a checkpoint, and the next step of its sequence reads that
checkpoint and writes into the slot's place, so nothing is copied. Checkpoints are worth keeping at the end
of a prompt, where prompts diverge, and at points within a long prompt.

A slot's own place serves only prompts in that slot; a checkpoint serves all prompts.

The invariants: a state depends only on the first tokens of its text; no place is read by one sequence
and written by another in the same step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from prefix import Prefixes, Reusable, Trail
from request import Chunk, Decode, Move, Request, StateCounts, Stateless


class Place:
    """A place for the state after `base` tokens of a text, and a log of the tokens up to `newest`."""

    def __init__(self, number: int):
        self.number = number
        self.forget()

    def record(self, trail: Trail, base: int, newest: int) -> None:
        self.trail = trail
        self.base = base
        self.newest = newest

    def forget(self) -> None:
        self.record(Trail(), 0, 0)

    def serves(self, trail: Trail, most: int, segment: int) -> int:
        """Return the largest number of a prompt's tokens, up to `most`, whose state this place can yield;
        0 if there is none. A text shorter than a segment is not recognized."""
        tokens = min(self.newest, most)
        count = tokens // segment
        if tokens < self.base or not count or count > min(len(self.trail.nodes), len(trail.nodes)):
            return 0
        if self.trail.nodes[count - 1] is not trail.nodes[count - 1]:
            return 0
        rest = slice(count * segment, tokens)
        return tokens if tuple(self.trail.tokens[rest]) == tuple(trail.tokens[rest]) else 0


class Fork(NamedTuple):
    """The point where a prompt diverges from the texts in the slots."""

    rows: int = 0  # number of rows that it shares with any slot
    own: int = 0  # number of rows that it shares with a slot of the same client


class Running(NamedTuple):
    """The state of a sequence whose first chunk is planned."""

    place: Place | None  # where its state is; None before its first token
    fork: int  # number of rows that it shares with another text
    left: int  # tokens before its newest checkpoint


class StatePlaces(Stateless):
    """A place for each slot, and the checkpoints, the least recently used first."""

    def __init__(self, slots: int, checkpoints: int, chunk: int, log: int):
        """`log`: the number of tokens that fit into a place's log."""
        self.slots = slots
        self.chunk = chunk
        self.log = log
        self.count = checkpoints
        self.counts = StateCounts()
        self.clear(Prefixes(slots))

    def clear(self, prefixes: Prefixes) -> None:
        self.prefixes = prefixes
        prefixes.find_reusable = self.find_reusable
        self.own = [Place(slot) for slot in range(self.slots)]
        self.checkpoints = [Place(self.slots + i) for i in range(self.count)]
        self.running: dict[int, Running] = {}  # by slot
        self.forks: dict[int, Fork] = {}  # by slot, for prompts that have not started

    # --- prefix caching

    def find_reusable(self, trail: Trail, rows: int, slot: int | None) -> list[Reusable]:
        """Return how many of a text's first rows each state serves, if any: first the slot's own state,
        then the checkpoints, the most recently used first."""
        own = [] if slot is None else [self.own[slot]]
        found = []
        for place in (*own, *reversed(self.checkpoints)):
            if tokens := place.serves(trail, rows, self.prefixes.segment):
                found.append(Reusable(tokens, place.number, place.base))
        return found

    def end_of_chunk(self, request: Request, start: int, stop: int) -> int:
        """End a chunk where this prompt diverges from another one, so that the next prompt with their
        common prefix finds a state."""
        if request.slot in self.running:
            fork = self.running[request.slot].fork
        else:
            trail = request.prefix.trail
            own = self.prefixes.rows_of(request.client, trail)
            self.forks[request.slot] = Fork(self.prefixes.longest(trail), own)
            fork = self.forks[request.slot].rows
        return fork if start < fork < stop else stop

    # --- a step

    def plan(self, chunks: Sequence[Chunk], decodes: Sequence[Decode]) -> Mapping[int, Move]:
        """Return slot -> the places that this step reads the state from and writes it to."""
        for chunk in chunks:
            if chunk.slot not in self.running:
                self._begin(chunk)
        busy = {running.place for running in self.running.values()}
        moves = {}
        for chunk in chunks:
            target = self._free_checkpoint(busy) if self._is_worth(chunk) else None
            target = target or self.own[chunk.slot]
            busy.add(target)
            keep = chunk.stop - 1
            moves[chunk.slot] = self._move(chunk.request, chunk.start, chunk.stop, target, keep)
        for decode in decodes:
            stop = decode.position + 1 + len(decode.draft)
            if stop - decode.position > self.log:
                raise ValueError(
                    f"{len(decode.draft)} draft tokens; the log has room for {self.log - 1}"
                )
            target = self.own[decode.slot]
            keep = decode.position
            moves[decode.slot] = self._move(decode.request, keep, stop, target, keep)
        check_apart(moves)
        self._check()
        return moves

    def _begin(self, chunk: Chunk) -> None:
        """Find the state that a prompt starts from, and count the tokens to prefill again."""
        fork = self.forks.pop(chunk.slot)
        place = None
        if chunk.restored is not None:
            place = self.own[chunk.slot]  # the runner writes the state from disk there
            place.record(chunk.request.prefix.trail, chunk.restored.base, chunk.start)
        elif chunk.start:
            trail = chunk.request.prefix.trail
            served = self.prefixes.most_reusable(trail, chunk.start, chunk.slot)
            assert served.rows == chunk.start, (served, chunk)
            places = (self.own[chunk.slot], *self.checkpoints)
            place = next(place for place in places if place.number == served.place)
            self._use(place)
            self._count(restored=place.number >= self.slots)
        chunk.request.prefix.reread = max(0, fork.rows - chunk.start)
        self._count(reread=max(0, min(fork.own, fork.rows) - chunk.start))
        self.running[chunk.slot] = Running(place, fork.rows, chunk.start)

    def _is_worth(self, chunk: Chunk) -> bool:
        """True if a checkpoint at the end of this chunk is worth a place. Within a prompt, the distance
        between checkpoints grows with their depth, so that a long prompt does not take all places."""
        running = self.running[chunk.slot]
        trail = chunk.request.prefix.trail
        if not trail.nodes or chunk.stop < self.prefixes.segment:
            return False  # shorter than a segment, so no prompt could find it
        is_far = chunk.stop - running.left >= max(self.chunk, running.left // 2)
        is_wanted = is_far or chunk.stop in (running.fork, len(trail.tokens))
        return is_wanted and self.prefixes.most_reusable(trail, chunk.stop, None).rows < chunk.stop

    def _free_checkpoint(self, busy: Collection[Place | None]) -> Place | None:
        """Return the checkpoint to evict: the least valuable one, and among equals the least recently
        used."""
        free = [place for place in self.checkpoints if place not in busy]
        return min(free, key=self._worth, default=None)

    def _worth(self, place: Place) -> int:
        """Return a checkpoint's value. 0: no slot has its rows. 1: one slot has them, and its own place is
        further ahead in the same text. 2: any other, such as the state of a common prefix."""
        count = place.newest // self.prefixes.segment
        end = place.trail.nodes[count - 1 : count] if count else ()
        slots = [slot for node in end for slot in node.slots]
        if len(slots) != 1:
            return 2 * bool(slots)
        own = self.own[slots[0]]
        is_behind = own.newest > place.newest and own.trail.nodes[count - 1 : count] == end
        return 1 if is_behind else 2

    def _count(self, **more: int) -> None:
        now = self.counts._asdict()
        self.counts = self.counts._replace(**{name: now[name] + more[name] for name in more})

    def _use(self, place: Place) -> None:
        if place in self.checkpoints:
            self.checkpoints.remove(place)
            self.checkpoints.append(place)

    def _move(self, request: Request, start: int, stop: int, target: Place, keep: int) -> Move:
        """Record where a step puts the state of a sequence."""
        place, fork, left = self.running[request.slot]
        assert (start == 0) if place is None else place.base <= start <= place.newest, request
        number, base = (-1, 0) if place is None else (place.number, place.base)
        if target.number >= self.slots:
            self._count(made=1, dropped=target.newest > 0)
            left = stop
        target.record(request.prefix.trail, keep, stop)
        self._use(target)
        self.running[request.slot] = Running(target, fork, left)
        return Move(number, base, target.number, keep)

    def leave(self, request: Request) -> None:
        """Keep the states of a finished request only as far as its rows are proven to be finite."""
        own = self.own[request.slot]
        running = self.running.pop(request.slot, None)
        for place in (own, *self.checkpoints):
            if place.trail is request.prefix.trail:
                place.newest = min(place.newest, request.proven)
                if place.newest < place.base:
                    self._count(dropped=place is not own)
                    place.forget()
        if running and own.trail is request.prefix.trail:
            own.trail = self.prefixes.text_of(request.slot)  # the text including the answer

    def view(self) -> tuple[Mapping[int, tuple[int, ...]], StateCounts]:
        marks = {}
        for slot in range(self.slots):
            text, rows = self.prefixes.text_of(slot), self.prefixes.rows[slot]
            found = {
                place.serves(text, min(rows, place.newest), self.prefixes.segment)
                for place in self.checkpoints
            }
            marks[slot] = tuple(sorted(found - {0}))
        return marks, self.counts

    def _check(self) -> None:
        numbers = [place.number for place in (*self.own, *self.checkpoints)]
        assert sorted(numbers) == list(range(self.slots + self.count)), numbers
        places = [running.place for running in self.running.values() if running.place]
        targets = [place for place in places if place in self.checkpoints]
        assert len({*targets}) <= len(targets)
        for slot, running in self.running.items():
            assert running.place is None or running.place in (self.own[slot], *self.checkpoints)


def check_apart(moves: Mapping[int, Move]) -> None:
    """Assert that no place is read by one sequence and written by another, because the order of
    sequences within a pass is not defined."""
    for slot, move in moves.items():
        for other, theirs in moves.items():
            is_apart = move.target not in (theirs.source, theirs.target)
            assert other == slot or is_apart, (slot, move, other, theirs)
