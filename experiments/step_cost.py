"""What does a step cost, and what is its bottleneck?

A step's bytes and operations are counted (`models/forward_cost.py`) and compared with the machine's measured
limits (`engine/roofline.py`):

    weights          read once per step, however many rows it has, so a token's share is 1 / rows
    keys and values  each sequence reads its own cache
    arithmetic       a fixed number of operations per token, plus some for each cached row
    Python           the engine's own work, measured

The page says which of reading, arithmetic and Python limits a step, or that none of them does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from base.installation import command
from base.validation import shown
from engine.snapshot import ExpertsView, StepView
from models.forward_cost import (
    Member,
    ModelCost,
    Roof,
    StepCost,
    Work,
    expected,
    floors_of,
    of_rows,
    pass_cost,
)
from screen.draw.canvas import Canvas, Figure, fitting
from screen.draw.charts import cost_of
from screen.draw.style import HUES, count, listed, number, shorten, span
from screen.engine_view import View
from screen.page import NOTHING_RAN, Page
from screen.state import State
from screen.timeline_columns import Column

if TYPE_CHECKING:
    from nanobatch import Engine
    from screen.commands import Session

# --- question -------------------------------------------------------------------------------------

NAME = "cost"
COUNTS = (1, 2, 4, 8, 16)  # numbers of rows in the table
MORE_COUNTS = (*COUNTS, 32, 64, 128)  # numbers of rows in the table on a tall screen
MOST = 2**16  # maximum number of rows considered

# --- run ------------------------------------------------------------------------------------------

ASKED = 100  # number of steps whose experts are kept


def obey(session: Session, rest: str) -> None:
    """Show the cost of the step at the cursor. Measure the roofline the first time, and again with
    "again"."""
    if rest not in ("", "again"):
        raise ValueError(
            f"/cost {shown(rest)}: the only argument is again, which measures the roofline"
        )
    engine = session.state.view.engine
    if rest or not engine or not engine.roof.reading:
        others = session.state.view.others
        session.client.inspect(NAME, partial(measure, others=others), off_the_clock=True)


def measure(engine: Engine, others: float) -> None:
    from engine.roofline import measure_roofline  # late: it imports MLX

    measure_roofline(engine, others)


def ask_for_experts(session: Session) -> bool:
    """Request the experts of the newest step, once per step."""
    engine = session.state.view.engine
    newest = engine.planned if engine and engine.model.experts else None
    known = experts_in(session.state)
    if newest and session.handled and newest not in known:
        known[newest] = None
        session.client.inspect(NAME, chosen_experts)
    return False  # nothing to draw until the answer arrives


def chosen_experts(engine: Engine) -> ExpertsView:
    """Return the experts that the newest step uses in each layer."""
    from kernels.device import device_lock, device_stream  # late: it imports MLX

    choices = engine.model.choices
    with device_lock, device_stream():
        layers = choices.counts() if choices else ()
    return ExpertsView(engine.sched.steps, tuple(tuple(each.most_common()) for each in layers))


def keep_experts(state: State, before: View) -> None:
    seen = state.view.inspected.get(NAME)
    if isinstance(seen, ExpertsView):
        known = experts_in(state)
        known[seen.step] = seen
        for step in [*known][:-ASKED]:
            del known[step]


def experts_in(state: State) -> dict[int, ExpertsView | None]:
    """Return step -> experts; None while the answer is pending."""
    return state.kept.setdefault(NAME, {})


# --- record ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCostRecord:
    """The bytes, operations and duration of a step."""

    step: StepView
    model: ModelCost
    roof: Roof
    members: Sequence[Member]  # the step's sequences, the longest first
    experts: Sequence[Mapping[int, int]]  # [layer] -> expert -> tokens; empty if unknown

    @property
    def cost(self) -> StepCost:
        work = Work.from_members(self.members, asked_of(self.step))
        return pass_cost(self.model, work, [len(layer) for layer in self.experts])


def record_of(state: State, column: Column) -> StepCostRecord:
    """Return the record of a step.

    The experts are left out if the counts do not match the step's tokens: if the step has two passes,
    only the second one's experts are known, and on a GPU a chunk's padding is counted, too.
    """
    engine = state.view.engine
    model = engine.model
    members = parts_of(column)
    seen = experts_in(state).get(column.step)
    experts: Sequence[Mapping[int, int]] = ()
    if seen is not None and len(seen.layers) == model.layers:
        layers = [dict(layer) for layer in seen.layers]
        tokens = sum(member.tokens for member in members)
        inside = asked_of(column.view) if model.layers == 1 else tokens
        experts = layers if sum(layers[0].values()) == model.taken * inside else ()
    return StepCostRecord(column.view, model, engine.roof, members, experts)


def parts_of(column: Column) -> list[Member]:
    """Return the sequences of a step, the longest first."""
    step = column.view
    parts = [Member(request, stop - start, stop) for _, request, start, stop in step.prefill]
    drafts = {slot: (drafted, right) for slot, drafted, right in step.drafts}
    for slot, request in step.decode:
        drafted, right = drafts.get(slot, (0, 0))
        # `column.rows` does not include the rows of ghosts and rejected drafts, which are computed, too
        rows = column.rows[slot] + (slot in step.ghosts) + drafted - right
        parts.append(Member(request, 1 + drafted, rows))
    return sorted(parts, key=lambda part: -part.rows)


def asked_of(step: StepView) -> int:
    return step.tokens + len(step.ghosts) + step.draft_tokens - step.accepted_tokens


def usual_length(state: State) -> int:
    """Return the mean length of the decoding sequences, or half a slot if none decodes."""
    column = state.here
    lengths = [part.rows for part in parts_of(column) if part.tokens == 1] if column else []
    return round(fmean(lengths)) if lengths else state.view.engine.limits.max_len // 2


# --- drawing --------------------------------------------------------------------------------------

NAMES = 13  # characters for a name
NEARER = 1.2  # weights read this many times faster than from memory are in a cache
DISTURBED = 1.5  # a step this many times longer than usual was disturbed
FIGURES = (
    Figure("rows", 5, 0),
    Figure("bytes", 9, 3),
    Figure("arithmetic", 12, 4),
    Figure("roofline", 9, 1),
    Figure("measured", 10, 0),
    Figure("weights", 12, 0, bar=True),
    Figure("keys", 9, 0),
    Figure("time", 9, 0),
)


def draw(state: State, on: Canvas) -> None:
    """Draw the cost of the step at the cursor, and a table of costs by number of rows."""
    on.names = NAMES
    column = state.here
    model = state.view.engine.model
    length = usual_length(state)
    lost = column.lost if column else NOTHING_RAN
    record = None if lost else record_of(state, column)
    keys = "←→ steps  Esc"
    if on.width >= 100:
        step = "" if state.view.watches else "  s takes one"
        keys = f"←→ other steps{step}  Esc back"
    on.title("The cost of a step" if lost else f"The cost of step {column.step:,}", keys)
    on.say(lost, on.muted)
    if record:
        draw_entries(state, on, record)
    on.entry("roofline", roof_of(state))
    if record:
        draw_floors(state, on, record)
    draw_counts(state, on, MORE_COUNTS if on.height >= 34 else COUNTS, length)
    roof = state.view.engine.roof
    on.say(f"{what_is_shared(model, length)} {where_it_ends(model, roof, length)}")
    if record:
        draw_experts(on, record)


def draw_entries(state: State, on: Canvas, record: StepCostRecord) -> None:
    """Draw the bytes and operations of a step."""
    engine = state.view.engine
    bill = record.cost
    shared = "read once"
    if bill.tokens > 1:
        shared += f" for all {bill.tokens:,} tokens: {scaled(bill.weights / bill.tokens, 'B')} each"
    if engine.ranks.memory:
        shared += f" (the share of rank 0, of {len(engine.ranks.memory)})"
    first, *others = record.members
    whose = f"{first.rows:,} rows of r{first.request}"
    if others:
        rows = [whose, *(f"{part.rows:,} r{part.request}" for part in others)]
        whose = f"each its own: {listed(rows, 8)}"
    products = f"{scaled(bill.products, 'FLOP')} in products"
    entries = {
        "weights": f"{scaled(bill.weights, 'B')} of {record.model.form}, {shared}",
        "keys, values": f"{scaled(bill.keys, 'B')}, {whose}",
        "states": f"{scaled(bill.states, 'B')}, read and written" if bill.states else "",
        "arithmetic": f"{products}, {scaled(bill.attention, 'FLOP')} in attention",
        "experts": experts_of(record, state.view.watches),
        "window": windows_of(record),
    }
    on.entries(entries)


def experts_of(record: StepCostRecord, watches: bool) -> str:
    """Describe the number of experts read, known or expected."""
    model = record.model
    if not model.experts:
        return ""
    words = f"{model.taken} of {model.experts:,} a token and layer"
    chance = expected(model, record.cost.tokens)
    if record.experts:
        mean = number(fmean(map(len, record.experts)))
        return f"{words}; read: {mean} a layer (by chance {number(chance)})"
    which = " (a watched engine does not tell which)" if watches else ""
    return f"{words}; expected: {number(chance)} a layer{which}"


def windows_of(record: StepCostRecord) -> str:
    """Describe the sliding window if a sequence is longer than the window."""
    model = record.model
    rows = max((member.rows for member in record.members), default=0)
    if model.window is None or rows <= model.window:
        return ""
    return f"{model.windowed} of {model.layers} layers see {model.window:,} rows; older ones are read, and hidden"


def roof_of(state: State) -> str:
    """Describe the measured roofline, or say why there is none."""
    roof = state.view.engine.roof
    if not roof.reading:
        if state.view.watches:
            return f"not measured there; B on a screen with the server does it ({command('tui.py')} --serve)"
        return "is being measured"
    words = f"memory {scaled(roof.reading, 'B/s')}, arithmetic {scaled(roof.multiplying, 'FLOP/s')}"
    if roof.again > NEARER * roof.reading:
        source = "the weights once more" if roof.others else "the model fits a cache, which yields"
        words += f"; {source} {scaled(roof.again, 'B/s')}"
    if roof.others:
        words += f"; other programs took {roof.others:.1f} cores then: /cost again"
    return words


def draw_floors(state: State, on: Canvas, record: StepCostRecord) -> None:
    """Draw the lower bounds of the step's time and the measured time."""
    step = record.step
    floors = floors_of(record.cost, record.roof)
    bars = [("Python", step.python_s, HUES[0], "░"), ("measured", step.seconds, on.text, "█")]
    if floors:
        reading = ("reading", floors.reading, HUES[1], "▒")
        bars = [reading, ("arithmetic", floors.multiplying, HUES[2], "▓"), *bars]
    longest = max(seconds for _, seconds, *_ in bars) or 1.0
    room = on.width - NAMES - 2 - 18
    for name, seconds, hue, glyph in bars:
        share = percent(seconds, step.seconds) if step.seconds else "–"
        pen = on.pen().put(f" {name:<{NAMES}}", on.muted).put(f"{span(seconds):>8}")
        pen.put(f"{share:>7}  ", on.muted)
        pen.put(glyph * max(1, round(seconds / longest * room)), hue)
    on.say(what_bounds(record.cost, step, record.roof) + how_usual(state, step), bold=True)


def how_usual(state: State, step: StepView) -> str:
    """Return a note if the step took much longer than usual, otherwise ""."""
    usual = None if step.prefill else cost_of(state.costs.get(len(step.decode), ()))
    if usual is None or step.seconds < DISTURBED * usual:
        return ""
    return f" Other steps with as many rows took {span(usual)}."


def draw_counts(state: State, on: Canvas, counts: Sequence[int], length: int) -> None:
    """Draw a table of steps by number of rows, with the share of a token."""
    model = state.view.engine.model
    room = on.width - 3 - sum(figure.width for figure in fitting(FIGURES, on.width - 1))
    has_room = room > 17
    title = f"A step by number of rows, each {length:,} long │ and what a token pays"
    on.heading(title, "▒weights █keys and values" if has_room else "")
    columns = on.columns(FIGURES)
    most = of_rows(model, 1, length).nbytes
    now = len(state.step.decode) if state.step and not state.step.prefill else 0
    for rows in counts:
        pen = on.row(columns, figures_of(state, rows, length), bold=rows == now)
        if has_room:
            bill = of_rows(model, rows, length)
            pen.put("  ").put("▒" * round(bill.weights / rows / most * room), HUES[1])
            pen.put("█" * max(1, round(bill.keys / rows / most * room)), HUES[3])


def figures_of(state: State, rows: int, length: int) -> dict[str, str]:
    """Return a row of the table. The measured time is given only if this run had such a step."""
    engine = state.view.engine
    bill = of_rows(engine.model, rows, length)
    floors = floors_of(bill, engine.roof)
    seconds = cost_of(state.costs.get(rows, ()))
    return {
        "rows": f"{rows:,}",
        "bytes": scaled(bill.nbytes, "B"),
        "arithmetic": scaled(bill.operations, "FLOP"),
        "roofline": span(floors and floors.longest),
        "measured": span(seconds),
        "weights": scaled(bill.weights / rows, "B"),
        "keys": scaled(bill.keys / rows, "B"),
        "time": span(seconds and seconds / rows),
    }


def draw_experts(on: Canvas, record: StepCostRecord) -> None:
    """Draw the experts of each layer with their numbers of tokens."""
    many = record.model.experts
    if record.experts:
        on.heading("Experts: by how many tokens each was read")
    for i, layer in enumerate(record.experts):
        whose = ", ".join(f"{expert} ×{tokens}" for expert, tokens in layer.items())
        words = f"{len(layer):,} of {many:,}: {whose}" if layer else "no token is asked"
        on.entry(f"layer {i}", shorten(words, on.width - NAMES - 2))


def scaled(value: float, unit: str) -> str:
    """Format a value with a unit prefix: 12345678, "B" -> "12.3 MB"."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{number(value / scale)} {prefix}{unit}"
    return f"{number(value / 1e3)} k{unit}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


def what_bounds(bill: StepCost, step: StepView, roof: Roof) -> str:
    """Name the bottleneck of the step. Do not mention caches if other programs ran while the roofline was
    measured."""
    floors = floors_of(bill, roof)
    whole = step.seconds
    if floors is None or not whole:
        return ""
    rate = bill.nbytes / whole
    most = max(step.python_s, *floors)
    python, read, multiplied = (percent(part, whole) for part in (step.python_s, *floors))
    if most > whole:
        return (
            f"It was quicker than the roofline allows ({span(most)}): other programs ran when the roofline "
            "was measured (/cost again), or the data was in a cache."
        )
    if most < whole / 2:
        words = f"None of the three bounds it: reading is {read}, arithmetic {multiplied}, Python {python}. "
        words += "The rest goes to small operations, to starting them, and to what else ran."
    elif most == step.python_s:
        words = f"Python is most of it: {python}. The roofline would allow {span(floors.longest)}."
    elif most == floors.reading:
        words = f"Reading bounds it: {scaled(rate, 'B/s')}, {read} of what memory yields."
    else:
        words = f"Arithmetic bounds it: by the roofline that takes {multiplied} of the time."
    if rate > roof.reading and not roof.others:
        words += (
            f" It read {scaled(rate, 'B/s')}, more than memory yields: the weights are in a cache."
        )
    return words


def what_is_shared(model: ModelCost, length: int) -> str:
    """Explain why eight rows cost hardly more than one."""
    one, eight = (of_rows(model, rows, length) for rows in (1, 8))
    shares = [scaled(bill.weights / bill.tokens, "B") for bill in (one, eight)]
    keys = scaled(one.keys, "B")
    words = f"The weights are read once: alone, a token pays for {shares[0]}, and one of eight for {shares[1]}."
    if model.experts:
        words += " (As many experts as are to be expected, each read once for all its tokens.)"
    return f"{words} Of keys and values each pays for its own {keys}."


def where_it_ends(model: ModelCost, roof: Roof, length: int) -> str:
    """Say at how many rows another row no longer makes a token cheaper, and why."""
    ends = []
    outweighs = first_count(lambda bill: bill.keys >= bill.weights, model, length)
    if outweighs is not None:
        ends.append(f"these weigh more than the weights (from {count(outweighs, 'row')} on)")
    turns = roof.reading and first_count(
        lambda bill: floors_of(bill, roof).multiplying > floors_of(bill, roof).reading,
        model,
        length,
    )
    if turns:
        ends.append(f"arithmetic takes longer than reading (from {count(turns, 'row')} on)")
    if not ends:
        return "Nothing ends that gain here."
    return f"The gain ends where {', or where '.join(ends)}."


def first_count(is_so: Callable[[StepCost], bool], model: ModelCost, length: int) -> int | None:
    """Return the lowest number of rows for which `is_so` holds, or None up to MOST. It must hold for all higher
    numbers."""
    counts = range(1, MOST + 1)
    place = bisect_left(counts, True, key=lambda rows: is_so(of_rows(model, rows, length)))
    return counts[place] if place < len(counts) else None


PAGE = Page(
    NAME,
    "B",
    "Step cost",
    "the cost of a step: bytes, arithmetic and Python, under this machine's roofline",
    draw,
    obey=obey,
    example="again",
    words=("again",),
    explains=(
        (
            "roofline",
            "what this machine can do at most: bytes read and operations a second. Measured when B is first pressed.",
        ),
        (
            "arithmetic",
            "operations of a step: a product and a sum are two. A weight is read once, and multiplied for each row.",
        ),
    ),
    own={"left": lambda state: state.move(-1), "right": lambda state: state.move(1)},
    on_view=keep_experts,
    poll=ask_for_experts,
    is_live=True,
)
