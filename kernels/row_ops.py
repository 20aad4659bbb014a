"""Operations on rows that `cpu_kernels.c` computes in addition to matrix products: softmax, gates, norms, RoPE.

The problem. On a CPU, MLX computes a softmax or a norm as several operations, number by number, and
without vector instructions. In the prefill of a small model these take half as long as all matrix
products.

The solution. MLX passes an address to our product (`cpu_kernels.c`), and never reads the memory there, as
with a packed matrix (`packed.py`). So an operation claims to be a matrix, too: `x @ claim` is the softmax
of each row of x. A header at the address names the operation. The header is valid as long as a product
refers to the memory.

The invariant: only an `Operation` or a `Rotation` holds an array that claims more memory than it has, because
any other operation would read beyond its end.

Where next: `models/ops.py`, the formulas; `cpu_kernels.c`, how they are computed.
"""

from __future__ import annotations

import ctypes
from functools import cache

from kernels import device, library
from kernels.device import mx
from kernels.library import LINE
from kernels.packed import address

HALVES = (library.SWIGLU, library.GEGLU, library.SIGLU, library.TO_FLOAT16)


def handles(x: mx.array) -> bool:
    """Return True for float32 arrays on a CPU where our own product runs."""
    return x.dtype == mx.float32 and device.is_batch_invariant()


class Operation:
    """An operation on rows of float32 numbers that MLX treats as a matrix."""

    def __init__(self, form: int, setting: float = 0.0, weight: mx.array | None = None):
        """`form`: the operation's number in `cpu_kernels.c`.
        `setting`: the scale of a softmax, the eps of a norm, or the cap.
        `weight`: the weights of a norm."""
        own = mx.zeros(0) if weight is None else weight
        self._memory = mx.concatenate([mx.zeros(LINE // 4), own])
        self._halves = form in HALVES
        self._claims: dict[int, mx.array] = {}  # by the width of x
        write_header(self._memory, form, own.size, setting)

    def __call__(self, x: mx.array) -> mx.array:  # (..., K) -> (..., K); for HALVES (..., K / 2)
        K = x.shape[-1]
        if K not in self._claims:
            N = K // 2 if self._halves else K
            self._claims[K] = mx.as_strided(self._memory, (K, N), (1, K))
        return x @ self._claims[K]


usual = cache(Operation)  # for operations without a weight; a model has only a few settings


class Rotation:
    """`models.rope.rotate` for the tokens of a forward pass. Their angles are stored after the header."""

    def __init__(self, cos: mx.array, sin: mx.array):  # (N, 1, Dh) each
        N, _, Dh = cos.shape
        angles = mx.concatenate([cos, sin], axis=-1).flatten()
        memory = mx.concatenate([rotation_header(N, Dh), angles])
        self._claim = mx.as_strided(memory, (Dh, Dh), (1, Dh))

    def __call__(self, x: mx.array) -> mx.array:  # (N, heads, Dh) -> the same
        return (x @ self._claim).astype(x.dtype)


@cache
def rotation_header(N: int, Dh: int) -> mx.array:
    header = mx.array([0.0] * (LINE // 4))  # `mx.zeros` would wait for the step that runs
    write_header(header, library.TURN, N, Dh)
    return header


def narrowed(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """Convert x to this dtype, with NaN for numbers out of its range."""
    if handles(x) and dtype == mx.float16 and x.shape[-1] % 2 == 0:
        return usual(library.TO_FLOAT16)(x).view(dtype)
    x = x.astype(dtype)
    return x + x * 0  # inf x 0 is NaN


def write_header(memory: mx.array, form: int, width: int, setting: float) -> None:
    at = ctypes.c_void_p(address(memory))
    device.blas.library.rows_operation(at, form, width, ctypes.c_float(setting))
