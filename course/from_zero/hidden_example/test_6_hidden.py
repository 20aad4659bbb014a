"""An example of hidden checks for stage 6."""

import random

from course.from_zero.shared_by_tests import Tale


def test_other_schedules():
    """Requests at random moments, under each policy and with run-ahead, keep every invariant."""
    for seed in range(40):
        dice = random.Random(f"hidden {seed}")
        policy = dice.choice(("continuous", "static", "serial", "short"))
        tale = Tale(dice.randint(1, 5), policy=policy, lag=dice.randint(0, 1), chunk=4, budget=9)
        requests = [tale.submit(dice.randint(1, 30), dice.randint(1, 12)) for _ in range(9)]
        tale.fails.add(dice.choice(requests).id)
        while tale.sched.running or tale.sched.waiting:
            if dice.random() < 0.1:
                tale.sched.finish(dice.choice(requests), "cancelled", tale.now)
            tale.step()
            assert len(tale.plans) < 500, f"seed {seed}: requests still run or wait"
        assert all(len(each.answer) <= each.max_tokens for each in requests)
