"""Chapter 2: the KV cache. One slab: an array per layer, cut into slots, allocated once.

The problem. To predict the next token, attention reads the key and the value of every token before
it. Computing them again for each new token would make an answer of n tokens cost n times as much,
so they are kept, in the KV cache. When many sequences are served, this cache is the scarcest memory
there is, and how it is divided decides what the scheduler can do. The simplest scheme that works
gives every sequence a *slot* of the same, fixed length. A slot consists of *rows*; a row holds the
key and the value of one token.

    arrays[layer]: (slots, 2 Hkv, S + 1, Dh)     one head of one layer, 3 slots of S = 8 rows

                 row  0    1    2    3    4    5    6    7
        slot 0        A0   A1   A2   A3   .    .    .    .        A has 4 tokens in the slab, its 5th comes next
        slot 1        old  old  old  .    .    .    .    .        free: rows of the last owner remain
        slot 2        B0   B1   B2   B3   B4   B5   .    .        B has 6

The first Hkv heads are keys, the others values. Each head has one spare row (or a few, if heads are
small): a label for the C operation is in the last row of the array (`kernels/c_attention.py`).

A forward pass works on the slab through windows. A prefill chunk has a window of its own, which
writes L rows of one slot. Decoding sequences without draft tokens share one window, which writes
one row in each of their slots (A4, B6). Those with the same number of draft tokens share another,
which writes L rows in each. A free slot takes no part, and costs nothing.

The invariant: what a sequence computes depends on row p only if the sequence has written row p
itself, or if a sequence with the same first p + 1 tokens has. (Then the row was still in the slot,
or was copied from another one.) So a slot need not be cleared for its next owner, with one
exception: attention multiplies rows that it must not see by zero, but 0 x NaN is NaN. So rows that
may hold a number that is not finite are zeroed first. A NaN in another slot does no harm, because a
sequence reads its own slot and no other.

This file knows slots, rows and lengths, but no requests. Where next: `request.py`, then `prefix.py`, which
chooses a slot for each prompt.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from kernels import c_attention, row_ops
from kernels.delta_net import States
from kernels.device import has_gpu, mx

BUCKET = 32  # rows: the length of a slot is a multiple of this


class Slab:
    """The keys and values of all sequences, in every layer."""

    def __init__(
        self,
        layers: int,
        slots: int,
        Hkv: int,
        length: int,  # rows of a slot
        Dh: int,
        dtype: mx.Dtype,
        # (heads, size of a head) for each layer, if the layers differ
        layer_rows: Sequence[tuple[int, int]] = (),
    ):
        if length % BUCKET:
            raise ValueError(f"slots of {length} rows; choose a multiple of {BUCKET}")
        self.slots = slots
        self.length = length
        rows = length + c_attention.label_rows(Dh, dtype.size)
        self.shape = (slots, 2 * Hkv, rows, Dh)  # of a layer's array, if all layers are alike
        layer_rows = layer_rows or [(2 * Hkv, Dh)] * layers
        self.shapes = [(slots, heads, rows, size) for heads, size in layer_rows]
        self.dtype = dtype
        self.arrays = [mx.zeros(shape, dtype) for shape in self.shapes]
        mx.eval(self.arrays)  # MLX is lazy: this allocates the memory now
        for array in self.arrays:
            c_attention.write_label(array)
        # For delta nets, layers without rows (`state_places.py`); skip these on a first reading
        self.states: list[States] = []

    def bucket(self, rows: int) -> int:
        """Round `rows` up to a whole bucket, but not beyond the length of a slot.

        Buckets grow with the length: from 256 rows on, they are at most an eighth of it. That keeps
        the number of shapes small, and neighbours of similar length can share a matrix product.
        """
        size = max(BUCKET, 2 ** rows.bit_length() // 16)
        whole = -(-rows // size) * size
        return min(self.length, whole)

    def written(self) -> list[mx.array]:
        """A corner of the last layer, for `Runner._start` to wait for. That layer is written last, and MLX computes an
        array as a whole, so evaluating the corner waits for all writes.

        subtle: wait for this view, and not for the slab's arrays. `array[...] = x` makes the name
        `array` refer to a new node of the graph (see `Window.write`), so a reference to the array
        itself would later mean a later write.
        """
        return [self.arrays[-1][:1, :1, :1]]

    def narrowed(self, new: mx.array) -> mx.array:
        """Cast keys and values to the slab's dtype, if it differs. Numbers outside its range become NaN.

        subtle: float16 ends at 65,504, and larger numbers would become infinite. An infinite key
        may get the weight 0, and then the overflow would go unnoticed. A NaN spreads to the logits,
        and ends the request with an error that names `--kv float32`.
        """
        if new.dtype == self.dtype:
            return new
        return row_ops.narrowed(new, self.dtype)

    def scrub(self, slot: int, start: int, stop: int) -> None:
        """Zero rows that may hold NaN or infinity, but not the spare row at the slot's end, where the
        C operation keeps its label."""
        for array in self.arrays:
            array[slot, :, start : min(stop, self.length)] = 0

    def proof(self, slot: int, start: int, stop: int) -> mx.array:  # ()
        """0 if these rows are finite in every layer, else NaN, because 0 x NaN and 0 x inf are NaN.

        Checking the last layer is enough. A token's key there is computed from its keys and values in
        all earlier layers, and from those of all earlier tokens. If one of them is not finite, neither
        is that key. The exception: where `narrowed` casts nothing, an infinite key with the weight 0 goes
        unnoticed.
        """
        rows = self.arrays[-1][slot, :, start:stop]  # (2 Hkv, rows, Dh)
        return (rows * 0).sum()

    def prefix(self, slot: int, rows: int) -> list[mx.array]:  # (1, 2 Hkv, rows, Dh) each
        """Copy a slot's first rows. (A slice would refer to the slab, and the next write would then
        copy the whole slab.)"""
        return [mx.contiguous(array[slot : slot + 1, :, :rows]) for array in self.arrays]

    def fill(self, slot: int, prefix: list[mx.array]) -> None:
        """Write rows that `prefix` copied from another slot into this one."""
        for array, rows in zip(self.arrays, prefix, strict=True):
            array[slot, :, : rows.shape[2]] = rows[0]

    def state(self, place: int) -> list[mx.array]:
        """Copy the states of one place, a state for each delta net."""
        return [states.read(place) for states in self.states]

    def fill_state(self, slot: int, copies: Sequence[mx.array], base: int) -> None:
        for states, copy in zip(self.states, copies, strict=True):
            states.write(slot, copy, base)

    def check(self) -> None:
        """Assert that the shape and dtype of each array have not changed."""
        for array, shape in zip(self.arrays, self.shapes, strict=True):
            assert array.shape == shape, array.shape
            assert array.dtype == self.dtype, array.dtype


class AttentionGroup(NamedTuple):
    """Sequences of a window in neighbouring slots, whose attention is one matrix product."""

    slots: slice  # one slot for each sequence
    T: int  # rows that each sequence reads
    positions: mx.array  # (B, 1, L, 1): position of each token

    @property
    def B(self) -> int:
        return self.slots.stop - self.slots.start


class Window:
    """The rows of the slab that a prefill chunk, or decoding sequences together, write and read in
    a forward pass.

    There are B sequences; `slots` names their slots. Each writes L rows, beginning at its entry in
    `starts`. (Both hold Python ints, because `+=` on an `mx.array` also changes it for everyone else
    who holds the array.)
    """

    def __init__(
        self,
        slab: Slab,
        slots: Sequence[int],
        starts: Sequence[int],
        L: int,
        state_moves: Sequence[tuple[int, int, int, int] | None] = (),
    ):
        # MLX checks no bounds: a write past the end of the slab would corrupt other memory.
        if not len(slots) == len(starts) == len(set(slots)):
            raise IndexError(f"{len(starts)} starts for slots {slots}, which must differ")
        if not all(0 <= slot < slab.slots for slot in slots):
            raise IndexError(f"slots {slots} of a slab with {slab.slots}")
        if not all(0 <= start <= slab.length - L for start in starts):
            raise IndexError(f"{L} rows from {starts} in slots of {slab.length} rows")
        self.slab = slab
        self.slots = slots
        self.starts = starts
        self.B = len(slots)
        self.L = L
        # In a model with states, a `request.Move` for each sequence; skip it on a first reading
        self.state_moves = state_moves
        positions = [start + i for start in starts for i in range(L)]
        self.positions = mx.array(positions)  # (B * L,)
        self._rows: dict[tuple[int, int], mx.array] = {}  # by (heads, size of a head)

    def _decoding_rows(self, heads: int, Dh: int) -> mx.array:  # (B * L * heads, Dh)
        """The indices at which `put` writes the new rows of decoding sequences, the same in every layer.

        Flattened to rows, a layer's array has all rows of a slot's first head, then those of its
        second, and so on. Each element of a row needs its own index.
        """
        if (heads, Dh) in self._rows:
            return self._rows[heads, Dh]
        stride = self.slab.shape[2]  # rows of a head in memory, the spare ones included
        rows = []
        for slot, start in zip(self.slots, self.starts, strict=True):
            first = slot * heads * stride + start
            for row in range(first, first + self.L):
                for head in range(heads):
                    rows.append(row + head * stride)
        column = mx.array(rows)[:, None]
        return self._rows.setdefault((heads, Dh), mx.broadcast_to(column, (len(rows), Dh)))

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Write k and v, both (B * L, Hkv, Dh)."""
        self.put(layer, mx.concatenate([k, v], axis=1))  # (B * L, 2 Hkv, Dh)

    def put(self, layer: int, rows: mx.array) -> None:
        """Write a layer's new rows, (B * L, heads, Dh).

        subtle: an `mx.array` is a name for a node of the graph. `a[i] = x` makes a new node, and
        from then on the name refers to that node, wherever the name is used. The new node takes
        over the old one's memory, without copying the slab, if and only if there is no other
        reference to the old node. Three rules see to that. Only `Slab` holds the arrays. The
        windows of one forward pass all write before the first of them reads (`attend`). And
        `Runner._start` starts a pass only when the one before has read the slab.
        """
        slab = self.slab
        new = slab.narrowed(rows)
        if self.B == 1:  # consecutive rows of one slot: a slice
            start = self.starts[0]
            stop = start + self.L
            slab.arrays[layer][self.slots[0], :, start:stop] = new.swapaxes(0, 1)  # (heads, L, Dh)
        else:  # L rows in each slot, for each head
            # One operation. Indexing by arrays of slots and rows would add ten nodes to the graph.
            where = self._decoding_rows(*new.shape[1:])
            flat = slab.arrays[layer].flatten(0, 2)  # (slots * heads * (S + 1), Dh)
            flat = mx.put_along_axis(flat, where, new.flatten(0, 1), axis=0)
            slab.arrays[layer] = flat.reshape(slab.shapes[layer])

    @cached_property
    def moves(self) -> mx.array:  # (B * L, 5)
        """One row for each token: its sequence's `Move`, with the token's row in the middle."""
        return mx.array(
            [
                (source, base, row, target, keep)
                for move, start in zip(self.state_moves, self.starts, strict=True)
                for source, base, target, keep in [move]
                for row in range(start, start + self.L)
            ],
            mx.float32,  # exact up to 2^24 rows
        )

    def read(self, layer: int, group: AttentionGroup) -> list[mx.array]:
        """Return the keys and values of a group as views of the slab, (B, Hkv, T, Dh) each."""
        rows = self.slab.arrays[layer][group.slots, :, : group.T]
        return mx.split(rows, 2, axis=1)

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        """The sequences that share a product in the formula for attention, and how far they read.

        Neighbours whose lengths fall into the same bucket form a group, and read as far as the
        longest of them. With one group for all, short sequences would read as many rows as the
        longest. On a GPU all neighbours form one group, because another product costs more there
        than reading fewer rows saves.

        How far a sequence reads does not change its results: the rows that it must not see have the
        weight 0, and in our matrix product (`cpu_kernels.c`) adding 0 changes no sum.
        """
        ends = [start + self.L for start in self.starts]
        buckets = [0 if has_gpu() else self.slab.bucket(end) for end in ends]
        positions = self.positions.reshape(self.B, 1, self.L, 1)
        found = []
        first = 0  # the group's first sequence
        for i in range(1, self.B + 1):
            if (
                i < self.B
                and self.slots[i] == self.slots[i - 1] + 1
                and buckets[i] == buckets[i - 1]
            ):
                continue  # their rows are one view of the slab
            T = max(ends[first:i])
            if has_gpu() and i - first > 1:
                T = self.slab.bucket(T)  # a GPU prepares its kernels for each new shape
            slots = slice(self.slots[first], self.slots[i - 1] + 1)
            found.append(AttentionGroup(slots, T, positions[first:i]))
            first = i
        return found
