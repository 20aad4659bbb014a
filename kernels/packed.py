"""A matrix of weights: whole, packed into a few bits, or one for each expert; and what multiplies by it.

The problem. A step with few rows takes as long as its weights take to be read. A checkpoint with
four bits a weight is a seventh of what it is in float32. But on a CPU MLX multiplies float32
matrices alone quickly.

The way out. MLX hands our product (`matmul.c`) an address, and never looks at what lies there. So a
packed matrix gets an array that *claims* to be float32, and costs no memory of its own. Our product
knows a packed matrix by its first bytes, makes each weight into the float32 that it stands for, and
adds up as ever: not one bit of a result changes.

    | what it is: form, N, K, group; 64 bytes | weights | scales | offsets |     each at a line of the cache
      ^ the claim begins here

Weights of four bits lie in another order than in a file (`matmul.c` draws it); `as_in_a_file` undoes it.
A matrix for activations in 8 bits lies in panels of 16 rows, and so do its scales; `from_panels` takes
a row out of them.

What this file keeps. An array that claims more than there is lives in `Claim` alone: anything else
that read it would read beyond its end. It holds the matrix's memory, and so does each product that
has not been computed yet: the memory says what it is for as long as it is there.

Where next: `models/load.py`, what matrices are made of; `matmul.c`, how they are multiplied.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from kernels import matmul_library
from kernels import mlx as device
from kernels.matmul_library import LINE, ORDER
from kernels.mlx import mx

FORMS = {
    mx.float32: matmul_library.FLOAT32,
    mx.float16: matmul_library.FLOAT16,
    mx.bfloat16: matmul_library.BFLOAT16,
}
FORMS |= {mx.uint8: matmul_library.EIGHT_BITS}  # of scales and offsets (`widened`)
SPAN = 256  # weights whose scales of 8 bits are multiplied by one float16 number
WIDER = {2: 4, 3: 8, 5: 8, 6: 8}  # bits of a weight in a file, where we keep it in more
MLX_GROUPS = (32, 64, 128)  # how many numbers may share a scale in MLX's own products
LEAST = 16  # numbers in a row: what begins a packed matrix takes as much memory


class Claim:
    """Holds an array that looks like float32 numbers to MLX's products, and to nothing else."""

    def __init__(self, array: mx.array):
        self.array = array  # (in, out), or (experts, in, out)


class Matrix(NamedTuple):
    """y = x W^T + b, with W as the checkpoint stores it. Of experts there is a W for each.

    W may be packed: `bits` bits a number, and a scale and an offset for every `group` of them.
    Numbers of 16 bits may have a scale for each row, in float32, and no offset. Scales and offsets
    may be bytes (`widened`).
    """

    weight: mx.array  # (..., out, in); packed (..., out, in * bits / 32), uint32
    bias: mx.array | None = None  # (out,)
    scales: mx.array | None = None  # (..., out, in / group); None: W is not packed
    offsets: mx.array | None = None  # the same
    bits: int = 0
    group: int = 0
    claim: Claim | None = None  # of a packed one: our own product multiplies. None: MLX does
    rounds: bool = False  # it rounds activations to 8 bits

    def __call__(self, x: mx.array, chosen: mx.array | None = None) -> mx.array:
        """(..., in) -> (..., out)

        `chosen`: of experts, those of each row: (..., 1, in) -> (..., k, 1, out).
        """
        if self.scales is not None and not self.claim:
            y = self._unpacked_by_mlx(x, chosen)
        else:
            turned = self.claim.array if self.claim else self.weight.swapaxes(-1, -2)
            y = x @ turned if chosen is None else mx.gather_mm(x, turned, rhs_indices=chosen)
        return y if self.bias is None else y + self.bias

    def _unpacked_by_mlx(self, x: mx.array, chosen: mx.array | None) -> mx.array:
        arrays = (self.weight, self.scales, self.offsets)
        how = {"group_size": self.group, "bits": self.bits}
        if chosen is None:
            return mx.quantized_matmul(x, *arrays, **how)
        return mx.gather_qmm(x, *arrays, rhs_indices=chosen, **how)

    def embed(self, ids: mx.array) -> mx.array:  # (...) -> (..., in)
        """As an embedding: row `id` of the (V, D) matrix, so that a tied head and its table are one
        matrix."""
        if self.rounds:
            weight, scales, offsets = (
                from_panels(each, ids, self.group) for each in self.arrays.values()
            )
        elif self.scales is None:
            return self.weight[ids]
        elif self.offsets is None:
            return self.weight[ids].astype(self.scales.dtype) * self.scales[ids]
        else:
            weight, scales, offsets = (each[ids] for each in self.arrays.values())
        if self.claim:
            scales = widened(scales, self.group).astype(mx.float32)
            offsets = widened(offsets, self.group).astype(mx.float32)
            if self.bits == 4:
                weight = as_in_a_file(weight, scales.shape[-1] * self.group, self.rounds)
        return dequantized(weight, scales, offsets, self.group, self.bits)

    @property
    def arrays(self) -> dict[str, mx.array]:
        """What W is made of."""
        named = {"weight": self.weight, "scales": self.scales, "offsets": self.offsets}
        return {name: array for name, array in named.items() if array is not None}

    @property
    def size(self) -> int:
        """How many numbers it has: of packed ones, each scale is for a group of them."""
        if self.scales is None:
            return self.weight.size
        *rows, _ = self.scales.shape
        return math.prod(rows) * groups_of(self.scales, self.group) * self.group

    @property
    def packing(self) -> tuple:
        """What matrices must have alike to become one."""
        if self.scales is None:
            return ()
        return self.bits, self.group, self.weight.dtype, self.scales.dtype


def joined(parts: Sequence[Matrix]) -> Matrix:
    """Several matrices of the same input, packed alike, as one, which yields all their outputs
    side by side.

    So the input is read once, and one product runs instead of three.
    """
    if len(parts) == 1:
        return parts[0]
    arrays = {
        name: mx.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays
    }
    return parts[0]._replace(**arrays, bias=joined_biases(parts))


def joined_biases(parts: Sequence[Matrix]) -> mx.array | None:
    """The biases of several matrices as one: zeros where a matrix has none."""
    dtypes = [part.bias.dtype for part in parts if part.bias is not None]
    if not dtypes:
        return None
    return mx.concatenate(
        [
            mx.zeros(len(part.weight), dtypes[0]) if part.bias is None else part.bias
            for part in parts
        ]
    )


def packed(matrix: Matrix, rounds: bool = False) -> Matrix:
    """The same in the memory that our product reads, and with what multiplies by it. `rounds`:
    activations to 8 bits, unless the weights have 16."""
    group = matrix.group
    rounds = rounds and matrix.bits < 16
    K = groups_of(matrix.scales, group) * group
    bits = WIDER.get(matrix.bits, matrix.bits)
    form = {4: matmul_library.FOUR_BITS, 8: matmul_library.EIGHT_BITS}.get(bits) or FORMS[
        matrix.weight.dtype
    ]
    *many, N, _ = matrix.weight.shape
    weight, *factors = matrix.arrays.values()
    rows = N
    if rounds:
        form = rounded_form(weight, matrix.bits)
        factors = [in_panels(array, group) for array in factors]
        rows = factors[0].shape[-2]
    arrays = [mx.contiguous(array) for array in (weight, *factors)]
    count = math.prod(many)  # of matrices: one, or one for each expert
    row = K * bits // 8 if rounds else row_nbytes(K, bits)
    sizes = [rows * row, *(array.nbytes // count for array in arrays[1:])]
    # Of weights, scales and offsets, counted in lines from a matrix's beginning; last, its end
    places = [*accumulate((-(-nbytes // LINE) for nbytes in sizes), initial=1)]
    lines = places[-1]
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

    said = (form, FORMS[matrix.scales.dtype], N, K, group, *places[1:3])
    sources = [address(array) for array in arrays]
    for index in range(count):
        at = begin + start + index * lines * LINE
        device.blas.library.rows_pack(ctypes.c_void_p(at), *said)
        for n, array in enumerate(arrays):
            nbytes = array.nbytes // count
            source = sources[n] + index * nbytes
            target = at + places[n] * LINE
            if n or matrix.bits == 16:
                ctypes.memmove(target, source, nbytes)
            else:
                lay(source, matrix.bits, target, form, N, K)
    kept = {}
    widths = [row // matrix.weight.dtype.size, *(array.shape[-1] for array in arrays[1:])]
    for name, array, place, width in zip(matrix.arrays, arrays, places, widths, strict=False):
        kept[name] = view(array.dtype, place, (rows, width), (width, 1))
    claimed = view(mx.float32, 0, (K, N), (1, K))
    mx.eval(kept, claimed)
    return matrix._replace(**kept, bits=bits, claim=Claim(claimed), rounds=rounds)


def rounded_form(weight: mx.array, bits: int) -> int:
    """How our product multiplies whole numbers. Those of six bits may stand in a file's bytes."""
    if WIDER.get(bits, bits) == 4:
        return matmul_library.ROUNDED_4
    is_small = bits < 8 or int(weight.view(mx.uint8).max()) < 64
    return matmul_library.ROUNDED_6 if is_small else matmul_library.ROUNDED_8


def in_panels(factors: mx.array, group: int) -> mx.array:  # (..., N, width) -> (..., rows, width)
    """Scales or offsets of 16 rows next to one another, group by group; after the last row, zeros."""
    *many, N, width = factors.shape
    factors = mx.pad(factors, [(0, 0)] * len(many) + [(0, -N % ORDER), (0, 0)])
    parts = [
        part.reshape(*many, -1, ORDER, part.shape[-1]).swapaxes(-1, -2).flatten(-2)
        for part in parts_of(factors, group)
    ]
    parts = [mx.contiguous(part).view(factors.dtype) for part in parts]
    return mx.concatenate(parts, axis=-1).reshape(*many, -1, width)


def from_panels(array: mx.array, ids: mx.array, group: int) -> mx.array:  # -> (..., width)
    """Rows of what lies in panels."""
    width = array.shape[-1]
    panels = array.reshape(-1, width, ORDER)[ids // ORDER].flatten(-2)  # (..., width * ORDER)
    column = (ids % ORDER)[..., None, None]
    parts = [
        mx.take_along_axis(mx.unflatten(part, -1, (-1, ORDER)), column, axis=-1)[..., 0]
        for part in parts_of(panels, group)
    ]
    return mx.concatenate([part.view(array.dtype) for part in parts], axis=-1)


def parts_of(factors: mx.array, group: int) -> list[mx.array]:
    """Of scales or offsets of 8 bits their numbers and their sizes (`widened`); others as they are."""
    if factors.dtype != mx.uint8:
        return [factors]
    groups = groups_of(factors, group)
    return [factors[..., :groups], mx.contiguous(factors[..., groups:]).view(mx.float16)]


def groups_of(factors: mx.array, group: int) -> int:
    """For how many groups of a row there are scales."""
    width = factors.shape[-1]
    each = SPAN // group
    return width * each // (each + 2) if factors.dtype == mx.uint8 else width


def widened(factors: mx.array, group: int) -> mx.array:
    """Scales or offsets of 8 bits as the float32 numbers that they stand for; others as they are.

    | a byte for each group: its number plus 128 | a float16 number for each SPAN weights |
    """
    if factors.dtype != mx.uint8:
        return factors
    numbers, sizes = (part.astype(mx.float32) for part in parts_of(factors, group))
    return (numbers - 128) * mx.repeat(sizes, SPAN // group, axis=-1)


def dequantized(
    weight: mx.array, scales: mx.array, offsets: mx.array, group: int, bits: int
) -> mx.array:
    """Packed numbers as what they stand for. Groups of 16 numbers, of 8 bits, are GGUF's alone."""
    if group in MLX_GROUPS:
        return mx.dequantize(weight, scales, offsets, group, bits)
    assert bits == 8, bits
    numbers = mx.unflatten(weight.view(mx.uint8), -1, (-1, group))
    return (numbers * scales[..., None] + offsets[..., None]).flatten(-2)


def lay(source: int, bits: int, target: int, form: int, N: int, K: int) -> None:
    """Write weights of so many bits in a file as our product reads them."""
    places = ctypes.c_void_p(source), bits, ctypes.c_void_p(target), form
    device.blas.library.rows_lay(*places, ctypes.c_long(N), ctypes.c_long(K))


def row_nbytes(K: int, bits: int) -> int:
    """What a kept row of K weights takes."""
    if bits != 4:
        return K * bits // 8
    return device.blas.library.rows_width(matmul_library.FOUR_BITS, ctypes.c_long(K))


def address(array: mx.array) -> int:
    """Where the numbers of an array lie, side by side."""
    numbers = array.view(mx.uint8)  # a memoryview knows no bfloat16
    return ctypes.addressof(ctypes.c_char.from_buffer(memoryview(numbers)))


def as_in_a_file(words: mx.array, K: int, rounds: bool) -> mx.array:  # (..., words) -> (..., K / 8)
    """Rows of four bits, as they are kept, in the order that MLX knows."""
    places = mx.arange(0, 32, 4, dtype=mx.uint32)  # of eight numbers in a word
    if rounds:  # four in the lower halves of its bytes, and then four in the upper ones
        numbers = words[..., None] >> mx.array([0, 8, 16, 24, 4, 12, 20, 28], mx.uint32) & 15
        return (numbers << places).sum(axis=-1)
    rest = words.shape[:-1]
    numbers = words.reshape(*rest, -1, 1, ORDER) >> places[:, None] & 15  # (..., blocks, 8, lanes)
    numbers = numbers.reshape(*rest, -1, 8)[..., : K // 8, :]
    return (numbers << places).sum(axis=-1)
