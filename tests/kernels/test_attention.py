"""Fused attention gives the same bits as the formula in `llama.attention`. With an engine,
`tests/core/test_batch_invariance.py` checks that a token has the same bits in any chunk and batch."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

import llama
from kernels import c_attention, device
from kernels.device import mx
from kv import Slab, Window
from models.rope import AttentionType

pytestmark = pytest.mark.skipif(
    not device.is_batch_invariant(), reason="our own product does not run here"
)
LENGTH = 352


class Shape:
    """Random sizes, and slabs full of random numbers, as if every row had been used before."""

    def __init__(self, seed: int):
        self.rng = rng = np.random.default_rng(seed)
        self.Hkv = int(rng.integers(1, 5))
        self.H = self.Hkv * int(rng.choice([1, 2, 3, 7, 25]))
        self.Dh = int(rng.choice([3, 8, 12, 20, 32, 33, 64, 100, 128]))
        self.slots = int(rng.integers(1, 9))
        dtype = mx.float16 if rng.random() < 0.6 else mx.float32
        self.slabs = [Slab(1, self.slots, self.Hkv, LENGTH, self.Dh, dtype) for _ in range(2)]
        left = mx.array(rng.normal(0, 3, (self.slots, 2 * self.Hkv, LENGTH, self.Dh)))
        for slab in self.slabs:
            slab.arrays[0][:, :, :LENGTH] = left
        cap = float(rng.choice([2.0, 30.0])) if rng.random() < 0.3 else None
        span = int(rng.integers(1, 200)) if rng.random() < 0.4 else None
        sinks = {}
        if rng.random() < 0.3 and not cap:
            sinks[0] = mx.array(rng.normal(0, 5, self.H).astype(np.float32))
        self.kind = AttentionType(None, span, cap, None, None, sinks=sinks)

    def windows(
        self, fused: bool, asked: Sequence[tuple[list[int], list[int], int]]
    ) -> list[Window]:
        return [Window(self.slabs[not fused], *each) for each in asked]

    def draw(self) -> list[tuple[list[int], list[int], int]]:
        """Return random chunks, drafts and decoding sequences, in separate slots."""
        rng = self.rng
        slots = rng.permutation(self.slots).tolist()
        asked = []
        while slots:
            count = int(rng.integers(1, len(slots) + 1)) if rng.random() < 0.5 else 1
            mine, slots = sorted(slots[:count]), slots[count:]
            L = int(rng.integers(1, 90)) if count == 1 else int(rng.integers(1, 4))
            starts = rng.integers(0, LENGTH - L + 1, count).tolist()
            asked.append((mine, starts, L))
        return asked

    def numbers(self, count: int) -> list[mx.array]:
        """Return queries, keys and values of new tokens."""
        heads = (self.H, self.Hkv, self.Hkv)
        return [
            mx.array(self.rng.normal(0, 2, (count, n, self.Dh)).astype(np.float32)) for n in heads
        ]

    def attend(self, windows: list[Window], q: mx.array, k: mx.array, v: mx.array) -> np.ndarray:
        form = "c" if windows[0].slab is self.slabs[0] else "formula"
        attention = llama.ATTENTION[form](self.kind, self.H, windows)
        layer = SimpleNamespace(slab_index=0, kind=0)
        return np.array(llama.attend(layer, q, k, v, windows, attention))


@pytest.mark.parametrize("seed", range(60))
def test_the_operation_has_the_bits_of_the_formula(seed):
    """The cases vary grouped heads, head sizes, spans, caps, chunks, drafts and old content of slots."""
    shape = Shape(seed)
    asked = shape.draw()
    numbers = shape.numbers(sum(len(slots) * L for slots, _, L in asked))
    fused, formula = (shape.attend(shape.windows(way, asked), *numbers) for way in (True, False))
    assert np.isfinite(fused).all() and np.array_equal(fused, formula)
    for slab in shape.slabs:
        slab.check()


def test_a_sink_joins_the_softmax_and_takes_no_value():
    """Compare with the definition in float64."""
    slab = Slab(1, 1, 2, 64, 8, mx.float32)
    sinks = np.array([-3.0, 0.5, 2.0, 20.0], np.float32)
    kind = AttentionType(None, 30, None, None, None, sinks={0: mx.array(sinks)})
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(0, 1, (50, n, 8)).astype(np.float32) for n in (4, 2, 2))
    attention = llama.ATTENTION["c"](kind, 4, [window := Window(slab, [0], [0], 50)])
    ours = llama.attend(
        SimpleNamespace(slab_index=0), *map(mx.array, (q, k, v)), [window], attention
    )
    for token in (0, 29, 49):
        seen = slice(max(0, token - 29), token + 1)
        for head in range(4):
            scores = k[seen, head // 2] @ q[token, head].astype(np.float64) / np.sqrt(8)
            powers = np.exp(np.append(scores, sinks[head]))
            right = powers[:-1] / powers.sum() @ v[seen, head // 2]
            assert np.abs(np.array(ours)[token].reshape(4, 8)[head] - right).max() < 1e-6


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_a_nan_stays_in_its_sequence(dtype):
    """A NaN reaches all later tokens of its sequence, and no other sequence."""
    slab = Slab(1, 3, 2, 64, 16, dtype)
    windows = [Window(slab, [0], [0], 20), Window(slab, [1, 2], [9, 9], 1)]
    q = mx.ones((22, 4, 16))
    k = mx.ones((22, 2, 16))
    k[7] = mx.nan
    layer = SimpleNamespace(slab_index=0, kind=0)
    kind = AttentionType(None, None, None, None, None)
    attention = llama.ATTENTION["c"](kind, 4, windows)
    sums = np.array(llama.attend(layer, q, k, k * 0, windows, attention))
    assert np.isnan(sums[7:20]).all()
    assert np.isfinite(sums[20:]).all()


def test_a_slab_keeps_its_label_through_all_that_is_written():
    """Writes, fills and scrubs leave intact the label by which the C library recognizes the operation."""
    slab = Slab(1, 2, 1, 32, 16, mx.float16)
    label = np.array(slab.arrays[0][-1, -1, -1]).tobytes()
    assert any(label)
    new = mx.ones((32, 1, 16))
    Window(slab, [1], [0], 32).write(0, new, new)
    Window(slab, [0, 1], [31, 31], 1).write(0, new[:2], new[:2])
    slab.fill(0, slab.prefix(1, 32))
    slab.scrub(1, 0, 32)
    assert np.array(slab.arrays[0][-1, -1, -1]).tobytes() == label


def test_a_label_stays_within_its_slab():
    """Regression: in bfloat16, which the operation does not support, the label was written beyond the end of
    the slab, and `--dtype checkpoint` corrupted the heap."""
    both = mx.zeros((2, 2, 33, 16), mx.bfloat16)
    mx.eval(both)
    slab = both[:1]
    mx.eval(slab)
    c_attention.write_label(slab)
    assert not np.array(both[1].astype(mx.float32)).any()
