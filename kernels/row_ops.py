"""Operations on rows that `cpu_kernels.c` computes in addition to matrix products: softmax, gates, norms.

The problem. On a CPU, MLX computes a softmax or a norm as several operations, number by number, and
without vector instructions. In the prefill of a small model these take half as long as all matrix
products.

The solution. MLX passes an address to our product (`cpu_kernels.c`), and never reads the memory there, as
with a packed matrix (`packed.py`). So an operation claims to be a matrix, too: `x @ claim` is the softmax
of each row of x. A header at the address names the operation. It is valid as long as a product holds the
memory.

The invariant: only an `Operation` holds an array that claims more memory than it has, because any other
operation would read beyond its end.

Where next: `models/ops.py`, the formulas; `cpu_kernels.c`, how they are computed.
"""

from __future__ import annotations

import ctypes
from functools import cache

from kernels import device, library
from kernels.device import mx
from kernels.library import LINE
from kernels.packed import address


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
        self._halves = form in (library.SWIGLU, library.GEGLU, library.SIGLU)
        at = ctypes.c_void_p(address(self._memory))
        device.blas.library.rows_operation(at, form, own.size, ctypes.c_float(setting))

    def __call__(self, x: mx.array) -> mx.array:  # (..., K) -> (..., K); for a gate (..., K / 2)
        K = x.shape[-1]
        N = K // 2 if self._halves else K
        return x @ mx.as_strided(self._memory, (K, N), (1, K))


usual = cache(Operation)  # for operations without a weight; a model has only few settings
