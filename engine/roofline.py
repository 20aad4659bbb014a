"""The roofline: how fast this machine reads weights and multiplies them at most, by the engine's own product.

A step with few rows is limited by memory bandwidth. It is measured with more bytes than any cache holds,
and again with as many as the model has, which may fit a cache: on a CPU our C library reads them and does
nothing else, elsewhere products with one row do. A product of two square matrices is limited by arithmetic.
Each figure is the fastest of some short tries, because interruptions only make a try longer. All this
takes less than a second and at most a quarter of the free memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from kernels.device import (
    device_lock,
    device_stream,
    free_memory,
    is_batch_invariant,
    mx,
    read_rate,
)
from models.forward_cost import Roof

if TYPE_CHECKING:
    from nanobatch import Engine

WIDE = 1024  # length of a row
PIECE = 2**24  # bytes read by a try
LARGE = 2**28  # bytes: more than most caches hold
LARGEST = 2**32
LEAST_S = 0.0005  # a shorter try is mostly launch overhead
TRIES_S = 0.1  # time for each figure


def measure_roofline(engine: Engine, others: float = 0.0) -> None:
    """Measure between two steps. Later snapshots of this engine have the result.

    `others`: the number of cores that other programs take meanwhile, as far as that is known.
    """
    with device_lock, device_stream():
        found = Roof(*measure(engine.model.cost.nbytes, engine.model.dtype), others)
    engine.registry.roof = engine.registry.roof.joined(found)


def measure(nbytes: int, dtype: mx.Dtype) -> tuple[float, float, float]:
    """Bytes per second; the same for `nbytes` read again and again; operations per second in `dtype`."""
    free = free_memory()
    most = LARGE if free is None else min(LARGEST, max(2**20, free // 8))
    large = min(LARGE, most)
    streams = is_batch_invariant()  # our own product multiplies
    rate = read_rate(large) if streams else reading(large, most)
    again = rate
    if nbytes < large:
        again = read_rate(nbytes) if streams else reading(nbytes, nbytes)
    return rate, again, multiplying(dtype, most)


def reading(nbytes: int, most: int, piece: int = PIECE) -> float:
    """Bytes per second, by products. While a try is too short and memory allows, try with more."""
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
    """Operations per second: a multiplication and an addition are two."""
    x = mx.ones((side, side), dtype)
    weight = mx.ones((side, side), dtype)
    mx.eval(x, weight)
    seconds = quickest([(x, weight)])
    if seconds < LEAST_S and 8 * weight.nbytes <= most:
        return multiplying(dtype, most, 2 * side)
    return 2 * side**3 / seconds


def quickest(pairs: Sequence[tuple[mx.array, mx.array]]) -> float:
    """Seconds of the fastest product x W^T. The pairs are tried in turn."""
    turn = cycle(pairs)
    x, weight = pairs[0]
    mx.eval(x @ weight.T)  # warm up
    tries: list[float] = []
    while sum(tries) < TRIES_S:
        x, weight = next(turn)
        began = time.perf_counter()
        mx.eval(x @ weight.T)
        tries.append(time.perf_counter() - began)
    return min(tries)
