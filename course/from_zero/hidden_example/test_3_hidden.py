"""An example of hidden checks for stage 3."""

import random

import pytest

import kv
from course.from_zero.shared_by_tests import (
    assert_close,
    drawn,
    ids_of,
    logits,
    new_slab,
    our_logits,
)
from kernels.device import mx

dice = random.Random(3)


@pytest.mark.about("write")
def test_neighbours_keep_their_rows():
    """A write changes its own rows and no others."""
    for _ in range(8):
        slab = kv.Slab(1, 5, 2, 32, 4, mx.float32)
        slab.arrays[0] = drawn(slab.shape, 31)
        before = slab.arrays[0] + 0
        L = dice.randint(1, 6)
        slots = dice.sample(range(5), dice.randint(1, 4))
        starts = [dice.randint(0, 32 - L) for _ in slots]
        new = drawn((len(slots) * L, 2, 4), 32)
        kv.Window(slab, slots, starts, L).write(0, new, -new)
        for i, (slot, start) in enumerate(zip(slots, starts, strict=True)):
            rows = new[i * L : (i + 1) * L].swapaxes(0, 1)
            before[slot, :, start : start + L] = mx.concatenate([rows, -rows])
        assert_close(slab.arrays[0], before, f"the slab after a write to slots {slots}")


def test_a_neighbour_of_nan():
    """A sequence with non-finite numbers does not affect its neighbours."""
    slab = new_slab(slots=2)
    for layer in range(len(slab.arrays)):
        slab.arrays[layer][1] = mx.nan
    assert_close(logits(ids_of(), slab), our_logits(ids_of()), "the logits", 1e-3)
