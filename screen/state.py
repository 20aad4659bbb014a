"""All that the screen knows."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from screen.ink import span
from screen.room import BURST, RequestView, Settings, View
from screen.timeline import Cell, Column, Contest, Run, cells_of, column, costs_of, is_shut, measured, merge, replay

if TYPE_CHECKING:
    from parts.answers import StepView


@dataclass
class State:
    """All that is drawn. `absorb` brings it up to date; the rest is what the user has chosen."""

    model: str = "demo"
    view: View = field(default_factory=View)
    settings: Settings = field(default_factory=Settings)
    prompts: Sequence[tuple[str, int]] = BURST
    history: list[Column] = field(default_factory=list)  # a column for each step, oldest first
    steps: list[StepView] = field(default_factory=list)  # the same steps as the engine tells them
    tokens: list[int] = field(default_factory=list)  # delivered up to and with each of them
    owners: dict[int, int] = field(default_factory=dict)  # slot -> who holds it, or held it last
    printed: str = ""  # what a library printed last while loading: a download's progress
    selected: int = 0  # a slot
    cursor: int | None = None  # a step; None follows the newest
    edge: int = 0  # the newest column in sight when the cursor was set
    zoom: int | None = None  # steps a column; None fits what is running
    lower: str = "timeline"  # the pane that is shown where there is room for one only
    opened: int = 0  # which of the requests is open, counted from the newest
    contest: Contest | None = None  # the comparison that is shown; None: the race
    typing: bool = False  # the prompt has the keyboard
    said: str = ""  # an answer to what was done last
    woke: int = 0  # index of the first step of the latest busy time
    _merged: dict[int, list[Column]] = field(default_factory=dict)

    KEPT = 20_000  # steps

    def absorb(self, view: View) -> None:
        self.view = view
        for step in view.engine.steps if view.engine else ():
            if step.began >= view.since and (not self.steps or step.step > self.steps[-1].step):
                self._add(step, len(view.engine.slots))
        for slot in view.engine.slots if view.engine else ():
            if slot.request is not None:
                self.owners[slot.slot] = slot.request
        if len(self.history) > self.KEPT:
            gone = self.KEPT // 4
            del self.history[:gone], self.steps[:gone], self.tokens[:gone]
            self.woke, self._merged = max(0, self.woke - gone), {}

    def _add(self, step: StepView, slots: int) -> None:
        cells = cells_of(slots, is_shut(step), step.held, step.prefill, step.decode, step.ghosts)
        # A busy time begins where nobody works who was there before. (To look for a rest is not enough: behind the last
        # token of one leg of a race its ghost is still in flight when the next leg is fired.)
        working, before = {cell.request for cell in cells} - {None}, self.steps[-1].began if self.steps else 0.0
        came = [r.arrived for r in self.view.requests if r.id in working] if len(step.admitted) == len(working) else []
        if came and min(came) > before:
            self.woke = len(self.steps)
        self.history.append(column(step.step, step.began, step.ended, cells, step.tokens))
        self.tokens.append((self.tokens[-1] if self.tokens else 0) + step.tokens)
        self.steps.append(step)
        self.owners |= {slot: cell.request for slot, cell in enumerate(cells) if cell.request is not None}

    def delivered(self, moment: float) -> float:
        """Tokens delivered up to a moment. Within a step they are spread evenly: else slow steps would make spikes."""
        i = bisect_left(self.history, moment, key=lambda column: column.ended)
        if i == len(self.history):
            return self.tokens[-1] if self.tokens else 0
        step = self.history[i]
        began = max(step.began, self.history[i - 1].ended) if i else step.began
        part = (moment - began) / (step.ended - began) if step.ended > began else 1.0
        return self.tokens[i] - step.tokens * min(1.0, 1.0 - part)

    def tokens_per_s(self) -> float:
        """Over the last second of the engine's clock, or since it woke up."""
        if not self.history:
            return 0.0
        began = max(self.history[self.woke].began, self.view.now - 1)
        return (self.tokens[-1] - self.delivered(began)) / max(1e-3, self.view.now - began)

    def columns(self, zoom: int) -> list[Column]:
        """The history with `zoom` steps to a column. What has been merged once is kept."""
        if zoom == 1:
            return self.history
        merged = self._merged.setdefault(zoom, [])
        while (len(merged) + 1) * zoom <= len(self.history):
            merged.append(merge(self.history[len(merged) * zoom : (len(merged) + 1) * zoom]))
        rest = self.history[len(merged) * zoom :]
        return [*merged, merge(rest)] if rest else merged

    def zoom_for(self, width: int) -> int:
        """Steps a column: as chosen, or so many that the latest busy time fits, up to 8."""
        if self.zoom:
            return self.zoom
        return next((zoom for zoom in (1, 2, 4) if len(self.history) - self.woke <= zoom * width), 8)

    def window(self, width: int) -> tuple[int, list[Column], int | None]:
        """Zoom, the columns in sight, and which of them the cursor is on."""
        zoom = self.zoom_for(width)
        columns = self.columns(zoom)
        if self.cursor is None:
            return zoom, columns[-width:], None
        at = self.index_of(self.cursor) // zoom
        stop = max(min(self.edge // zoom + 1, at + width), at + 1, min(width, len(columns)))
        start = max(0, stop - width)
        return zoom, columns[start:stop], at - start

    def index_of(self, step: int) -> int:
        """Where a step stands in the history."""
        return min(bisect_left(self.history, step, key=lambda c: c.step), len(self.history) - 1)

    def move(self, steps: int) -> None:
        """Move the cursor back or forth; beyond the newest step it lets go and follows again."""
        at = len(self.history) - 1 if self.cursor is None else self.index_of(self.cursor)
        self.look_at(max(0, at + steps))

    def look_at(self, index: int) -> None:
        if self.cursor is None:
            self.edge = len(self.history) - 1
        self.cursor = self.history[index].step if index < len(self.history) else None
        self.edge = max(self.edge, index)

    @property
    def step(self) -> StepView | None:
        """The step that the inspector shows: the cursor's, or the newest."""
        if not self.steps:
            return None
        return self.steps[-1 if self.cursor is None else self.index_of(self.cursor)]

    @property
    def ended(self) -> list[RequestView]:
        """Newest first."""
        return [request for request in reversed(self.view.requests) if request.reason]

    def request(self, number: int | None) -> RequestView | None:
        return next((r for r in reversed(self.view.requests) if r.id == number), None)

    def owner(self, slot: int) -> RequestView | None:
        return self.request(self.owners.get(slot))


def compare(state: State) -> Contest:
    """What just ran, replayed under its own policy and another: two simulations, so that like is measured by like.

    ValueError says why there is nothing to compare.
    """
    steps, columns = state.steps[state.woke :], state.history[state.woke :]
    if not steps:
        raise ValueError("nothing has run yet; b fires a burst")
    seen = {cell.request for column in columns for cell in column.cells}
    requests = sorted((r for r in state.view.requests if r.id in seen and r.metrics.output_tokens), key=lambda r: r.id)
    if len(requests) < 2:
        raise ValueError("one request alone takes as long under every policy; b fires a burst")
    policies = Counter(step.policy for step in steps)  # more than one, if it was changed meanwhile
    ran, costs = policies.most_common(1)[0][0], costs_of(steps)
    other = "static" if ran == "continuous" else "continuous"
    runs = [replay(state.view, requests, policy, steps[0].began, costs) for policy in (ran, other)]
    real = measured(", then ".join(policies), columns, requests)
    note = (
        f"Both are simulated: {span(costs[0])} a decode step, {span(costs[1])} a chunk of prefill, as measured. "
        f"What really ran ({real.policy}) took {span(real.makespan)}, and {span(real.ttft_mean)} to the first token."
    )
    return Contest(f"Compare: {ran} and {other}, {len(requests)} requests", runs, note)


def race(state: State) -> Contest:
    """The race as far as it has come, measured. A request has the same number in both runs."""
    runs, legs = [], state.view.legs
    for leg in legs:
        number = {request: i + 1 for i, request in enumerate(leg.requests)}
        columns = [
            c._replace(cells=tuple(Cell(kind, number.get(request)) for kind, request in c.cells))
            for c in state.history
            if leg.first_step <= c.step <= (leg.last_step or math.inf)
        ]
        requests = [r for r in state.view.requests if r.id in number]
        runs.append(measured(leg.policy, columns, requests, "measured" if leg.last_step else "running …"))
    title = "Race: static and continuous" + (f", {len(legs[0].requests)} requests" if legs else "")
    note = "" if runs else "The race begins when everything that runs now has ended."
    return Contest(title, runs, "Paused: space goes on." if state.view.paused else note)


def verdict(runs: Sequence[Run]) -> str:
    """One sentence, once both runs are there."""
    if len(runs) < 2 or any(run.how == "running …" or not run.makespan for run in runs):
        return ""
    slow, fast = sorted(runs, key=lambda run: -run.makespan)
    times = f"{span(fast.makespan)} instead of {span(slow.makespan)}: {slow.makespan / fast.makespan:.2f} times as fast"
    words = f"{fast.policy} takes {times} as {slow.policy}"
    if slow.ttft_mean and fast.ttft_mean:
        words += f"; the first token comes after {span(fast.ttft_mean)} instead of {span(slow.ttft_mean)} on average"
    return words + "."
