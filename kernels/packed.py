"""Weight matrices: plain, quantized (packed into a few bits), or a stack of experts.

The problem. A step with few rows takes as long as reading its weights. A checkpoint with 4-bit weights
is a seventh of its size in float32. But on a CPU, MLX is fast with float32 matrices only.

The solution. MLX passes an address to our product (`cpu_kernels.c`), and never reads the memory there. So
a packed matrix gets an array that *claims* to be float32, without memory of its own. Our product
recognizes a packed matrix by its header, converts each weight to float32 in registers, and sums in
the same order: no bit of a result changes.

    | header: form, N, K, group; 64 bytes | weights | scales | offsets |      each aligned to a cache line
      ^ the claim begins here

Weights are not in the order of the file (`cpu_kernels.c` draws the layouts); `as_bytes` restores it. For
8-bit activations, weights and scales are in panels of 16 rows, and take as much memory as in the file;
`from_panels` reads a row of them.

The invariant: only a `Claim` holds an array that claims more memory than it has, because any other
operation would read beyond its end. The array keeps the matrix's memory alive, and so does each pending
product. So the header stays valid as long as it may be read.

Where next: `models/load.py`, which creates the matrices; `cpu_kernels.c`, which multiplies them.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from base.untrusted_files import ModelError
from kernels import device, library
from kernels.device import mx
from kernels.library import LINE, ORDER

FORMS = {
    mx.float32: library.FLOAT32,
    mx.float16: library.FLOAT16,
    mx.bfloat16: library.BFLOAT16,
}
FORMS |= {mx.uint8: library.EIGHT_BITS}  # for scales and offsets (`widened`)
SPAN = 256  # weights whose 8-bit scales share a float16 factor
# Bits of a weight in a file -> its form for our product: for float arithmetic, and for 8-bit activations
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
    library.ROUNDED_MXFP4: 4,
}
# MXFP4 weights (`models/mxfp4.py`) are loaded as five-bit numbers with this center
MXFP4_CENTER = -12.0
MXFP4_NUMBERS = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
MLX_GROUPS = (32, 64, 128)  # group sizes that MLX's own products support
PARTS = ("weight", "scales", "offsets")
LEAST_SHARE = 2**19  # minimum number of weights that a thread copies at a time
MOST_AT_ONCE = (
    2**30
)  # maximum size of an allocation in bytes: MLX counts an array's elements in 32 bits
LEAST = 16  # minimum row length of a packed matrix; a header takes as much memory as 16 floats


class Claim:
    """An array that may be passed only to MLX's products, which treat it as float32 numbers."""

    def __init__(self, array: mx.array, N: int):
        self.array = array  # (in, out); for a stack, its header
        self.N = N  # outputs

    def of_experts(self, x: mx.array, chosen: mx.array) -> mx.array:
        """Multiply by the chosen matrices of a stack: (n, 1 or k, in), (n, k) -> (n, k, out)."""
        k = chosen.shape[1]
        x = mx.concatenate([x.flatten(1), chosen.astype(mx.float32)], axis=1)
        K = x.shape[1]
        return (x @ mx.as_strided(self.array, (K, k * self.N), (1, K))).reshape(-1, k, self.N)


class Blocks(NamedTuple):
    """A matrix in a GGUF file. Its rows consist of blocks, which contain weights, scales and offsets."""

    source: int  # the type's number in `cpu_kernels.c`
    factors: mx.Dtype  # the type of scales and offsets in memory
    path: Path
    name: str
    begin: int  # the offset in the file
    width: int  # weights of a row


class Matrix(NamedTuple):
    """y = x W^T + b, with W as the checkpoint stores it. Each expert has its own W.

    W may be packed: `bits` bits per weight, and a scale and an offset for each `group` of weights.
    16-bit weights may have a float32 scale for each row, and no offset. Scales and offsets may be
    bytes (`widened`). With a `center`, each offset is the scale times the center, and no offsets are
    stored. Until it is packed, W may be in MXFP4 as stored in files (uint8, two weights per byte), or
    still in a GGUF file.
    """

    weight: mx.array  # (..., out, in); packed (..., out, in * bits / 32), uint32
    bias: mx.array | None = None  # (..., out)
    scales: mx.array | None = None  # (..., out, in / group); None: W is not packed
    offsets: mx.array | None = None  # the same shape
    bits: int = 0
    group: int = 0
    claim: Claim | None = None  # set if W is packed for our own product; None: MLX multiplies
    rounds: bool = False  # activations are rounded to 8 bits
    center: float = 0.0
    blocks: Blocks | None = (
        None  # set if W is in a file; `weight` then contains its row numbers there
    )

    def __call__(self, x: mx.array) -> mx.array:  # (..., in) -> (..., out)
        if self.scales is not None and not self.claim:
            y = self._unpacked_by_mlx(x)
        else:
            y = x @ (self.claim.array if self.claim else self.weight.swapaxes(-1, -2))
        return y if self.bias is None else y + self.bias

    def of_experts(self, x: mx.array, chosen: mx.array) -> mx.array:
        """Multiply each row by the W of k experts: (n, 1 or k, in), (n, k) -> (n, k, out)."""
        if self.claim:
            return self.claim.of_experts(x, chosen)
        x = x[..., None, :]
        if self.scales is None:
            y = mx.gather_mm(x, self.weight.swapaxes(-1, -2), rhs_indices=chosen)
        else:
            y = self._unpacked_by_mlx(x, chosen)
        return y[..., 0, :] if self.bias is None else y[..., 0, :] + self.bias[chosen]

    def _unpacked_by_mlx(self, x: mx.array, chosen: mx.array | None = None) -> mx.array:
        arrays = (self.weight, self.scales, self.offsets)
        how = {"group_size": self.group, "bits": self.bits}
        if chosen is None:
            return mx.quantized_matmul(x, *arrays, **how)
        return mx.gather_qmm(x, *arrays, rhs_indices=chosen, **how)

    def embed(self, ids: mx.array) -> mx.array:  # (...) -> (..., in)
        """Look up rows of an embedding table, (V, in), which a tied head shares."""
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
        if self.rounds and self.center == MXFP4_CENTER:
            weight = mx.array(MXFP4_NUMBERS, mx.uint8)[weight.view(mx.uint8)].view(mx.uint32)
        return dequantized(weight, *factors, self.group, 8)

    @property
    def arrays(self) -> dict[str, mx.array]:
        """The existing arrays of W, by name."""
        named = {"weight": self.weight, "scales": self.scales, "offsets": self.offsets}
        return {name: array for name, array in named.items() if array is not None}

    @property
    def size(self) -> int:
        """The number of weights. For packed weights it follows from the number of scales."""
        if self.scales is None:
            return self.weight.size
        *rows, _ = self.scales.shape
        return math.prod(rows) * self.width

    @property
    def width(self) -> int:
        """The number of weights in a row."""
        if not self.bits:
            return self.weight.shape[-1]
        if self.blocks:
            return self.blocks.width
        return groups_of(self.scales, self.group) * self.group

    @property
    def packing(self) -> tuple:
        """The properties that matrices must share to be joined."""
        if self.scales is None and not self.blocks:
            return ()
        stored = self.blocks.source if self.blocks else self.scales.dtype
        return self.bits, self.group, self.center, self.weight.dtype, stored


def joined(parts: Sequence[Matrix]) -> Matrix:
    """Join matrices with the same input and `packing`, by concatenating their outputs.

    The input is then read once, and one product runs instead of three. `packed` joins matrices, too.
    """
    if len(parts) == 1:
        return parts[0]
    arrays = {
        name: mx.concatenate([part.arrays[name] for part in parts], axis=-2)
        for name in parts[0].arrays
    }
    return parts[0]._replace(**arrays, bias=joined_biases(parts))


def joined_biases(parts: Sequence[Matrix]) -> mx.array | None:
    """Concatenate biases, with zeros for a matrix without one."""
    dtypes = [part.bias.dtype for part in parts if part.bias is not None]
    if not dtypes:
        return None
    return mx.concatenate(
        [
            mx.zeros(part.weight.shape[:-1], dtypes[0]) if part.bias is None else part.bias
            for part in parts
        ],
        axis=-1,
    )


def packed(*parts: Matrix, rounds: bool = False, memory: Memory | None = None) -> Matrix:
    """Copy matrices with the same input and `packing` into one matrix in our product's layout.

    `rounds`: round activations to 8 bits, unless weights have 16 bits or more. A stack of experts may also
    have float32 weights."""
    first = parts[0]
    is_few_bits = 0 < first.bits < 16
    rounds = rounds and is_few_bits
    K = first.width
    group = first.group or K
    form = form_of(first.bits, rounds, first.center) or FORMS[first.weight.dtype]
    *many, _, _ = first.weight.shape
    N = sum(part.weight.shape[-2] for part in parts)
    count = math.prod(many)  # one matrix, or one for each expert
    dtype = mx.float32
    if first.bits:
        dtype = first.blocks.factors if first.blocks else first.scales.dtype
    factors = (first.bits > 0) + (is_few_bits and not first.center)  # scales, and offsets
    rows = rows_of(N, rounds)
    # Bytes of a row
    widths = [row_nbytes(K, form)] + [factors_nbytes(K, group, dtype)] * factors
    # The first cache lines of weights, scales and offsets, and the end of the matrix
    places = [*accumulate((-(-rows * width // LINE) for width in widths), initial=1)]
    bias = joined_biases(parts)
    at_bias = places[-1] if many and bias is not None else 0  # the product of a stack adds the bias
    lines = places[-1] + (-(-N * 4 // LINE) if at_bias else 0)
    to_next = lines * LINE
    array, start = (memory or Memory()).take(LINE * bool(many) + count * to_next)
    if many:
        place = ctypes.c_void_p(address(array) + start)
        device.blas.library.rows_stack(place, count, N, K, lines, at_bias)
        start += LINE
    at = address(array) + start
    kind = (form, FORMS[dtype], N, K, group, places[1], places[factors])
    for index in range(count):
        place = ctypes.c_void_p(at + index * to_next)
        device.blas.library.rows_pack(place, *kind, ctypes.c_float(first.center))
    lay(parts, at, to_next)

    def view(dtype: mx.Dtype, line: int, *shape: int, strides: Sequence[int]) -> mx.array:
        """Return a view of the part that begins at cache line `line` of each matrix."""
        begin = (start + line * LINE) // dtype.size
        strides = [to_next // dtype.size] * len(many) + [*strides]
        return mx.as_strided(array.view(dtype), (*many, *shape), strides, begin)

    kept = {"scales": None, "offsets": None}
    dtypes = [mx.uint32 if is_few_bits else first.weight.dtype, dtype, dtype]
    for name, each, place, nbytes in zip(PARTS, dtypes, places, widths, strict=False):
        width = nbytes // each.size
        kept[name] = view(each, place, rows, width, strides=(width, 1))
    if at_bias:
        each = mx.contiguous(bias.astype(mx.float32).reshape(count, N))
        for index in range(count):
            to = at + index * to_next + at_bias * LINE
            ctypes.memmove(to, address(each) + index * N * 4, N * 4)
        bias = view(mx.float32, at_bias, N, strides=(1,))
    if many:
        claimed = mx.as_strided(array.view(mx.float32), (LINE // 4,), (1,), (start - LINE) // 4)
    else:
        claimed = view(mx.float32, 0, K, N, strides=(1, K))
    mx.eval(kept, claimed, bias)
    return Matrix(
        **kept,
        bias=bias,
        bits=first.bits and BITS.get(form, 16),
        group=first.group,
        claim=Claim(claimed, N),
        rounds=rounds,
        center=first.center,
    )


def lay(parts: Sequence[Matrix], at: int, to_next: int) -> None:
    """Fill the rows of a matrix, or of a stack of matrices that are `to_next` bytes apart, from its parts.

    The rows are divided among threads."""
    jobs = []
    first = 0
    held = []  # keeps arrays alive until their rows are copied
    for part in parts:
        *many, N, _ = part.weight.shape
        arrays = [mx.contiguous(array) for array in part.arrays.values()]
        held.append(arrays)
        sources = [(address(array), array.nbytes // math.prod((*many, N))) for array in arrays]
        share = -(-max(LEAST_SHARE // part.width, 1) // ORDER) * ORDER  # whole panels
        for index in range(math.prod(many)):
            for row in range(0, N, share):
                where = [ctypes.c_void_p(at + index * to_next)]
                where += ctypes.c_long(first + row), ctypes.c_long(min(share, N - row))
                places = [begin + (index * N + row) * width for begin, width in sources]
                jobs.append((part, where, places))
        first += N
    threads = min(library.threads(), len(jobs))
    if threads < 2:
        for job in jobs:
            lay_share(*job)
        return
    with ThreadPoolExecutor(threads) as pool:  # ctypes releases the GIL during a call
        for future in [pool.submit(lay_share, *job) for job in jobs]:
            future.result()


def lay_share(part: Matrix, where: list, places: list[int]) -> None:
    """Fill a range of rows from a part.

    `where`: the address of the matrix, the first row, and the number of rows.
    `places`: the addresses of the rows in the part's arrays."""
    c = device.blas.library
    pointers = [ctypes.c_void_p(place) for place in places]
    blocks = part.blocks
    if not blocks:
        source = library.CODES if part.weight.dtype == mx.uint8 else part.bits or 32
        c.rows_lay(*where, source, *pointers, *[None] * (3 - len(pointers)))
        return
    begin = ctypes.c_long(blocks.begin)
    error = c.rows_lay_file(*where, blocks.source, os.fsencode(blocks.path), begin, *pointers)
    if error == library.INFINITE:
        raise ModelError(f"{blocks.path}: {blocks.name} holds NaN or infinity; download it again.")
    if error:
        why = "it was truncated" if error == library.CUT_OFF else os.strerror(error)
        raise ModelError(f"{blocks.path} cannot be read ({why}); download it again.")


class Memory:
    """An allocator for packed matrices: it divides large blocks of memory in large pages."""

    def __init__(self, expected: int = 0):
        """`expected`: the total size of all matrices in bytes."""
        self.expected = expected
        self.array: mx.array | None = None
        self.begin = self.end = 0  # the free part of the array, in bytes

    def take(self, nbytes: int) -> tuple[mx.array, int]:
        """Allocate `nbytes`. Return an array of uint32 and the byte offset in it, aligned to a cache line."""
        if self.begin + nbytes > self.end:
            size = max(nbytes, min(self.expected, MOST_AT_ONCE))
            self.expected -= size
            # One extra line for the alignment, and one at the end, because whole vectors are read
            self.array = unwritten(size + 2 * LINE)
            self.begin = -address(self.array) % LINE
            self.end = self.begin + size
        self.begin += nbytes
        return self.array, self.begin - nbytes


def unwritten(nbytes: int) -> mx.array:
    """Return an uninitialized array of uint32, in large pages if the system has them.

    MLX has no constructor for this, but it does not initialize the result of a product."""
    count = -(-nbytes // 4)
    claim = mx.as_strided(memory_header(), (1, count), (count, 1))
    array = (mx.ones((1, 1)) @ claim).flatten().view(mx.uint32)
    mx.eval(array)
    return array


@cache
def memory_header() -> mx.array:
    header = mx.zeros(LINE // 4)
    at = ctypes.c_void_p(address(header))
    device.blas.library.rows_operation(at, library.MEMORY, 0, ctypes.c_float(0))
    return header


def form_of(bits: int, rounds: bool, center: float = 0.0) -> int | None:
    """Return the form in which our product reads weights of this many bits; None for 16 bits."""
    if rounds and center == MXFP4_CENTER:
        return library.ROUNDED_MXFP4
    return (ROUNDED_FORMS if rounds else FLOAT_FORMS).get(bits)


def rows_of(N: int, rounds: bool) -> int:
    """Return the number of rows in memory: with `rounds`, N rounded up to whole panels."""
    return -(-N // ORDER) * ORDER if rounds else N


def from_panels(array: mx.array, ids: mx.array, group: int) -> mx.array:  # -> (..., width)
    """Return the rows `ids` of an array that is stored in panels."""
    width = array.shape[-1]
    panels = array.reshape(-1, width, ORDER)[ids // ORDER].flatten(-2)  # (..., width * ORDER)
    column = (ids % ORDER)[..., None, None]
    parts = [
        mx.take_along_axis(mx.unflatten(part, -1, (-1, ORDER)), column, axis=-1)[..., 0]
        for part in parts_of(panels, group)
    ]
    return mx.concatenate([part.view(array.dtype) for part in parts], axis=-1)


def parts_of(factors: mx.array, group: int) -> list[mx.array]:
    """Split 8-bit scales or offsets into bytes and their float16 factors (`widened`). Other types are
    returned as the only part."""
    if factors.dtype != mx.uint8:
        return [factors]
    groups = groups_of(factors, group)
    return [factors[..., :groups], mx.contiguous(factors[..., groups:]).view(mx.float16)]


def factors_nbytes(K: int, group: int, dtype: mx.Dtype) -> int:
    """Return the size in bytes of a row's scales, or of its offsets."""
    return K // group * dtype.size + (K // SPAN * 2 if dtype == mx.uint8 else 0)


def groups_of(factors: mx.array, group: int) -> int:
    """Return the number of groups in a row."""
    width = factors.shape[-1]
    each = SPAN // group
    return width * each // (each + 2) if factors.dtype == mx.uint8 else width


def widened(factors: mx.array, group: int) -> mx.array:
    """Convert 8-bit scales or offsets to float32. Other types are returned unchanged.

    | a byte for each group: its number plus 128 | a float16 factor for each SPAN weights |
    """
    if factors.dtype != mx.uint8:
        return factors
    numbers, sizes = (part.astype(mx.float32) for part in parts_of(factors, group))
    return (numbers - 128) * mx.repeat(sizes, SPAN // group, axis=-1)


def dequantized(
    weight: mx.array, scales: mx.array, offsets: mx.array, group: int, bits: int
) -> mx.array:
    """Return unpacked weights. `mx.dequantize` does not support groups of 16, which only GGUF has."""
    if group in MLX_GROUPS:
        return mx.dequantize(weight, scales, offsets, group, bits)
    least = MLX_GROUPS[0]
    ones = mx.ones((*scales.shape[:-1], scales.shape[-1] * group // least))
    numbers = mx.dequantize(weight, ones, mx.zeros_like(ones), least, bits)
    numbers = mx.unflatten(numbers, -1, (-1, group))
    return (numbers * scales[..., None] + offsets[..., None]).flatten(-2)


def row_nbytes(K: int, form: int) -> int:
    """Return the size in bytes of a packed row of K weights."""
    return device.blas.library.rows_width(form, ctypes.c_long(K))


def address(array: mx.array) -> int:
    """Return the address of a contiguous array's data. The caller must keep the array alive."""
    numbers = array.view(mx.uint8)  # memoryview does not support bfloat16
    return ctypes.addressof(ctypes.c_char.from_buffer(memoryview(numbers)))


def as_bytes(words: mx.array, bits: int, rounds: bool) -> mx.array:  # (..., words) -> (..., K / 4)
    """Convert rows of packed weights to one byte per weight. `cpu_kernels.c` draws both layouts."""
    if bits == 8:
        return words
    places = mx.arange(0, 32, 4, dtype=mx.uint32)
    if not rounds:  # (..., blocks, 8, lanes)
        numbers = mx.unflatten(words, -1, (-1, 1, ORDER)) >> places[:, None] & 15
        return mx.contiguous(numbers.astype(mx.uint8).flatten(-3)).view(mx.uint32)
    # A unit: words with the lower four bits of eight numbers each, and one word with upper bits
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
    """Pack numbers in MLX's format: eight numbers of n bits take n bytes."""
    if bits < 8:
        eight = mx.unflatten(numbers, -1, (-1, 8)).astype(mx.uint64)
        eight = (eight << mx.arange(0, 8 * bits, bits, dtype=mx.uint64)).sum(axis=-1)
        numbers = mx.unflatten(eight.view(mx.uint8), -1, (-1, 8))[..., :bits].flatten(-2)
    return mx.contiguous(numbers).view(mx.uint32)
