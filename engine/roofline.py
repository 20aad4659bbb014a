"""The roofline: the highest rates at which this machine reads weights and multiplies them.

A step with few rows is limited by memory bandwidth. The bandwidth is measured with more bytes than any cache
holds, and again with the size of the model, which may fit into a cache. On a CPU our C library only reads the
bytes; on other devices a product with one row reads them. A product of two square matrices is limited by
arithmetic. Each figure is the fastest of several short tries, because interruptions can only make a try
slower. The measurement takes less than a second and at most a quarter of the free memory.
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

WIDE = 1024  # numbers in a row
PIECE = 2**24  # bytes read in a try
LARGE = 2**28  # bytes; larger than most caches
LARGEST = 2**32
LEAST_S = 0.0005  # a shorter try is mostly launch overhead
TRIES_S = 0.1  # time for each figure


def measure_roofline(engine: Engine, others: float = 0.0) -> None:
    """Measure the roofline. Call this between two steps. Later snapshots of this engine contain the result.

    `others`: the number of cores that other programs use, if known.
    """
    with device_lock, device_stream():
        found = Roof(*measure(engine.model.cost.nbytes, engine.model.dtype), others)
    engine.registry.roof = engine.registry.roof.joined(found)


def measure(nbytes: int, dtype: mx.Dtype) -> tuple[float, float, float]:
    """Return bytes per second from memory, bytes per second for `nbytes` read repeatedly, and operations per
    second in `dtype`."""
    free = free_memory()
    most = LARGE if free is None else min(LARGEST, max(2**20, free // 8))
    large = min(LARGE, most)
    streams = is_batch_invariant()  # our own product is in use
    rate = read_rate(large) if streams else reading(large, most)
    again = rate
    if nbytes < large:
        again = read_rate(nbytes) if streams else reading(nbytes, nbytes)
    return rate, again, multiplying(dtype, most)


def reading(nbytes: int, most: int, piece: int = PIECE) -> float:
    """Return bytes per second, measured with products. If a try is too short, retry with more bytes, up
    to `most`."""
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
    """Return operations per second. A multiply-add counts as two operations."""
    x = mx.ones((side, side), dtype)
    weight = mx.ones((side, side), dtype)
    mx.eval(x, weight)
    seconds = quickest([(x, weight)])
    if seconds < LEAST_S and 8 * weight.nbytes <= most:
        return multiplying(dtype, most, 2 * side)
    return 2 * side**3 / seconds


def quickest(pairs: Sequence[tuple[mx.array, mx.array]]) -> float:
    """Return the time of the fastest product x W^T in seconds. Use the pairs in turn."""
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
