"""Compare two answers bit by bit.

Equal texts do not prove equal logits, so the log probabilities of the tokens and of the likeliest
alternatives are compared. For an embedding the vector is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import product
from operator import sub
from typing import NamedTuple

from engine.handle import Handle


class Bits(NamedTuple):
    """An answer with its log probabilities, or an embedding."""

    digest: str  # hash of `tokens`, `likely` and `vector`
    tokens: tuple[int, ...]
    # For each position: (token, log probability) of the chosen token, then of the likeliest tokens
    likely: tuple[tuple[tuple[int, float], ...], ...]
    pieces: tuple[str, ...]  # the text that each token added
    vector: tuple[float, ...] = ()

    @staticmethod
    def from_handle(handle: Handle, until: int | None = None) -> Bits:
        """Return the bits of a request. `until`: use only this many tokens."""
        tokens = tuple(handle.tokens[:until])
        likely = []
        for token, found in zip(tokens, handle.logprobs, strict=False):
            likely.append(((token, found.logprob), *found.top))
        pieces = []
        start = 0
        for length in handle.lengths[:until]:
            pieces.append(handle.text[start : start + length])
            start += length
        return Bits.made(tokens, tuple(likely), tuple(pieces), tuple(handle.vector or ()))

    @staticmethod
    def made(tokens: tuple, likely: tuple, pieces: tuple, vector: tuple = ()) -> Bits:
        # repr distinguishes all floats
        seen = repr((tokens, list(likely))) + repr(vector) * bool(vector)
        digest = sha256(seen.encode()).hexdigest()[:8]
        return Bits(digest, tokens, likely, pieces, vector)

    def only(self, place: int) -> Bits:
        """Return an answer with only the token at this position."""
        here = slice(place, place + 1)
        return Bits.made(self.tokens[here], self.likely[here], self.pieces[here])

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def numbers(self) -> int:
        """The number of floats that the hash covers."""
        return sum(map(len, self.likely)) + len(self.vector)

    def piece(self, place: int) -> str:
        """Return a token as text: "the end" for an end token, "nothing more" after the last token."""
        if place >= len(self.tokens):
            return "nothing more"
        if place >= len(self.pieces):
            return "the end"
        return f"“{self.pieces[place]}”" if self.pieces[place] else f"token {self.tokens[place]}"


class Difference(NamedTuple):
    """The first difference between two answers."""

    place: int  # the first position with different bits, from 0; -1: the vectors differ
    by: float  # the largest difference in a log probability or a vector's element
    parted: int | None  # the first position with different tokens
    said: tuple[str, str]  # the expected and the actual token at that position

    @property
    def words(self) -> str:
        if self.place < 0:
            return f"another vector, by up to {self.by:.1g}"
        bits = f"other bits from token {self.place + 1}"
        bits += f", by up to {self.by:.1g}" if self.by else ""
        if self.parted is None:
            return f"the same tokens; {bits}"
        right, wrong = self.said
        return f"token {self.parted + 1} is {wrong}, alone it is {right}; {bits}"


def difference(right: Bits, other: Bits) -> Difference | None:
    """Return the difference, or None if all bits are equal. Positions after the first different token
    are not compared, because their contexts differ."""
    if right.digest == other.digest:
        return None
    if right.vector or other.vector:
        by = max(map(abs, map(sub, right.vector, other.vector)), default=0.0)
        return Difference(-1, by, None, ("", ""))
    place = None
    furthest = 0.0
    for i, (ours, theirs) in enumerate(zip(right.likely, other.likely, strict=False)):
        if ours != theirs and place is None:
            place = i
        for (token, value), (same, found) in product(ours, theirs):
            if token == same and value != found:  # skips -inf, whose difference to itself is NaN
                furthest = max(furthest, abs(value - found))
        if right.tokens[i] != other.tokens[i]:
            break
    parted = first_other(right.tokens, other.tokens)
    said = ("", "") if parted is None else (right.piece(parted), other.piece(parted))
    if place is None:  # one answer is longer, or there are no log probabilities
        place = parted or 0
    return Difference(place, furthest, parted, said)


def first_other(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the first position with different tokens, or None if the answers are equal."""
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return place
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))
