"""Stage 11: keys and values in 8 bits.

The problem. The memory of the keys and values limits how many sequences fit, and each step reads
all of it. But attention does not need such precise numbers.

The solution. Store whole numbers from -127 to 127, and a scale for each row and head:

    key of one head    0.31  -1.20   0.05   2.54        scale 0.02 = 2.54 / 127
    is stored as         16    -60      2    127        and 0.02
    is read as         0.32  -1.20   0.04   2.54        off by half a scale at most

A head of 64 numbers takes 64 + 4 bytes in place of 256 (float32) or 128 (float16).

The invariant: the values that are read for a row depend only on that row. So an answer depends only
on its own sequence, whatever else is in the batch and however its prompt is cut into chunks. Also,
a row that holds NaN or infinity is read as NaN: a fault must not become a number that looks right.

The price: keys and values are off by up to half a scale, so logits change, and an answer may change
where two tokens were almost equally likely.

Where it loses: one large number in a row makes the scale large, and all other numbers coarse. The
keys of some models have such channels, so engines use a scale for each channel there, or 16 bits
for some layers. For a short sequence nothing is gained, because the weights are most of what a step
reads.

Where next: docs/slots.md for the size of a row, and
`vllm/model_executor/layers/quantization/kv_cache.py`.
"""

from collections.abc import Sequence

from course.from_zero.small_llama import Window
from kernels.device import mx
from kv import AttentionGroup


def quantize(x: mx.array) -> tuple[mx.array, mx.array]:  # (N, heads, Dh)
    """Return codes, int8 of the same shape, and scales, (N, heads, 1) in float32."""
    scale = mx.abs(x).max(axis=-1, keepdims=True).astype(mx.float32) / 127
    codes = mx.round(x / mx.where(scale == 0, 1, scale))
    return codes.astype(mx.int8), scale


def dequantize(codes: mx.array, scale: mx.array) -> mx.array:
    """Return the numbers that codes and scales stand for, in float32."""
    return codes * scale


class SmallSlab:
    """The slab of `kv.py` in 8 bits, with a scale for each row and head."""

    def __init__(self, layers: int, slots: int, Hkv: int, length: int, Dh: int):
        shape = (slots, 2 * Hkv, length)  # keys, then values, as in the slab
        self.codes = [mx.zeros((*shape, Dh), mx.int8) for _ in range(layers)]
        self.scales = [mx.zeros((*shape, 1), mx.float32) for _ in range(layers)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.codes, *self.scales))


class SmallWindow(Window):
    """The rows that some slots write and read in a forward pass.

    Each slot writes L rows, from its entry in `starts` on.
    """

    def __init__(self, slab: SmallSlab, slots: Sequence[int], starts: Sequence[int], L: int):
        super().__init__(starts, L)
        count, _, length, _ = slab.codes[0].shape
        for slot, start in zip(slots, starts, strict=True):
            if not (0 <= slot < count and 0 <= start <= length - L):
                raise IndexError(
                    f"rows from {start} of slot {slot}: {count} slots of {length} rows"
                )
        self.slab = slab
        self.slots = slots

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Write k and v, both (B * L, Hkv, Dh), in 8 bits, with their scales."""
        codes, scale = quantize(mx.concatenate([k, v], axis=1))
        for i, (slot, start) in enumerate(zip(self.slots, self.starts, strict=True)):
            new = slice(i * self.L, (i + 1) * self.L)
            rows = slice(start, start + self.L)
            self.slab.codes[layer][slot, :, rows] = codes[new].swapaxes(0, 1)
            self.slab.scales[layer][slot, :, rows] = scale[new].swapaxes(0, 1)

    def read(self, layer: int, group: AttentionGroup) -> list[mx.array]:
        """Return the first T rows of a group's slot as float32: keys and values, (1, Hkv, T, Dh)
        each."""
        slot = self.slots[group.slots.start]
        codes = self.slab.codes[layer][slot, :, : group.T]
        scales = self.slab.scales[layer][slot, :, : group.T]
        return mx.split(dequantize(codes, scales)[None], 2, axis=1)
