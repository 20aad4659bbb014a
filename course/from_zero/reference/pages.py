"""Stage 9: the KV cache in pages.

The problem. A slot is as long as the longest sequence may be, and most sequences are short. If 128
rows are reserved, a request of 25 rows leaves 103 empty, while others wait for memory.

The solution (PagedAttention). The memory is cut into pages of a few rows. A sequence takes a page
when its next row needs one, and its *block table* lists its pages, in order:

    A: 0 1 4     row 37 of A is in page 4 (37 = 2 * 16 + 5), at place 5
    B: 3         pages 2 and 5 are free

The invariant: attention gets the same numbers as from a slot, so every token is the same. A page is
either free or in exactly one table.

The price: attention needs one array. So each step copies every row that it reads, in each layer: a
gather. (vLLM has a kernel that follows the block table instead.)

Where it loses: if requests are about as long as a slot, no more of them fit, but the gather still
has its cost. Also, pages may run out in the middle of an answer: then a request is preempted, and
its rows are computed again later.

The window is used like that of `kv.py`. Where next: docs/slots.md, and `vllm/v1/core/block_pool.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from course.from_zero.small_llama import Window
from kernels.device import mx
from kv import AttentionGroup

PAGE = 16  # rows


class Pool:
    """The pages of all sequences in every layer, and each sequence's block table."""

    def __init__(self, layers: int, pages: int, Hkv: int, Dh: int, dtype: mx.Dtype = mx.float32):
        # Keys are the first Hkv heads, values the others, as in the slab
        self.arrays = [mx.zeros((pages, 2 * Hkv, PAGE, Dh), dtype) for _ in range(layers)]
        self.free = list(range(pages))
        self.tables: dict[int, list[int]] = {}  # sequence -> its pages, in order

    def grow(self, sequence: int, rows: int) -> bool:
        """Give a sequence enough pages for `rows` rows in total.

        If too few are free, return False and change nothing.
        """
        table = self.tables.get(sequence, [])
        missing = max(0, -(-rows // PAGE) - len(table))
        if missing > len(self.free):
            return False
        taken = [self.free.pop() for _ in range(missing)]
        self.tables[sequence] = table + taken
        return True

    def leave(self, sequence: int) -> None:
        """Free the pages of a sequence that has ended, and drop its table."""
        self.free += self.tables.pop(sequence)

    def place(self, sequence: int, row: int) -> tuple[int, int]:
        """Return the page that holds a row of a sequence, and the place in that page."""
        return self.tables[sequence][row // PAGE], row % PAGE


class PagedWindow(Window):
    """The rows that some sequences write and read in a forward pass.

    Each sequence writes L rows, from its entry in `starts` on.
    """

    def __init__(self, pool: Pool, sequences: Sequence[int], starts: Sequence[int], L: int):
        super().__init__(starts, L)
        for sequence, start in zip(sequences, starts, strict=True):
            if start + L > PAGE * len(pool.tables.get(sequence, [])):
                raise IndexError(f"sequence {sequence} has no page for row {start + L - 1}")
        self.slab = pool
        self.sequences = sequences

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Write k and v, both (B * L, Hkv, Dh), where the block tables say."""
        new = mx.concatenate([k, v], axis=1)  # (B * L, 2 Hkv, Dh)
        pages = []
        places = []
        for sequence, start in zip(self.sequences, self.starts, strict=True):
            for row in range(start, start + self.L):
                page, place = self.slab.place(sequence, row)
                pages.append(page)
                places.append(place)
        self.slab.arrays[layer][mx.array(pages), :, mx.array(places)] = new

    def read(self, layer: int, group: AttentionGroup) -> list[mx.array]:
        """Gather the first T rows of a group's sequence: keys and values, (1, Hkv, T, Dh) each."""
        table = self.slab.tables[self.sequences[group.slots.start]]
        pages = self.slab.arrays[layer][mx.array(table)]  # (pages, 2 Hkv, PAGE, Dh)
        rows = pages.swapaxes(0, 1).flatten(1, 2)[None, :, : group.T]
        return mx.split(rows, 2, axis=1)
