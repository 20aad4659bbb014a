"""Chapter 3, fourth part: admission policies. How many requests are admitted, and which is next?

The problem. Requests wait in the queue, and some slots are free. An early first token for one, or a
full batch for all? First come, first served, or the short ones first? No choice is right for every
load.

The solution. A policy is a record with two functions. `room` takes the number of free slots and of
running requests, and returns how many to admit now. `next` yields the waiting requests in the order
of admission, and the scheduler takes as many as there is room for.

The invariant: no request waits forever. Under `fair`, a client without a slot is overtaken at most
once by each other client. Under `short`, a request of n tokens is overtaken only by those that
arrive within the next n steps. No state is kept for a client without a waiting request.

Where next: `sampling.py`, chapter 4.
"""

from collections import Counter
from collections.abc import Iterator

from request import Policy, Request
from sched import Scheduler

DEFAULT = "continuous"


def policy_of(name: str) -> Policy:
    if name not in POLICIES:
        raise ValueError(f"policy = {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name]


def by_arrival(scheduler: Scheduler) -> Iterator[Request]:
    """First come, first served."""
    return iter(scheduler.waiting.values())


def by_turns(scheduler: Scheduler) -> Iterator[Request]:
    """The client with the fewest slots is next; among equals, the least recently served one.

    A client's wait counts from the arrival of its oldest waiting request, or from the last step
    that admitted a request of this client (`Queued.fairness_turn`), whichever is later.
    """
    now = scheduler.steps + 1
    slots_of = Counter(request.client for request in scheduler.running.values())
    queues: dict[str, list[Request]] = {}
    line = []
    for request in scheduler.waiting.values():
        queue = queues.setdefault(request.client, [])
        is_first = not queue
        since = max(request.queued.arrival_step, request.queued.fairness_turn) if is_first else now
        # The client's slots, counting its earlier requests in the queue as admitted
        slots = slots_of[request.client] + len(queue)
        line.append((slots, since, request.id, is_first, request))
        queue.append(request)
    for *_, is_first, request in sorted(line):
        if is_first:
            for other in queues[request.client]:
                other.queued.fairness_turn = now
        yield request


def by_length(scheduler: Scheduler) -> Iterator[Request]:
    """The shortest prompt is next. Aging: each step in the queue counts as one token less."""
    line = scheduler.waiting.values()
    return iter(sorted(line, key=lambda request: len(request.prompt) + request.queued.arrival_step))


TABLE = (
    Policy(
        "continuous",
        "the next request in line takes a slot as soon as one is free.",
        room=lambda free, running: free,
        next=by_arrival,
    ),
    Policy(
        "static",
        "a batch is admitted together; the next one waits until all of it has ended.",
        room=lambda free, running: 0 if running else free,
        next=by_arrival,
    ),
    Policy(
        "serial",
        "one request at a time.",
        room=lambda free, running: 0 if running else 1,
        next=by_arrival,
    ),
    Policy(
        "fair",
        "a free slot goes to the client with the fewest slots, then to the one served longest ago.",
        room=lambda free, running: free,
        next=by_turns,
    ),
    Policy(
        "short",
        "a free slot goes to the shortest prompt; each step in line counts as a token less.",
        room=lambda free, running: free,
        next=by_length,
    ),
)
POLICIES = {policy.name: policy for policy in TABLE}
