"""The bill of a step: bytes, products and Python, under this machine's roof.

The problem. Eight answers cost hardly more than one, and nobody believes it before the sum is on
the table. Nor does a figure such as "3.4 ms a step" tell where the sum ends.

The way out. A step's bytes and products are counted, and held against the machine's own roof:

    weights          read once, whatever the number of rows: a token's share falls as 1 / rows
    keys and values  of all rows behind a token: each sequence has its own, and shares none
    arithmetic       so much for each token, and more for each row behind the token
    Python           the engine's own work, measured

The roof is the most of this machine: bytes a second, and operations a second. Both were measured
(`analysis/roofline.py`). No step is quicker than the roof allows.

What this file keeps. A measured figure stands beside a counted one (`analysis/step_costs.py`), and the page
names the bound of a step: one of the three, or none.

Where next: `analysis/step_costs.py`, the counting.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from analysis.step_costs import Member, StepCost, Work, expected, floors_of, of_rows, pass_cost
from runtime.cli import command
from runtime.snapshot import ExpertsView, ModelView, Roof, StepView
from runtime.validation import shown
from screen.draw.canvas import Figure, Paper, fitting
from screen.draw.charts import cost_of
from screen.draw.style import HUES, count, number, shorten, span
from screen.engine_client import View
from screen.page import Desk, Page
from screen.state import State
from screen.step_columns import Column

COUNTS = (1, 2, 4, 8, 16)  # rows of the steps side by side
MORE_COUNTS = (*COUNTS, 32, 64, 128)  # where there is room for them
NAMES = 13  # characters of an entry's name
NEARER = 1.2  # times as fast as memory: such weights lie in a cache
DISTURBED = 1.5  # times as long as usual
MOST = 2**16  # rows: no batch is larger
ASKED = 100  # of so many steps the experts are kept


def parts_of(column: Column) -> list[Member]:
    """The sequences of a step, the farthest look back first."""
    step = column.view
    parts = [Member(request, stop - start, stop) for _, request, start, stop in step.prefill]
    guesses = {slot: (guessed, right) for slot, guessed, right in step.guesses}
    for slot, request in step.decode:
        guessed, right = guesses.get(slot, (0, 0))
        # Rows of ghosts and of wrong guesses are written and read, and counted by nobody
        rows = column.rows[slot] + (slot in step.ghosts) + guessed - right
        parts.append(Member(request, 1 + guessed, rows))
    return sorted(parts, key=lambda part: -part.rows)


def asked_of(step: StepView) -> int:
    return step.tokens + len(step.ghosts) + step.guessed - step.right


def seen_experts(state: State, column: Column) -> Sequence[Mapping[int, int]]:
    """By layer: by how many tokens each expert was taken; empty if unknown.

    Of a step with two passes, only the second is remembered. On a GPU, a chunk's padding takes
    experts, too.
    """
    found = experts_in(state).get(column.step)
    model = state.view.engine.model
    tokens = sum(part.tokens for part in parts_of(column))
    if found is None or len(found.layers) != model.layers:
        return ()
    layers = [dict(layer) for layer in found.layers]
    inside = asked_of(column.view) if model.layers == 1 else tokens
    return layers if sum(layers[0].values()) == model.taken * inside else ()


def this_bill(state: State, column: Column) -> StepCost:
    model = state.view.engine.model
    experts = [len(layer) for layer in seen_experts(state, column)]
    return pass_cost(model, Work.of(parts_of(column), asked_of(column.view)), experts)


def usual_length(state: State) -> int:
    """Of the decoding sequences in the step; else half a slot."""
    column = state.here
    lengths = [part.rows for part in parts_of(column) if part.tokens == 1] if column else []
    return round(fmean(lengths)) if lengths else state.view.engine.limits.max_len // 2


# --- in words -----------------------------------------------------------------------------------


def scaled(value: float, unit: str) -> str:
    """12345678, "B" -> "12.3 MB" """
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{number(value / scale)} {prefix}{unit}"
    return f"{number(value / 1e3)} k{unit}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


def what_bounds(bill: StepCost, step: StepView, roof: Roof) -> str:
    """The bound of the step, in one sentence. If none does, it says so. Of caches it
    says nothing if other programs ran when the roof was measured."""
    floors = floors_of(bill, roof)
    whole = step.seconds
    if floors is None or not whole:
        return ""
    rate = bill.nbytes / whole
    most = max(step.python_s, *floors)
    python, read, multiplied = (percent(part, whole) for part in (step.python_s, *floors))
    if most > whole:
        return (
            f"It was quicker than the roof allows ({span(most)}): other programs ran when the roof "
            "was measured (/bill again), or what it read lay in a nearer cache."
        )
    if most < whole / 2:
        words = f"None of the three bounds it: reading is {read}, arithmetic {multiplied}, Python {python}. "
        words += "The rest goes to small operations, to starting them, and to what else ran."
    elif most == step.python_s:
        words = f"Python is most of it: {python}. The roof would allow {span(floors.longest)}."
    elif most == floors.reading:
        words = f"Reading bounds it: under the roof that takes {read} of the time."
    else:
        words = f"Arithmetic bounds it: under the roof that takes {multiplied} of the time."
    if rate > roof.reading and not roof.others:
        words += (
            f" It read {scaled(rate, 'B/s')}, more than memory yields: the weights lie in a cache."
        )
    return words


def what_is_shared(model: ModelView, length: int) -> str:
    """Why eight cost hardly more than one."""
    one, eight = (of_rows(model, rows, length) for rows in (1, 8))
    shares = [scaled(bill.weights / bill.tokens, "B") for bill in (one, eight)]
    keys = scaled(one.keys, "B")
    words = f"The weights are read once: alone, a token pays for {shares[0]}, and one of eight for {shares[1]}."
    if model.experts:
        words += " (As many experts as are to be expected, each once: a cache must keep it.)"
    return f"{words} Of keys and values each pays for its own {keys}."


def where_it_ends(model: ModelView, roof: Roof, length: int) -> str:
    """With how many rows one more costs as much as the first."""
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


def first_count(is_so: Callable[[StepCost], bool], model: ModelView, length: int) -> int | None:
    """With how many rows this is so for the first time. With more rows it stays so."""
    counts = range(1, MOST + 1)
    place = bisect_left(counts, True, key=lambda rows: is_so(of_rows(model, rows, length)))
    return counts[place] if place < len(counts) else None


# --- the page -----------------------------------------------------------------------------------


def draw(state: State, on: Paper) -> None:
    """The bill of the step under the cursor, or of the newest one; then of steps of so many
    rows."""
    on.names = NAMES
    column = state.here
    model = state.view.engine.model
    length = usual_length(state)
    lost = column.lost if column else "Nothing has run yet. b fires a burst."
    keys = "←→ steps  Esc"
    if on.width >= 100:
        step = "" if state.view.watches else "  s takes one"
        keys = f"←→ other steps{step}  Esc back"
    on.title("The bill of a step" if lost else f"The bill of step {column.step:,}", keys)
    on.say(lost, on.muted)
    if not lost:
        draw_entries(state, on, column)
    on.entry("roof", roof_of(state))
    if not lost:
        draw_floors(state, on, column)
    draw_counts(state, on, MORE_COUNTS if on.height >= 34 else COUNTS, length)
    roof = state.view.engine.roof
    on.say(f"{what_is_shared(model, length)} {where_it_ends(model, roof, length)}")
    if not lost:
        draw_experts(state, on, column)


def draw_entries(state: State, on: Paper, column: Column) -> None:
    """Bytes and products."""
    engine = state.view.engine
    model = engine.model
    bill = this_bill(state, column)
    shared = "read once"
    if bill.tokens > 1:
        shared += f" for all {bill.tokens:,} tokens: {scaled(bill.weights / bill.tokens, 'B')} each"
    if engine.ranks.memory:
        shared += f" (the share of rank 0, of {len(engine.ranks.memory)})"
    whose = named(parts_of(column), on.width - NAMES - 12)
    products = f"{scaled(bill.products, 'FLOP')} in products"
    entries = {
        "weights": f"{scaled(bill.weights, 'B')} of {model.form}, {shared}",
        "keys, values": f"{scaled(bill.keys, 'B')}, {whose}",
        "arithmetic": f"{products}, {scaled(bill.attention, 'FLOP')} in attention",
        "experts": experts_of(state, column, bill),
        "window": windows_of(model, column),
    }
    on.entries(entries)


def named(parts: Sequence[Member], width: int) -> str:
    """As many of the sequences as find room, with how many rows each looks back on."""
    first, *others = parts
    words = f"{first.rows:,} rows of r{first.request}"
    if others:
        words = f"each its own: {words}"
    for i, part in enumerate(others):
        left = f", {len(others) - i:,} more"
        text = f", {part.rows:,} r{part.request}"
        if len(words + text + left) > width:
            return words + left
        words += text
    return words


def experts_of(state: State, column: Column, bill: StepCost) -> str:
    """How many experts were read, known or expected."""
    model = state.view.engine.model
    if not model.experts:
        return ""
    seen = seen_experts(state, column)
    words = f"{model.taken} of {model.experts:,} a token and layer"
    chance = expected(model, bill.tokens)
    if seen:
        mean = number(fmean(map(len, seen)))
        return f"{words}; read: {mean} a layer (by chance {number(chance)})"
    which = " (only its own screen knows which)" if state.view.watches else ""
    return f"{words}; expected: {number(chance)} a layer{which}"


def windows_of(model: ModelView, column: Column) -> str:
    """Where attention slides, if that would matter here."""
    rows = max((part.rows for part in parts_of(column)), default=0)
    if model.window is None or rows <= model.window:
        return ""
    return f"{model.windowed} of {model.layers} layers see {model.window:,} rows; older ones are read, and hidden"


def roof_of(state: State) -> str:
    """The measured roof."""
    roof = state.view.engine.roof
    if not roof.reading:
        if state.view.watches:
            return f"not measured there: a screen of its own does so ({command('tui.py')} --serve, then B)"
        return "is being measured"
    words = f"memory {scaled(roof.reading, 'B/s')}, arithmetic {scaled(roof.multiplying, 'FLOP/s')}"
    if roof.again > NEARER * roof.reading:
        source = "the weights once more" if roof.others else "the model fits a cache, which yields"
        words += f"; {source} {scaled(roof.again, 'B/s')}"
    if roof.others:
        words += f"; other programs took {roof.others:.1f} cores then: /bill again"
    return words


def draw_floors(state: State, on: Paper, column: Column) -> None:
    """The least time by each of the three bounds, over the real time."""
    step = column.view
    roof = state.view.engine.roof
    bill = this_bill(state, column)
    floors = floors_of(bill, roof)
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
    on.say(what_bounds(bill, step, roof) + how_usual(state, step), bold=True)


def how_usual(state: State, step: StepView) -> str:
    """Was it disturbed?"""
    usual = None if step.prefill else cost_of(state.costs.get(len(step.decode), ()))
    if usual is None or step.seconds < DISTURBED * usual:
        return ""
    return f" Other steps of so many rows took {span(usual)}."


FIGURES = (
    Figure("rows", 5, 0),
    Figure("bytes", 9, 3),
    Figure("arithmetic", 12, 4),
    Figure("roof", 9, 1),
    Figure("measured", 10, 0),
    Figure("weights", 12, 0, bar=True),
    Figure("keys", 9, 0),
    Figure("time", 9, 0),
)


def draw_counts(state: State, on: Paper, counts: Sequence[int], length: int) -> None:
    """Steps of so many rows side by side, and the share of a token."""
    model = state.view.engine.model
    room = on.width - 3 - sum(figure.width for figure in fitting(FIGURES, on.width - 1))
    has_room = room > 17
    title = f"A step of so many rows, each {length:,} long │ and what a token pays"
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
    """A line of the table. Without such a step in this run, nothing is measured."""
    engine = state.view.engine
    bill = of_rows(engine.model, rows, length)
    floors = floors_of(bill, engine.roof)
    seconds = cost_of(state.costs.get(rows, ()))
    return {
        "rows": f"{rows:,}",
        "bytes": scaled(bill.nbytes, "B"),
        "arithmetic": scaled(bill.operations, "FLOP"),
        "roof": span(floors and floors.longest),
        "measured": span(seconds),
        "weights": scaled(bill.weights / rows, "B"),
        "keys": scaled(bill.keys / rows, "B"),
        "time": span(seconds and seconds / rows),
    }


def draw_experts(state: State, on: Paper, column: Column) -> None:
    """Of each layer: the experts, and for each the number of tokens."""
    many = state.view.engine.model.experts
    seen = seen_experts(state, column)
    if seen:
        on.heading("Experts: by how many tokens each was read")
    for i, layer in enumerate(seen):
        whose = ", ".join(f"{expert} ×{tokens}" for expert, tokens in layer.items())
        words = f"{len(layer):,} of {many:,}: {whose}" if layer else "no token is asked"
        on.entry(f"layer {i}", shorten(words, on.width - NAMES - 2))


def bill_line(state: State) -> str:
    """The same of the newest step, in a line of the log."""
    column = state.here
    engine = state.view.engine
    if column is None:
        return f"no step has run yet; the roof: {roof_of(state)}"
    if column.lost:
        return f"{column.lost} The roof: {roof_of(state)}"
    bill = this_bill(state, column)
    floors = floors_of(bill, engine.roof)
    step = column.view
    words = [
        f"step {column.step:,}: {count(bill.tokens, 'token')}",
        f"weights {scaled(bill.weights, 'B')}, read once",
        f"keys and values {scaled(bill.keys, 'B')}",
        f"arithmetic {scaled(bill.operations, 'FLOP')}",
        f"took {span(step.seconds)}, of it Python {span(step.python_s)}",
        f"roof: {roof_of(state)}",
    ]
    if floors:
        words.append(
            f"at least {span(floors.reading)} to read, {span(floors.multiplying)} to multiply"
        )
    return f"{'; '.join(words)}. {what_bounds(bill, step, engine.roof)}".rstrip()


# --- the command --------------------------------------------------------------------------------


def obey(desk: Desk, rest: str) -> None:
    """Of the step under the cursor. The roof is measured the first time, and once more
    with "again"."""
    if rest not in ("", "again"):
        raise ValueError(f"/bill {shown(rest)}: only again may stand there; it measures the roof")
    engine = desk.state.view.engine
    if rest or not engine or not engine.roof.reading:
        desk.room.measure_roof()


def look(desk: Desk) -> bool:
    """The experts of the newest step: one question at a time, and one for each step."""
    engine = desk.state.view.engine
    newest = engine.planned if engine and engine.model.experts else None
    known = experts_in(desk.state)
    if newest and desk.heard and newest not in known:
        known[newest] = None
        desk.room.ask_experts()
    return False  # the answer is news


def take(state: State, before: View) -> None:
    if state.view.experts:
        known = experts_in(state)
        known[state.view.experts.step] = state.view.experts
        for step in [*known][:-ASKED]:
            del known[step]


def experts_in(state: State) -> dict[int, ExpertsView | None]:
    """By step: the experts. None: the question has no answer yet."""
    return state.kept.setdefault("bill", {})


PAGE = Page(
    "bill",
    "B",
    "StepCost",
    "the bill of a step: bytes, arithmetic and Python, under this machine's roof",
    draw,
    obey=obey,
    example="again",
    words=("again",),
    tell=lambda state: [bill_line(state)],
    own={"left": lambda state: state.move(-1), "right": lambda state: state.move(1)},
    take=take,
    look=look,
    is_live=True,
)
