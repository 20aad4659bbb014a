"""What a policy does for the second of two clients. The scheduler alone, so all times are steps.

    python measure/fair.py [--every 100] [--slots 8]

One client sends 100 prompts at once. The other sends 20, one every so many steps. For each policy:
how many steps each client's prompts wait for a slot, and how many tokens a step yields. The figures
are of ten such crowds, which differ in their prompts' and answers' lengths.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from parts.replay import Guest, Replay
from policies import POLICIES
from sched import Request, Scheduler

MANY = 100
ONE = 20
SEEDS = 10


class Outcome(NamedTuple):
    """Of all crowds together. Waits are in steps, the shortest first."""

    one: list[int]
    many: list[int]
    rate: float  # tokens a step


def crowd(dice: random.Random, every: int) -> list[Guest]:
    """Who comes, and before which step. The same for each policy."""
    guests = []
    for id in range(MANY + ONE):
        client = "many" if id < MANY else "one"
        step = 1 + every * max(0, id - MANY + 1)
        prompt = (0,) * dice.randint(20, 200)
        most = dice.randint(16, 320)
        request = Request(id, prompt, most, 0.0, reuse=False, client=client)
        guests.append(Guest(request, most, comes=step))
    return guests


def outcome(policy: str, every: int = 100, slots: int = 8) -> Outcome:
    waits: dict[str, list[int]] = {"one": [], "many": []}
    steps = 0
    tokens = 0
    for seed in range(SEEDS):
        guests = crowd(random.Random(seed), every)
        scheduler = Scheduler(slots, 1024, POLICIES[policy])
        for plan, *_ in Replay(scheduler, guests, by_steps=True, run_ahead=False):
            for request in plan.admitted:
                waits[request.client].append(plan.step - 1 - request.came)
            tokens += len(plan.emitters)
        steps += scheduler.steps
    return Outcome(sorted(waits["one"]), sorted(waits["many"]), tokens / steps)


def percentile(waits: list[int], percent: int) -> int:
    """The wait that so many percent do not exceed."""
    return waits[-(-percent * len(waits) // 100) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=100, help="steps from one prompt to the next")
    parser.add_argument("--slots", type=int, default=8)
    args = parser.parse_args()
    print(
        f"{'':10}  one waits: p50 {'p95':>6} {'max':>6}   many wait: p50 {'p95':>6}   tokens a step"
    )
    for policy in POLICIES:
        of = outcome(policy, args.every, args.slots)
        one = f"{percentile(of.one, 50):14,} {percentile(of.one, 95):6,} {of.one[-1]:6,}"
        many = f"{percentile(of.many, 50):16,} {percentile(of.many, 95):6,}"
        print(f"{policy:10} {one} {many} {of.rate:15.2f}")


if __name__ == "__main__":
    main()
