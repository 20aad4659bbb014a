"""An example of hidden checks for stage 7."""

import random

import pytest

from course.from_zero.shared_by_tests import Tale


@pytest.mark.about("_cut", "_allot")
def test_nobody_starves():
    """A long prompt advances in each step, although short ones keep arriving."""
    for seed in range(10):
        dice = random.Random(f"hidden {seed}")
        tale = Tale(slots=6, max_len=200, chunk=dice.randint(4, 9), budget=dice.randint(1, 12))
        long = tale.submit(80, 2)
        while long.phase != "decode":
            before = long.prefilled
            if len(tale.sched.running) < 6:
                tale.submit(dice.randint(1, 9), 1)
            tale.step()
            assert long.prefilled > before, f"seed {seed}, step {len(tale.plans)}"
