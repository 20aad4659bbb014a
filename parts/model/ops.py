"""The few operations of a Llama: the formula, and beside it the form that each device runs fastest.

The problem. The page of `llama.py` shows what a Llama computes. How fast that goes depends on
details that have nothing to do with a Llama: on a CPU, MLX takes three times as long for an `exp`
as for a power. On a GPU, a step of a few tokens takes the time to read the weights, and some
microseconds for each kernel (a function that runs there), however little it computes: so there the
fewest kernels win.

What this file keeps. Each docstring begins with the formula, and the code computes it, in whatever
form: a test holds one against the other (`tests/model/test_ops.py`). No form depends on what else
runs in the step, since a request's bits must not. The products of matrices are our own on a CPU
(`rows.c`).
"""

from __future__ import annotations

import math

from parts.device import mlx as device
from parts.device.mlx import mx


def silu(x: mx.array) -> mx.array:
    """x / (1 + e^-x): nearly 0 below 0, nearly x above.

    The tuned form writes e^-x as a power of the number 1/e: on a CPU, MLX takes 2.7 ns for a power
    and 7.7 for an `exp`. Half precision holds e to three digits only, so there the formula stays.
    """
    if x.dtype != mx.float32:
        return x * mx.sigmoid(x)
    return x / (mx.power(math.exp(-1), x) + 1)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:  # (..., hidden) each -> (..., hidden)
    """silu(gate) * up     On a GPU in one kernel, which MLX compiles from the formula."""
    return one_kernel(gate, up) if device.has_gpu() else silu(gate) * up


def one_kernel(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


# For a CPU, MLX would call the machine's C++ compiler, if there is one
if mx.default_device() == mx.gpu:
    one_kernel = mx.compile(one_kernel, shapeless=True)


def gelu(x: mx.array) -> mx.array:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))

    That is x / (1 + e^-u) with u twice what tanh is taken of: `silu`'s form, with its power.
    """
    u = math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x)
    if x.dtype != mx.float32:
        return x * mx.sigmoid(u)
    return x / (mx.power(math.exp(-1), u) + 1)


def capped(x: mx.array, cap: float) -> mx.array:
    """cap tanh(x / cap): nearly x near 0, and never beyond the cap."""
    return cap * mx.tanh(x / cap)


def softmax(x: mx.array, scale: float = 1.0) -> mx.array:  # (..., T) -> (..., T), which sum up to 1
    """e^(scale x) / sum(e^(scale x)). The largest x is subtracted from all first, so that no power
    overflows.

    The tuned form takes five operations, with a power as in `silu`: a power of e^scale, so that the
    scale costs nothing. For few numbers MLX's one operation would be a little faster. But it rounds
    differently, and how many numbers there are depends on how far attention reads.
    """
    if x.dtype != mx.float32:
        return mx.softmax(x * scale, axis=-1)
    powers = mx.power(math.exp(scale), x - mx.max(x, axis=-1, keepdims=True))
    return powers / mx.sum(powers, axis=-1, keepdims=True)
