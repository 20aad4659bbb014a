"""The gated delta rule in one operation of `delta_net.c`, similar to attention (`c_attention.py`).

In place of a slab there are a layer's states, which end with a label. Each row of x contains a token's
inputs and a move: the place that its sequence continues from, and the place for its new state.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from kernels import device
from kernels.device import mx
from kernels.library import LINE
from kernels.packed import address

TAPS = 4  # kernel size of the convolution
LOG = 16  # tokens in the log of a slot's place, enough for a decode step with 15 draft tokens


class Heads(NamedTuple):
    """The numbers and sizes of a layer's heads."""

    Hk: int  # key heads, and query heads
    Hv: int  # value heads; Hv / Hk of them share a key head
    Dk: int  # size of a key
    Dv: int

    @property
    def inputs(self) -> int:
        """The number of a token's inputs: its queries, keys and values."""
        return 2 * self.Hk * self.Dk + self.Hv * self.Dv

    def place_size(self, log: int) -> int:
        """Return the size of a place with a log of this many tokens, rounded up to whole cache lines."""
        change = self.Hk * self.Dk + self.Hv * self.Dv + self.Hv
        size = self.Hv * self.Dk * self.Dv + (log + TAPS - 1) * self.inputs + log * change
        return -(-size // (LINE // 4)) * (LINE // 4)


class Places(NamedTuple):
    """The places for the states of sequences. The first places belong to slots. The others are
    checkpoints, whose log has one token."""

    slots: int
    checkpoints: int
    log: int  # tokens in the log of a slot: one more than the maximum number of draft tokens

    def size(self, heads: Heads) -> int:
        """Return the size of all places of a layer."""
        return self.slots * heads.place_size(self.log) + self.checkpoints * heads.place_size(1)

    def at(self, heads: Heads, place: int) -> tuple[int, int]:
        """Return the offset of a place in the layer's memory, and the length of its log."""
        if place < self.slots:
            return place * heads.place_size(self.log), self.log
        begin = Places(self.slots, place - self.slots, self.log).size(heads)
        return begin, 1


class States:
    """The states of a layer."""

    def __init__(self, places: Places, heads: Heads, weights: mx.array):
        """`weights`: those of the convolution, (TAPS, inputs), then A and dt of each value head."""
        self.places = places
        self.heads = heads
        self.weights = weights  # kept alive, because the label points to them
        self.memory = mx.zeros(places.size(heads) + LINE // 4)
        mx.eval(self.memory, weights)
        if device.is_batch_invariant():
            sizes = (places.slots, places.slots + places.checkpoints, places.log, *heads)
            write_label = device.blas.library.rows_states
            write_label.restype = ctypes.c_long
            memory, at = (ctypes.c_void_p(address(each)) for each in (self.memory, weights))
            size = write_label(memory, (ctypes.c_int * len(sizes))(*sizes), at)
            assert size == places.size(heads), (size, places, heads)

    def place_size(self, place: int) -> int:
        return self.heads.place_size(self.places.at(self.heads, place)[1])

    def read(self, place: int) -> mx.array:
        """Return a copy of the contents of a place."""
        begin, _ = self.places.at(self.heads, place)
        return mx.contiguous(self.memory[begin : begin + self.place_size(place)])

    def write(self, place: int, numbers: mx.array, base: int) -> None:
        """Write the contents of a slot's place or of a checkpoint into the place of a slot.

        `base`: the number of tokens that its matrices include."""
        if numbers.size < self.place_size(place):
            numbers = self.widened(numbers, base)
        begin, _ = self.places.at(self.heads, place)
        self.memory[begin : begin + self.place_size(place)] = numbers

    def widened(self, numbers: mx.array, base: int) -> mx.array:
        """Convert a checkpoint to the layout of a slot's place, which has longer rings."""
        Hk, Hv, Dk, Dv = self.heads
        # For each ring: the tokens before `base` in it, and the size of a token
        rings = [(TAPS - 1, self.heads.inputs), (0, Hk * Dk), (0, Hv * Dv), (0, Hv)]
        at = Hv * Dk * Dv
        parts = [numbers[:at]]
        for before, width in rings:
            count = before + 1
            ring = numbers[at : at + count * width].reshape(count, width)
            longer = mx.zeros((before + self.places.log, width))
            for row in range(max(0, base - before), base + 1):
                longer[row % len(longer)] = ring[row % count]
            parts.append(longer.flatten())
            at += count * width
        found = mx.concatenate(parts)
        return mx.pad(found, (0, self.heads.place_size(self.places.log) - found.size))

    def change(self, x: mx.array, moves: mx.array) -> mx.array:
        """Update the states with tokens and return the outputs: (N, inputs + 2 Hv), (N, 5) -> (N, Hv * Dv).

        subtle: the operation writes the states in place, without MLX's knowledge. `mx.depends` makes
        later uses of the states wait for its result.
        """
        x = mx.concatenate([x, moves], axis=1)
        K = x.shape[1]
        N = self.heads.Hv * self.heads.Dv
        y = x @ mx.as_strided(self.memory, (K, N), (1, K), self.memory.size - LINE // 4)
        self.memory = mx.depends(self.memory, y)
        return y
