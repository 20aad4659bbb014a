"""Operations on rows that our own product computes beside matrices: softmax, gates and norms.

The problem. On a CPU, MLX computes a softmax or a norm as a chain of nodes, number by number, and
without the processor's vectors. In a prompt of a small model that takes half as long as all
products of matrices.

The way out. MLX hands our product (`matmul.c`) an address, and never looks at what lies there. A
packed matrix uses that already (`packed.py`). So an operation claims to be a matrix, too: `x @ claim`
is the softmax of each row of x. What lies at the address says which operation it is, and the memory
says so for as long as a product holds it.

What this file keeps. An array that claims more than there is lives in `Operation` alone: anything
else that read it would read beyond its end.

Where next: `models/ops.py`, the formulas; `matmul.c`, how they are computed.
"""

from __future__ import annotations

import ctypes
from functools import cache

from kernels import matmul_library
from kernels import mlx as device
from kernels.matmul_library import LINE
from kernels.mlx import mx
from kernels.packed import address


def take(x: mx.array) -> bool:
    """Are these float32 numbers, on a CPU on which our own product runs?"""
    return x.dtype == mx.float32 and device.is_batch_invariant()


class Operation:
    """Takes rows of float32 numbers. It looks like a matrix to MLX, and to nothing else."""

    def __init__(self, form: int, setting: float = 0.0, weight: mx.array | None = None):
        """`form`: which operation, as `matmul.c` calls it.
        `setting`: the scale of a softmax, the eps of a norm.
        `weight`: a norm's."""
        own = mx.zeros(0) if weight is None else weight
        self._memory = mx.concatenate([mx.zeros(LINE // 4), own])
        self._halves = form in (matmul_library.SWIGLU, matmul_library.GEGLU)
        at = ctypes.c_void_p(address(self._memory))
        device.blas.library.rows_operation(at, form, own.size, ctypes.c_float(setting))

    def __call__(self, x: mx.array) -> mx.array:  # (..., K) -> (..., K); of a gate (..., K / 2)
        K = x.shape[-1]
        N = K // 2 if self._halves else K
        return x @ mx.as_strided(self._memory, (K, N), (1, K))


usual = cache(Operation)  # without a weight: a model has one scale, or very few
