"""One step in words: its plan, its work, and where the time went.

Times are rounded before they are added up, so that the displayed parts add up to the displayed sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from engine.snapshot import RanksView, StepView
from screen.draw import style
from screen.draw.canvas import Canvas
from screen.state import State


def draw_step(state: State, on: Canvas) -> None:
    """Draw the step at the cursor, or the newest."""
    step = state.step
    if step is None:
        on.heading("Step", which_step(state))
        on.say("plan → run → commit: nothing has run yet", on.muted)
        return
    on.heading(f"Step {step.step:,}", which_step(state))
    if state.here.lost:
        on.say(state.here.lost, on.muted)
        return
    for name, text in entries_of(state, step).items():
        on.entry(name, text)
    draw_time(step, on)


def draw_step_pane(state: State, on: Canvas) -> None:
    draw_step(state, on)
    on.cut("", "page('plan')")


def which_step(state: State) -> str:
    if state.cursor is not None:
        return "End: follow"
    return "one of many" if state.hurries else "newest"


def entries_of(state: State, step: StepView) -> dict[str, str]:
    """Return the parts of a step, by name. Empty ones are not shown."""
    chunks = [f"r{r} {a:,}–{b:,} → slot {s}" for s, r, a, b in sorted(step.prefill)]
    prefill = sum(stop - start for _, _, start, stop in step.prefill)
    decode = len(step.decode)
    whole = prefill + decode + step.draft_tokens
    more = f" + {step.draft_tokens} drafted" if step.draft_tokens else ""
    computed = f"{prefill:,} prefill + {decode} decode{more} = {whole:,} in one step"
    held = ", ".join(f"r{request}" for _, request in sorted(step.held))
    entries = {
        "admitted": admissions(step) or "no request",
        "prefill": ", ".join(chunks) or "no chunk",
        "decode": named(slot for slot, _ in step.decode) if decode else "no slot",
        "tokens": f"{computed}; {step.tokens} delivered",
        "budget": f"cost {prefill:,} + {decode}{more} of {step.budget:,}",
        "drafts": drafts_line(step),
    }
    if held:
        entries["held"] = f"{held}: over the budget, or what they share is being written"
    if step.ghosts:
        entries["ghosts"] = f"{named(step.ghosts)}: had ended, seen one step late"
    if step.waiting:
        entries["in line"] = f"{step.waiting:,}"
    entries["ranks"] = ranks_line(state.view.engine.ranks)
    return entries


def drafts_line(step: StepView) -> str:
    """Describe the drafts of a step: "drafted 4, 3 accepted", and in which slots."""
    if not step.drafts:
        return ""
    slots = ", ".join(f"slot {slot}: {right} of {of}" for slot, of, right in sorted(step.drafts))
    return f"drafted {step.draft_tokens}, {step.accepted_tokens} accepted ({slots})"


def admissions(step: StepView) -> str:
    """Describe the admitted requests with their slots, grouped by reason."""
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
    """Describe the processes that run the model."""
    if not ranks.memory:
        return ""
    memory = ", ".join(f"{nbytes / 2**20:,.0f}" for nbytes in ranks.memory)
    return f"{len(ranks.memory)} by {ranks.backend}, of {memory} MiB"


def draw_time(step: StepView, on: Canvas) -> None:
    """Draw where a step's time was spent, in milliseconds and as a bar."""
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
    on.entry("time", f"{total:,.2f} ms = {' + '.join(named_ms(parts))}")
    on.entry("Python", ", ".join(named_ms(python)))
    bar = on.pen().to(10)
    for (name, spent), hue in zip(parts.items(), style.HUES, strict=False):
        cells = max(1, round(spent / (total or 1) * (on.width - 14)))
        label = name if cells > len(name) else name[0]
        bar.put(f"{label:─^{cells}}", style.style(style.text_color_on(hue), hue))


def in_ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


def named_ms(parts: Mapping[str, float]) -> list[str]:
    return [f"{name} {spent:,.2f}" for name, spent in parts.items()]
