"""The KV cache: one slab per layer, cut into slots, allocated once.

The problem. To predict the next token, attention reads the key and the value of every token before it. Computing them
again for each new token would make an answer of n tokens cost n times as much, so they are kept: that is the KV
cache. Serving many sequences, the cache becomes the scarcest memory there is, and how it is cut up decides what the
scheduler can do. The simplest cut that works: every sequence gets a *slot* of the same, fixed length.

    k[layer], v[layer]: (slots, Hkv, S, Dh)          one head of one layer, 3 slots of S = 8 rows, and the spare rows

                 row  0    1    2    3    4    5    6    7   | spare
        slot 0        A0   A1   A2   A3   .    .    .    .   |  ~        A has 4 tokens in the slab, its 5th comes next
        slot 1        old  old  old  .    .    .    .    .   |  ~        free: the rows of an earlier owner remain
        slot 2        B0   B1   B2   B3   B4   B5   .    .   |  ~        B has 6

A forward pass looks at the slab through windows: which rows of which slots are written, and how far is read. Decoding
rows share one, which writes one row in every slot (A4, B6); what idle slots write lands in their spare rows, which
nobody reads, so that the device sees the same shapes whoever is alive. A prefill chunk's own writes L rows of one slot.

The invariant: what a sequence computes depends on row p only if it has itself written row p, or had it copied from a
sequence that begins with the same tokens. So a slot needs no cleaning between owners, with one exception: attention
multiplies the rows it must not see by zero, and 0 x NaN is NaN. Rows that may hold a non-finite number are scrubbed
before the next owner comes. A neighbour's NaN does no harm: a sequence reads its own slot and no other.

This file knows slots, rows and lengths, never requests. Where next: `sched.py`, which gives the slots away.
"""

from parts.device import mx

BUCKET = 32  # attention reads a multiple of this many rows: few shapes, and the same bits at every one of them
SPARE = 16  # one spare row would do; sixteen keep every head of every slot on a 64-byte boundary


class Slab:
    def __init__(self, layers: int, slots: int, Hkv: int, length: int, Dh: int, dtype: mx.Dtype):
        assert length % BUCKET == 0, f"a slot of {length} rows is no multiple of {BUCKET}"
        self.slots, self.Hkv, self.length, self.Dh = slots, Hkv, length, Dh
        self._shape, self._dtype = (slots, Hkv, length + SPARE, Dh), dtype
        self.k = [mx.zeros(self._shape, dtype) for _ in range(layers)]
        self.v = [mx.zeros(self._shape, dtype) for _ in range(layers)]
        mx.eval(self.k, self.v)  # zeros are lazy, too: take the memory now, not in the first step

    @staticmethod
    def nbytes(layers: int, slots: int, Hkv: int, length: int, Dh: int, itemsize: int) -> int:
        """What a slab of these sizes takes, before it is made."""
        return 2 * layers * slots * Hkv * (length + SPARE) * Dh * itemsize

    @property
    def spare(self) -> int:
        """The row that idle slots write to."""
        return self.length

    def reach(self, rows: int) -> int:
        """How far attention reads so that the first `rows` rows are seen: up to the next bucket, not to the end."""
        return min(self.length, -(-rows // BUCKET) * BUCKET)

    def written(self) -> tuple[mx.array, mx.array]:
        """Something to wait for: once these views are there, all that has been written so far is.

        (One corner is enough. The last layer's rows are written last, and an array is there as a whole or not at all.)

        subtle: not the arrays themselves. `array[...] = x` gives the name to a new node (see `append`), so whoever
        keeps the name and waits for it later waits for what it stands for by then.
        """
        return self.k[-1][:1, :1, :1], self.v[-1][:1, :1, :1]

    def scrub(self, slot: int, start: int, stop: int) -> None:
        """Zero rows that hold numbers which are not finite, or may."""
        for slab in (*self.k, *self.v):
            slab[slot, :, start:stop] = 0

    def prefix(self, slot: int, rows: int) -> list[mx.array]:  # (1, Hkv, rows, Dh) for each layer's k, then each v
        """Copies of a slot's first rows. Gathered, because a slice would hold on to the slab that is to be written."""
        return [mx.take(slab[:, :, :rows], mx.array([slot]), axis=0) for slab in (*self.k, *self.v)]

    def fill(self, slot: int, prefix: list[mx.array]) -> None:
        """Write what `prefix` took from one slot into another."""
        for slab, rows in zip((*self.k, *self.v), prefix, strict=True):
            slab[slot, :, : rows.shape[2]] = rows[0]

    def check(self) -> None:
        """Assert that the slab is what it was when it was made."""
        for array in (*self.k, *self.v):
            assert (array.shape, array.dtype) == (self._shape, self._dtype), (array.shape, array.dtype)


class Window:
    """The rows of the slab that a prefill chunk, or all decoding rows, write in a forward pass, and those they read.

    `slots` names the B slots, `starts` the first row that each of them writes (a Python int: `+=` on an `mx.array`
    changes it for whoever else holds it), L how many rows, `reach` how many rows are read.
    `lengths` are the lengths of the B sequences that the rows belong to, for models whose positions depend on them.
    """

    def __init__(self, slab: Slab, slots: list[int], starts: list[int], L: int, reach: int, lengths: list[int]):
        # MLX checks no bounds: a write past the slab would land in somebody else's memory.
        assert len(slots) == len(starts) == len(lengths) and (L == 1 or len(slots) == 1), (slots, starts, L)
        assert all(0 <= slot < slab.slots for slot in slots) and reach <= slab.length, (slots, reach)
        for start in starts:
            assert 0 <= start <= slab.length - L or (start, L) == (slab.spare, 1), (start, L)
        self.slab, self.slots, self.starts, self.L, self.reach, self.lengths = slab, slots, starts, L, reach, lengths
        self.B = len(slots)
        self.positions = mx.array(starts)[:, None] + mx.arange(L)  # (B, L)
        # Row j is visible from position p if j <= p: that is causality, and it also hides what earlier owners left.
        visible = mx.arange(reach) <= self.positions[:, :, None]  # (B, L, reach)
        self.mask = mx.where(visible, 0.0, -mx.inf)[:, None]  # (B, 1, L, reach), added to the scores
        self._slots, self._rows = mx.array(slots), mx.array(starts)
        # The same rows for every number of a (B, Hkv, 1, Dh): made once a step, not in every layer.
        self._is_all = slots == list(range(slab.slots))
        self._row = mx.broadcast_to(self._rows[:, None, None, None], (self.B, slab.Hkv, 1, slab.Dh))

    def mask_for(self, G: int) -> mx.array:  # (B, 1, 1 or G * L, reach)
        """The mask, for scores in which G heads' L tokens follow one another."""
        return self.mask if self.L == 1 else mx.concatenate([self.mask] * G, axis=2)

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Write k and v, both (B, Hkv, L, Dh).

        subtle: an `mx.array` is a name for a node of the graph. `a[i] = x` makes a new node, and the name stands for it
        from then on, for all who share the name. The new node takes over the old one's memory, without copying the
        slab, if and only if nobody else holds the old node any more. So the slab is held here and nowhere else, the
        windows of one forward pass all write before the first of them reads, and `Engine` takes care that no step
        which still reads it is in flight.
        """
        for slab, new in ((self.slab.k, k), (self.slab.v, v)):
            if self.B == 1:  # a run of rows in one slot
                slot, start = self.slots[0], self.starts[0]
                slab[layer][slot, :, start : start + self.L] = new[0]
            elif self._is_all:  # one row in every slot
                # One operation: a scatter by two arrays of indices, as below, takes ten nodes of the graph.
                slab[layer] = mx.put_along_axis(slab[layer], self._row, new, axis=2)
            else:  # one row in some slots
                slab[layer][self._slots, :, self._rows] = new[:, :, 0]

    def read(self, layer: int) -> tuple[mx.array, mx.array]:  # (B, Hkv, reach, Dh) each
        """Keys and values of all that is visible: views of the slab, or gathered where it is some of the slots."""
        both = self.slab.k[layer][:, :, : self.reach], self.slab.v[layer][:, :, : self.reach]
        if self.B == 1:
            slot = self.slots[0]
            return both[0][slot : slot + 1], both[1][slot : slot + 1]
        if self._is_all:
            return both
        return mx.take(both[0], self._slots, axis=0), mx.take(both[1], self._slots, axis=0)
