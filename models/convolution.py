"""The short convolution that some families use instead of attention in most layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kernels.device import mx
from kernels.packed import Matrix

if TYPE_CHECKING:
    from kv import Window


class Convolution(NamedTuple):
    """A gated convolution over the last tokens. With three taps, at position p:

        b, c, x = project(x)     u = b x     c (w0 u[p - 2] + w1 u[p - 1] + w2 u[p])

    The inputs u of earlier tokens are rows of the slab, like keys and values, so a sequence can
    continue from any row of any slot.
    """

    index: int  # index of its array in the slab
    project: Matrix  # D -> 3 D
    taps: mx.array  # (taps, D)

    def __call__(self, x: mx.array, windows: Sequence[Window]) -> mx.array:  # (N, D) -> the same
        b, c, x = mx.split(self.project(x), 3, axis=1)
        u = b * x
        slab = windows[0].slab
        _, heads, length, Dh = slab.shapes[self.index]
        start = 0
        for window in windows:
            stop = start + window.B * window.L
            window.put(self.index, u[start:stop].reshape(-1, heads, Dh))
            start = stop
        positions = mx.concatenate([window.positions for window in windows])  # (N,)
        # (N, heads): the index of the row of position 0
        first = [slot * heads * length for w in windows for slot in w.slots for _ in range(w.L)]
        first = mx.array(first)[:, None] + length * mx.arange(heads)
        rows = slab.arrays[self.index].flatten(0, 2)  # (slots * heads * (S + 1), Dh)
        total = None
        for back, weight in zip(reversed(range(len(self.taps))), self.taps, strict=True):
            at = positions - back  # negative before the start of the sequence, where u is 0
            taken = rows[first + mx.maximum(at, 0)[:, None]].flatten(1)  # (N, D)
            part = mx.where(at[:, None] >= 0, taken.astype(u.dtype), 0) * weight
            total = part if total is None else total + part
        return c * total
