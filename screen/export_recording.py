"""Export a run as a file for the web page: plans, tokens, texts and times.

Steps and requests are lists of fields, packed by `engine/watch_frames.py`; the file names the
fields. In addition to the engine's times, it contains times without interruptions
(`undisturbed_times.py`), so that a page compares policies and not the machine's load. A recording
contains no client address and no path, and its size is bounded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from engine import watch_frames
from engine.snapshot import Limits, Metrics, RequestView, StepView
from screen.draw.style import count
from screen.state import State, prices, prompt_of
from screen.timeline_columns import Column
from screen.undisturbed_times import Prices, on_clock

FORMAT = 2
STEPS = 5_000  # limit per run; the first ones are recorded
REQUESTS = 500  # limit per run
LETTERS = 20_000  # limit per text
FIELDS = {
    kind.__name__: watch_frames.names_of(kind) or kind._fields
    for kind in (StepView, RequestView, Metrics, Limits)
}
HOLDS = (
    "each prompt and each answer of what ran last, word for word; what each step did and how long it "
    "took; this machine's processor; the command. No address and no path"
)

Ids = Callable[[RequestView], Sequence[int]]  # a request's prompt tokens; () if unknown


def record(state: State, about: dict[str, str], ids: Ids) -> dict[str, Any]:
    """Return a recording of the last experiment, or of the latest busy period.

    `about`: the command, the machine and other context.
    """
    costs = prices(state)
    runs = []
    for columns, requests in parts_of(state):
        if columns:
            kept = [state.requests[id] for id in requests if id in state.requests]
            runs.append(run_of(state, columns[:STEPS], kept[:REQUESTS], costs, ids))
    if not runs:
        raise ValueError(
            "nothing has run, so there is nothing to record; --script burst24 fires a burst"
        )
    price = {name: round(getattr(costs, name), 9) for name in ("step", "row", "chunk")}
    head = {"format": FORMAT, "about": about, "fields": FIELDS}
    return head | {"prices": price, "runs": runs}


def parts_of(state: State) -> list[tuple[Sequence[Column], Sequence[int]]]:
    """Return the steps of each run, and its request ids in the order of arrival."""
    history = state.history
    parts = state.view.record.parts if state.view.record else ()
    if parts and history and history[-1].step < parts[-1].stop:
        return [(state.between(part.first_step, part.stop), part.requests) for part in parts]
    columns = history[state.woke :]
    seen = {cell.request for column in columns for cell in column.cells}
    return [(columns, sorted(seen - {None}))]


def run_of(
    state: State,
    columns: Sequence[Column],
    requests: Sequence[RequestView],
    costs: Prices,
    ids: Ids,
) -> dict[str, Any]:
    """Return one run, with steps and requests numbered from 1 and times from 0."""
    numbers = {request.id: number for number, request in enumerate(requests, start=1)}
    first = columns[0].view.step
    began = min([columns[0].view.began, *(request.arrived for request in requests)])
    # Clients become numbers: addresses are private
    clients = {"": ""}
    for request in requests:
        clients.setdefault(request.client, f"client {len(clients)}")
    clocked, moment = on_clock(columns, costs)
    answers = [request.text.encode() for request in requests]
    limits = state.limits_of(columns[0].step, columns[-1].step)
    run = {
        "policy": columns[0].view.policy,
        "limits": limits,
        "missed": sum(column.unseen for column in columns),
        "steps": [renumbered(column.view, numbers, first, began) for column in columns],
        # Times without interruptions
        "clock": [(column.began, column.ended) for column in clocked],
        "requests": [
            shortened(request, numbers[request.id], began, clients[request.client])
            for request in requests
        ],
        "arrivals": [moment(request.arrived) for request in requests],  # also without interruptions
        "asked": [request.max_tokens for request in requests],
        "ids": [ids(request) for request in requests],
        "hashes": [hashlib.sha256(answer).hexdigest()[:16] for answer in answers],
    }
    # Round times to microseconds: further digits would be noise, and a third of the file
    return json.loads(watch_frames.ENCODE(run), parse_float=lambda digits: round(float(digits), 6))


def renumbered(step: StepView, numbers: dict[int, int], first: int, began: float) -> StepView:
    """Return a step with new numbers. A request that is not recorded gets 0."""

    def named(members: Sequence[tuple[int, ...]]) -> tuple:
        return tuple((slot, numbers.get(id, 0), *rest) for slot, id, *rest in members)

    members = ("admitted", "prefill", "decode", "held", "checkpoints")
    changes = {name: named(getattr(step, name)) for name in members}
    changes |= {"began": step.began - began, "ended": step.ended - began}
    return replace(step, step=step.step - first + 1, **changes)


def shortened(request: RequestView, number: int, began: float, client: str) -> RequestView:
    """Return a request with a new number, bounded texts, and a number for its client."""
    return replace(
        request,
        id=number,
        client=client,
        prompt=prompt_of(request)[:LETTERS],
        origin=None,
        arrived=request.arrived - began,
        ended=None if request.ended is None else request.ended - began,
        text=request.text[:LETTERS],
        error=request.error and "error",  # the message may contain a path
    )


def contents(recording: dict[str, Any]) -> str:
    """Describe the contents of a recording."""
    runs = recording["runs"]
    requests = sum(len(run["requests"]) for run in runs)
    steps = sum(len(run["steps"]) for run in runs)
    policies = " and ".join(run["policy"] for run in runs)
    missed = sum(run["missed"] for run in runs)
    lost = f", without {count(missed, 'step')} that the screen missed" if missed else ""
    texts = f"{count(requests, 'prompt')} and their answers"
    return f"{count(len(runs), 'run')} ({policies}), {texts}, {count(steps, 'step')}{lost}"


def as_text(recording: dict[str, Any]) -> str:
    """Return a recording as JSON, with a line for each step and each request."""
    runs = []
    for run in recording["runs"]:
        members = [f'"{name}":{in_lines(value)}' for name, value in run.items()]
        runs.append("{" + ",\n".join(members) + "}")
    head = {name: value for name, value in recording.items() if name != "runs"}
    return f'{json.dumps(head)[:-1]},\n"runs":[{",".join(runs)}]}}\n'


def in_lines(value: Any) -> str:
    is_long = isinstance(value, list) and value and isinstance(value[0], (list, str))
    if not is_long:
        return json.dumps(value)
    return "[" + ",\n".join(json.dumps(each, separators=(",", ":")) for each in value) + "]"
