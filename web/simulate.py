"""Replay recorded prompts through the real scheduler, without a model.

The page runs the scheduler's files as they are, in Pyodide (CPython for the browser), and
`experiments/simulator.py` gives it the recorded prompts and the time of each step. Readers edit
policies, which are functions and records. Nothing here decides anything.
"""

import inspect
import json
import random
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import policies
from experiments.simulator import Guest, Ran, Replay, Stuck, drafts_in
from policies import POLICIES
from request import Plan, Policy, Request

# The policy that a reader of the page may write
OWN = """

POLICIES["mine"] = Policy(
    "mine",
    "this one is yours.",
    room=lambda free, running: free if free >= 2 else 0,
    next=by_arrival,
)
"""


class Sent(NamedTuple):
    """A prompt that was sent, and what became of it."""

    prompt: tuple[int, ...]
    max_tokens: int
    tokens: int  # of its answer
    arrived: float
    client: str = ""
    drafts: Sequence[tuple[int, int]] = ()  # of each step in which it decodes: drafted, accepted


def named(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """A list of values as a recording has it, by the names of its fields."""
    return dict(zip(names, values, strict=True))


def sent_of(run: dict[str, Any], fields: dict[str, Sequence[str]]) -> list[Sent]:
    """The prompts of a recorded run."""
    steps = [named(fields["StepView"], step) for step in run["steps"]]
    drafts = drafts_in((s["decode"], s["ghosts"], s.get("drafts", ())) for s in steps)
    out = []
    for i, packed in enumerate(run["requests"]):
        request = named(fields["RequestView"], packed)
        metrics = named(fields["Metrics"], request["metrics"])
        # If the tokens of a prompt are unknown, its length is used
        prompt = run["ids"][i] or [-1 - i] * metrics["prompt_tokens"]
        tokens = metrics["output_tokens"]
        most = run["asked"][i] or tokens
        client = request.get("client", "")
        drafted = drafts.get(i + 1, ())
        out.append(Sent(tuple(prompt), most, tokens, run["arrivals"][i], client, drafted))
    return out


def play(
    limits: dict[str, Any], policy: Policy, prompts: Sequence[Sent], price: dict[str, float]
) -> dict[str, list[Any]]:
    """Each step that a scheduler with these limits plans, and when it begins and ends.

    `price`: seconds of a step, a row, a token of a prompt.
    """
    guests = []
    for number, sent in enumerate(prompts, start=1):
        request = Request(number, sent.prompt, sent.max_tokens, sent.arrived, client=sent.client)
        guests.append(Guest(request, sent.tokens, drafts=sent.drafts))

    def seconds(plan: Plan) -> float:
        tokens = sum(chunk.stop - chunk.start for chunk in plan.chunks)
        return price["step"] + price["row"] * len(plan.decodes) + price["token"] * tokens

    steps = []
    clock = []
    for ran in Replay.under(limits, policy, guests, seconds):
        steps.append(step_of(ran))
        clock.append((ran.began, ran.ended))
    return {"steps": steps, "clock": clock}


def step_of(ran: Ran) -> dict[str, Any]:
    """A step as a recording has it, by name."""
    plan = ran.plan
    return {
        "step": plan.step,
        "admitted": [(r.slot, r.id) for r in plan.admitted],
        "why": [r.admission.why for r in plan.admitted],
        "prefill": [(c.slot, c.request.id, c.start, c.stop) for c in plan.chunks],
        "decode": [(d.slot, d.request.id) for d in plan.decodes],
        "held": [(r.slot, r.id) for r in plan.held],
        "ghosts": ran.ghosts,
        "blocked": list(plan.blocked),
        "waiting": plan.waiting,
        "policy": plan.policy,
        "tokens": len(plan.emitters)
        - len(ran.ghosts)
        + sum(accepted for *_, accepted in ran.drafts),
        "drafts": ran.drafts,
        "budget": plan.budget,
    }


# --- what a reader of the page may change -------------------------------------------------------


def lines() -> str:
    """The part of `policies.py` that readers may edit, and a record of their own."""
    text = inspect.getsource(policies)
    return text[text.index("def by_arrival") :] + OWN


def start() -> str:
    """The lines and the policies that the page begins with, as JSON."""
    return json.dumps({"lines": lines(), "policies": list(edited(lines()))})


def edited(text: str) -> dict[str, Policy]:
    """Run this text, and return its policies. Its lines are named in a traceback."""
    names = vars(policies) | {"POLICIES": dict(POLICIES)}
    exec(compile(text, "<lines>", "exec"), names)
    return names["POLICIES"]


def line_of(error: BaseException) -> int | None:
    """The line of the reader's text in which the error was raised."""
    if isinstance(error, SyntaxError) and error.filename == "<lines>":
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno for f in reversed(frames) if f.filename == "<lines>"), None)


def arrivals(prompts: Sequence[Sent], rate: float) -> list[Sent]:
    """Poisson arrivals at this rate, with a fixed seed; 0: all at once."""
    dice = random.Random(1)
    now = 0.0
    out = []
    for sent in prompts:
        out.append(sent._replace(arrived=round(now, 6)))
        now += dice.expovariate(rate) if rate else 0.0
    return out


def answer(question: str) -> str:
    """Answer a question of the page. Both are JSON."""
    asked = json.loads(question)
    try:
        prompts = arrivals(sent_of(asked["run"], asked["fields"]), asked["rate"])
        found = edited(asked["lines"])
        if asked["policy"] not in found:
            raise Stuck(f"these lines have no policy {asked['policy']!r}")
        played = play(asked["limits"], found[asked["policy"]], prompts, asked["price"])
    except Exception as error:
        said = f"{type(error).__name__}: {error}" if not isinstance(error, Stuck) else str(error)
        return json.dumps({"error": said.partition(" (<lines>")[0], "line": line_of(error)})
    return json.dumps(played | {"arrivals": [sent.arrived for sent in prompts]})
