"""The scheduler of this project, driven through recorded prompts, without a model.

The problem. A page should let its reader change the scheduler, and see what that does. A model does not
fit there. But `sched.py` needs none: it decides by lengths, beginnings and a budget.

The way out. The page runs `sched.py` and `prefix.py` as they are (by Pyodide, which is CPython compiled
for the browser). This file gives them the recorded prompts, says of each answer when it ends, and lets
each step take what such a step took in the recording. The same function runs in our tests, and there its
plans are those that were recorded.

What this file keeps. Nothing in here decides anything.

Where next: `web/lab.js`, which draws what comes of it.
"""

from __future__ import annotations

import inspect
import json
import random
import textwrap
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import sched
from sched import POLICIES, Plan, Request, Scheduler

METHODS = ("_room", "_next")  # in which the policies differ
MINE = "mine"  # the policy that a reader of the page may write
STEPS = 20_000  # more would be a policy that never comes to an end


class Wish(NamedTuple):
    """A prompt, and what became of it."""

    prompt: tuple[int, ...]
    max_tokens: int
    tokens: int  # of its answer
    arrived: float
    client: str = ""


class Stuck(RuntimeError):
    """Requests wait, no slot is taken, and the policy admits none."""


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
    scheduler: Scheduler, wishes: Sequence[Wish], price: dict[str, float]
) -> dict[str, list[Any]]:
    """Each step that the scheduler plans, and when it begins and ends.

    As the engine does, this loop runs ahead: a step is planned before the one before is committed,
    unless that one is to be read at once. `price`: seconds of a step, a row, a token of a prompt.
    """
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
        plan = None if flight and flight.read_at_once else scheduler.plan(now)
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
    """The lines in which the policies differ, with one more policy in them."""
    found = [getattr(Scheduler, name) for name in METHODS if hasattr(Scheduler, name)]
    text = "\n".join(textwrap.dedent(inspect.getsource(method)) for method in found)
    own = f'        "{MINE}": free if free >= 2 else 0,  # this one is yours\n'
    return text.replace("    }[self.policy]", f"{own}    }}[self.policy]", 1)


def edited(text: str) -> type[Scheduler]:
    """A scheduler with these methods in place of its own. An error knows its line in the text."""
    POLICIES.setdefault(MINE, "the reader's own.")
    # The class is line 0, so that lines are counted as the reader counts them
    source = "class Edited(Scheduler):\n" + textwrap.indent(text, "    ")
    names = dict(vars(sched))
    exec(compile(source, "<lines>", "exec"), names)
    return names["Edited"]


def line_of(error: BaseException) -> int | None:
    """The line of the reader's text in which the error was raised."""
    if isinstance(error, SyntaxError) and error.filename == "<lines>":
        return (error.lineno or 2) - 1
    found = None
    trace = error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == "<lines>":
            found = trace.tb_lineno - 1
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


def answer(question: str) -> str:
    """What the page asks, and what it is told, as JSON."""
    asked = json.loads(question)
    try:
        wishes = [Wish(tuple(prompt), *rest) for prompt, *rest in asked["wishes"]]
        wishes = arrivals(wishes, asked["rate"])
        make = edited(asked["lines"])
        scheduler = make(**asked["limits"], policy=asked["policy"])
        played = play(scheduler, wishes, asked["price"])
    except Exception as error:
        said = f"{type(error).__name__}: {error}" if not isinstance(error, Stuck) else str(error)
        return json.dumps({"error": said.partition(" (<lines>")[0], "line": line_of(error)})
    return json.dumps(played | {"arrivals": [wish.arrived for wish in wishes]})
