"""Replay recorded prompts through the real scheduler, without a model.

The page runs the unmodified scheduler files in Pyodide (CPython for the browser).
`experiments/simulator.py` feeds them the recorded prompts, with step times from `price`. Readers edit policies,
which are functions and records. This module makes no scheduling decisions.
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

# A template for the reader's own policy
OWN = """

POLICIES["mine"] = Policy(
    "mine",
    "this one is yours.",
    room=lambda free, running: free if free >= 2 else 0,
    next=by_arrival,
)
"""


class Sent(NamedTuple):
    """A recorded prompt and its outcome."""

    prompt: tuple[int, ...]
    max_tokens: int
    tokens: int  # number of tokens in the answer
    arrived: float
    client: str = ""
    drafts: Sequence[tuple[int, int]] = ()  # (drafted, accepted) for each decode step


def named(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """Return a recording's list of values as a dict by field name."""
    return dict(zip(names, values, strict=True))


def sent_of(run: dict[str, Any], fields: dict[str, Sequence[str]]) -> list[Sent]:
    """Return the prompts of a recorded run."""
    steps = [named(fields["StepView"], step) for step in run["steps"]]
    drafts = drafts_in((s["decode"], s["ghosts"], s.get("drafts", ())) for s in steps)
    out = []
    for i, packed in enumerate(run["requests"]):
        request = named(fields["RequestView"], packed)
        metrics = named(fields["Metrics"], request["metrics"])
        # If a prompt's tokens are unknown, repeat a token that no other prompt contains
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
    """Replay the prompts under a policy. Return the planned steps and their start and end times.

    `price`: seconds per step, per decoding row and per prompt token.
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
    """Return a step with the field names of a recording."""
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


# --- the code that readers may edit -------------------------------------------------------------


def lines() -> str:
    """Return the part of `policies.py` that readers may edit, followed by a template for their own policy."""
    text = inspect.getsource(policies)
    return text[text.index("def by_arrival") :] + OWN


def start() -> str:
    """Return the initial lines and policies of the page as JSON."""
    return json.dumps({"lines": lines(), "policies": list(edited(lines()))})


def edited(text: str) -> dict[str, Policy]:
    """Run the reader's code and return its policies. Tracebacks name its lines."""
    names = vars(policies) | {"POLICIES": dict(POLICIES)}
    exec(compile(text, "<lines>", "exec"), names)
    return names["POLICIES"]


def line_of(error: BaseException) -> int | None:
    """Return the line of the reader's code in which the error was raised, if any."""
    if isinstance(error, SyntaxError) and error.filename == "<lines>":
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno for f in reversed(frames) if f.filename == "<lines>"), None)


def arrivals(prompts: Sequence[Sent], rate: float) -> list[Sent]:
    """Give the prompts Poisson arrival times with a fixed seed. Rate 0 sends all at once."""
    dice = random.Random(1)
    now = 0.0
    out = []
    for sent in prompts:
        out.append(sent._replace(arrived=round(now, 6)))
        now += dice.expovariate(rate) if rate else 0.0
    return out


def answer(question: str) -> str:
    """Run a simulation for the page. The question and the answer are JSON."""
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
