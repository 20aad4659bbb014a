"""MXFP4, the format of gpt-oss's experts: a weight is one of 15 numbers times a power of two.

Doubled, these numbers are integers from -12 to 12. So MXFP4 converts without loss to an ordinary
quantization of 5 bits in groups of 32: a weight is scale * (number - 12). With activations of 8 bits, our
product keeps the original four bits, which index the 15 numbers.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels import packed
from kernels.device import mx
from kernels.packed import words

BITS, GROUP, CENTER = 5, 32, packed.MXFP4_CENTER
NUMBERS = packed.MXFP4_NUMBERS  # indexed by the four bits of a weight in the file
NAN = 255  # the scale that means NaN


class Mxfp4(NamedTuple):
    """The conversion of a tensor's weights or scales from MXFP4."""

    is_scales: bool

    def __call__(self, array: mx.array) -> mx.array:
        if self.is_scales:
            return powers(array)
        if array.ndim < 3:
            return decoded(array)
        parts = []
        # One expert at a time, because unpacked numbers take more memory
        for part in array:
            parts.append(decoded(part))
            mx.eval(parts)
        return mx.stack(parts)


def decoded(array: mx.array) -> mx.array:  # (rows, ...), bytes or words -> (rows, words of 5 bits)
    pairs = mx.contiguous(array).view(mx.uint8).reshape(len(array), -1)
    codes = mx.stack([pairs & 15, pairs >> 4], axis=-1).flatten(1)  # the lower four bits come first
    return words(mx.array(NUMBERS, mx.uint8)[codes], BITS)


def powers(array: mx.array) -> mx.array:
    """Decode scales: 2^(byte - 128) in bfloat16, half the power of two, because numbers are doubled."""
    byte = array.astype(mx.uint16)
    bits = mx.where(byte > 1, (byte - 1) << 7, mx.array(0x20, mx.uint16) << byte)
    return mx.where(byte == NAN, 0x7F80, bits).astype(mx.uint16).view(mx.bfloat16)


def shapes(rows: tuple[int, ...], width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of weights and scales after conversion."""
    return (*rows, width * BITS // 32), (*rows, width // GROUP)
