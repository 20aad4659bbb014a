"""The roof: how fast this machine reads weights and multiplies them at most.

The problem. "A step takes 4 ms" says nothing as long as nobody knows what the machine could do.
What a data sheet says is another machine's, and no program reaches it.

The way out. Two products are timed on the device that steps, with the product that the engine uses.
A product with one row reads each weight and multiplies it once, so reading is all that it does.
(It is done with weights that no cache holds, and again with as many as the model has: a small model
stays in the processor's cache.) A product of two square matrices uses each number many times, so
multiplying is all that it does.

What this file keeps. Each figure is the quickest of many tries, for what interrupts a try makes it
only longer. And a try is short, so that some fall between two interruptions: the weights are read in
pieces, one after the other, and no cache has a piece when its turn comes again. All of it takes less
than a second, and at most a quarter of the free memory.

Where next: `screen/pages/step_cost.py`, which holds a step against it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle

from kernels.mlx import free_memory, mx

WIDE = 1024  # numbers in a row of a matrix of which one row is multiplied
PIECE = 2**24  # bytes that a try reads
LARGE = 2**28  # bytes: most caches hold less
LARGEST = 2**32
LEAST_S = 0.0005  # a try that is shorter is mostly the overhead of starting it
TRIES_S = 0.1  # so long each figure is tried


def measure(nbytes: int, dtype: mx.Dtype) -> tuple[float, float, float]:
    """Bytes a second, the same of `nbytes` again and again, and operations a second in `dtype`."""
    free = free_memory()
    most = LARGE if free is None else min(LARGEST, max(2**20, free // 8))
    large = min(LARGE, most)
    rate = reading(large, most)
    again = reading(nbytes, nbytes) if nbytes < large else rate
    return rate, again, multiplying(dtype, most)


def reading(nbytes: int, most: int, piece: int = PIECE) -> float:
    """Bytes a second. As long as a try is too short and there is room, it is done with more."""
    rows = max(1, min(nbytes, piece) // (4 * WIDE))
    count = max(1, nbytes // piece)
    x = mx.ones((1, WIDE))
    pieces = [mx.ones((rows, WIDE)) for _ in range(count)]
    mx.eval(x, pieces)
    seconds = quickest([(x, piece) for piece in pieces])
    if seconds < LEAST_S and 2 * nbytes <= most:
        return reading(2 * nbytes, most, 2 * piece)
    return pieces[0].nbytes / seconds


def multiplying(dtype: mx.Dtype, most: int, side: int = 256) -> float:
    """Operations a second: a product and a sum are two."""
    x = mx.ones((side, side), dtype)
    weight = mx.ones((side, side), dtype)
    mx.eval(x, weight)
    seconds = quickest([(x, weight)])
    if seconds < LEAST_S and 8 * weight.nbytes <= most:
        return multiplying(dtype, most, 2 * side)
    return 2 * side**3 / seconds


def quickest(pairs: Sequence[tuple[mx.array, mx.array]]) -> float:
    """Seconds of the quickest product x W^T of all that are tried, in turn."""
    turn = cycle(pairs)
    x, weight = pairs[0]
    mx.eval(x @ weight.T)  # the first is slow
    tries: list[float] = []
    while sum(tries) < TRIES_S:
        x, weight = next(turn)
        began = time.perf_counter()
        mx.eval(x @ weight.T)
        tries.append(time.perf_counter() - began)
    return min(tries)
