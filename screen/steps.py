"""One step, in words: what was planned, what it computed, and where its time went.

What this file keeps. The parts of a step's time add up to its time, also after rounding: a reader
who adds up what is shown gets the same sum.

Where next: `Engine.step` in `nanobatch.py`, which takes the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from parts.api.views import RanksView, StepView
from screen import ink
from screen.ink import Line, Palette, Pen, count, entry, heading, wrap
from screen.state import State


def draw_step(state: State, p: Palette, width: int, height: int, whole: bool = False) -> list[Line]:
    """The step under the cursor, or the newest. `whole`: all lines, however many there are."""
    step = state.step
    if step is None:
        nothing = Pen().put(" plan → run → commit: nothing has run yet", p.muted)
        return [heading(p, width, "Step", which_step(state)), nothing.line]
    lines = [heading(p, width, f"Step {step.step:,}", which_step(state))]
    unseen = state.here.unseen
    if unseen:
        went = f"{unseen:,} steps up to this one went by before the screen looked"
        said = f"{went}, and {step.tokens:,} tokens came."
        lines += (Pen().put(f" {part}", p.muted).line for part in wrap(said, width - 2))
        return lines[:height]
    for name, text in entries_of(state, step).items():
        lines += entry(p, width, name, text)
    lines += draw_time(step, p, width)
    hidden = len(lines) - height
    if whole or hidden <= 0:
        return lines
    more = Pen().put(f" ↓ {count(hidden + 1, 'more line')}", p.accent, do="sheet('step')")
    return [*lines[: height - 1], more.line]


def which_step(state: State) -> str:
    if state.cursor is not None:
        return "End: follow"
    return "one of many" if state.hurries else "newest"


def entries_of(state: State, step: StepView) -> dict[str, str]:
    """What a step did, by name; what is empty is not shown."""
    chunks = [f"r{r} {a:,}–{b:,} → slot {s}" for s, r, a, b in sorted(step.prefill)]
    prefill = sum(stop - start for _, _, start, stop in step.prefill)
    decode = len(step.decode)
    computed = f"{prefill:,} prefill + {decode} decode = {prefill + decode:,} in one step"
    held = ", ".join(f"r{request}" for _, request in sorted(step.held))
    budget = state.limits_at(step.step).budget
    entries = {
        "admitted": admissions(step) or "no request",
        "prefill": ", ".join(chunks) or "no chunk",
        "decode": named(slot for slot, _ in step.decode) if decode else "no slot",
        "tokens": f"{computed}; {step.tokens} delivered",
        "budget": f"cost {step.cost - decode:,} + {decode} of {budget:,}",
    }
    if held:
        entries["held"] = f"{held}: over the budget, or what they share is being written"
    if step.ghosts:
        entries["ghosts"] = f"{named(step.ghosts)}: had ended, seen one step late"
    if step.waiting:
        entries["in line"] = f"{step.waiting:,}"
    entries["ranks"] = ranks_line(state.view.engine.ranks)
    return entries


def admissions(step: StepView) -> str:
    """Which requests got which slots, and why: those with the same reason share it."""
    slots = sorted(zip(step.admitted, step.why, strict=True))
    parts = []
    for why, some in groupby(slots, key=lambda one: one[1]):
        who = ", ".join(f"r{request} → slot {slot}" for (slot, request), _ in some)
        parts.append(f"{who}: {why}")
    return "; ".join(parts)


def named(slots: Iterable[int]) -> str:
    names = [str(slot) for slot in sorted(slots)]
    return f"slot{'s' if len(names) > 1 else ''} {', '.join(names)}"


def ranks_line(ranks: RanksView) -> str:
    """The processes that share the model."""
    if not ranks.memory:
        return ""
    memory = ", ".join(f"{nbytes / 2**20:,.0f}" for nbytes in ranks.memory)
    return f"{len(ranks.memory)} by {ranks.backend}, of {memory} MiB"


def draw_time(step: StepView, p: Palette, width: int) -> list[Line]:
    """Where a step's time went: sums in milliseconds, and a bar of the same.

    The parts are rounded before they are added up.
    """
    python = {
        "plan": in_ms(step.plan_s),
        "build": in_ms(step.build_s),
        "commit": in_ms(step.commit_s),
    }
    parts = {
        "Python": sum(python.values()),
        "device": in_ms(step.device_s),
        "wait": in_ms(step.wait_s),
    }
    total = sum(parts.values())
    lines = entry(p, width, "time", f"{total:,.2f} ms = {' + '.join(named_ms(parts))}")
    lines += entry(p, width, "Python", ", ".join(named_ms(python)))
    bar = Pen().to(10)
    for (name, spent), hue in zip(parts.items(), ink.HUES, strict=False):
        cells = max(1, round(spent / (total or 1) * (width - 14)))
        label = name if cells > len(name) else name[0]
        bar.put(f"{label:─^{cells}}", ink.style(ink.ink_on(hue), hue))
    return [*lines, bar.line]


def in_ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


def named_ms(parts: Mapping[str, float]) -> list[str]:
    return [f"{name} {spent:,.2f}" for name, spent in parts.items()]
