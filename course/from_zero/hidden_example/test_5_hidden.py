"""An example of hidden checks for stage 5."""

import random

import pytest

from course.from_zero.shared_by_tests import ANSWERS, ids_of
from course.from_zero.test_5_static_batching import new_runner, run
from runner import Prefill

dice = random.Random(5)


@pytest.mark.about("_forward", "_sample")
def test_any_slots_and_cuts():
    """Two prompts in random slots, each cut at a random place, begin with the right tokens."""
    for _ in range(5):
        prompts = dice.sample([*ANSWERS], 2)
        slots = dice.sample(range(3), 2)
        runner = new_runner()
        first = []
        last = []
        for slot, prompt in zip(slots, prompts, strict=True):
            ids = ids_of(prompt)
            at = dice.randint(1, len(ids) - 1)
            first.append(Prefill(slot, ids[:at], 0, emits=False))
            last.append(Prefill(slot, ids[at:], at, emits=True))
        assert run(runner, first) == {}
        for slot, said in run(runner, last).items():
            assert ANSWERS[prompts[slots.index(slot)]].startswith(said)
