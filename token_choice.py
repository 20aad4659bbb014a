"""How one token is chosen from a row: the largest logit, or a draw from a distribution.

A draw uses no random generator, because neighbours in the batch could advance its state. Its noise is
`uniform`, a hash of the request's seed and of the token's index in the answer.
"""

import math

from kernels.device import has_gpu, mx
from kernels.sampling_ops import BLOCK, added, gather, padded


def argmax(x: mx.array) -> tuple[mx.array, mx.array]:  # (n, V) -> (n, 1) twice
    """Return the largest number in each row, and its first index.

    On a CPU, first find the best block (the first one, if several are equal), then the index within it. A
    block is a small matrix, because MLX computes the maxima of columns in a third of the time.
    """
    if has_gpu():
        best = x.max(axis=-1, keepdims=True)
        return best, mx.argmax(x, axis=-1, keepdims=True)
    x = padded(x, 128, -math.inf)
    blocks = x.reshape(len(x), -1, 8, 16)
    best = blocks.max(axis=2).max(axis=2)  # (n, blocks)
    first = 128 * mx.argmax(best, axis=-1, keepdims=True)  # (n, 1): where that block begins
    block = gather(x, first + mx.arange(128))
    ids = first + mx.argmax(block, axis=-1, keepdims=True)
    return best.max(axis=-1, keepdims=True), ids


def inverse_cdf(
    weights: mx.array,  # (n, V)
    u: mx.array,  # (n, 1)
) -> mx.array:  # (n, 1)
    """Draw from a distribution: return the index where the running sum of weights passes u times the total.

        weights    | 0.5    | 0.3    | 0.2 |      u = 0.6 draws the second
        sums       0        0.5      0.8   1

    One running sum over V float32 numbers would lose the small weights. So sum blocks, then blocks of
    blocks. The index is found from the top: the large block, the block in it, the index.
    """
    levels = [weights]
    while levels[-1].shape[-1] > BLOCK:
        blocks = levels[-1].reshape(len(weights), -1, BLOCK)
        sums = blocks.sum(axis=-1)
        levels.append(padded(sums, BLOCK, 0))
    mark = u * added(levels[-1])
    place = mx.zeros(u.shape, mx.int32)
    for level in reversed(levels):
        first = place * BLOCK
        block = gather(level, first + mx.arange(BLOCK))  # (n, BLOCK)
        sums = mx.cumsum(block, axis=-1)
        # Rounding may put the mark at the end of the block, on a token that is filtered out.
        end = sums[:, -1:] * (1 - 2**-22)
        mark = mx.clip(mark, 0, end)
        inside = mx.minimum(added(sums <= mark), BLOCK - 1)
        mark = mark - gather(sums - block, inside)
        place = first + inside
    return place


def uniform(seed: int, index: int) -> float:
    """Hash a seed and an index to a number above 0 and below 1.

    It has 22 bits, so that u times a float32 sum is always below the sum.
    """
    x = seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03
    x = (x + 0x8CB92BA72F3D8DD7) % 2**64
    for _ in range(2):  # splitmix64's finalizer: each input bit affects each output bit
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        x ^= x >> 31
    return ((x >> 42) + 0.5) / 2**22
