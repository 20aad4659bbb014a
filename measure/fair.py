"""What a policy does for the second of two clients. The scheduler alone, so all times are steps.

    python bench.py --parts fair --samples 1

One client sends 100 prompts at once. The other sends 20, one every 100 steps. How many steps do each
client's prompts wait for a slot, and how many tokens does a step yield? The figures are of ten such
crowds together, which differ in their prompts' and answers' lengths, and all are counted: a second
sample says the same.
"""

import random

from measure.figures import Figures
from parts.api.views import percentile
from parts.replay import Guest, Replay
from policies import POLICIES
from sched import Request, Scheduler

MANY = 100
ONE = 20
EVERY = 100  # steps from one prompt of the second client to the next
SLOTS = 8
SEEDS = 10


def crowd(dice: random.Random) -> list[Guest]:
    """Who comes, and before which step. The same for each policy."""
    guests = []
    for id in range(MANY + ONE):
        client = "many" if id < MANY else "one"
        step = 1 + EVERY * max(0, id - MANY + 1)
        prompt = (0,) * dice.randint(20, 200)
        most = dice.randint(16, 320)
        request = Request(id, prompt, most, 0.0, reuse=False, client=client)
        guests.append(Guest(request, most, comes=step))
    return guests


def fair_figures(policy: str) -> Figures:
    waits: dict[str, list[int]] = {"one": [], "many": []}
    steps = 0
    tokens = 0
    for seed in range(SEEDS):
        guests = crowd(random.Random(seed))
        scheduler = Scheduler(SLOTS, 1024, POLICIES[policy])
        for plan, *_ in Replay(scheduler, guests, by_steps=True, run_ahead=False):
            for request in plan.admitted:
                waits[request.client].append(plan.step - 1 - request.came)
            tokens += len(plan.emitters)
        steps += scheduler.steps
    figures = {"tokens a step": tokens / steps}
    for client in waits:
        for percent in (50, 95, 100):
            figures[f"{client} waits p{percent} steps"] = percentile(waits[client], percent / 100)
    return figures
