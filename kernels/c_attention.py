"""Fused attention: one operation of `cpu_kernels.c` in place of the formula in `llama.attention`.

As with other operations (`row_ops.py`), MLX sees a matrix product. In place of the matrix there is a
layer's slab, which ends with a label that `cpu_kernels.c` recognizes. Each row of x contains a token's
queries, its slot, and the range of rows that it sees there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernels import device
from kernels.device import mx
from kernels.library import LINE
from kernels.packed import FORMS, address

if TYPE_CHECKING:
    from kv import Window
    from models.rope import AttentionType


def label_rows(Dh: int, itemsize: int) -> int:
    """Return the number of a head's rows that the label takes up."""
    return -(-LINE // (Dh * itemsize))


def write_label(slab: mx.array) -> None:
    """Write the label at the end of a layer's slab, (slots, 2 Hkv, rows, Dh).

    The operation recognizes the slab by it. Without our own product, or for a bfloat16 slab, which the
    operation does not support, nothing is written."""
    if not device.is_batch_invariant() or slab.dtype == mx.bfloat16:
        return
    slots, heads, rows, Dh = slab.shape
    sizes = (slots, heads // 2, rows, Dh, ctypes.c_float(Dh**-0.5))
    at = ctypes.c_void_p(address(slab))
    device.blas.library.rows_slab(at, FORMS[slab.dtype], *sizes)


class COperation:
    """Attention for all windows of a pass, in one operation."""

    def __init__(self, kind: AttentionType, H: int, windows: Sequence[Window]):
        self.slab = windows[0].slab
        self.visible = visible_rows(windows, kind.span, kind.cap)
        self.sinks = kind.sinks

    def run(self, layer: int, q: mx.array) -> mx.array:  # (N, H, Dh) -> (N, H * Dh)
        parts = [q.flatten(1), self.visible]
        if layer in self.sinks:
            sinks = self.sinks[layer]
            parts.append(mx.broadcast_to(sinks, (len(q), len(sinks))))
        x = mx.concatenate(parts, axis=1)
        N, K = parts[0].shape[1], x.shape[1]
        memory = self.slab.arrays[layer].flatten().view(mx.float32)
        at_label = memory.size - LINE // 4
        return x @ mx.as_strided(memory, (K, N), (1, K), at_label)


def visible_rows(
    windows: Sequence[Window], span: int | None, cap: float | None
) -> mx.array:  # (N, 4)
    """Return each token's slot, the first and last row that it sees, and the cap of its scores."""
    visible = []
    for window in windows:
        for slot, start in zip(window.slots, window.starts, strict=True):
            for row in range(start, start + window.L):
                first = max(0, row - span + 1) if span else 0
                visible.append((slot, first, row, cap or 0.0))
    return mx.array(visible, mx.float32)  # exact up to 2^24 rows
