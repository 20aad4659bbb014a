"""The output of a step for one request, in plain Python: token, log probabilities, a prompt's vector."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple


class TokenLogprob(NamedTuple):
    """A token's log probability, and the most likely tokens with theirs: under a grammar, among the
    allowed tokens."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    free: tuple[tuple[int, float], ...] = ()  # the top as it would be without the grammar


class StepOutput(NamedTuple):
    """The output of one row of a step."""

    token: int  # -1 if the logits were not finite
    logprob: TokenLogprob | None = None  # if it asked for them
    state: array | None = None  # if it asked for a vector: the prompt's last state, (D,)


class TokenLogprobs(Sequence[TokenLogprob]):
    """Those of all tokens of an answer, as numbers in one array.

    As tuples, 20 for each of 8,000 tokens would take 25 MB instead of 3.
    """

    def __init__(self) -> None:
        self._numbers = array("d")  # of each token: its own, then each id with its value
        self._top = 0  # pairs of each token that are the top
        self._width = 1  # numbers of each token

    def append(self, entry: TokenLogprob) -> None:
        numbers = [entry.logprob, *chain(*entry.top, *entry.free)]
        assert not self or len(numbers) == self._width, (len(numbers), self._width)
        self._top = len(entry.top)
        self._width = len(numbers)
        self._numbers.extend(numbers)

    def __len__(self) -> int:
        return len(self._numbers) // self._width

    def __getitem__(self, place):
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        start = range(len(self))[place] * self._width
        own, *rest = self._numbers[start : start + self._width]
        pairs = tuple(zip(map(int, rest[::2]), rest[1::2], strict=True))
        return TokenLogprob(own, pairs[: self._top], pairs[self._top :])

    def __eq__(self, other) -> bool:
        return list(self) == list(other)
