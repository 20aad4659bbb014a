"""What a handle keeps of its answer, and how its figures are counted."""

import random
import sys

import pytest

from runtime.handle import TokenLogprob, TokenLogprobs
from runtime.snapshot import percentile


@pytest.mark.parametrize("top, free", [(0, 0), (5, 0), (20, 20)])
def test_logprobs_are_compact(top, free):
    """As tuples those of 8,000 tokens took 25 MB, and half as much again under a grammar."""
    dice = random.Random(top)

    def pairs(count: int) -> tuple:
        values = (dice.choice([-dice.random(), -float("inf")]) for _ in range(count))
        return tuple((dice.randrange(200_000), value) for value in values)

    kept = TokenLogprobs()
    assert len(kept) == 0 and list(kept) == []
    entries = []
    for _ in range(1000):
        entries.append(TokenLogprob(-dice.random(), pairs(top), pairs(free)))
        kept.append(entries[-1])
    assert kept == entries and kept[-1] == entries[-1] and kept[3:-5:2] == entries[3:-5:2]
    with pytest.raises(IndexError):
        kept[1000]
    size = sum(sys.getsizeof(each) for each in vars(kept).values())
    assert size < 1000 * 16 * (1 + top + free) * 1.2 + 1000


def test_a_percentile_is_a_value_that_was_there():
    """`/metrics` took the value behind it: of two steps the longer one as the median."""
    values = [3.0, 1.0, 2.0, *map(float, range(4, 101))]
    assert [percentile(values, part) for part in (0, 0.5, 0.95, 1)] == [1, 50, 95, 100]
    assert percentile([2.0, 1.0], 0.5) == 1
    assert percentile([7.0], 0.99) == 7
    assert percentile([], 0.5) is None
