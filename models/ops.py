"""The operations of a Llama that are not matrix products.

The problem. `llama.py` shows what a Llama computes. Its speed depends on details that have nothing to
do with a Llama. On a CPU, MLX computes one number at a time, so `cpu_kernels.c` computes float32 rows
there (`kernels/row_ops.py`). On a GPU, a step of a few tokens takes the time to read the weights plus
some microseconds per kernel (a function that runs on the GPU), however little the kernel computes. So
fewer kernels are faster.

The solution. Each docstring begins with the formula. The body computes it with `cpu_kernels.c`, or else
with MLX's operations. A test compares both with the formula (`tests/models/test_ops.py`).

The invariant: no result depends on what else runs in the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kernels import row_ops
from kernels.device import mx
from kernels.library import CAP, GEGLU, NORM, SIGLU, SOFTMAX, SWIGLU


def softmax(x: mx.array, scale: float = 1.0) -> mx.array:  # (..., T) -> (..., T), which sum to 1
    """e^(scale x) / sum(e^(scale x))"""
    if row_ops.handles(x):
        return row_ops.usual(SOFTMAX, scale)(x)
    return mx.softmax(x * scale, axis=-1)


def swiglu(gate_up: mx.array) -> mx.array:  # (..., 2 * hidden), side by side -> (..., hidden)
    """silu(gate) * up, with silu(x) = x / (1 + e^-x): close to 0 for x < 0, to x for x > 0."""
    if row_ops.handles(gate_up):
        return row_ops.usual(SWIGLU)(gate_up)
    gate, up = mx.split(gate_up, 2, axis=-1)
    return one_kernel(gate, up)


def clamped_swiglu(gate_up: mx.array, limit: float) -> mx.array:
    """g / (1 + e^-(1.702 g)) * (u + 1), with g = min(gate, limit), and u = up between -limit and limit"""
    gate, up = mx.split(gate_up, 2, axis=-1)
    gate = 1.702 * mx.minimum(gate, limit)
    up = (mx.clip(up, -limit, limit) + 1) * (1 / 1.702)
    return swiglu(mx.concatenate([gate, up], axis=-1))


def one_kernel(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


# Only on a GPU: on a CPU, MLX would call the machine's C++ compiler
if mx.default_device() == mx.gpu:
    one_kernel = mx.compile(one_kernel, shapeless=True)


def geglu(gate_up: mx.array) -> mx.array:  # (..., 2 * hidden), side by side -> (..., hidden)
    """gelu(gate) * up, with gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))

    That is x / (1 + e^-v), where v is twice the argument of tanh.
    """
    if row_ops.handles(gate_up):
        return row_ops.usual(GEGLU)(gate_up)
    x, up = mx.split(gate_up, 2, axis=-1)
    v = math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x)
    return x * mx.sigmoid(v) * up


def siglu(gate_up: mx.array) -> mx.array:  # (..., 2 * hidden), side by side -> (..., hidden)
    """sigmoid(gate) * up, with sigmoid(x) = 1 / (1 + e^-x)"""
    if row_ops.handles(gate_up):
        return row_ops.usual(SIGLU)(gate_up)
    gate, up = mx.split(gate_up, 2, axis=-1)
    return mx.sigmoid(gate) * up


def rms_norm(weight: mx.array, eps: float) -> Callable[[mx.array], mx.array]:
    """x / sqrt(mean(x^2) + eps) * weight, as a function of x: (..., D) -> the same"""
    if row_ops.handles(weight):
        return row_ops.Operation(NORM, eps, weight)
    return lambda x: mx.fast.rms_norm(x, weight, eps)


def capped(x: mx.array, cap: float) -> mx.array:
    """cap tanh(x / cap): close to x near 0, and never beyond the cap."""
    if row_ops.handles(x):
        return row_ops.usual(CAP, cap)(x)
    return cap * mx.tanh(x / cap)
