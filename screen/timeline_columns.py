"""Steps as columns of the timeline, slots × steps: from a run or from a replay.

    continuous  0 ▒A██████▒C████████     ▒ prefill: a chunk of the prompt goes into the slot
                1 ▒B██▒D████████████     █ decode: one more token of the answer

    static      0 ▒A██████▒C████████     ╳ blocked: the slot is free and requests wait, but the policy
                1 ▒B██╳╳╳╳▒D████████       admits none: here until the last request of the batch has ended

With draft tokens, a cell shows how many tokens the step yielded: ⁴ if three drafts were accepted, ¹
if none was. Columns are computed from plans; nothing here depends on a policy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from engine.snapshot import StepView
from screen.draw.style import BLOCKED, DECODE, EMPTY, FAILED, GHOST, HELD, PREFILL, UNSEEN


class Cell(NamedTuple):
    kind: int
    request: int | None = None


FREE = Cell(EMPTY)
SHUT = Cell(BLOCKED)


class Column(NamedTuple):
    """One step of the timeline, or several steps merged into one."""

    step: int
    began: float
    ended: float
    cells: tuple[Cell, ...]  # by slot
    tokens: int  # number of tokens delivered
    # Number of cells that did useful work; in a merged column, summed over all its steps. A
    # cell with draft tokens counts as the share of its rows that yielded a token
    useful: float
    view: StepView  # the step in the engine's snapshot; in a merged column, the last step
    rows: tuple[int, ...] = ()  # by slot: number of rows filled by its request
    steps: int = 1
    unseen: int = 0  # number of steps that the screen has missed

    @property
    def lost(self) -> str:
        """Why nothing is known about a step; empty if it is known."""
        if self.cells[0].kind == FAILED:
            return "This step failed: its requests ended with it, and E shows where."
        went = f"{self.unseen:,} steps up to this one went by before the screen looked"
        return f"{went}, and {self.tokens:,} tokens came." if self.unseen else ""


def column(step: StepView, slots: int, before: Column | None = None) -> Column:
    """Return a step as a column of the timeline that follows `before`.

    The engine runs ahead and plans a step before the previous one has ended. In the timeline, the
    step begins when the previous one ends.
    """
    cells = [FREE] * slots
    rows = list(before.rows) if before else [0] * slots
    for slot in step.blocked:
        cells[slot] = SHUT
    for slot, request in step.held:
        cells[slot] = Cell(HELD, request)
    for slot, _ in step.admitted:
        rows[slot] = 0
    for slot, request, _, stop in step.prefill:
        cells[slot] = Cell(PREFILL, request)
        rows[slot] = stop
    for slot, request in step.decode:
        is_ghost = slot in step.ghosts
        cells[slot] = Cell(GHOST if is_ghost else DECODE, request)
        rows[slot] += not is_ghost
    useful = 0.0
    for slot, drafted, right in step.drafts:
        rows[slot] += right
        useful -= (drafted - right) / (1 + drafted)
    for slot, cell in enumerate(cells):
        useful += cell.kind in (PREFILL, DECODE)
        if cell.request is None:
            rows[slot] = 0
    began = max(step.began, before.ended) if before else step.began
    return Column(
        step=step.step,
        began=began,
        ended=step.ended,
        cells=tuple(cells),
        tokens=step.tokens,
        useful=useful,
        view=step,
        rows=tuple(rows),
    )


def last_in(columns: Sequence[Column], slot: int) -> Column | None:
    """Return the last step with a request in this slot."""
    return next((c for c in reversed(columns) if c.cells[slot].request is not None), None)


def said_in(rows: int, prompt: int) -> int:
    """Return the number of output tokens for the filled rows. The newest token has no row yet."""
    return rows - prompt + 1 if rows >= prompt > 0 else 0


def during(history: Sequence[Column], began: float, ended: float) -> Iterator[Column]:
    """Yield the steps that ran between two times."""
    first = bisect_left(history, began, key=lambda column: column.ended)
    for i in range(first, len(history)):
        if history[i].began >= ended:
            return
        yield history[i]


def spread(
    history: Sequence[Column], began: float, ended: float, part: Callable[[Column], float]
) -> float:
    """Sum a quantity of the steps between two times.

    The quantity is spread evenly over a step's duration. Otherwise a slow step would be a spike in
    a chart.
    """
    total = 0.0
    for column in during(history, began, ended):
        inside = min(column.ended, ended) - max(column.began, began)
        seconds = column.ended - column.began
        total += part(column) * inside / seconds if seconds else part(column)
    return total


def gap(kind: int, first: StepView, before: Column, missed: int = 0, tokens: int = 0) -> Column:
    """Return a column for the missed or failed steps between `before` and `first`."""
    nothing = dict.fromkeys(
        ("admitted", "why", "prefill", "decode", "held", "ghosts", "blocked", "drafts"), ()
    )
    nothing |= dict.fromkeys(("budget", "plan_s", "build_s", "device_s", "wait_s", "commit_s"), 0)
    times = {"began": before.ended, "ended": max(before.ended, first.began)}
    view = replace(first, step=first.step - 1, tokens=tokens, **nothing, **times)
    return Column(
        step=view.step,
        **times,
        cells=(Cell(kind),) * len(before.cells),
        tokens=tokens,
        useful=0,
        view=view,
        rows=before.rows,
        steps=0,
        unseen=missed,
    )


def merge(columns: Sequence[Column]) -> Column:
    """Merge steps into one column.

    A cell shows its most frequent kind, but a prefill, a missed step or a failed step takes
    precedence.
    """
    if len(columns) == 1:
        return columns[0]
    cells = []
    for slot in zip(*(column.cells for column in columns), strict=True):
        rare = max((cell for cell in slot if cell.kind in (PREFILL, UNSEEN, FAILED)), default=None)
        cells.append(rare or Counter(slot).most_common(1)[0][0])
    names = ("tokens", "useful", "steps", "unseen")
    sums = {name: sum(getattr(column, name) for column in columns) for name in names}
    return columns[-1]._replace(
        step=columns[0].step, began=columns[0].began, cells=tuple(cells), **sums
    )


def useful_of(columns: Sequence[Column]) -> float:
    """Return the percentage of slots × steps in which something was computed for a request."""
    cells = sum(column.steps * len(column.cells) for column in columns)
    return 100 * sum(column.useful for column in columns) / cells if cells else 0.0
