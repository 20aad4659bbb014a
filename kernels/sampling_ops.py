"""Array operations of the sampler. None of them sorts a long row or waits for a result while a step is
being prepared.

Eight rows of a vocabulary of 152,000 are 1.2 million numbers, and sorting them takes ten times as long
as the whole forward pass of a small model. `likeliest` finds the top k by block minima, and
`keep_nearest` finds by bisection what a sort and `sampling.keep_first` would keep
(`test_bisection_keeps_what_a_sort_would_keep` in tests/core/test_sampling.py).
"""

import math
from collections.abc import Callable, Sequence

from kernels.device import mx

BLOCK = 64  # rows of logits are padded to whole blocks


def likeliest(gap: mx.array, k: int) -> mx.array:  # (n, V) -> (n, k)
    """Return the ids of the k smallest gaps, smallest first. Equal gaps are in the order of their ids.

    The k smallest gaps are in the k blocks with the smallest minima. For k = 2, in blocks of 3:

        gaps       5 2 7 | 4 9 8 | 1 0 6 | 3 3 9
        smallest     2       4       0       3        only blocks 0 and 2 are sorted

    Proof: the k minima of these blocks come before any number of another block. The same holds
    for equal gaps, because blocks are in the order of ids. Finding the k blocks is the same problem
    on a shorter row.
    """
    n, V = gap.shape
    # This size balances the number of blocks with the size of k blocks
    size = 2 ** round(math.log2(V / k) / 2)
    if size < 4:
        return mx.argsort(gap, axis=-1)[:, :k]
    gap = padded(gap, size, math.inf)
    blocks = gap.reshape(n, -1, size)
    nearest = likeliest(blocks.min(axis=-1), k)
    nearest = mx.sort(nearest, axis=-1)  # so that the ids below are sorted, too
    ids = nearest[:, :, None] * size + mx.arange(size)
    ids = ids.reshape(n, -1)  # (n, k * size): all tokens of these blocks
    ids = gather(ids, likeliest(gather(gap, ids), k))
    return mx.minimum(ids, V - 1)  # padding is chosen only in a row of NaN; keep its ids valid


def keep_nearest(
    gap: mx.array,  # (n, V): how far a logit is below the largest
    weights: mx.array,  # (n, V): e^-gap
    total: mx.array,  # (n, 1): their sum
    count: mx.array,  # (n, 1): the number of tokens to keep
    mass: mx.array | None,  # (n, 1): keep tokens until they reach this fraction of the total
) -> mx.array:  # (n, V) bool
    """Return a mask of the tokens to keep, without a sort: all tokens up to some gap, the bound.

    A bound is too far if the tokens nearer than the bound already number `count` or have the `mass`.
    Bisection finds the farthest bound that is not too far. The bits of positive floats, read as
    integers, have the order of the floats. So the bound is found bit by bit, highest first:

        is 2.0 too far?        yes: the bit is 0
        is 1.1e-19 too far?    no: the bit is 1        repeated for 31 bits

    Probabilities are counted in units of 2^-31. A sum of integers is exact, whatever the order in
    which a device adds.
    """
    V = gap.shape[-1]
    unit = 2.0**31 / total
    if mass is not None:
        units = (weights * unit).astype(mx.uint32)
        wanted = mx.ceil(mass * added(units))
        wanted = wanted.astype(mx.uint32)

    def quota(bound: mx.array) -> mx.array:  # (n, 1) -> (n, 1)
        """Return the number of tokens at this bound that may be kept: 0 or less if it is too far."""
        # Tokens at the bound or farther. A NaN guess has no tokens beyond it, so it is too far
        beyond = added(gap >= bound)
        by_count = count - (V - beyond)
        if mass is None:
            return by_count
        # subtle: `nearer` is the mass of all nearer tokens. Selecting them would take MLX five times
        # as long. So every token beyond is counted as if it were at the bound, and subtracted again.
        # The sum may wrap around at 2^32, but the difference is right.
        each = (exp_minus(bound) * unit).astype(mx.uint32)
        nearer = added(mx.maximum(units, each))
        nearer = nearer - each * beyond.astype(mx.uint32)
        lacking = wanted - mx.minimum(nearer, wanted)
        each = mx.maximum(each, 1)
        by_mass = lacking // each + (lacking % each > 0)  # rounded up
        return mx.minimum(by_count, by_mass)

    bits = mx.zeros(unit.shape, mx.uint32)
    for bit in reversed(range(31)):
        guess = bits + 2**bit
        is_near = quota(guess.view(mx.float32)) > 0
        bits = mx.where(is_near, guess, bits)
    bound = bits.view(mx.float32)
    ties = gap == bound  # among ties, the lowest ids are kept
    keep_ties = mx.cumsum(ties, axis=-1) <= quota(bound)
    return (gap < bound) | (ties & keep_ties)


def exp_minus(gap: mx.array) -> mx.array:
    """Return e^-gap, as a power of 1/e. On a CPU, MLX takes twice as long for `exp`."""
    return mx.power(math.exp(-1), gap)


def fold(reduce: Callable, x: mx.array) -> mx.array:  # (n, V) -> (n, 1)
    """Reduce each row to its maximum or sum, in two steps: each row is reshaped to a matrix, whose
    columns are reduced first, then the resulting row.

    On a CPU this takes a third of the time. A sum is more precise, too: near the end of a long
    float32 sum, small numbers are lost because the sum so far is large.
    """
    matrix = x.reshape(len(x), BLOCK, -1)
    columns = reduce(matrix, axis=1)
    return reduce(columns, axis=-1, keepdims=True)


def column(values: list[float]) -> mx.array:  # (n, 1)
    return mx.array(values)[:, None]


def filled(rows: Sequence[tuple[int, ...]], width: int) -> mx.array:  # (n, width)
    """Return token ids as a matrix. Short rows are padded with their first token."""
    full = []
    for row in rows:
        first = row[:1] or (0,)
        full.append(row + first * (width - len(row)))
    return mx.array(full)


def gather(x: mx.array, places: mx.array) -> mx.array:  # (n, m) and (n, k) -> (n, k)
    return mx.take_along_axis(x, places, axis=-1)


def added(x: mx.array) -> mx.array:  # (n, m) -> (n, 1)
    return x.sum(axis=-1, keepdims=True)


def padded(
    x: mx.array,  # (n, m)
    size: int,
    value: float,
) -> mx.array:  # (n, m rounded up to a multiple of size)
    missing = -x.shape[-1] % size
    if not missing:
        return x
    widths = [(0, 0), (0, missing)]
    return mx.pad(x, widths, constant_values=value)
