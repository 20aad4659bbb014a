"""Compare each operation, in the C library and in MLX, with its formula in float64 or with MLX's own function."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import make_checkpoint

import llama
from kernels import device, row_ops
from kernels.device import mx
from kv import Slab, Window
from llama import heads
from models.config import AttentionHeads, read_config
from models.layers import Norm
from models.ops import capped, geglu, softmax, swiglu
from models.rope import Rope, both_of_a_plane, rope_frequencies, rotate
from token_choice import argmax


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def wide(x: mx.array) -> np.ndarray:
    """Convert to float64. numpy has no bfloat16."""
    return np.array(x.astype(mx.float32), dtype=np.float64)


# --- element by element -------------------------------------------------------------------------


@pytest.fixture(params=["cpu_kernels.c", "MLX"])
def form(request, monkeypatch) -> str:
    """What computes the operations: the C library, or MLX."""
    if request.param == "MLX":
        monkeypatch.setattr(row_ops, "handles", lambda x: False)
    elif not device.is_batch_invariant():
        pytest.skip("our own product does not run here")
    return request.param


def places_off(y: mx.array, wanted: np.ndarray) -> float:
    """Return the largest error, in units in the last place."""
    return (np.abs(wide(y) - wanted) / np.spacing(np.abs(wanted).astype(np.float32))).max()


@pytest.mark.parametrize("D", [1, 7, 64, 288, 5000])
@pytest.mark.parametrize("size", [4.0, 4e-4, 1e25])
def test_rms_norm_is_its_formula(form, D, size):
    """The cases include values where eps matters, and where MLX's squares overflow float32."""
    x, weight = normal(15, D, scale=size), normal(D, seed=1)
    mean = (x.astype(np.float64) ** 2).mean(-1, keepdims=True)
    wanted = x / np.sqrt(mean + 1e-5) * weight
    y = Norm.from_weight(mx.array(weight), 1e-5)(mx.array(x))
    if form == "cpu_kernels.c":
        assert places_off(y, wanted) < 4
    elif size < 1e20:
        assert np.abs(wide(y) - wanted).max() < 2e-5


def alone(gated, x: mx.array) -> mx.array:
    """Return the gate's values for these numbers."""
    return gated(mx.concatenate([x, mx.ones_like(x)], axis=-1))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def cap_30(x: np.ndarray) -> np.ndarray:
    return 30 * np.tanh(x / 30)


@pytest.mark.parametrize(
    ("formula", "ours", "last"),
    [
        (silu, partial(alone, swiglu), 91),
        (gelu, partial(alone, geglu), 12),
        (cap_30, partial(capped, cap=30.0), 600),
    ],
)
def test_each_function_is_its_formula(form, formula, ours, last):
    """The inputs range from far below zero to far above, up to the largest numbers."""
    x = np.concatenate([np.linspace(-last, last, 20_001), [-1e-6, 1e-30]]).astype(np.float32)
    wanted = formula(x.astype(np.float64))
    y = ours(mx.array(x))
    if formula is gelu:
        assert (np.abs(wide(y) - wanted) <= 2**-22 * np.maximum(1, np.abs(wanted))).all()
    else:
        assert (np.abs(wide(y) - wanted) <= 3e-6 * np.abs(wanted) + 1e-7).all()
        assert form == "MLX" or places_off(y, wanted) < 4
    ends = np.float32([-1e38, -1e4, 1e4, 1e38])
    right = [-30.0, -30.0, 30.0, 30.0] if formula is cap_30 else np.maximum(ends, 0).tolist()
    assert wide(ours(mx.array(ends))).tolist() == right
    half = ours(mx.array(x[::100]).astype(mx.float16))
    assert half.dtype == mx.float16
    assert np.abs(wide(half) - wanted[::100]).max() < 5e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("place", [0, 3, 16, 36])
def test_a_number_that_is_none_stays_none(form, place):
    """Every operation propagates NaN, so that a poisoned row is detected and scrubbed."""
    x = normal(3, 37)
    x[1, place] = np.nan
    lost = np.zeros((3, 37), bool)
    lost[1] = True
    assert np.array_equal(np.isnan(wide(softmax(mx.array(x)))), lost)
    assert np.array_equal(np.isnan(wide(Norm.from_weight(mx.ones(37), 1e-5)(mx.array(x)))), lost)
    lost[1] = np.arange(37) == place
    for gated in (swiglu, geglu):
        assert np.array_equal(np.isnan(wide(alone(gated, mx.array(x)))), lost)
    assert np.array_equal(np.isnan(wide(capped(mx.array(x), 30.0))), lost)


@pytest.mark.parametrize("V", [100, 128, 384, 32_000])  # 100 is not a multiple of the block size
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_argmax_takes_the_first(V, dtype):
    random = np.random.default_rng(V)
    # Many ties, within a block and between blocks
    x = random.integers(-5, 5, (400, V)).astype(np.float32)
    x[:100, :] = random.standard_normal((100, V))
    x[100] = -np.inf
    x[101] = 3.0
    for row, place in enumerate(random.integers(0, V, 50)):
        x[200 + row, place] = 7.0  # a single maximum, at any place
    best, place = (column[:, 0] for column in argmax(mx.array(x).astype(dtype)))
    x = wide(mx.array(x).astype(dtype))
    assert place.tolist() == x.argmax(axis=-1).tolist()
    assert np.array_equal(wide(best), x.max(axis=-1))


@pytest.mark.parametrize("place", [0, 5, 130, 255])
def test_argmax_shows_nan(place):
    """A row that contains NaN yields no token, although comparisons with NaN are false."""
    x = normal(3, 256)
    x[1, place] = np.nan
    best, _ = argmax(mx.array(x))
    assert np.isfinite(wide(best))[:, 0].tolist() == [True, False, True]


@pytest.mark.parametrize("L", [1, 5])
def test_sliding_window_mask(L):
    """At position p a window of 10 shows the rows p - 9 to p. A window as long as the slot hides nothing."""
    window = Window(Slab(1, 2, 2, 96, 16, mx.float32), [1], [40], L)
    (group,) = window.groups
    seen = llama.seen(group.positions, group.T, 10)
    assert group.slots == slice(1, 2) and seen.shape == (1, 1, L, group.T)
    assert [np.flatnonzero(row).tolist() for row in np.array(seen)[0, 0]] == [
        list(range(31 + n, 41 + n)) for n in range(L)
    ]
    whole, longer = (llama.seen(group.positions, group.T, span) for span in (None, 96))
    assert mx.array_equal(whole, longer)


@pytest.mark.parametrize(
    "slots, starts, L",
    [
        ([2], [0], 1),
        ([-1], [0], 1),
        ([0], [90], 8),
        ([0], [-1], 1),
        ([0, 0], [3, 4], 1),
        ([0, 1], [3], 1),
        ([0, 1], [3, 96], 1),
    ],
)
def test_a_window_outside_the_slab_is_refused(slots, starts, L):
    """A wrong window raises an IndexError, because MLX checks no bounds, and `python -O` removes asserts."""
    slab = Slab(1, 2, 2, 96, 16, mx.float32)
    with pytest.raises(IndexError):
        Window(slab, slots, starts, L)


def test_mask_is_per_sequence():
    """Slots 1 and 2 are read together, up to the longer one's rows; slot 4 is read separately."""
    window = Window(Slab(1, 5, 2, 96, 16, mx.float32), [1, 2, 4], [20, 7, 60], 1)
    near, far = window.groups
    assert (near.slots, near.T, far.slots, far.T) == (slice(1, 3), 21, slice(4, 5), 61)
    masks = [np.array(llama.seen(group.positions, group.T, None)) for group in (near, far)]
    assert [row.sum() for row in masks[0]] == [21, 8] and masks[1].all()


@pytest.mark.parametrize("scale", [1.0, 0.125])
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
@pytest.mark.parametrize("T", [1, 2, 32, 224, 3001])
def test_softmax_is_its_formula(form, rows, T, scale):
    """The inputs include large numbers and masked ones."""
    x = normal(rows, T, scale=30.0) + 500
    x[:, 1:][normal(rows, T - 1, seed=2) > 0.5] = -np.inf
    y = wide(softmax(mx.array(x), scale))
    powers = np.exp(scale * (x.astype(np.float64) - x.max(-1, keepdims=True)))
    off = np.abs(y - powers / powers.sum(-1, keepdims=True)).max()
    assert off < (2**-22 if form == "cpu_kernels.c" else 3e-5)
    assert (y[np.isinf(x)] == 0).all(), "what is masked weighs exactly nothing"
    if T == 1:
        assert (y == 1).all()


def test_softmax_is_row_invariant(form):
    """Regression: the kernel was chosen by the number of rows, which depends on the other requests."""
    x = mx.array(normal(40, 4, 96, scale=5.0))
    whole = softmax(x)
    for rows in (1, 2, 3, 4, 15, 16, 39):
        assert mx.array_equal(softmax(x[:rows]), whole[:rows]), rows


# --- positions ----------------------------------------------------------------------------------


def rope(**settings) -> Rope:
    return Rope(**({"type": "default", "theta": 10_000.0} | settings))


@pytest.mark.parametrize("part", [None, 48])
def test_yarn_rope(part):
    """transformers' definition, reimplemented: a ramp from the plane that turns 32 times within the trained
    length to the one that turns once, with both bounds rounded outwards to whole planes."""
    settings = rope(
        type="yarn", theta=1e6, factor=4.0, high_freq_factor=32.0, original_length=4096, turned=part
    )
    ours, R = wide(rope_frequencies(settings, 64)), part or 64
    plain, i = 1e6 ** (-2 * np.arange(R // 2) / R), np.arange(R // 2)
    first, last = (
        R * math.log(4096 / (2 * math.pi * turns)) / (2 * math.log(1e6)) for turns in (32, 1)
    )
    ramp = np.clip((i - math.floor(first)) / (math.ceil(last) - math.floor(first)), 0, 1)
    assert (ramp == 0).any() and (ramp == 1).any() and ((ramp > 0) & (ramp < 1)).sum() > 3
    assert np.abs(ours[: R // 2] / (plain * ramp / 4 + plain * (1 - ramp)) - 1).max() < 5e-6
    assert ours.shape == (32,) and (ours[R // 2 :] == 0).all()


def test_longrope():
    """Sequences beyond the trained length use the long factors."""
    settings = rope(type="longrope", short=(1.0, 1.5), long=(4.0, 8.0), original_length=100)
    assert np.allclose(wide(rope_frequencies(settings, 4, 100)), [1.0, 0.01 / 1.5])
    assert np.allclose(wide(rope_frequencies(settings, 4, 101)), [0.25, 0.01 / 8])


@pytest.mark.parametrize(
    ("turned", "interleaved"), [(None, True), (6, False), (6, True), (10, False)]
)
def test_interleaved_rope(turned, interleaved):
    """Reordering reduces a partly rotated head, and planes of neighbours, to the usual case."""
    settings, Dh = rope(turned=turned, interleaved=interleaved), 10
    x, order = mx.array(normal(1, 3, 5, Dh)), mx.array(settings.order(Dh))
    angles = (mx.arange(5)[:, None] + 7) * rope_frequencies(settings, Dh)
    ours = rotate(x[..., order], *both_of_a_plane(mx.cos(angles), mx.sin(angles)))
    theirs = mx.fast.rope(
        x, turned or Dh, traditional=interleaved, base=10_000.0, scale=1.0, offset=7
    )
    assert sorted(settings.order(Dh)) == list(range(Dh))
    assert np.abs(wide(ours) - wide(theirs[..., order])).max() < 2e-6


@pytest.mark.parametrize(
    ("scaling", "gain"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, 0.1 * math.log(4) + 1),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.75}, 0.75),
        # mscale without mscale_all_dim has no effect
        ({"rope_type": "yarn", "factor": 4.0, "mscale": 2.0}, 0.1 * math.log(4) + 1),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 512},
            0.1 * math.log(2048 / 512) + 1,
        ),
        (
            {"rope_type": "longrope", "original_max_position_embeddings": 64},
            math.sqrt(1 + math.log(32) / math.log(64)),
        ),
        ({"rope_type": "longrope", "factor": 8.0}, math.sqrt(1 + math.log(8) / math.log(2048))),
    ],
)
def test_rope_attention_factor(tmp_path, scaling, gain):
    """mlx-lm ignores an attention_factor, and uses an mscale without mscale_all_dim. In both we follow
    transformers."""
    planes = (
        {f"{name}_factor": [1.0] * 8 for name in ("short", "long")}
        if scaling["rope_type"] == "longrope"
        else {}
    )
    config = read_config(make_checkpoint(tmp_path, rope_scaling=scaling | planes), True)
    assert config.rope.gain == pytest.approx(gain)


# --- attention ----------------------------------------------------------------------------------


def test_fused_projection_head_order():
    """(N, (H + 2 Hkv) * Dh): all query heads, all key heads, all value heads; here without a rotation."""
    layer = SimpleNamespace(qkv=lambda x: x, qk_norm=lambda x: x, heads=AttentionHeads(4, 2, 6))
    x = normal(3, 8 * 6)
    q, k, v = heads(layer, mx.array(x), lambda x: x)
    apart = x.reshape(3, 8, 6)
    for ours, wanted in ((q, apart[:, :4]), (k, apart[:, 4:6]), (v, apart[:, 6:])):
        assert np.array_equal(np.array(ours), wanted)


@pytest.mark.parametrize("rounds", [True, False])
def test_bounds_of_yarn_may_be_whole_planes(rounds):
    """The definition is that of transformers' `_compute_yarn_parameters`, with gpt-oss's numbers."""
    R, theta, factor, original = 64, 150_000.0, 32.0, 4096
    rope = Rope("yarn", theta, factor, 1.0, 32.0, original, rounds=rounds)
    planes = np.arange(R // 2)
    plain = theta ** (-2 * planes / R)
    low, high = (
        R * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(theta)) for turns in (32, 1)
    )
    if rounds:
        low, high = np.floor(low), np.ceil(high)
    slowed = np.clip((planes - low) / (high - low), 0, 1)
    right = plain / factor * slowed + plain * (1 - slowed)
    assert np.allclose(np.array(rope_frequencies(rope, R)), right, rtol=2e-6)


# --- products -----------------------------------------------------------------------------------
