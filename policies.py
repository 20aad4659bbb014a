"""Chapter 3, second part: how policies differ. How many requests may come in now, and who is next?

The problem. Requests wait in line, and some slots are free. Whom to let in is a choice between an
early first token for one and a full batch for all, between those who came first and those who ask
for little. No choice is right for every crowd.

The way out. All that the choices disagree on are two questions, so a policy is a record with two
answers. `room` is told how many slots are free and how many requests run, and says how many may
come in now. `next` looks at the scheduler, and yields the requests in line, one after the other; the
scheduler admits as many as there is room for.

What this file keeps. No request waits for ever. Under `fair`, a client without a slot is overtaken
once at most by each other client. Under `short`, a request of n tokens is overtaken only by those
that come within the next n steps. Nothing is noted of a client that has nothing in line.

Where next: `prefix.py`, which says into which of the free slots a request goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from sched import Policy, Request, Scheduler


def by_arrival(scheduler: Scheduler) -> Iterator[Request]:
    """First come, first served."""
    return iter(scheduler.waiting.values())


def by_turns(scheduler: Scheduler) -> Iterator[Request]:
    """The client with the fewest slots is next; of these, the one served longest ago.

    Until a client has been served, the step counts in which its oldest request came. Later, what
    counts is the last step that admitted one of its requests while others of them waited: they
    remember it (`turn`).
    """
    now = scheduler.steps + 1
    held = Counter(request.client for request in scheduler.running.values())
    queues: dict[str, list[Request]] = {}
    for request in scheduler.waiting.values():
        queues.setdefault(request.client, []).append(request)
    heap = []
    for client, queue in queues.items():
        queue.reverse()  # the oldest stands last, where it can be taken away
        oldest = queue[-1]
        heap.append((held[client], max(oldest.came, oldest.turn), oldest.id, queue))
    heapify(heap)
    while heap:
        slots, turn, _, queue = heappop(heap)
        request = queue.pop()
        if turn < now:  # its client's first one in this step
            for other in queue:
                other.turn = now
        yield request
        if queue:
            heappush(heap, (slots + 1, now, queue[-1].id, queue))


def by_length(scheduler: Scheduler) -> Iterator[Request]:
    """The shortest prompt is next. Each step in line counts as a token less."""
    line = scheduler.waiting.values()
    return iter(sorted(line, key=lambda request: len(request.prompt) + request.came))


TABLE = (
    Policy(
        name="continuous",
        does="the next in line takes a slot as soon as one is free.",
        room=lambda free, running: free,
        next=by_arrival,
    ),
    Policy(
        name="static",
        does="a batch is admitted together; the next one waits until all of it has ended.",
        room=lambda free, running: 0 if running else free,
        next=by_arrival,
    ),
    Policy(
        name="serial",
        does="one request at a time.",
        room=lambda free, running: 0 if running else 1,
        next=by_arrival,
    ),
    Policy(
        name="fair",
        does="a free slot goes to the client with the fewest slots, then to the one served longest ago.",
        room=lambda free, running: free,
        next=by_turns,
    ),
    Policy(
        name="short",
        does="a free slot goes to the shortest prompt; each step in line counts as a token less.",
        room=lambda free, running: free,
        next=by_length,
    ),
)
POLICIES = {policy.name: policy for policy in TABLE}
DEFAULT = "continuous"


def policy_of(name: str) -> Policy:
    if name not in POLICIES:
        raise ValueError(f"policy = {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name]
