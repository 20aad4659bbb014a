"""The roof: how fast this machine reads weights and multiplies them at most.

The problem. "A step takes 4 ms" says nothing as long as nobody knows what the machine could do.
What a data sheet says is another machine's, and no program reaches it.

The way out. Two products are timed on the device that steps, with the product that the engine uses.
A product with one row reads each weight and multiplies it once, so reading is all that it does.
(It is done with weights that no cache holds, and again with as many as the model has: a small model
stays in the processor's cache.) A product of two square matrices uses each number many times, so
multiplying is all that it does.

What this file keeps. Each figure is the quickest of many tries, for what interrupts makes a try only
longer. All of it takes less than a second, and at most a quarter of the free memory.

Where next: `screen/bill.py`, which holds a step against it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from parts.device.mlx import free_memory, mx

WIDE = 1024  # numbers in a row of a matrix of which one row is multiplied
LARGE = 2**28  # bytes: most caches hold less
LARGEST = 2**32
LEAST_S = 0.004  # a try that is shorter is mostly the overhead of starting it
TRIES_S = 0.08  # so long each figure is tried


def measure(nbytes: int, dtype: mx.Dtype) -> tuple[float, float, float]:
    """Bytes a second, the same of `nbytes` again and again, and operations a second in `dtype`."""
    free = free_memory()
    most = LARGE if free is None else min(LARGEST, max(2**20, free // 8))
    large = min(LARGE, most)
    rate = reading(large, most)
    again = reading(nbytes, nbytes) if nbytes < large else rate
    return rate, again, multiplying(dtype, most)


def reading(nbytes: int, most: int) -> float:
    """Bytes a second. As long as a try is too short and there is room, it is done with more."""
    rows = max(1, nbytes // (4 * WIDE))
    x = mx.ones((1, WIDE))
    weight = mx.ones((rows, WIDE))
    mx.eval(x, weight)
    seconds = quickest(lambda: x @ weight.T)
    if seconds < LEAST_S and 2 * weight.nbytes <= most:
        return reading(2 * weight.nbytes, most)
    return weight.nbytes / seconds


def multiplying(dtype: mx.Dtype, most: int, side: int = 256) -> float:
    """Operations a second: a product and a sum are two."""
    x = mx.ones((side, side), dtype)
    weight = mx.ones((side, side), dtype)
    mx.eval(x, weight)
    seconds = quickest(lambda: x @ weight.T)
    if seconds < LEAST_S and 8 * weight.nbytes <= most:
        return multiplying(dtype, most, 2 * side)
    return 2 * side**3 / seconds


def quickest(product: Callable[[], mx.array]) -> float:
    mx.eval(product())  # the first is slow
    tries: list[float] = []
    while sum(tries) < TRIES_S:
        began = time.perf_counter()
        mx.eval(product())
        tries.append(time.perf_counter() - began)
    return min(tries)
