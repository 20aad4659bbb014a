"""What a policy does for the second of two clients. The scheduler alone, so all times are steps.

    python tools/fair.py [--every 100] [--slots 8]

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

from policies import POLICIES
from sched import Request, Scheduler

MANY = 100
ONE = 20
SEEDS = 10


class Outcome(NamedTuple):
    """Waits are in steps, the shortest first."""

    one: list[int]
    many: list[int]
    steps: int
    tokens: int

    @property
    def rate(self) -> float:
        return self.tokens / self.steps


def crowd(dice: random.Random, every: int) -> list[tuple[int, Request]]:
    """(step, request): who comes before which step. The same for each policy."""
    coming = [(0, "many")] * MANY + [(every * (i + 1), "one") for i in range(ONE)]
    out = []
    for id, (step, client) in enumerate(coming):
        prompt = (0,) * dice.randint(20, 200)
        request = Request(id, prompt, dice.randint(16, 320), 0.0, shares=False, client=client)
        out.append((step, request))
    return out


def serve(policy: str, every: int = 100, slots: int = 8, seed: int = 0) -> Outcome:
    sched = Scheduler(slots, 1024, POLICIES[policy])
    coming = crowd(random.Random(seed), every)
    waits: dict[str, list[int]] = {"one": [], "many": []}
    tokens = 0
    while coming or sched.waiting or sched.running:
        while coming and (coming[0][0] <= sched.steps or not (sched.waiting or sched.running)):
            sched.submit(coming.pop(0)[1])
        plan = sched.plan(0.0)
        for request in plan.admitted:
            waits[request.client].append(plan.step - 1 - request.came)
        tokens += len(plan.emitters)
        sched.commit(plan, [0] * len(plan.emitters), lambda request, token: None, 0.0)
    return Outcome(sorted(waits["one"]), sorted(waits["many"]), sched.steps, tokens)


def outcome(policy: str, every: int = 100, slots: int = 8) -> Outcome:
    """Of all crowds together."""
    several = [serve(policy, every, slots, seed) for seed in range(SEEDS)]
    return Outcome(
        one=sorted(wait for each in several for wait in each.one),
        many=sorted(wait for each in several for wait in each.many),
        steps=sum(each.steps for each in several),
        tokens=sum(each.tokens for each in several),
    )


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
