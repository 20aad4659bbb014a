"""Replace MLX's BLAS with the library of `cpu_kernels.c`, after checking its results.

The problem. A BLAS is the library that multiplies matrices. MLX's CPU wheel for Linux brings the
*reference* BLAS, which is 10 to 50 times slower than it could be. A tuned BLAS is fast, but its order of
summation depends on the number of rows, so a request's last bits would depend on the other requests in
its batch. On a Mac (Accelerate, Metal) and on CUDA none of this applies.

The solution. The dynamic linker binds a symbol such as `cblas_sgemm` to the first library that defines it.
So a library that is loaded *before* `mlx.core`, with global symbols, replaces the slow one. Ours
sums in the same order for any number of rows. It is compiled at installation, once for each instruction set
(`build.py`), and all of these libraries compute the same bits. A compiler bug or a wrong option could
produce a library that loads but computes wrong bits. So some products and operations are computed at
startup and their hash is compared, which takes a few milliseconds. `preload` must run first: all our
files import `mx` from `device.py`, which calls it.

The invariant: a library with a different hash is never used. MLX's own product is used instead, and the first
line of a program says so.

    NANOBATCH_BLAS=rows               our own product, or an error that says why it cannot be loaded
    NANOBATCH_BLAS=rows:avx2          the same with this instruction set (avx512, avx2, neon, plain)
    NANOBATCH_BLAS=off                keep MLX's own product, without a message
    NANOBATCH_BLAS=libopenblas.so.0   another library, by path or name: shows results that are not batch-invariant
    NANOBATCH_THREADS=1               the number of threads of our product
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import math
import os
import platform
import random
import struct
import sys
from array import array
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from base.installation import IS_INSTALLED, install
from base.machine import cores, cpuinfo
from base.validation import read_whole
from kernels.build import FORMS, SOURCE, library, source_hash

MOST_THREADS = 16  # by default; memory bandwidth saturates earlier, and more threads are untested
# The hash of the check's results, the same for every library on any processor. It changes if the order
# of a sum changes; the error message then names the new hash.
BITS = "be6d0838d8d2a088bd247e48aa765fcb"
PLAIN_BITS = "7cea1b3faa5aacfd08a224fe3cd58909"  # for the form without fused multiply-adds

# Forms of numbers and operations, in the order of the `enum` in `cpu_kernels.c`
FLOAT32, FLOAT16, BFLOAT16, FOUR_BITS, EIGHT_BITS = range(5)
# Weights for 8-bit activations
ROUNDED_4, ROUNDED_5, ROUNDED_6, ROUNDED_8, ROUNDED_MXFP4 = range(5, 10)
SOFTMAX, SWIGLU, GEGLU, NORM, CAP, ATTENTION, DELTA, SIGLU, MEMORY, EXPERTS = range(10, 20)
TURN, TO_FLOAT16 = range(20, 22)
# `source` of `rows_lay`: codes of MXFP4, and GGUF types; a smaller number is the bits of a weight
CODES, OF_GGUF = 99, 100
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4, Q4_K, Q5_K, Q6_K = range(OF_GGUF, OF_GGUF + 9)
CUT_OFF, INFINITE = -1, -2  # results of `rows_lay_file`
LINE = 64  # bytes of the header of a packed matrix; a cache line
ORDER = 16  # the number of partial sums of a product
WIDE = 144  # columns of a turned matrix: more vectors than a tile has in any form, and a remainder


def say(line: str) -> None:
    """Print a line for the user. The screen replaces this function."""
    print(f"nanobatch: {line}", file=sys.stderr, flush=True)


class Blas(NamedTuple):
    """The library that computes MLX's matrix products."""

    name: str  # "rows" for our own, "mlx" for MLX's own, or the name of a file
    kernels: str = ""  # instruction set and threads of our own library
    why_not: str = ""  # why our own is not used, and the remedy; empty if it is used or not needed
    library: ctypes.CDLL | None = None  # our own library, if loaded
    bits: str = ""  # the hash of our library's results in the check

    def __str__(self) -> str:
        if self.why_not:
            return f"{self.name}, so bits may differ with the batch: {self.why_not}"
        return f"{self.name} ({self.kernels})" if self.kernels else self.name

    @property
    def products(self) -> int:
        """The number of products that our own library has computed so far."""
        return ctypes.c_long.in_dll(self.library, "rows_products").value


def preload() -> Blas:
    """Load our own library, or the one named by the user. Must run before `mlx.core` is imported."""
    choice = os.environ.get("NANOBATCH_BLAS", "")
    name, _, form = choice.partition(":")
    if choice == "off" or not is_needed():
        return Blas("mlx")
    if "mlx.core" in sys.modules:
        return Blas("mlx", why_not="MLX was imported first; import nanobatch before mlx")
    if name not in ("", "rows"):
        return load_another(choice)
    try:
        return load(form)
    except Unbuilt as reason:
        if choice:
            raise ImportError(f"NANOBATCH_BLAS={choice}: {reason}.") from None
        return Blas("mlx", why_not=str(reason))


def is_needed() -> bool:
    """Return True for MLX's CPU wheel on Linux: only its product is slow. Warn if two wheels conflict."""
    found = backends()
    if len(found) > 1:
        both = " and ".join(found)
        remedy = f"pip uninstall {' '.join(found)}, then {install('cpu', 'mlx[cpu]')}"
        say(f"{both} install the same file, and the newest is used; to keep one: {remedy}")
    return sys.platform == "linux" and not any("cuda" in name for name in found)


def backends() -> list[str]:
    """Return MLX's installed backends. Each of them installs the same file, `mlx/lib/libmlx.so`."""
    names = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")
    return [name for name in names if [*importlib.metadata.distributions(name=name)]]


def load_another(file: str) -> Blas:
    try:
        ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL).cblas_sgemm  # noqa: B018 (raises if missing)
    except (OSError, ValueError, AttributeError):  # ValueError: a path with a null byte
        raise ImportError(
            f"NANOBATCH_BLAS={file} is not a BLAS that can be loaded; name a shared library, rows or off."
        ) from None
    return Blas(os.path.basename(file), why_not=f"NANOBATCH_BLAS={file}")


class Unbuilt(Exception):
    """Raised if our own library cannot be used here, with the reason and the remedy."""


def load(name: str = "") -> Blas:
    """Load the library for the form `name`, by default the best one for this processor. Make its symbols global.
    Raise Unbuilt if it cannot be used."""
    forms = forms_here()
    if not forms:
        raise Unbuilt(f"cpu_kernels.c does not support processors of the kind {platform.machine()}")
    if name and name not in forms:
        raise Unbuilt(
            f"this processor has no form {name!r} of cpu_kernels.c; choose among {', '.join(forms)}"
        )
    compiled = [form for form in forms if library(form).exists() and name in ("", form)]
    if not compiled and IS_INSTALLED:
        raise Unbuilt(f"this wheel is for Macs; {remedy()}")
    if not compiled:
        raise Unbuilt(f"{SOURCE.name} is not compiled; {remedy()}")
    form = compiled[0]
    count = threads()
    try:
        loaded = ctypes.CDLL(str(library(form)))
    except OSError as error:
        raise Unbuilt(f"the matrix product cannot be loaded ({error})") from None
    if why := why_unfit(loaded, form):
        raise Unbuilt(f"{library(form).name} {why}")
    ctypes.CDLL(str(library(form)), mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
    started = loaded.rows_start(count)
    said = f"{form}, {started} thread{'s' * (started > 1)}"
    return Blas("rows", said, library=loaded, bits=bits_of(form))


def remedy() -> str:
    if IS_INSTALLED:
        return "install nanobatch's wheel for Linux, or its sdist"
    return f"run pip install -e {SOURCE.parents[1]}"


def forms_here() -> list[str]:
    """Return the forms that this processor can run, best first."""
    features = processor()
    return [
        name
        for name, form in FORMS.items()
        if form.machine == platform.machine() and set(form.features.split()) <= features
    ]


@cache
def processor() -> frozenset[str]:
    """Return the feature flags of the first processor."""
    info = cpuinfo()
    return frozenset(info.get("flags", info.get("Features", "")).split())


# --- threads ------------------------------------------------------------------------------------


def threads(most: int = MOST_THREADS) -> int:
    """Return the number of threads for products: NANOBATCH_THREADS, or the number of cores available to
    this process (`base/machine.py`), up to `most`."""
    asked = os.environ.get("NANOBATCH_THREADS", "")
    if not asked:
        return min(cores(), most)
    try:
        return read_whole("NANOBATCH_THREADS", asked, 1, 1024)
    except ValueError as error:
        raise ImportError(str(error)) from None


# --- the check ----------------------------------------------------------------------------------

# M, N, K: every height of a tile, incomplete vectors, and a long sum
SHAPES = [(1, 5, 3), (1, 9, 35), (2, 4, 16), (5, 9, 33), (6, 8, 40), (7, 37, 17), (13, 3, 20)]
SHAPES += [(9, 130, 40), (3, 6, 1100)]
# Packed matrices: the form of the weights, their bits, the form of the scales
PACKED = [(FLOAT16, 16, FLOAT32), (BFLOAT16, 16, FLOAT32)]
for _scales in (FLOAT32, FLOAT16, BFLOAT16):
    PACKED += [(FOUR_BITS, 4, _scales), (EIGHT_BITS, 8, _scales)]
# Matrices for 8-bit activations: form, bits, N, K, group, and the center (each offset is its scale times
# the center); 0 for matrices with separate offsets
PANELS = [(ROUNDED_4, 4, 21, 2176, 64, 0), (ROUNDED_4, 4, 5, 96, 32, -8)]
PANELS += [(ROUNDED_5, 5, 18, 128, 64, 0), (ROUNDED_5, 5, 5, 96, 32, -16)]
PANELS += [(ROUNDED_6, 6, 5, 96, 32, 0), (ROUNDED_6, 6, 18, 48, 16, -32)]
PANELS += [(ROUNDED_8, 8, 18, 1152, 128, 0), (ROUNDED_8, 8, 5, 96, 32, -128)]
PANELS += [(ROUNDED_MXFP4, 5, 18, 128, 32, -12)]


def why_unfit(loaded: ctypes.CDLL, form: str) -> str:
    """Return why this library cannot be used; empty if it can."""
    if compiled_from(loaded) != source_hash(form):
        return f"was compiled from a different {SOURCE.name}; {remedy()}"
    expected = bits_of(form)
    found = computed(loaded)
    if found == expected:
        return ""
    return f"computes wrong products: its hash is {found}, expected {expected}"


def bits_of(form: str) -> str:
    return PLAIN_BITS if form == "plain" else BITS


def compiled_from(loaded: ctypes.CDLL) -> str:
    try:
        return (ctypes.c_char * 65).in_dll(loaded, "rows_source").value.decode()
    except ValueError:  # not our library
        return ""


def computed(library: ctypes.CDLL) -> str:
    """Return the hash of the library's results for a fixed sequence of random numbers.

    Covers both layouts, weights packed in each form, and each operation, with one row, few rows and many.
    Everything runs in this thread, because helper threads start later. A turned matrix gets copies of its
    columns, which must all have the same bits: the original columns would fill no AVX-512 vector, and so
    run none of its tiles.
    """
    draw = random.Random(0)
    seen = hashlib.sha256()

    def multiply(
        x: array,
        w: array,
        M: int,
        N: int,
        K: int,
        turned: bool = False,
        begin: int = 0,
        copies: int = 1,
    ) -> None:
        """Multiply x (M, K) by W: (N, K), or (K, N) if turned, or the memory of a packed matrix, whose
        header is at byte `begin`. `copies`: how often each row of a turned W is repeated."""
        if copies > 1:
            rows = (w[k * N : (k + 1) * N] * copies for k in range(K))
            w = array("f", b"".join(row.tobytes() for row in rows))
        wide = N * copies
        y = array("f", [math.nan]) * (M * wide)  # NaN, so that a missed write is noticed
        x_at, w_at, y_at = (ctypes.c_void_p(each.buffer_info()[0]) for each in (x, w, y))
        w_at.value += begin
        layout = (111, wide) if turned else (112, K)
        sizes = (M, wide, K, ctypes.c_float(1), x_at, K, w_at, layout[1])
        library.cblas_sgemm(101, 111, layout[0], *sizes, ctypes.c_float(0), y_at, wide)
        found = array("f")
        for m in range(0, M * wide, wide):
            found += y[m : m + N]
            if y[m : m + wide].tobytes() != y[m : m + N].tobytes() * copies:
                seen.update(b"one of the copies differs")
        seen.update(str(found.tolist()).encode())  # as text, where NaN has no sign

    for M, N, K in SHAPES:
        w = drawn(draw, N * K)
        multiply(drawn(draw, M * K), w, M, N, K)
        multiply(drawn(draw, M * K), w, M, N, K, turned=True, copies=-(-WIDE // N))
    for form, bits, form_of_scales in PACKED:
        N, K, group = (6, 75, 75) if bits == 16 else (6, 96, 32)
        w = packed(library, draw, form, bits, form_of_scales, N, K, group)
        for M in (1, 4, 5, 25):
            multiply(drawn(draw, M * K), w, M, N, K)
    # More groups than are unpacked at once
    for form, bits, center in ((FOUR_BITS, 4, 0), (EIGHT_BITS, 8, -128)):
        N, K = 5, 2112
        w = packed(library, draw, form, bits, FLOAT16, N, K, 32, center)
        for M in (1, 21):
            multiply(drawn(draw, M * K), w, M, N, K)
    for form, bits, N, K, group, center in PANELS:
        for scales in (FLOAT32, FLOAT16, BFLOAT16):
            w = packed(library, draw, form, bits, scales, N, K, group, center)
            for M in range(1, 10):
                x = drawn(draw, M * K, 3)
                x[-1], x[-K] = (math.nan, 1e30) if M == 9 else (0, 0)
                multiply(x, w, M, N, K)
    for form in (FOUR_BITS, ROUNDED_4):
        N, K, k, M = 21, 96, 2, 7
        experts = [packed(library, draw, form, 4, FLOAT16, N, K, 32) for _ in range(3)]
        stack = array("B", bytes(LINE)) + experts[0] + experts[1] + experts[2]
        at = ctypes.c_void_p(stack.buffer_info()[0])
        library.rows_stack(at, len(experts), N, K, len(experts[0]) // LINE, 0)
        x = array("f")
        for m in range(M):
            x += drawn(draw, K) + array("f", [m % 3, 2 * m % 3])
        multiply(x, stack, M, k * N, K + k)
    for operation in (SOFTMAX, SWIGLU, GEGLU, SIGLU, NORM, CAP, TO_FLOAT16):
        for M, N in ((1, 1), (3, 5), (4, 75)):
            K = N if operation in (SOFTMAX, NORM, CAP) else 2 * N
            w = array("f", bytes(LINE)) + drawn(draw, N)  # the weights, for a norm
            at = ctypes.c_void_p(w.buffer_info()[0])
            library.rows_operation(at, operation, N, ctypes.c_float(0.3))
            x = drawn(draw, M * K, 150)  # some powers overflow or underflow a float32
            if M > 1:
                x[0] = math.nan
                x[-1] = -math.inf  # like a masked score
            # MLX passes a matrix of one number as turned
            multiply(x, w, M, N, K, turned=K == 1)
    for Dh in (6, 64, 80):
        M, heads = 3, 5
        w = array("f", bytes(LINE)) + drawn(draw, M * 2 * Dh)  # a cos and a sin for each number
        at = ctypes.c_void_p(w.buffer_info()[0])
        library.rows_operation(at, TURN, M, ctypes.c_float(Dh))
        multiply(drawn(draw, M * heads * Dh), w, M * heads, Dh, Dh)
    for form, Dh, group, has_sinks in SLABS:
        x, slab = attention_of(library, draw, form, Dh, group, has_sinks)
        K, N = len(x) // len(TOKENS), group * HEADS * Dh
        multiply(x, slab, len(TOKENS), N, K, begin=len(slab) - LINE)
    for heads in ((1, 2, 20, 48), (2, 2, 16, 80)):
        states, weights = states_of(library, draw, heads)
        inputs = 2 * heads[0] * heads[2] + heads[1] * heads[3]
        for windows in STATES:
            x = array("f")
            for source, base, start, stop, target, keep in windows:
                for row in range(start, stop):
                    x += drawn(draw, inputs + 2 * heads[1], 2)
                    x += array("f", [source, base, row, target, keep])
            M = sum(stop - start for _, _, start, stop, _, _ in windows)
            K = len(x) // M
            multiply(x, states, M, heads[1] * heads[3], K, begin=len(states) * 4 - LINE)
        seen.update(states[: -LINE // 4].tobytes())
        assert weights  # still alive: the states point to them
    return seen.hexdigest()[:32]


# Windows of the gated delta rule: the place that a sequence continues from, its base, its tokens from start to stop,
# the place for its new state, and the number of tokens in that state. Two prompts; a chunk that leaves a checkpoint;
# drafts, some of which are rejected; and a fork
STATES = [
    [(-1, 0, 0, 7, 0, 6), (-1, 0, 0, 2, 1, 1)],
    [(0, 6, 7, 12, 2, 11), (1, 1, 2, 5, 1, 2)],
    [(2, 11, 12, 13, 0, 12), (1, 2, 4, 7, 1, 4)],
    [(0, 12, 13, 16, 0, 13), (2, 11, 11, 14, 1, 13)],
    [(0, 13, 14, 15, 0, 14), (1, 13, 14, 15, 1, 14)],
]
DRAFTS = 2

# Tokens for attention: slot, first row, last row, cap. A chunk, and single tokens
TOKENS = [(1, 0, row, 0) for row in range(90, 97)]
TOKENS += [(0, 0, 0, 0), (0, 70, 99, 0), (1, 2, 65, 30)]
HEADS = 2  # key heads
# Slabs: the form of the numbers, Dh, query heads per key head, and whether each has a sink
SLABS = [(FLOAT32, 20, 1, False), (FLOAT16, 33, 3, False), (FLOAT16, 64, 7, False)]
SLABS += [(FLOAT32, 20, 3, True), (FLOAT16, 64, 8, True)]


def attention_of(
    library: ctypes.CDLL, draw: random.Random, form: int, Dh: int, group: int, has_sinks: bool
) -> tuple[array, array]:
    """Return random queries for attention, and the memory of a slab that ends with its label."""
    slots, rows = 2, 105
    slab = array("B", written(drawn(draw, slots * 2 * HEADS * rows * Dh), form))
    at = ctypes.c_void_p(slab.buffer_info()[0])
    library.rows_slab(at, form, slots, HEADS, rows, Dh, ctypes.c_float(Dh**-0.5))
    sinks = drawn(draw, group * HEADS, 5) if has_sinks else array("f")
    x = array("f")
    for token in TOKENS:
        x += drawn(draw, group * HEADS * Dh, 3) + array("f", token) + sinks
    return x, slab


def states_of(
    library: ctypes.CDLL, draw: random.Random, heads: tuple[int, int, int, int]
) -> tuple[array, array]:
    """Return the states of a layer, with two slots and a checkpoint, and its weights. `heads`: Hk, Hv, Dk, Dv."""
    Hk, Hv, Dk, Dv = heads
    weights = drawn(draw, 4 * (2 * Hk * Dk + Hv * Dv) + 2 * Hv)
    sizes = (ctypes.c_int * 7)(2, 3, 1 + DRAFTS, *heads)
    library.rows_states.restype = ctypes.c_long
    at_weights = ctypes.c_void_p(weights.buffer_info()[0])
    count = library.rows_states(None, sizes, at_weights)
    states = array("f", [1e30]) * (
        count + LINE // 4
    )  # a kernel that reads it unwritten changes the digest
    library.rows_states(ctypes.c_void_p(states.buffer_info()[0]), sizes, at_weights)
    return states, weights


def drawn(draw: random.Random, count: int, most: float = 1) -> array:
    return array("f", [most * (2 * draw.random() - 1) for _ in range(count)])


def packed(
    library: ctypes.CDLL,
    draw: random.Random,
    form: int,
    bits: int,
    form_of_scales: int,
    N: int,
    K: int,
    group: int,
    center: float = 0,
) -> array:
    """Return the memory of a packed matrix of random numbers."""
    rows = -(-N // ORDER) * ORDER if form >= ROUNDED_4 else N  # whole panels
    weights = drawn(draw, N * K) if bits == 16 else draw.randbytes(N * K * bits // 8)
    weights = written(weights, form) if bits == 16 else weights
    factors = [written(drawn(draw, N * K // group), form_of_scales) for _ in range(2)]
    sizes = [rows * library.rows_width(form, ctypes.c_long(K))]
    sizes += [len(factors[0]) // N * rows] * (1 if center else 2)
    # The first cache line of weights, scales and offsets, and the end
    places = [*accumulate((-(-size // LINE) for size in sizes), initial=1)]
    matrix = array("B", bytes((places[-1] + 1) * LINE))
    at = ctypes.c_void_p(matrix.buffer_info()[0])
    kind = (form, form_of_scales, N, K, group, places[1], places[-2])
    library.rows_pack(at, *kind, ctypes.c_float(center))
    rows_laid = ctypes.c_long(0), ctypes.c_long(N)
    offsets = None if center or bits == 16 else factors[1]
    library.rows_lay(at, *rows_laid, bits, weights, factors[0], offsets)
    return matrix


def written(numbers: array, form: int) -> bytes:
    """Return the bytes of numbers in this form."""
    if form == FLOAT16:
        return struct.pack(f"={len(numbers)}e", *numbers)
    if form == BFLOAT16:  # the upper half of each float32
        return array("H", numbers.tobytes())[1::2].tobytes()
    return numbers.tobytes()
