"""Weight matrices: plain, quantized (packed into a few bits), or a stack of experts.

The problem. A step with few rows takes as long as reading its weights. A checkpoint with four bits a
weight is a seventh of its size in float32. But on a CPU, MLX is fast with float32 matrices alone.

The solution. MLX passes our product (`cpu_kernels.c`) an address, and never reads what is there. So a
packed matrix gets an array that *claims* to be float32, without memory of its own. Our product
recognizes a packed matrix by its header, converts each weight to float32 in registers, and sums in
the same order: no bit of a result changes.

    | header: form, N, K, group; 64 bytes | weights | scales | offsets |      each aligned to a cache line
      ^ the claim begins here

Weights are stored in another order than in a file (`cpu_kernels.c` draws it); `as_bytes` restores that.
With activations in 8 bits, weights and scales are stored in panels of 16 rows; `from_panels` reads a
row of them. There weights have the size that they have in a file.

The invariant: only a `Claim` holds an array that claims more than there is, because anything else
would read beyond its end. The array keeps the matrix's memory alive, and so does each product that
has not been computed yet, so the header is valid as long as it may be read.

Where next: `models/load.py`, which makes the matrices; `cpu_kernels.c`, which multiplies them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from kernels import device, library
from kernels.device import mx
from kernels.library import LINE, ORDER

FORMS = {
    mx.float32: library.FLOAT32,
    mx.float16: library.FLOAT16,
    mx.bfloat16: library.BFLOAT16,
}
FORMS |= {mx.uint8: library.EIGHT_BITS}  # of scales and offsets (`widened`)
SPAN = 256  # weights whose scales of 8 bits are multiplied by one float16 number
# Bits of a weight in a file -> how our product reads it, in float arithmetic and for activations of 8 bits
FLOAT_FORMS = {
    2: library.FOUR_BITS,
    3: library.FOUR_BITS,
    4: library.FOUR_BITS,
    5: library.EIGHT_BITS,
    6: library.EIGHT_BITS,
    8: library.EIGHT_BITS,
}
ROUNDED_FORMS = {
    2: library.ROUNDED_4,
    3: library.ROUNDED_4,
    4: library.ROUNDED_4,
    5: library.ROUNDED_5,
    6: library.ROUNDED_6,
    8: library.ROUNDED_8,
}
BITS = {
    library.FOUR_BITS: 4,
    library.EIGHT_BITS: 8,
    library.ROUNDED_4: 4,
    library.ROUNDED_5: 5,
    library.ROUNDED_6: 6,
    library.ROUNDED_8: 8,
}
MLX_GROUPS = (32, 64, 128)  # group sizes that MLX's own products support
LEAST = 16  # numbers in a row of a packed matrix; a header takes as much memory


class Claim:
    """Holds an array for MLX's products alone, to which it looks like float32 numbers."""

    def __init__(self, array: mx.array):
        self.array = array  # (in, out), or (experts, in, out)


class Matrix(NamedTuple):
    """y = x W^T + b, with W as the checkpoint stores it. Each expert has its own W.

    W may be packed: `bits` bits a weight, and a scale and an offset for each `group` of weights.
    16-bit weights may have a float32 scale for each row, and no offset. Scales and offsets may be
    bytes (`widened`). With a `center`, a power of two, an offset is its scale times that, and none is
    kept.
    """

    weight: mx.array  # (..., out, in); packed (..., out, in * bits / 32), uint32
    bias: mx.array | None = None  # (..., out)
    scales: mx.array | None = None  # (..., out, in / group); None: W is not packed
    offsets: mx.array | None = None  # the same
    bits: int = 0
    group: int = 0
    claim: Claim | None = None  # if it is packed for our own product; None: MLX multiplies
    rounds: bool = False  # activations are rounded to 8 bits
    center: float = 0.0

    def __call__(self, x: mx.array, chosen: mx.array | None = None) -> mx.array:
        """(..., in) -> (..., out)

        `chosen`: the experts of each row: (..., 1, in) -> (..., k, 1, out).
        """
        if self.scales is not None and not self.claim:
            y = self._unpacked_by_mlx(x, chosen)
        else:
            turned = self.claim.array if self.claim else self.weight.swapaxes(-1, -2)
            y = x @ turned if chosen is None else mx.gather_mm(x, turned, rhs_indices=chosen)
        if self.bias is None:
            return y
        return y + (self.bias if chosen is None else self.bias[chosen][..., None, :])

    def _unpacked_by_mlx(self, x: mx.array, chosen: mx.array | None) -> mx.array:
        arrays = (self.weight, self.scales, self.offsets)
        how = {"group_size": self.group, "bits": self.bits}
        if chosen is None:
            return mx.quantized_matmul(x, *arrays, **how)
        return mx.gather_qmm(x, *arrays, rhs_indices=chosen, **how)

    def embed(self, ids: mx.array) -> mx.array:  # (...) -> (..., in)
        """Look up rows of the (V, D) matrix, so that a tied head and its table are one matrix."""
        if self.rounds:
            weight, *factors = (from_panels(each, ids, self.group) for each in self.arrays.values())
        elif self.scales is None:
            return self.weight[ids]
        elif self.bits == 16:
            return self.weight[ids].astype(self.scales.dtype) * self.scales[ids]
        else:
            weight, *factors = (each[ids] for each in self.arrays.values())
        if not self.claim:
            return dequantized(weight, *factors, self.group, self.bits)
        factors = [widened(each, self.group).astype(mx.float32) for each in factors]
        if self.center:
            factors.append(factors[0] * self.center)
        weight = as_bytes(weight, self.bits, self.rounds)[..., : self.width // 4]
        return dequantized(weight, *factors, self.group, 8)

    @property
    def arrays(self) -> dict[str, mx.array]:
        """The arrays of W."""
        named = {"weight": self.weight, "scales": self.scales, "offsets": self.offsets}
        return {name: array for name, array in named.items() if array is not None}

    @property
    def size(self) -> int:
        """The number of weights. If they are packed, each scale is for a group of them."""
        if self.scales is None:
            return self.weight.size
        *rows, _ = self.scales.shape
        return math.prod(rows) * self.width

    @property
    def width(self) -> int:
        """The numbers in a row of a packed matrix."""
        return groups_of(self.scales, self.group) * self.group

    @property
    def packing(self) -> tuple:
        """What must be equal in matrices that are joined."""
        if self.scales is None:
            return ()
        return self.bits, self.group, self.center, self.weight.dtype, self.scales.dtype


def joined(parts: Sequence[Matrix]) -> Matrix:
    """Join matrices of the same input that are packed alike. The outputs are concatenated.

    So the input is read once, and one product runs instead of three.
    """
    if len(parts) == 1:
        return parts[0]
    arrays = {
        name: mx.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays
    }
    return parts[0]._replace(**arrays, bias=joined_biases(parts))


def joined_biases(parts: Sequence[Matrix]) -> mx.array | None:
    """Concatenate biases, with zeros for a matrix that has none."""
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
    """Copy a matrix into memory as our product reads it. `rounds`: round activations to 8 bits, unless
    weights have 16."""
    group = matrix.group
    rounds = rounds and matrix.bits < 16
    K = matrix.width
    form = form_of(matrix.bits, rounds) or FORMS[matrix.weight.dtype]
    *many, N, _ = matrix.weight.shape
    weight, *factors = matrix.arrays.values()
    rows = rows_of(N, rounds)
    if rounds:
        factors = [in_panels(array, group) for array in factors]
    arrays = [mx.contiguous(array) for array in (weight, *factors)]
    count = math.prod(many)  # one matrix, or one for each expert
    row = row_nbytes(K, form)
    sizes = [rows * row, *(array.nbytes // count for array in arrays[1:])]
    # The first line of weights, scales and offsets in a matrix; last, its end
    places = [*accumulate((-(-nbytes // LINE) for nbytes in sizes), initial=1)]
    lines = places[-1]
    # One line more for the alignment, and one at the end, because whole vectors are read
    memory = mx.zeros((count * lines + 2) * LINE // 4, mx.uint32)
    begin = address(memory)
    start = -begin % LINE

    def view(dtype: mx.Dtype, line: int, shape: Sequence[int], strides: Sequence[int]) -> mx.array:
        """A view of what begins in this line of each matrix."""
        to_next = lines * LINE // dtype.size
        first = (start + line * LINE) // dtype.size
        strides = [to_next] * len(many) + [*strides]
        return mx.as_strided(memory.view(dtype), (*many, *shape), strides, first)

    scales, offsets = places[1], places[-2]
    kind = (form, FORMS[matrix.scales.dtype], N, K, group)
    said = (*kind, scales, offsets, ctypes.c_float(matrix.center))
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
    bits = BITS.get(form, 16)
    return matrix._replace(**kept, bits=bits, claim=Claim(claimed), rounds=rounds)


def form_of(bits: int, rounds: bool) -> int | None:
    """How our product reads weights that have this number of bits in a file; None for 16 bits."""
    return (ROUNDED_FORMS if rounds else FLOAT_FORMS).get(bits)


def rows_of(N: int, rounds: bool) -> int:
    """The number of rows in memory: panels are whole."""
    return -(-N // ORDER) * ORDER if rounds else N


def in_panels(factors: mx.array, group: int) -> mx.array:  # (..., N, width) -> (..., rows, width)
    """Arrange scales or offsets in panels: those of 16 rows together, group by group. The last panel is
    padded with zeros."""
    *many, N, width = factors.shape
    factors = mx.pad(factors, [(0, 0)] * len(many) + [(0, -N % ORDER), (0, 0)])
    parts = [
        part.reshape(*many, -1, ORDER, part.shape[-1]).swapaxes(-1, -2).flatten(-2)
        for part in parts_of(factors, group)
    ]
    parts = [mx.contiguous(part).view(factors.dtype) for part in parts]
    return mx.concatenate(parts, axis=-1).reshape(*many, -1, width)


def from_panels(array: mx.array, ids: mx.array, group: int) -> mx.array:  # -> (..., width)
    """Read rows from panels."""
    width = array.shape[-1]
    panels = array.reshape(-1, width, ORDER)[ids // ORDER].flatten(-2)  # (..., width * ORDER)
    column = (ids % ORDER)[..., None, None]
    parts = [
        mx.take_along_axis(mx.unflatten(part, -1, (-1, ORDER)), column, axis=-1)[..., 0]
        for part in parts_of(panels, group)
    ]
    return mx.concatenate([part.view(array.dtype) for part in parts], axis=-1)


def parts_of(factors: mx.array, group: int) -> list[mx.array]:
    """Split 8-bit scales or offsets into bytes and their float16 factors (`widened`); return others
    unchanged."""
    if factors.dtype != mx.uint8:
        return [factors]
    groups = groups_of(factors, group)
    return [factors[..., :groups], mx.contiguous(factors[..., groups:]).view(mx.float16)]


def groups_of(factors: mx.array, group: int) -> int:
    """The number of groups in a row."""
    width = factors.shape[-1]
    each = SPAN // group
    return width * each // (each + 2) if factors.dtype == mx.uint8 else width


def widened(factors: mx.array, group: int) -> mx.array:
    """Convert 8-bit scales or offsets to float32; return others unchanged.

    | a byte for each group: its number plus 128 | a float16 factor for each SPAN weights |
    """
    if factors.dtype != mx.uint8:
        return factors
    numbers, sizes = (part.astype(mx.float32) for part in parts_of(factors, group))
    return (numbers - 128) * mx.repeat(sizes, SPAN // group, axis=-1)


def dequantized(
    weight: mx.array, scales: mx.array, offsets: mx.array, group: int, bits: int
) -> mx.array:
    """Unpack weights. Only GGUF has groups of 16."""
    if group in MLX_GROUPS:
        return mx.dequantize(weight, scales, offsets, group, bits)
    least = MLX_GROUPS[0]
    ones = mx.ones((*scales.shape[:-1], scales.shape[-1] * group // least))
    numbers = mx.dequantize(weight, ones, mx.zeros_like(ones), least, bits)
    numbers = mx.unflatten(numbers, -1, (-1, group))
    return (numbers * scales[..., None] + offsets[..., None]).flatten(-2)


def lay(source: int, bits: int, target: int, form: int, N: int, K: int) -> None:
    """Write weights that have this number of bits in a file as our product reads them."""
    places = ctypes.c_void_p(source), bits, ctypes.c_void_p(target), form
    device.blas.library.rows_lay(*places, ctypes.c_long(N), ctypes.c_long(K))


def row_nbytes(K: int, form: int) -> int:
    """The memory of a row of K weights."""
    return device.blas.library.rows_width(form, ctypes.c_long(K))


def address(array: mx.array) -> int:
    """The address of an array whose numbers are contiguous."""
    numbers = array.view(mx.uint8)  # there is no memoryview of bfloat16
    return ctypes.addressof(ctypes.c_char.from_buffer(memoryview(numbers)))


def as_bytes(words: mx.array, bits: int, rounds: bool) -> mx.array:  # (..., words) -> (..., K / 4)
    """Rows as they are in memory, with a byte for each number. `cpu_kernels.c` draws both orders."""
    if bits == 8:
        return words
    places = mx.arange(0, 32, 4, dtype=mx.uint32)
    if not rounds:  # (..., blocks, 8, lanes)
        numbers = mx.unflatten(words, -1, (-1, 1, ORDER)) >> places[:, None] & 15
        return mx.contiguous(numbers.astype(mx.uint8).flatten(-3)).view(mx.uint32)
    # A unit: words with the lower four bits of two times four numbers, and one with the upper bits
    lower = {4: 1, 5: 4, 6: 2}[bits]
    unit = mx.unflatten(words, -1, (-1, lower + (bits > 4)))
    numbers = unit[..., :lower, None] >> places[:2] & 0x0F0F0F0F
    numbers = numbers.flatten(-2)  # (..., units, 2 lower)
    if bits > 4:
        shifts = mx.arange(0, 8, bits - 4, dtype=mx.uint32)
        upper = unit[..., lower:] >> shifts & {5: 0x01010101, 6: 0x03030303}[bits]
        numbers = numbers | upper << 4
    return numbers.flatten(-2)


def words(numbers: mx.array, bits: int) -> mx.array:  # (..., n), uint8 -> (..., n bits / 32)
    """Pack numbers as MLX does: eight of them in as many bytes as one has bits."""
    if bits < 8:
        eight = mx.unflatten(numbers, -1, (-1, 8)).astype(mx.uint64)
        eight = (eight << mx.arange(0, 8 * bits, bits, dtype=mx.uint64)).sum(axis=-1)
        numbers = mx.unflatten(eight.view(mx.uint8), -1, (-1, 8))[..., :bits].flatten(-2)
    return mx.contiguous(numbers).view(mx.uint32)
