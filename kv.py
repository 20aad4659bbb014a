"""Chapter 2: the KV cache. One slab per layer, cut into slots, allocated once.

The problem. To predict the next token, attention reads the key and the value of every token before
it. Computing them again for each new token would make an answer of n tokens cost n times as much.
So they are kept, in the KV cache. When many sequences are served, this cache is the scarcest memory
there is, and how it is cut up decides what the scheduler can do. The simplest cut that works gives
every sequence a *slot* of the same, fixed length. A slot consists of *rows*; a row holds the key
and the value of one token.

    k[layer], v[layer]: (slots, Hkv, S, Dh)          one head of one layer, 3 slots of S = 8 rows

                 row  0    1    2    3    4    5    6    7
        slot 0        A0   A1   A2   A3   .    .    .    .        A has 4 tokens in the slab, its 5th comes next
        slot 1        old  old  old  .    .    .    .    .        free: the rows of an earlier owner remain
        slot 2        B0   B1   B2   B3   B4   B5   .    .        B has 6

A forward pass works on the slab through windows. A prefill chunk has a window of its own, which
writes L rows of one slot. All decoding sequences share one window, which writes one row in each of
their slots (A4, B6). Where their next tokens are drafted, those with as many draft tokens share one,
which writes L rows in each. A free slot takes no part, and costs nothing.

The invariant: what a sequence computes depends on row p only if the sequence has written row p
itself, or if a sequence that begins with the same tokens has. (Then the row has stayed in the slot,
or was copied from another one.) So a slot needs no cleaning between owners, with one exception.
Attention multiplies the rows of earlier owners by zero, but 0 x NaN is NaN. So rows that may hold a
number that is not finite are scrubbed before the slot gets its next owner. A NaN in another slot
does no harm, because a sequence reads its own slot and no other.

This file knows slots, rows and lengths, never requests. Where next: `sched.py`, which gives the
slots away.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kernels.mlx import has_gpu, mx

BUCKET = 32  # rows: a slot has a multiple of this many
# Decoding sequences in neighbouring slots share one product if their lengths fall into the same
# bucket. The longer the sequences, the larger the buckets, so that neighbours meet in one more
# often.
BUCKETS = {128: BUCKET, 512: 64, math.inf: 128}  # up to so many rows: a bucket's size


class Slab:
    """The keys and values of all sequences, in every layer."""

    def __init__(
        self,
        layers: int,
        slots: int,
        Hkv: int,
        length: int,  # of a slot, in rows
        Dh: int,
        dtype: mx.Dtype,
    ):
        assert length % BUCKET == 0, f"a slot of {length} rows is no multiple of {BUCKET}"
        self.slots = slots
        self.Hkv = Hkv
        self.length = length
        self.Dh = Dh
        self.shape = (slots, Hkv, length, Dh)
        self.dtype = dtype
        self.k = [mx.zeros(self.shape, dtype) for _ in range(layers)]
        self.v = [mx.zeros(self.shape, dtype) for _ in range(layers)]
        mx.eval(self.k, self.v)  # zeros are lazy, too: this takes the memory now

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.k, *self.v]

    def bucket(self, rows: int) -> int:
        """`rows`, rounded up to whole buckets, but never more than a slot has."""
        size = next(size for most, size in BUCKETS.items() if rows <= most)
        whole = -(-rows // size) * size
        return min(self.length, whole)

    def written(self) -> tuple[mx.array, mx.array]:
        """Two views to wait for: once they are computed, so is all that was written.

        A corner is enough: the last layer's rows are written last, and MLX computes an array as a
        whole.

        subtle: wait for these views, and not for the slab's arrays. `array[...] = x` lets the name
        `array` stand for a new node of the graph (see `Window.write`). So code that kept an array
        to wait for would wait for a later write.
        """
        k = self.k[-1]
        v = self.v[-1]
        return k[:1, :1, :1], v[:1, :1, :1]

    def narrowed(self, new: mx.array) -> mx.array:
        """Keys or values in the slab's dtype, with a NaN for what exceeds it.

        subtle: float16 ends at 65,504, and what is larger would become infinite. A token whose key is
        infinite may get the weight 0, so that nobody would notice. A NaN spreads to the logits, and
        ends the request with an error that names `--kv float32`.
        """
        if new.dtype == self.dtype:
            return new
        new = new.astype(self.dtype)
        return new + new * 0  # inf x 0 is NaN

    def scrub(self, slot: int, start: int, stop: int) -> None:
        """Zero rows that may hold numbers which are not finite."""
        for array in self.arrays:
            array[slot, :, start:stop] = 0

    def proof(self, slot: int, start: int, stop: int) -> mx.array:  # ()
        """0 if these rows are finite in every layer, else NaN: 0 x NaN is NaN, and so is 0 x inf.

        The last layer is enough. A token's key there is computed from its own keys and values in
        all layers before, and from those of all tokens before it: if one of them is not finite, the
        key is not.
        """
        k = self.k[-1][slot, :, start:stop]  # (Hkv, rows, Dh)
        v = self.v[-1][slot, :, start:stop]
        return (k * 0).sum() + (v * 0).sum()

    def prefix(self, slot: int, rows: int) -> list[mx.array]:  # (1, Hkv, rows, Dh) each
        """Copies of a slot's first rows. (A slice would refer to the slab, and make the next write
        copy it all.)"""
        slots = mx.array([slot])
        copies = []
        for array in self.arrays:
            first = array[:, :, :rows]
            copies.append(mx.take(first, slots, axis=0))
        return copies

    def fill(self, slot: int, prefix: list[mx.array]) -> None:
        """Write into this slot what `prefix` has copied from another one."""
        for array, rows in zip(self.arrays, prefix, strict=True):
            array[slot, :, : rows.shape[2]] = rows[0]

    def check(self) -> None:
        """Assert that the slab is what it was when it was made."""
        for array in self.arrays:
            assert array.shape == self.shape, array.shape
            assert array.dtype == self.dtype, array.dtype


class AttentionGroup(NamedTuple):
    """Sequences of a window in neighbouring slots, with one product for their attention."""

    slots: slice  # one slot for each sequence
    T: int  # how many rows each sequence reads. Of a sequence by itself, the newest token sees all
    mask: Any  # hides rows from `attention`, in the form that it wants

    @property
    def B(self) -> int:
        return self.slots.stop - self.slots.start


class Window:
    """The rows of the slab that a prefill chunk, or decoding sequences together, write and read in
    a forward pass.

    There are B sequences; `slots` names their slots. Each writes L rows, from its row in `starts`.
    (Both are Python ints, because `+=` on an `mx.array` changes it for every other holder of the
    array, too.)
    """

    def __init__(
        self,
        slab: Slab,
        slots: Sequence[int],
        starts: Sequence[int],
        L: int,
    ):
        # MLX checks no bounds. A write past the end of the slab would change whatever memory lies
        # there. So these are no asserts, which `python -O` removes.
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
        positions = [start + i for start in starts for i in range(L)]
        self.positions = mx.array(positions)  # (B * L,)
        self._rows = self._decoding_rows() if self.B > 1 else None
        self._looks: dict[int | None, list[AttentionGroup]] = {}  # by span

    def _decoding_rows(self) -> mx.array:  # (B * L * Hkv, Dh)
        """Where `write` puts the new rows of decoding sequences, in every layer alike.

        As one list of rows, the slab of a layer has all rows of a slot's first head, then those of
        its second, and so on. Each number of a row needs its own index.
        """
        slab = self.slab
        rows = []
        for slot, start in zip(self.slots, self.starts, strict=True):
            first = slot * slab.Hkv * slab.length + start
            for row in range(first, first + self.L):
                for head in range(slab.Hkv):
                    rows.append(row + head * slab.length)
        column = mx.array(rows)[:, None]
        return mx.broadcast_to(column, (len(rows), slab.Dh))

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Write k and v, both (B * L, Hkv, Dh).

        subtle: an `mx.array` is a name for a node of the graph. `a[i] = x` makes a new node, and
        from then on the name stands for that node, wherever the name is used. The new node takes
        over the old one's memory, without copying the slab, if and only if there is no other
        reference to the old node. Three rules see to that. Only `Slab` holds the arrays. The
        windows of one forward pass all write before the first of them reads. And `Runner._start`
        starts a pass only when the one before has read the slab.
        """
        for arrays, new in ((self.slab.k, k), (self.slab.v, v)):
            new = self.slab.narrowed(new)
            if self._rows is None:  # a run of rows in one slot
                slot = self.slots[0]
                start = self.starts[0]
                stop = start + self.L
                arrays[layer][slot, :, start:stop] = new.swapaxes(0, 1)  # (Hkv, L, Dh)
            else:  # L rows in each slot, for each head
                # This is one operation. A scatter by arrays of slots and rows would take ten nodes
                # of the graph.
                rows = arrays[layer].flatten(0, 2)  # (slots * Hkv * S, Dh)
                new = new.flatten(0, 1)  # (B * L * Hkv, Dh)
                rows = mx.put_along_axis(rows, self._rows, new, axis=0)
                arrays[layer] = rows.reshape(self.slab.shape)

    def read(self, layer: int, look: AttentionGroup) -> tuple[mx.array, mx.array]:
        """The keys and values that a look reads: views of the slab, (B, Hkv, T, Dh) each."""
        k = self.slab.k[layer][look.slots, :, : look.T]
        v = self.slab.v[layer][look.slots, :, : look.T]
        return k, v

    def looks(self, span: int | None, mask_of: Callable[[mx.array], Any]) -> list[AttentionGroup]:
        """How far the sequences look back. Made for the first layer that asks; the others take the
        same.

        `span`: how many rows a token sees, its own included; None means all rows of its sequence.
        `mask_of`: makes a mask of what each token sees, (B, 1, L, T).

        Neighbours whose lengths fall into the same bucket share one product, and read as far as the
        longest of them. If all sequences did, the short ones would wait for the longest. How far a
        sequence reads does not show in its numbers: the rows that it must not see have the weight
        0, and in a product of our own (`matmul.c`) adding 0 changes no sum.
        """
        if span not in self._looks:
            self._looks[span] = list(self._make_looks(span, mask_of))
        return self._looks[span]

    def _make_looks(self, span: int | None, mask_of: Callable) -> Iterator[AttentionGroup]:
        ends = [start + self.L for start in self.starts]
        buckets = [self.slab.bucket(end) for end in ends]
        seen = self._seen(max(buckets), span)
        first = 0  # the look's first sequence
        for i in range(1, self.B + 1):
            if i < self.B and self._joins(i, buckets):
                continue
            T = max(ends[first:i])
            if has_gpu() and i - first > 1:
                T = self.slab.bucket(T)  # so that the shapes are few
            slots = slice(self.slots[first], self.slots[i - 1] + 1)
            yield AttentionGroup(slots, T, mask_of(seen[first:i, ..., :T]))
            first = i

    def _seen(self, T: int, span: int | None) -> mx.array:  # (B, 1, L, T)
        """A token at position p sees row j if j <= p. So it sees no later token, and no old row."""
        positions = self.positions.reshape(self.B, 1, self.L, 1)
        rows = mx.arange(T)
        seen = rows <= positions
        return seen if span is None else seen & (rows > positions - span)

    def _joins(self, i: int, buckets: Sequence[int]) -> bool:
        """Do sequences i - 1 and i share a product?

        On a GPU all neighbours do: one more product costs more than reading less saves.
        """
        if self.slots[i] != self.slots[i - 1] + 1:
            return False  # their rows are no view of the slab
        return has_gpu() or buckets[i] == buckets[i - 1]
