"""Rotary positions: queries and keys are turned by angles that depend on their position.

Families differ in how they go beyond the length that a model was trained for, and devices in which form
is fastest. A `Rope` is the config as plain data, an `AttentionType` is how attention treats positions in
some of the layers. Tests compare each form with the formula or with mlx-lm (`tests/models/test_ops.py`).
Next: `layers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kernels import device
from kernels.device import mx


@dataclass(frozen=True)
class Rope:
    """The parameters that make angles of positions (`rope_frequencies`)."""

    type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    # The factor by which each plane is slowed, for sequences up to the original length
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()  # and for longer ones
    gain: float = 1.0  # rotated vectors are multiplied by this
    turned: int | None = None  # how many numbers of a head turn, from the first; None means all
    interleaved: bool = False  # adjacent numbers are a plane, instead of number i and i + Dh/2
    rounds: bool = True  # yarn: the planes at its bounds are whole numbers
    part: float = 1.0  # of the planes, those that turn fastest; the others do not turn

    def is_too_short(self, length: int) -> bool:
        """True beyond the trained length, for types that then turn differently."""
        return self.type in ("dynamic", "longrope") and length > self.original_length

    def order(self, Dh: int) -> list[int]:
        """The order of a head's numbers in which number i and number i + Dh/2 are a plane.

        Planes that do not turn come last. The rows of q and k are put into this order when they are
        loaded, which does not change their dot products.
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
    """Number i and number i + Dh/2 of a head are a point in a plane. Turn it by the angle of its
    position.

    The dot product of two rotated vectors depends only on the difference of their angles. So attention
    sees the distance of two tokens, and not their positions. (a, b) becomes (a cos - b sin, b cos +
    a sin); `sin` has the minus sign.
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
    """Rotate queries and keys, and multiply the queries by the factor of their position."""
    q, k = mx.split(x, [growth.H], axis=1)
    place = mx.minimum(positions // growth.every, len(growth.factors) - 1)
    factor = growth.factors[place][:, None, None]  # (N, 1, 1)
    return mx.concatenate([rotate(q, cos * factor, sin * factor), rotate(k, cos, sin)], axis=1)


class Growth(NamedTuple):
    """Queries at position p are multiplied by 1 + beta ln(1 + floor(p / every)). The factors are a
    table, because a logarithm's last bit differs between processors."""

    factors: mx.array  # by floor(p / every)
    every: int
    H: int  # the first H heads of x are queries

    @staticmethod
    def for_config(beta: float, every: int, H: int) -> Growth:
        steps = range(2**20 // every + 2)  # further positions keep the last factor
        return Growth(mx.array([1 + beta * math.log(1 + step) for step in steps]), every, H)


class AttentionType(NamedTuple):
    """The window and the rope of some of the layers. Most models have one kind of layer."""

    rope: Rope | None  # None: no positions (NoPE)
    span: int | None  # the sliding window, a token's own row included; None: full attention
    cap: float | None  # soft cap of the scores
    frequencies: mx.array | None  # (Dh/2,)
    periods: mx.array | None  # 1 / frequencies, for a GPU
    growth: Growth | None = None  # of far queries
    # (H,), by the index of a layer: logits that join the softmax of each head (`models/sinks.py`)
    sinks: Mapping[int, mx.array] = {}

    @property
    def Dh(self) -> int:
        """The size of heads that turn."""
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
        """`length`: the maximum length of a sequence."""
        if rope is None:
            return AttentionType(None, span, cap, None, None, sinks=sinks)
        frequencies = rope_frequencies(rope, Dh, length)
        periods = None
        if (
            device.has_gpu() and rope.gain == 1 and not growth
        ):  # as `mx.fast.rope` wants them; no plane stands still
            periods = 1 / mx.maximum(frequencies, 1e-30)
        return AttentionType(rope, span, cap, frequencies, periods, growth, sinks)


def turning(
    kind: AttentionType,
    positions: mx.array,  # (N,)
) -> Callable[[mx.array], mx.array]:  # (N, heads, Dh) -> the same
    """A function that turns queries and keys of tokens at these positions: `rotate`, or one kernel of
    MLX's on a GPU."""
    rope = kind.rope
    if rope is None:
        return lambda x: x
    if kind.periods is None:
        cos, sin = rope_angles(kind, positions)
        if kind.growth:
            return partial(
                rotate_growing, cos=cos, sin=sin, growth=kind.growth, positions=positions
            )
        return partial(rotate, cos=cos, sin=sin)

    def turn(x: mx.array) -> mx.array:
        turned = mx.fast.rope(
            x[:, :, None],  # (N, heads, 1, Dh): each token is a sequence of one
            x.shape[-1],
            traditional=False,
            base=None,
            scale=1.0,
            offset=positions,
            freqs=kind.periods,
        )
        return turned[:, :, 0]

    return turn


def rope_angles(
    kind: AttentionType,
    positions: mx.array,  # (N,)
) -> tuple[mx.array, mx.array]:  # (N, 1, Dh) each
    """cos and sin of each position times each plane's frequency, for both numbers of a plane."""
    rope = kind.rope
    angles = positions[:, None, None] * kind.frequencies  # (N, 1, Dh/2)
    cos = mx.cos(angles)
    sin = mx.sin(angles)
    if rope.gain != 1:  # only for planes that turn
        gain = mx.where(kind.frequencies > 0, rope.gain, 1.0)
        cos = cos * gain
        sin = sin * gain
    return both_of_a_plane(cos, sin)


def both_of_a_plane(
    cos: mx.array,  # (..., Dh/2)
    sin: mx.array,  # (..., Dh/2)
) -> tuple[mx.array, mx.array]:  # (..., Dh) each
    """cos and sin for both numbers of each plane, as `rotate` wants them: `sin` with its minus sign."""
    both_cos = mx.concatenate([cos, cos], axis=-1)
    both_sin = mx.concatenate([-sin, sin], axis=-1)
    return both_cos, both_sin


def rope_frequencies(rope: Rope, Dh: int, length: int = 0) -> mx.array:  # (Dh/2,)
    """The angle by which each of a head's Dh/2 planes turns from one position to the next.

    Plane i turns by theta ** (-2 i / Dh): the first by 1, which distinguishes neighbours, the last by
    nearly 1 / theta, which takes tens of thousands of positions for a turn and distinguishes near from
    far. If only a part of a head turns, that part is the Dh of this formula, and the other planes do
    not turn.

    Planes that turn more slowly extend a model beyond the length it was trained for. `linear` slows all
    of them. `llama3` and `yarn` slow only the slow ones, because the fast ones distinguish neighbours.
    `dynamic` raises theta with `length`. `longrope` has a factor for each plane, found by search, and
    others for sequences beyond the trained length. Here `length` is that of a slot, so all sequences of
    an engine turn alike and may share rows. `proportional` turns the fast planes alone, as if all did.
    """
    R = rope.turned or Dh
    theta = rope.theta
    is_too_short = rope.is_too_short(length)
    if rope.type == "dynamic" and is_too_short:
        stretch = rope.factor * length / rope.original_length - (rope.factor - 1)
        theta *= stretch ** (R / (R - 2))
    periods = theta ** (mx.arange(0, R, 2) / R)  # (R/2,): positions for one radian
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
    """The periods of `llama3` and `yarn`: a mixture of each frequency and the slowed one.

    It is computed from the reciprocals, for each type as mlx-lm does: at far positions, the last digit of
    a frequency changes the fourth digit of a logit.
    """
    turns = rope.original_length / (2 * mx.pi * periods)  # full turns within the trained length
    keep = kept_of_planes(rope, turns)
    if rope.type == "llama3":
        return periods / ((1 - keep) / rope.factor + keep)
    slow = rope.factor * periods
    return slow * periods / (slow * keep + periods * (1 - keep))


def kept_of_planes(rope: Rope, turns: mx.array) -> mx.array:  # (R/2,) -> the same
    """The share of each plane's frequency that is kept: 0 means slowed by the whole factor, 1 not at all.

    With fewer turns than low_freq_factor it is 0, with more than high_freq_factor 1. In between `llama3`
    interpolates by the number of turns, `yarn` by the number of the plane, between the bounds, which may
    be rounded outwards.
    """
    low = rope.low_freq_factor
    high = rope.high_freq_factor
    if rope.type == "llama3":
        return mx.clip((turns - low) / (high - low), 0, 1)
    planes = mx.arange(turns.size)
    R = 2 * turns.size

    def plane_with(turns: float) -> float:
        positions = rope.original_length / (2 * math.pi * turns)  # for one radian
        return R * math.log(positions) / (2 * math.log(rope.theta))

    first, last = plane_with(high), plane_with(low)
    if rope.rounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, R - 1)
    return 1 - mx.clip((planes - first) / max(last - first, 0.001), 0, 1)
