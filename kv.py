"""The KV cache: one slab per layer, cut into slots, allocated once.

The problem. To predict the next token, attention reads the key and the value of every token before it. Computing them
again for each new token would make an answer of n tokens cost n times as much. So they are kept, in the KV cache. When
many sequences are served, this cache is the scarcest memory there is, and how it is cut up decides what the scheduler
can do. The simplest cut that works gives every sequence a *slot* of the same, fixed length. A slot consists of *rows*;
a row holds the key and the value of one token.

    k[layer], v[layer]: (slots, Hkv, S, Dh)          one head of one layer, 3 slots of S = 8 rows

                 row  0    1    2    3    4    5    6    7
        slot 0        A0   A1   A2   A3   .    .    .    .        A has 4 tokens in the slab, its 5th comes next
        slot 1        old  old  old  .    .    .    .    .        free: the rows of an earlier owner remain
        slot 2        B0   B1   B2   B3   B4   B5   .    .        B has 6

A forward pass looks at the slab through windows. A `Window` says which rows of which slots are written, and how far
attention reads. A prefill chunk has a window of its own, which writes L rows of one slot. All decoding sequences share
one window, which writes one row in each of their slots (A4, B6). A free slot takes no part, and costs nothing.

The invariant: what a sequence computes depends on row p only if the sequence has written row p itself, or if row p was
copied from a sequence that begins with the same tokens. So a slot needs no cleaning between owners, with one exception.
Attention multiplies the rows it must not see by zero, but 0 x NaN is NaN. So rows that may hold a number that is not
finite are scrubbed before the slot gets its next owner. A NaN in another slot does no harm, because a sequence reads
its own slot and no other.

This file knows slots, rows and lengths, never requests. Where next: `sched.py`, which gives the slots away.
"""

from itertools import pairwise
from typing import NamedTuple

from parts.device.mlx import has_gpu, mx

BUCKET = 32  # on a GPU, attention reads a multiple of this many rows, so that the shapes are few
# The longer a decoding sequence is, the more coarsely its reach is rounded up. So neighbouring slots more often fall
# into the same bucket, and share one product.
COARSER = ((512, 128), (128, 64), (0, BUCKET))  # (beyond so many rows, a multiple of)


class Slab:
    def __init__(self, layers: int, slots: int, Hkv: int, length: int, Dh: int, dtype: mx.Dtype):
        assert length % BUCKET == 0, f"a slot of {length} rows is no multiple of {BUCKET}"
        self.slots, self.Hkv, self.length, self.Dh = slots, Hkv, length, Dh
        self._shape, self._dtype = (slots, Hkv, length, Dh), dtype
        self.k = [mx.zeros(self._shape, dtype) for _ in range(layers)]
        self.v = [mx.zeros(self._shape, dtype) for _ in range(layers)]
        mx.eval(self.k, self.v)  # zeros are lazy, too; this takes the memory now, not in the first step

    @staticmethod
    def nbytes(layers: int, slots: int, Hkv: int, length: int, Dh: int, itemsize: int) -> int:
        """The memory that a slab of these sizes will take."""
        return 2 * layers * slots * Hkv * length * Dh * itemsize

    def reach(self, rows: int, decoding: bool = False) -> int:
        """How many rows attention reads to see the first `rows` of them: `rows`, rounded up to whole buckets."""
        bucket = next(bucket for beyond, bucket in COARSER if rows > beyond) if decoding else BUCKET
        return min(self.length, -(-rows // bucket) * bucket)

    def written(self) -> tuple[mx.array, mx.array]:
        """Two views to wait for: once they are computed, so is all that was written before this call.

        (One corner is enough, since the last layer's rows are written last, and an array is computed as a whole.)

        subtle: do not wait for the arrays themselves. `array[...] = x` gives the name to a new node (see
        `Window.write`). Code that keeps the array and waits for it later waits for the node that it stands for by then.
        """
        return self.k[-1][:1, :1, :1], self.v[-1][:1, :1, :1]

    def scrub(self, slot: int, start: int, stop: int) -> None:
        """Zero rows that may hold numbers which are not finite."""
        for slab in (*self.k, *self.v):
            slab[slot, :, start:stop] = 0

    def prefix(self, slot: int, rows: int) -> list[mx.array]:  # (1, Hkv, rows, Dh) for each layer's k, then each v
        """Copies of a slot's first rows. (A slice would refer to the slab, and make the next write copy it all.)"""
        return [mx.take(slab[:, :, :rows], mx.array([slot]), axis=0) for slab in (*self.k, *self.v)]

    def fill(self, slot: int, prefix: list[mx.array]) -> None:
        """Write into this slot what `prefix` has copied from another one."""
        for slab, rows in zip((*self.k, *self.v), prefix, strict=True):
            slab[slot, :, : rows.shape[2]] = rows[0]

    def check(self) -> None:
        """Assert that the slab is what it was when it was made."""
        for array in (*self.k, *self.v):
            assert (array.shape, array.dtype) == (self._shape, self._dtype), (array.shape, array.dtype)


class Look(NamedTuple):
    """Sequences of a window in neighbouring slots, which read equally far: their attention is one product."""

    start: int  # the sequences start..stop of the window
    stop: int
    T: int  # how many rows they read
    mask: mx.array | str  # (stop - start, 1, 1 or G * L, T), added to the scores; on a GPU other forms


class Window:
    """The rows of the slab that a prefill chunk, or all decoding sequences together, write and read in a forward pass.

    There are B sequences; `slots` names their slots. Each writes L rows, from its row in `starts`. `lengths` is for
    models whose positions depend on how long a sequence is (`Rope.length`). (These are Python ints, because `+=` on an
    `mx.array` changes it for every other holder of the array, too.)

    `looks` says how far they read. Neighbours whose lengths fall into the same bucket share one product, and read as
    far as the longest of them. If all sequences did, the short ones would wait for the longest. How far a sequence
    reads does not show in its numbers. Rows that it must not see have the weight 0, and adding 0 changes no sum.
    """

    def __init__(self, slab: Slab, slots: list[int], starts: list[int], L: int, lengths: list[int]):
        # MLX checks no bounds. A write past the end of the slab would change whatever memory lies there.
        assert len(slots) == len(starts) == len(lengths) and (L == 1 or len(slots) == 1), (slots, starts, L)
        assert all(0 <= slot < slab.slots for slot in slots), slots
        for start in starts:
            assert 0 <= start <= slab.length - L, (start, L)
        self.slab, self.slots, self.starts, self.L, self.lengths = slab, slots, starts, L, lengths
        self.B = len(slots)
        self.first = mx.array(starts)  # (B,)
        self.positions = self.first[:, None] + mx.arange(L) if L > 1 else self.first[:, None]  # (B, L)
        # The slab of a layer as one list of rows has all rows of a slot's first head, then those of its second, and so
        # on. Here stands where in that list `write` puts the rows of decoding sequences, in every layer alike.
        rows = []
        for slot, start in zip(slots, starts, strict=True):
            first = slot * slab.Hkv * slab.length + start
            rows += [[first + head * slab.length] for head in range(slab.Hkv)]
        self._row = mx.broadcast_to(mx.array(rows), (len(rows), slab.Dh))  # (B * Hkv, Dh)

    def looks(self, G: int, span: int | None = None, by_formula: bool = False) -> list[Look]:
        """How far the sequences read. `attention` folds G query heads into one product, so a mask is made for all G."""
        has_kernel = has_gpu() and not by_formula  # where scores have a cap, a GPU's attention is that of a CPU
        slides = span is not None and span < self.slab.length  # then rows older than the span are read, and hidden
        if has_kernel and self.B == 1 and not slides:  # "causal" says all: the last token sees the last row
            return [Look(0, 1, self.starts[0] + self.L, "causal")]
        reaches = [self.slab.reach(start + self.L, self.L == 1) for start in self.starts]
        # On a GPU, reaches in whole buckets keep the shapes few. On a CPU they only tell who reads together.
        ends = reaches if has_gpu() else [start + self.L for start in self.starts]
        longest = max(ends)
        # Row j is visible from position p if j <= p. That is causality, and it also hides what earlier owners left.
        visible = (mx.arange(longest) <= self.positions[:, :, None])[:, None]  # (B, 1, L, longest)
        if slides:
            visible = visible & (mx.arange(longest) > self.positions[:, :, None] - span)[:, None]
        if has_kernel:  # subtle: in full, once for all layers; else the kernel copies it for each head in each layer
            mask = mx.contiguous(mx.broadcast_to(visible, (self.B, G * self.slab.Hkv, self.L, longest)))
        else:
            mask = mx.concatenate([mx.where(visible, 0.0, -mx.inf)] * (G if self.L > 1 else 1), axis=2)
        # Neighbouring slots are a view of the slab. On a GPU, one more product costs more than reading less saves.
        other = [a != b and not has_gpu() for a, b in pairwise(reaches)]
        cuts = [i for i in range(1, self.B) if self.slots[i] - self.slots[i - 1] > 1 or other[i - 1]]
        looks = []
        for i, j in pairwise([0, *cuts, self.B]):
            T = max(ends[i:j])
            looks.append(Look(start=i, stop=j, T=T, mask=mask[i:j, ..., :T]))
        return looks

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Write k and v, both (B, Hkv, L, Dh).

        subtle: an `mx.array` is a name for a node of the graph. `a[i] = x` makes a new node, and from then on the name
        stands for that node, wherever the name is used. The new node takes over the old one's memory, without copying
        the slab, if and only if there is no other reference to the old node. Three rules see to that. Only `Slab`
        holds the arrays. The windows of one forward pass all write before the first of them reads. And `Engine`
        writes only when no step in flight still reads the slab.
        """
        for slab, new in ((self.slab.k, k), (self.slab.v, v)):
            if self.B == 1:  # a run of rows in one slot
                slot, start = self.slots[0], self.starts[0]
                slab[layer][slot : slot + 1, :, start : start + self.L] = new
            else:  # one row in each slot, and for each head
                # This is one operation. A scatter by arrays of slots and rows would take ten nodes of the graph.
                rows = mx.put_along_axis(slab[layer].flatten(0, 2), self._row, new.flatten(0, 2), axis=0)
                slab[layer] = rows.reshape(slab[layer].shape)

    def read(self, layer: int, look: Look) -> tuple[mx.array, mx.array]:  # (B, Hkv, T, Dh) each
        """The keys and values that a look reads: views of the slab."""
        slots = slice(self.slots[look.start], self.slots[look.stop - 1] + 1)
        return self.slab.k[layer][slots, :, : look.T], self.slab.v[layer][slots, :, : look.T]
