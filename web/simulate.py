"""The scheduler of this project, driven through recorded prompts, without a model.

The problem. A page should let its reader change the scheduler, and see what that does. A model does not
fit there. But `sched.py` needs none: it decides by lengths, beginnings and a budget.

The way out. The page runs `sched.py`, `policies.py` and `prefix.py` as they are (by Pyodide, which is
CPython compiled for the browser). This file gives them the recorded prompts, says of each answer when it ends, and lets
each step take what such a step took in the recording. The same function runs in our tests, and there its
plans are those that were recorded.

What this file keeps. Nothing in here decides anything.

Where next: `web/lab.js`, which draws what comes of it.
"""

from __future__ import annotations

import inspect
import json
import random
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import policies
from parts.price import NEVER, Price
from policies import POLICIES
from sched import Plan, Policy, Request, Scheduler

# The policy that a reader of the page may write
MINE = "mine"
OWN = f"""

POLICIES["{MINE}"] = Policy(
    name="{MINE}",
    does="this one is yours.",
    room=lambda free, running: free if free >= 2 else 0,
    next=by_arrival,
)
"""
STEPS = 20_000  # more would be a policy that never comes to an end


class Wish(NamedTuple):
    """A prompt, and what became of it."""

    prompt: tuple[int, ...]
    max_tokens: int
    tokens: int  # of its answer
    arrived: float
    client: str = ""


class Stuck(RuntimeError):
    """The reader's policy plays no run to its end."""


def wishes_of(run: dict[str, Any], fields: dict[str, Sequence[str]]) -> list[Wish]:
    """The prompts of a recorded run."""
    out = []
    for i, packed in enumerate(run["requests"]):
        request = dict(zip(fields["RequestView"], packed, strict=True))
        metrics = dict(zip(fields["Metrics"], request["metrics"], strict=True))
        # Of a prompt whose tokens are not known, the length is; its tokens are like no other's
        prompt = run["ids"][i] or [-1 - i] * metrics["prompt_tokens"]
        tokens = metrics["output_tokens"]
        most = run["asked"][i] or tokens
        client = request.get("client", "")
        out.append(Wish(tuple(prompt), most, tokens, run["arrivals"][i], client))
    return out


def play(
    limits: dict[str, Any], policy: Policy, wishes: Sequence[Wish], price: dict[str, float]
) -> dict[str, list[Any]]:
    """Each step that a scheduler with these limits plans, and when it begins and ends.

    As the engine does, this loop runs ahead: a step is planned before the one before is committed,
    unless that one is to be read at once. `price`: seconds of a step, a row, a token of a prompt.
    """
    limits = dict(limits)
    looks_back = Price(limits.pop("far", NEVER))
    hurries = limits.pop("hurry", False)
    scheduler = Scheduler(**limits, policy=policy, price=looks_back)
    coming = deque(
        Request(number, wish.prompt, wish.max_tokens, wish.arrived, client=wish.client)
        for number, wish in enumerate(wishes, start=1)
    )
    coming = deque(sorted(coming, key=lambda request: request.arrived))
    out: dict[str, list[Any]] = {"steps": [], "clock": []}
    now = 0.0
    flight: Plan | None = None

    def accept(request: Request, token: int) -> str | None:
        return "stop" if request.committed >= wishes[request.id - 1].tokens else None

    while coming or scheduler.waiting or scheduler.running:
        while coming and coming[0].arrived <= now:
            scheduler.submit(coming.popleft())
        waits = flight and hurries and flight.has_first_token
        plan = None if waits else scheduler.plan(now)
        if flight:
            began = now
            tokens = sum(chunk.stop - chunk.start for chunk in flight.chunks)
            now += price["step"] + price["row"] * len(flight.decodes) + price["token"] * tokens
            ghosts = [m.slot for m in flight.emitters if m.request.finish_reason is not None]
            # No prompt begins like an answer
            scheduler.commit(flight, [2**40] * len(flight.emitters), accept, now)
            out["steps"].append(step_of(flight, ghosts))
            out["clock"].append((began, now))
        elif plan is None and coming:
            now = max(now, coming[0].arrived)
        elif plan is None:
            raise Stuck(f"no slot is taken, {len(scheduler.waiting)} wait, and none is admitted")
        if len(out["steps"]) > STEPS:
            raise Stuck(f"after {STEPS:,} steps it is not over")
        flight = plan
    return out


def step_of(plan: Plan, ghosts: list[int]) -> dict[str, Any]:
    """A plan as a recording has it, by name."""
    return {
        "step": plan.step,
        "admitted": [(r.slot, r.id) for r in plan.admitted],
        "why": [r.why for r in plan.admitted],
        "prefill": [(c.slot, c.request.id, c.start, c.stop) for c in plan.chunks],
        "decode": [(d.slot, d.request.id) for d in plan.decodes],
        "held": [(r.slot, r.id) for r in plan.held],
        "ghosts": ghosts,
        "blocked": list(plan.blocked),
        "waiting": plan.waiting,
        "policy": plan.policy,
        "tokens": len(plan.emitters) - len(ghosts),
        "cost": len(plan.decodes) + sum(chunk.cost for chunk in plan.chunks),
    }


def price_of(recording: dict[str, Any]) -> dict[str, float]:
    """What a step takes: the recorded prices, with that of a chunk shared out among its tokens."""
    at = recording["fields"]["StepView"].index("prefill")
    chunks = [chunk for run in recording["runs"] for step in run["steps"] for chunk in step[at]]
    tokens = sum(stop - start for *_, start, stop in chunks)
    price = recording["prices"]
    token = price["chunk"] * len(chunks) / max(tokens, 1)
    return {"step": price["step"], "row": price["row"], "token": token}


# --- what a reader of the page may change -------------------------------------------------------


def lines() -> str:
    """The functions and records in which the policies differ, and one record more."""
    text = inspect.getsource(policies)
    return text[text.index("def ") :] + OWN


def edited(text: str) -> dict[str, Policy]:
    """The policies of this text. An error knows its line in it."""
    names = vars(policies) | {"POLICIES": dict(POLICIES)}
    exec(compile(text, "<lines>", "exec"), names)
    return names["POLICIES"]


def line_of(error: BaseException) -> int | None:
    """The line of the reader's text in which the error was raised."""
    if isinstance(error, SyntaxError) and error.filename == "<lines>":
        return error.lineno
    found = None
    trace = error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == "<lines>":
            found = trace.tb_lineno
        trace = trace.tb_next
    return found


def arrivals(wishes: Sequence[Wish], rate: float) -> list[Wish]:
    """So many a second, at random moments, which are the same every time; 0: all at once."""
    dice = random.Random(1)
    now = 0.0
    out = []
    for wish in wishes:
        out.append(wish._replace(arrived=now))
        now += dice.expovariate(rate) if rate else 0.0
    return out


def names() -> str:
    """Of all policies in `lines`, as JSON."""
    return json.dumps([*POLICIES, MINE])


def answer(question: str) -> str:
    """What the page asks, and what it is told, as JSON."""
    asked = json.loads(question)
    try:
        wishes = [Wish(tuple(prompt), *rest) for prompt, *rest in asked["wishes"]]
        wishes = arrivals(wishes, asked["rate"])
        found = edited(asked["lines"])
        if asked["policy"] not in found:
            raise Stuck(f"these lines have no policy {asked['policy']!r}")
        played = play(asked["limits"], found[asked["policy"]], wishes, asked["price"])
    except Exception as error:
        said = f"{type(error).__name__}: {error}" if not isinstance(error, Stuck) else str(error)
        return json.dumps({"error": said.partition(" (<lines>")[0], "line": line_of(error)})
    return json.dumps(played | {"arrivals": [wish.arrived for wish in wishes]})
