"""The few operations of a Llama: the formula, and beside it the form that each device runs fastest.

The problem. The first page of `nanobatch.py` shows what a Llama computes. How fast that goes depends on details that
have nothing to do with a Llama: on a CPU, MLX takes three times as long for an `exp` as for a power. On a GPU, a step
of a few tokens takes the time to read the weights, and some microseconds for each kernel (a function that runs there),
however little it computes: so there the fewest kernels win.

What this file keeps. Each docstring begins with the formula, and the code computes it, in whatever form: a test holds
one against the other (`tests/test_ops.py`). No form depends on what else runs in the step, since a request's bits must
not. The products of matrices are our own on a CPU (`rows.c`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from parts import device
from parts.checkpoint import Rope
from parts.device import mx

if TYPE_CHECKING:
    from kv import Window


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:  # (..., D) -> (..., D)
    """x / sqrt(mean(x^2) + eps) * weight     Where a family has no norm there is no weight, and x stays as it is."""
    return x if weight is None else mx.fast.rms_norm(x, weight, eps)


def silu(x: mx.array) -> mx.array:
    """x / (1 + e^-x): nearly 0 below 0, nearly x above.

    The tuned form writes e^-x as a power of the number 1/e: on a CPU, MLX takes 2.7 ns for a power and 7.7 for an
    `exp`. Half precision holds e to three digits only, so there the formula stays.
    """
    if x.dtype != mx.float32:
        return x * mx.sigmoid(x)
    return x / (mx.power(math.exp(-1), x) + 1)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:  # (..., hidden) each -> (..., hidden)
    """silu(gate) * up     On a GPU in one kernel, which MLX compiles from the formula."""
    return one_kernel(gate, up) if device.has_gpu() else silu(gate) * up


def one_kernel(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


if mx.default_device() == mx.gpu:  # for a CPU, MLX would call the machine's C++ compiler, if there is one
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


def softmax(x: mx.array) -> mx.array:  # (..., T) -> (..., T), which sum up to 1
    """e^x / sum(e^x). The largest x is subtracted from all first: that changes no result, and no power overflows.

    The tuned form takes five operations, with a power as in `silu`. For few numbers MLX's one operation would be a
    little faster. But it rounds differently, and how many numbers there are depends on how far attention reads.
    """
    if x.dtype != mx.float32:
        return mx.softmax(x, axis=-1)
    powers = mx.power(math.e, x - mx.max(x, axis=-1, keepdims=True))
    return powers / mx.sum(powers, axis=-1, keepdims=True)


DOWN, ACROSS = 8, 16  # a block of `argmax`


def argmax(x: mx.array) -> tuple[mx.array, mx.array]:  # (n, V) -> the largest of each row (n,), and its place (n,)
    """The first of the largest numbers.

    The tuned form looks for the first of the best blocks, and then within that block. On a CPU, MLX takes a third of
    the time for the largest number of each column than for those of rows, so a block is a small matrix.
    """
    n, V = x.shape
    if device.has_gpu() or V % (ACROSS * DOWN):
        place = mx.argmax(x, axis=-1)
        return mx.take_along_axis(x, place[:, None], axis=-1)[:, 0], place
    blocks = x.reshape(n, -1, DOWN, ACROSS)
    best = blocks.max(axis=2).max(axis=2)  # (n, blocks)
    block = mx.argmax(best, axis=-1)[:, None]
    within = mx.take_along_axis(blocks.flatten(2), block[:, :, None], axis=1)[:, 0]  # (n, DOWN * ACROSS)
    return best.max(axis=-1), block[:, 0] * (DOWN * ACROSS) + mx.argmax(within, axis=-1)


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:  # (B, heads, L, Dh) -> the same
    """Rotary positions: number i and number i + Dh/2 of a head are one point in a plane, turned by its position.

    The dot product of two turned vectors depends on the difference of their angles alone. So attention sees how far
    apart two tokens are, and never where they stand. (a, b) becomes (a cos - b sin, b cos + a sin); `sin` holds the
    minus.
    """
    a, b = mx.split(x, 2, axis=-1)
    return (x * cos + mx.concatenate([b, a], axis=-1) * sin).astype(x.dtype)


class Kind(NamedTuple):
    """How attention treats positions in some of the layers. Most models have one kind of layer."""

    rope: Rope | None  # None: it knows no positions
    span: int | None  # how many rows a token looks back on, its own included; None: all
    frequencies: mx.array | None  # (Dh/2,)
    periods: mx.array | None  # 1 / frequencies, for a GPU

    @staticmethod
    def of(rope: Rope | None, span: int | None, Dh: int, dtype: mx.Dtype) -> Kind:
        frequencies = rope and rope_frequencies(rope, Dh)
        has_kernel = rope and device.has_gpu() and rope.gain == 1
        return Kind(rope, span, frequencies, rope_periods(frequencies, dtype) if has_kernel else None)


def turning(kind: Kind, window: Window) -> Callable[[mx.array], mx.array]:  # (B, heads, L, Dh) -> the same
    """How a window's queries and keys are turned: `rotate`, by the angles of their positions.

    On a GPU it is one kernel of MLX's, which makes nothing shorter or longer, where that is right (`rope_periods`). It
    has one frequency a plane for all sequences: so not where they follow each sequence's length.
    """
    rope = kind.rope
    if rope is None:
        return unturned
    if not device.has_gpu() or kind.periods is None or rope.follows(max(window.lengths)):
        cos, sin = rope_angles(kind, window)
        return partial(rotate, cos=cos, sin=sin)
    scale = 1 / rope.factor if rope.type == "linear" else 1.0
    options = {"traditional": False, "base": None, "scale": scale, "freqs": kind.periods}
    return lambda x: mx.fast.rope(x, x.shape[-1], offset=window.first, **options)


def rope_periods(frequencies: mx.array, dtype: mx.Dtype) -> mx.array | None:  # (Dh/2,) -> (Dh/2,)
    """1 / frequencies, as `mx.fast.rope` wants them. None on a CPU, and where a trial finds that operation wrong.

    Some releases of MLX turned one token a sequence by the first sequence's position, whichever sequence it was of.
    """
    Dh, periods = 2 * frequencies.size, 1 / frequencies
    first = mx.array([7, 0, 40])
    for L in (1, 3):
        x = mx.random.normal((3, 2, L, Dh), dtype, key=mx.random.key(0))
        angles = (first[:, None] + mx.arange(L))[:, None, :, None] * frequencies
        wanted = rotate(x, *both_of_a_plane(mx.cos(angles), mx.sin(angles)))
        turned = mx.fast.rope(x, Dh, traditional=False, base=None, scale=1.0, offset=first, freqs=periods)
        if mx.max(mx.abs(turned - wanted)).item() > 0.1:  # bfloat16 is off by 0.03, the wrong place by more than 1
            return None
    return periods


def rope_angles(kind: Kind, window: Window) -> tuple[mx.array, mx.array]:  # (B, 1, L, Dh) each
    """cos and sin of each position times each plane's frequency, once for both numbers that are turned in the plane."""
    rope, frequencies = kind.rope, kind.frequencies  # (Dh/2,)
    Dh = 2 * frequencies.size
    if rope.follows(max(window.lengths)):
        frequencies = mx.stack([rope_frequencies(rope, Dh, n) for n in window.lengths])[:, None]  # (B, 1, Dh/2)
    positions = window.positions * (1 / rope.factor if rope.type == "linear" else 1.0)  # (B, L)
    angles = (positions[:, :, None] * frequencies)[:, None]  # (B, 1, L, Dh/2)
    size = shorter(Dh)
    if rope.gain != 1:  # of what turns
        size = mx.where(kind.frequencies > 0, size * rope.gain, size)
    return both_of_a_plane(mx.cos(angles) * size, mx.sin(angles) * size)


def shorter(Dh: int) -> float:
    """Attention wants the product of q and k, divided by sqrt(Dh). So what is turned is made shorter by Dh^1/4 as well.

    The kernel that a GPU has for attention divides by itself.
    """
    return 1.0 if device.has_gpu() else Dh**-0.25


def unturned(x: mx.array) -> mx.array:  # (B, heads, L, Dh) -> the same
    """What stands for `rotate` in a layer whose attention knows no positions."""
    return x if device.has_gpu() else x * shorter(x.shape[-1])


def both_of_a_plane(cos: mx.array, sin: mx.array) -> tuple[mx.array, mx.array]:  # (..., Dh/2) -> (..., Dh) each
    return mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)


def rope_frequencies(rope: Rope, Dh: int, length: int = 0) -> mx.array:  # (Dh/2,)
    """How far each of a head's Dh/2 planes turns from one position to the next.

    Plane i turns by theta ** (-2 i / Dh): the first by 1, so it tells neighbours apart, the last by nearly 1 / theta,
    so it takes tens of thousands of positions for one turn, and tells far from near. Where only a part of a head turns,
    that part is the Dh of this formula, and the planes behind it stand still.

    A model is stretched beyond the length it was trained for by turning its planes more slowly. `linear` slows all of
    them (in `rope_angles`, by dividing the positions). `llama3` and `yarn` slow the slow ones only, because the fast
    ones tell neighbours apart. `dynamic` raises theta with the length of the sequence: a prompt's own length for all of
    its tokens, then each new token's. So the same token at the same place turns differently in a longer prompt.
    `longrope` names a factor for each plane, found by search, and others for prompts beyond the trained length.
    """
    theta, R = rope.theta, rope.turned or Dh
    if rope.follows(length) and rope.type == "dynamic":
        theta *= (rope.factor * length / rope.original_length - (rope.factor - 1)) ** (R / (R - 2))
    if rope.type in ("default", "linear", "dynamic"):
        frequencies = mx.exp(mx.arange(0, -(R // 2), -1) * (math.log(theta) / (R // 2)))  # theta ** (-2 i / R)
    else:
        periods = theta ** (mx.arange(0, R, 2) / R)  # positions for one radian
        if rope.type == "longrope":
            frequencies = 1 / (periods * mx.array(rope.long if rope.follows(length) else rope.short))
        else:
            keep = kept_of_planes(rope, R, rope.original_length / (2 * mx.pi * periods))
            # A mixture of the frequency and the slowed one. It is written for its reciprocal, for each type as mlx-lm
            # computes it: far from the beginning, the last digit of a frequency is seen in the fourth of a logit.
            slow = rope.factor * periods
            mixed = slow * periods / (slow * keep + periods * (1 - keep))
            frequencies = 1 / (mixed if rope.type == "yarn" else periods / ((1 - keep) / rope.factor + keep))
    return frequencies if Dh == R else mx.concatenate([frequencies, mx.zeros((Dh - R) // 2)])


def kept_of_planes(rope: Rope, R: int, turns: mx.array) -> mx.array:  # (R/2,): full turns within the trained length
    """How much of each plane's frequency is kept: 0 where it is slowed by the whole factor, 1 where not at all.

    Fewer turns than low_freq_factor: nothing is kept. More than high_freq_factor: all. In between `llama3` goes by the
    number of turns. `yarn` goes by the number of the plane: from the last whole one before the one bound to the first
    behind the other.
    """
    low, high = rope.low_freq_factor, rope.high_freq_factor
    if rope.type == "llama3":
        return mx.clip((turns - low) / (high - low), 0, 1)
    first, last = (
        R * math.log(rope.original_length / (2 * math.pi * n)) / (2 * math.log(rope.theta)) for n in (high, low)
    )
    first, last = max(math.floor(first), 0), min(math.ceil(last), R - 1)
    return 1 - mx.clip((mx.arange(R // 2) - first) / max(last - first, 0.001), 0, 1)


class Dense(NamedTuple):
    """y = x W^T + b, with W as the checkpoint stores it."""

    weight: mx.array  # (out, in)
    bias: mx.array | None  # (out,)

    def __call__(self, x: mx.array) -> mx.array:  # (..., in) -> (..., out)
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias

    @staticmethod
    def of(parts: list[tuple[mx.array, mx.array | None]]) -> Dense:
        """From the checkpoint's weights and biases: one matrix that yields all their outputs side by side.

        So the input is read once, and one product runs instead of three.
        """
        if len(parts) == 1:
            return Dense(*parts[0])
        weight = mx.concatenate([weight for weight, _ in parts])
        if all(bias is None for _, bias in parts):
            return Dense(weight, None)
        biases = [mx.zeros(len(weight), weight.dtype) if bias is None else bias for weight, bias in parts]
        return Dense(weight, mx.concatenate(biases))

    def rows(self, ids: mx.array) -> mx.array:  # (...) -> (..., in)
        """As an embedding: row `id` of the (V, D) matrix, so that a tied head and its table are one array."""
        return self.weight[ids]


class Quantized(NamedTuple):
    """The same with W packed: `bits` bits a number, and a scale and an offset for every `group` of them."""

    weight: mx.array  # (out, in * bits / 32), uint32
    scales: mx.array  # (out, in / group)
    offsets: mx.array
    bias: mx.array | None
    bits: int
    group: int

    def __call__(self, x: mx.array) -> mx.array:  # (..., in) -> (..., out)
        y = mx.quantized_matmul(x, self.weight, self.scales, self.offsets, True, self.group, self.bits)
        return y if self.bias is None else y + self.bias

    @staticmethod
    def of(parts: list[Quantized]) -> Quantized:
        """Several of the same input, packed alike, as one: each row of W is packed by itself."""
        weight, scales, offsets = (mx.concatenate(arrays) for arrays in list(zip(*parts, strict=True))[:3])
        biases = [mx.zeros(len(p.scales), p.scales.dtype) if p.bias is None else p.bias for p in parts]
        bias = mx.concatenate(biases) if any(part.bias is not None for part in parts) else None
        return Quantized(weight, scales, offsets, bias, parts[0].bits, parts[0].group)

    def rows(self, ids: mx.array) -> mx.array:  # (...) -> (..., in)
        return mx.dequantize(self.weight[ids], self.scales[ids], self.offsets[ids], self.group, self.bits)


class Mlp(NamedTuple):
    """down(silu(gate(x)) * up(x))     In some families gelu(gate(x))."""

    gate_up: Dense | Quantized | SideBySide  # D -> 2 * hidden
    down: Dense | Quantized  # hidden -> D
    gelu: bool = False

    def __call__(self, x: mx.array) -> mx.array:  # (..., D) -> (..., D)
        gate, up = mx.split(self.gate_up(x), 2, axis=-1)  # (..., hidden) each
        return self.down(gelu(gate) * up if self.gelu else swiglu(gate, up))


class Stack(NamedTuple):
    """One matrix for each expert. Each token is multiplied with those of its experts, by itself."""

    weight: mx.array  # (experts, out, in), or packed as in `Quantized`
    scales: mx.array | None = None
    offsets: mx.array | None = None
    bits: int = 0
    group: int = 0

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:  # (..., in) -> (..., k, 1, out)
        if self.scales is None:
            return mx.gather_mm(x, self.weight.swapaxes(-1, -2), rhs_indices=chosen)
        packed, sizes = (self.weight, self.scales, self.offsets), {"group_size": self.group, "bits": self.bits}
        return mx.gather_qmm(x, *packed, rhs_indices=chosen, transpose=True, **sizes)


class Experts(NamedTuple):
    """The sum over a token's k best experts of share * down(silu(gate(x)) * up(x))     A router says which they are.

    The shares are the router's softmax over all experts; in some models those of the k best are made to add up to 1.
    Which experts a token takes depends on that token alone, and so do its bits.
    """

    router: Dense | Quantized  # D -> experts
    gate: Stack
    up: Stack
    down: Stack
    k: int
    whole_shares: bool

    def __call__(self, x: mx.array) -> mx.array:  # (..., D) -> (..., D)
        shares = softmax(self.router(x))  # (..., experts)
        chosen = mx.argpartition(shares, -self.k, axis=-1)[..., -self.k :]  # (..., k)
        shares = mx.take_along_axis(shares, chosen, axis=-1)
        if self.whole_shares:
            shares = shares / shares.sum(axis=-1, keepdims=True)
        x = x[..., None, None, :]  # (..., 1, 1, D): a product for each token and expert
        y = self.down(swiglu(self.gate(x, chosen), self.up(x, chosen)), chosen)  # (..., k, 1, D)
        return (y[..., 0, :] * shares[..., None]).sum(axis=-2)


class Capped(NamedTuple):
    """A head whose logits never exceed a cap."""

    head: Dense | Quantized
    cap: float

    def __call__(self, x: mx.array) -> mx.array:  # (..., D) -> (..., V)
        return capped(self.head(x), self.cap)


class SideBySide(NamedTuple):
    """Projections of one input that cannot be one, because they are packed each in a way of its own."""

    parts: tuple[Quantized | Dense, ...]

    def __call__(self, x: mx.array) -> mx.array:
        return mx.concatenate([part(x) for part in self.parts], axis=-1)
