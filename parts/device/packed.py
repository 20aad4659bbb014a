"""Matrices that stay packed in memory, and that our own product reads where they lie.

The problem. A step with few rows takes as long as its weights take to be read. A checkpoint with
four bits a weight is a seventh of what it is in float32. But on a CPU MLX multiplies float32
matrices alone quickly.

The way out. MLX hands our product (`rows.c`) an address, and never looks at what lies there. So a
packed matrix gets an array that *claims* to be float32, and costs no memory of its own. Our product
knows a packed matrix by its first bytes, makes each weight into the float32 that it stands for, and
adds up as ever: not one bit of a result changes.

    | what it is: form, N, K, group; 64 bytes | weights | scales | offsets |     each at a line of the cache
      ^ the claim begins here

Weights of four bits lie in another order than in a file (`rows.c` draws it); `as_in_a_file` undoes it.

What this file keeps. An array that claims more than there is lives in `Claim` alone: anything else
that read it would read beyond its end. It holds the matrix's memory, and so does each product that
has not been computed yet: the memory says what it is for as long as it is there.

Where next: `parts/model/layers.py`, what multiplies by it; `rows.c`, how.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from parts.device import mlx as device
from parts.device import rows
from parts.device.mlx import mx
from parts.device.rows import LINE

FORMS = {mx.float32: rows.FLOAT32, mx.float16: rows.FLOAT16, mx.bfloat16: rows.BFLOAT16}
WIDER = {2: 4, 3: 8, 5: 8, 6: 8}  # bits of a weight in a file, where we keep it in more
LEAST = 16  # numbers in a row: what begins a packed matrix takes as much memory


class Matrix(Protocol):
    """A matrix as a checkpoint has it, (N, K), or one for each expert, (experts, N, K)."""

    weight: mx.array  # (..., N, K) float16 or bfloat16; or (..., N, K * bits / 32), packed
    scales: mx.array  # (..., N, K / group); of 16 bits a factor for each row: float32, (..., N, 1)
    offsets: mx.array | None  # the same; of 16 bits, None
    bits: int
    group: int


class Kept(NamedTuple):
    """The same in the memory that our product reads, and what multiplies by it."""

    weight: mx.array
    scales: mx.array
    offsets: mx.array | None
    bits: int
    group: int
    claim: Claim


class Claim:
    """Multiplies by packed matrices. It looks like a float32 matrix to MLX, and to nothing else."""

    def __init__(self, claimed: mx.array):
        self._claimed = claimed  # (K, N), or (experts, K, N)

    def __call__(self, x: mx.array) -> mx.array:  # (..., K) -> (..., N)
        return x @ self._claimed

    def of_chosen(self, x: mx.array, chosen: mx.array) -> mx.array:
        """Each row times the matrices that were chosen for it: (..., 1, K) -> (..., k, 1, N)."""
        return mx.gather_mm(x, self._claimed, rhs_indices=chosen)


def pack(parts: Sequence[Matrix]) -> Kept:
    """One matrix of several, whose rows stand one below the other. All have the same K, and are
    packed alike."""
    first = parts[0]
    group = first.group
    K = first.scales.shape[-1] * group
    bits = WIDER.get(first.bits, first.bits)
    form = {4: rows.FOUR_BITS, 8: rows.EIGHT_BITS}.get(bits) or FORMS[first.weight.dtype]
    weight = below_each_other([part.weight for part in parts])
    arrays = [weight, below_each_other([part.scales for part in parts])]
    if first.offsets is not None:
        arrays.append(below_each_other([part.offsets for part in parts]))
    *many, N, _ = weight.shape
    count = math.prod(many)  # of matrices: one, or one for each expert
    row = row_nbytes(K, bits)
    sizes = [N * row, *(array.nbytes // count for array in arrays[1:])]
    places = [1]  # of weights, scales and offsets, counted in lines from a matrix's beginning
    for nbytes in sizes:
        places.append(places[-1] + -(-nbytes // LINE))
    lines = places[-1]  # of a matrix
    # A line before, to begin at one, and one behind, since whole vectors are read
    memory = mx.zeros((count * lines + 2) * LINE // 4, mx.uint32)
    begin = address(memory)
    start = -begin % LINE

    def view(dtype: mx.Dtype, line: int, shape: Sequence[int], strides: Sequence[int]) -> mx.array:
        """Of each matrix what begins in this line, as an array of such numbers."""
        to_next = lines * LINE // dtype.size
        first = (start + line * LINE) // dtype.size
        strides = [to_next] * len(many) + [*strides]
        return mx.as_strided(memory.view(dtype), (*many, *shape), strides, first)

    said = (form, FORMS[first.scales.dtype], N, K, group, *places[1:3])
    sources = [address(array) for array in arrays]
    for index in range(count):
        at = begin + start + index * lines * LINE
        device.blas.library.rows_pack(ctypes.c_void_p(at), *said)
        for n, array in enumerate(arrays):
            nbytes = array.nbytes // count
            source = sources[n] + index * nbytes
            target = at + places[n] * LINE
            if n or first.bits == 16:
                ctypes.memmove(target, source, nbytes)
            else:
                lay(source, first.bits, target, form, N, K)
    kept = []
    widths = [row // weight.dtype.size, K // group, K // group]
    for n, array in enumerate(arrays):
        kept.append(view(array.dtype, places[n], (N, widths[n]), (widths[n], 1)))
    claimed = view(mx.float32, 0, (K, N), (1, K))
    mx.eval(kept, claimed)
    weight, scales, *offsets = kept
    return Kept(weight, scales, offsets[0] if offsets else None, bits, group, Claim(claimed))


def below_each_other(arrays: Sequence[mx.array]) -> mx.array:
    """The rows of several matrices as one, side by side in memory."""
    return mx.contiguous(mx.concatenate(arrays, axis=-2) if len(arrays) > 1 else arrays[0])


def lay(source: int, bits: int, target: int, form: int, N: int, K: int) -> None:
    """Write weights of so many bits in a file as our product reads them."""
    places = ctypes.c_void_p(source), bits, ctypes.c_void_p(target), form
    device.blas.library.rows_lay(*places, ctypes.c_long(N), ctypes.c_long(K))


def row_nbytes(K: int, bits: int) -> int:
    """What a kept row of K weights takes."""
    if bits != 4:
        return K * bits // 8
    return device.blas.library.rows_width(rows.FOUR_BITS, ctypes.c_long(K))


def address(array: mx.array) -> int:
    """Where the numbers of an array lie, side by side."""
    numbers = array.view(mx.uint8)  # a memoryview knows no bfloat16
    return ctypes.addressof(ctypes.c_char.from_buffer(memoryview(numbers)))


def as_in_a_file(words: mx.array, K: int) -> mx.array:  # (..., blocks * lanes) -> (..., K / 8)
    """Rows of four bits, as they are kept, in the order that MLX knows."""
    lanes = ctypes.c_int.in_dll(device.blas.library, "rows_lanes").value
    places = mx.arange(0, 32, 4, dtype=mx.uint32)  # of eight numbers in a word
    rest = words.shape[:-1]
    numbers = words.reshape(*rest, -1, 1, lanes) >> places[:, None] & 15  # (..., blocks, 8, lanes)
    numbers = numbers.reshape(*rest, -1, 8)[..., : K // 8, :]
    return (numbers << places).sum(axis=-1)
