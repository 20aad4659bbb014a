"""Rotary position embeddings (RoPE): rotate queries and keys by angles that depend on their position.

Families differ in how they extend a model beyond its trained length, and devices differ in which
implementation is fastest. A `Rope` holds the RoPE settings of a config. An `AttentionType` describes how
some of the layers treat positions. Tests compare each implementation with the formula or with mlx-lm
(`tests/models/test_ops.py`). Next: `layers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kernels import device, row_ops
from kernels.device import mx


@dataclass(frozen=True)
class Rope:
    """The parameters from which `rope_frequencies` computes angles."""

    type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    # The factor by which each plane is slowed, for sequences up to the original length
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()  # the same for longer sequences
    gain: float = 1.0  # rotated vectors are multiplied by this
    turned: int | None = None  # number of leading dimensions that rotate; None means all
    interleaved: bool = False  # planes are adjacent dimensions, instead of i and i + Dh/2
    rounds: bool = True  # yarn: the bounds are rounded to whole planes
    part: float = 1.0  # fraction of planes that rotate, the fastest first

    def is_too_short(self, length: int) -> bool:
        """True beyond the original length, for types that then use different frequencies."""
        return self.type in ("dynamic", "longrope") and length > self.original_length

    def order(self, Dh: int) -> list[int]:
        """Return the order of a head's dimensions in which i and i + Dh/2 form a plane.

        Planes that do not rotate come last. The rows of q and k are loaded in this order, which does
        not change their dot products.
        """
        turned = Dh if self.turned is None else self.turned
        if self.interleaved:
            firsts = range(0, turned, 2)
            seconds = range(1, turned, 2)
        else:
            firsts = range(turned // 2)
            seconds = range(turned // 2, turned)
        still = range(turned, Dh)
        half = len(still) // 2
        return [*firsts, *still[:half], *seconds, *still[half:]]


def rotate(
    x: mx.array,  # (N, heads, Dh)
    cos: mx.array,  # (N, 1, Dh)
    sin: mx.array,  # (N, 1, Dh)
) -> mx.array:  # (N, heads, Dh)
    """Treat dimensions i and i + Dh/2 of a head as a point in a plane, and rotate it by the angle of
    its position.

    The dot product of two rotated vectors depends only on the difference of their angles. So attention
    sees the distance between two tokens, not their positions. (a, b) becomes (a cos - b sin, b cos +
    a sin); `sin` already has the minus sign.
    """
    a, b = mx.split(x, 2, axis=-1)
    return (x * cos + mx.concatenate([b, a], axis=-1) * sin).astype(x.dtype)


def rotate_growing(
    x: mx.array,  # (N, H + Hkv, Dh)
    cos: mx.array,  # (N, 1, Dh)
    sin: mx.array,  # (N, 1, Dh)
    growth: Growth,
    positions: mx.array,  # (N,)
) -> mx.array:  # (N, H + Hkv, Dh)
    """Rotate queries and keys, and multiply each query by the factor for its position."""
    q, k = mx.split(x, [growth.H], axis=1)
    place = mx.minimum(positions // growth.every, len(growth.factors) - 1)
    factor = growth.factors[place][:, None, None]  # (N, 1, 1)
    return mx.concatenate([rotate(q, cos * factor, sin * factor), rotate(k, cos, sin)], axis=1)


class Growth(NamedTuple):
    """The factors 1 + beta ln(1 + floor(p / every)) of queries at position p. They are a table,
    because the last bit of a logarithm differs between processors."""

    factors: mx.array  # indexed by floor(p / every)
    every: int
    H: int  # the first H heads of x are queries

    @staticmethod
    def for_config(beta: float, every: int, H: int) -> Growth:
        steps = range(2**20 // every + 2)  # later positions keep the last factor
        return Growth(mx.array([1 + beta * math.log(1 + step) for step in steps]), every, H)


class AttentionType(NamedTuple):
    """The sliding window and the rope that some layers share. Most models have a single type."""

    rope: Rope | None  # None: no positions (NoPE)
    span: int | None  # the sliding window, including the token's own row; None: full attention
    cap: float | None  # soft cap of the scores
    frequencies: mx.array | None  # (Dh/2,)
    periods: mx.array | None  # 1 / frequencies, for a GPU
    growth: Growth | None = None  # scales queries at far positions
    # Slab index of a layer -> (H,) logits that join the softmax of each head (`models/sinks.py`)
    sinks: Mapping[int, mx.array] = {}

    @property
    def Dh(self) -> int:
        """The size of a head; 0 without RoPE."""
        return 0 if self.frequencies is None else 2 * self.frequencies.size

    @staticmethod
    def for_rope(
        rope: Rope | None,
        span: int | None,
        cap: float | None,
        Dh: int,
        length: int = 0,
        growth: Growth | None = None,
        sinks: Mapping[int, mx.array] = {},
    ) -> AttentionType:
        """Create the type and compute its frequencies. `length`: the maximum length of a sequence."""
        if rope is None:
            return AttentionType(None, span, cap, None, None, sinks=sinks)
        frequencies = rope_frequencies(rope, Dh, length)
        periods = None
        if device.has_gpu() and rope.gain == 1 and not growth:
            # `mx.fast.rope` takes periods, so a frequency of 0 becomes a tiny one
            periods = 1 / mx.maximum(frequencies, 1e-30)
        return AttentionType(rope, span, cap, frequencies, periods, growth, sinks)


def rope_at(
    kind: AttentionType,
    positions: mx.array,  # (N,)
) -> Callable[[mx.array], mx.array]:  # (N, heads, Dh) -> the same
    """Return a function that rotates the queries and keys of tokens at these positions: `rotate`, its
    equivalent in `cpu_kernels.c`, or MLX's fused kernel on a GPU."""
    rope = kind.rope
    if rope is None:
        return lambda x: x
    if kind.periods is None:
        cos, sin = rope_angles(kind, positions)
        if kind.growth:
            return partial(
                rotate_growing, cos=cos, sin=sin, growth=kind.growth, positions=positions
            )
        if row_ops.handles(cos):
            return row_ops.Rotation(cos, sin)
        return partial(rotate, cos=cos, sin=sin)

    def fused(x: mx.array) -> mx.array:
        rotated = mx.fast.rope(
            x[:, :, None],  # (N, heads, 1, Dh): each token is a sequence of length 1
            x.shape[-1],
            traditional=False,
            base=None,
            scale=1.0,
            offset=positions,
            freqs=kind.periods,
        )
        return rotated[:, :, 0]

    return fused


def rope_angles(
    kind: AttentionType,
    positions: mx.array,  # (N,)
) -> tuple[mx.array, mx.array]:  # (N, 1, Dh) each
    """Return cos and sin of position * frequency, for both dimensions of each plane."""
    rope = kind.rope
    angles = positions[:, None, None] * kind.frequencies  # (N, 1, Dh/2)
    cos = mx.cos(angles)
    sin = mx.sin(angles)
    if rope.gain != 1:  # only for planes that rotate
        gain = mx.where(kind.frequencies > 0, rope.gain, 1.0)
        cos = cos * gain
        sin = sin * gain
    return both_of_a_plane(cos, sin)


def both_of_a_plane(
    cos: mx.array,  # (..., Dh/2)
    sin: mx.array,  # (..., Dh/2)
) -> tuple[mx.array, mx.array]:  # (..., Dh) each
    """Repeat cos and sin for both dimensions of each plane, with the minus sign that `rotate` needs."""
    both_cos = mx.concatenate([cos, cos], axis=-1)
    both_sin = mx.concatenate([-sin, sin], axis=-1)
    return both_cos, both_sin


def rope_frequencies(rope: Rope, Dh: int, length: int = 0) -> mx.array:  # (Dh/2,)
    """Return the angle by which each of a head's Dh/2 planes rotates from one position to the next.

    Plane i rotates by theta ** (-2 i / Dh). The first rotates by 1, which distinguishes neighbours. The
    last rotates by nearly 1 / theta, which takes tens of thousands of positions for a full turn and
    distinguishes near from far. If only a part of a head rotates, Dh in this formula is the size of
    that part, and the other planes do not rotate.

    Slower planes extend a model beyond its trained length. `linear` slows all of them. `llama3` and
    `yarn` slow only the slow planes, because the fast ones distinguish neighbours. `dynamic` raises
    theta with `length`. `longrope` has a factor for each plane, found by search, and a second set of
    factors for sequences beyond the trained length. Here `length` is the length of a slot, so all
    sequences of an engine rotate by the same angles and can share rows. `proportional` rotates only the
    fast planes, at the frequencies they have when all planes rotate.
    """
    R = rope.turned or Dh
    theta = rope.theta
    is_too_short = rope.is_too_short(length)
    if rope.type == "dynamic" and is_too_short:
        stretch = rope.factor * length / rope.original_length - (rope.factor - 1)
        theta *= stretch ** (R / (R - 2))
    periods = theta ** (mx.arange(0, R, 2) / R)  # (R/2,): positions per radian
    if rope.type == "longrope":
        factors = rope.long if is_too_short else rope.short
        frequencies = 1 / (periods * mx.array(factors))
    elif rope.type in ("llama3", "yarn"):
        frequencies = 1 / slowed(rope, periods)
    else:
        # theta ** (-2 i / R)
        frequencies = mx.exp(mx.arange(0, -(R // 2), -1) * (math.log(theta) / (R // 2)))
    if rope.type in ("linear", "proportional"):
        frequencies = frequencies / rope.factor
    if rope.part < 1:
        frequencies = mx.where(mx.arange(R // 2) < int(rope.part * R // 2), frequencies, 0)
    if Dh > R:
        still = mx.zeros((Dh - R) // 2)
        frequencies = mx.concatenate([frequencies, still])
    return frequencies


def slowed(rope: Rope, periods: mx.array) -> mx.array:  # (R/2,) -> the same
    """Return the periods of `llama3` and `yarn`, which interpolate between full and slowed frequencies.

    Each type is computed from the reciprocals exactly as in mlx-lm, because at far positions the last
    digit of a frequency changes the fourth digit of a logit.
    """
    turns = rope.original_length / (2 * mx.pi * periods)  # full turns within the trained length
    keep = kept_of_planes(rope, turns)
    if rope.type == "llama3":
        return periods / ((1 - keep) / rope.factor + keep)
    slow = rope.factor * periods
    return slow * periods / (slow * keep + periods * (1 - keep))


def kept_of_planes(rope: Rope, turns: mx.array) -> mx.array:  # (R/2,) -> the same
    """Return how much of each plane's frequency is kept, from 0 (slowed by the full factor) to 1 (not slowed).

    A plane with fewer turns than low_freq_factor gets 0, and one with more than high_freq_factor gets 1.
    In between, `llama3` interpolates by the number of turns, and `yarn` by the index of the plane, whose
    bounds may be rounded outwards.
    """
    low = rope.low_freq_factor
    high = rope.high_freq_factor
    if rope.type == "llama3":
        return mx.clip((turns - low) / (high - low), 0, 1)
    planes = mx.arange(turns.size)
    R = 2 * turns.size

    def plane_with(turns: float) -> float:
        positions = rope.original_length / (2 * math.pi * turns)  # per radian
        return R * math.log(positions) / (2 * math.log(rope.theta))

    first, last = plane_with(high), plane_with(low)
    if rope.rounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, R - 1)
    return 1 - mx.clip((planes - first) / max(last - first, 0.001), 0, 1)
