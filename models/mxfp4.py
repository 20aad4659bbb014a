"""MXFP4, in which gpt-oss stores its experts: a weight is one of 15 numbers times a power of two.

Doubled, these numbers are whole, from -12 to 12. So MXFP4 is a quantization like any other, of 5 bits in
groups of 32, and exact: a weight is scale * (number - 12). Next to activations of 8 bits our product keeps
four bits, which say which of the numbers a weight is.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels import packed
from kernels.device import mx
from kernels.packed import words

BITS, GROUP, CENTER = 5, 32, packed.MXFP4_CENTER
NUMBERS = packed.MXFP4_NUMBERS  # by the four bits of a file
NAN = 255  # as a scale


class Mxfp4(NamedTuple):
    """A part of a tensor in MXFP4."""

    is_scales: bool

    def __call__(self, array: mx.array) -> mx.array:
        if self.is_scales:
            return powers(array)
        if array.ndim < 3:
            return decoded(array)
        parts = []
        for (
            part
        ) in array:  # of each expert by itself, since numbers take more memory than their bits
            parts.append(decoded(part))
            mx.eval(parts)
        return mx.stack(parts)


def decoded(array: mx.array) -> mx.array:  # (rows, ...), bytes or words -> (rows, words of 5 bits)
    pairs = mx.contiguous(array).view(mx.uint8).reshape(len(array), -1)
    codes = mx.stack([pairs & 15, pairs >> 4], axis=-1).flatten(1)  # the lower four bits come first
    return words(mx.array(NUMBERS, mx.uint8)[codes], BITS)


def powers(array: mx.array) -> mx.array:
    """Half the power of two that a byte stands for, 2^(byte - 128), in bfloat16."""
    byte = array.astype(mx.uint16)
    bits = mx.where(byte > 1, (byte - 1) << 7, mx.array(0x20, mx.uint16) << byte)
    return mx.where(byte == NAN, 0x7F80, bits).astype(mx.uint16).view(mx.bfloat16)


def shapes(rows: tuple[int, ...], width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of weights and scales, as `Weights` hands them on."""
    return (*rows, width * BITS // 32), (*rows, width // GROUP)
