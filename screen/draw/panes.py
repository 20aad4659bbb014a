"""The panes: pure functions from the state to lines of text.

The problem. A screen is hard to test, and a terminal may have any size.

What this file keeps. Each function writes the state on a paper, and a pane shows as many lines as
there is room for. Words without room are left out as a whole, since half of a number is a lie.
Nothing here remembers anything between two calls or knows a terminal, so a test compares text with
text.

Where next: `steps.py` and `charts.py`, more of them; `places.py`, the places of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from runtime.progress import UNREAD, PrefillProgress
from runtime.snapshot import RequestView, SlotView
from screen.draw import style
from screen.draw.canvas import Paper
from screen.draw.style import Line, Palette, Pen, clean, number, shorten, span, wrap
from screen.engine_client import View
from screen.state import State, client_of, prompt_of
from screen.stats import Period, words
from screen.step_columns import Column, useful_of
from text.tool_parser import marked

TOTALS = "page('totals')"  # opens the table of busy periods
PROMPT_END = "┊"  # in a slot's bar, while a long prompt is read
WAITING = 8  # lines in wait for the model: so many are shown, the newest
OFFER = "T takes a tour of eight scenes; Esc: do not offer it again."
FIRST = (  # in the timeline before the first step
    "b fires a burst of prompts; i types a prompt, and Enter fires it.",
    "Where no answers are in sight, v leads to them, and to other panes.",
    "space stops the engine, s takes a step: then read the step's plan.",
    "? explains every key and every word.",
)


def aligned(values: Iterable[str], widths: Sequence[int]) -> str:
    """Figures in columns of these widths, each at the right of a column. A width of 0 leaves the
    figure out."""
    return "".join(
        f"{value:>{width}}" for value, width in zip(values, widths, strict=False) if width
    )


def fit_slots(state: State, rows: int) -> range:
    """The slots in sight. If there is no room for all, the selected one is in the middle."""
    count = len(state.view.engine.slots)
    first = min(max(0, state.selected - rows // 2), max(0, count - rows))
    return range(first, min(count, first + rows))


def what_is_done(view: View) -> str:
    if view.gone_s is not None:
        return f"✗ gone for {view.gone_s:,.0f} s"
    if view.door and view.door.draining:
        return "⇣ ending"
    if view.engine.draining_to:
        return f"{'▮▮ paused,' if view.paused else '⇣'} draining → {view.engine.draining_to}"
    if view.paused:
        return "▮▮ paused"
    sign, word = "■", "idle"
    if view.busy:
        sign, word = "▶", "running"
    if view.racing:
        sign, word = "⚑", "racing"
    # The watcher's clock counts these steps; all other figures go by the engine's.
    return f"{sign} slow: {view.slow:g} steps/s" if view.slow else f"{sign} {word}"


def others_of(view: View) -> str:
    """Whether other programs take the cores: then a slow step is not the engine's fault."""
    return f"others: {view.others:.1f} of {view.cores} cores" if view.others else ""


def draw_status(state: State, on: Paper) -> None:
    """As many of the parts as find room, the first ones first."""
    pen = on.pen().put(" ")
    for text, *how in parts_of_status(state, on):
        if text and pen.width + cell_len(text) + 1 <= on.width:
            pen.put(text, *how)
            pen.put("  "[: on.width - pen.width])


def parts_of_status(state: State, on: Paper) -> Iterator[Sequence]:
    """Each part, as a pen takes it: text, colour, whether bold, and the action of a click."""
    view = state.view
    engine = view.engine
    past = state.past
    newest = state.history[-1].step if state.history else 0
    yield "nanobatch", on.text, True
    if past:
        yield f"◀ back at step {state.cursor:,} of {newest:,}", on.accent, True, "follow"
    yield shorten(clean(state.model).rstrip("/").rsplit("/", 1)[-1], 28), on.muted
    if state.book:
        yield shorten(f"book {state.book}", 20), on.accent
    colour = on.muted
    if view.gone_s is not None:
        colour = on.bad
    elif view.busy and not past:
        colour = on.accent
    doing = what_is_done(view)
    yield f"now: {doing}" if past else doing, colour, True, "pause"
    policy = engine.policy
    if past:
        policy = state.step.policy
    elif engine.draining_to:
        policy = ""
    yield policy, on.text, True, "command('/policy')"
    if engine.ranks.memory:
        yield f"{len(engine.ranks.memory)} ranks", on.text
    reads = not past and any(slot.prefill.is_long for slot in engine.slots)
    tokens_per_s = state.tokens_per_s() if view.busy or past else None
    if tokens_per_s or not reads:
        yield f"{number(tokens_per_s):>5} tok/s", on.text
    if reads:
        yield f"{number(engine.prompt_tokens_per_s):>5} prompt tok/s", on.text
    if view.busy and not past:
        yield others_of(view), on.bad, True
    yield f"{state.finished:,} ended", on.text, False, "page('requests')"
    if view.door:
        clients = sum(bool(call.requests) for call in view.door.open)
        address = view.door.address.partition("//")[2]
        yield f"{clients:,} asking at {address}", on.text, False, "page('clients')"
    if not past:
        yield f"step {newest:,}", on.muted
    yield f"{step_ms(state):>5} ms/step", on.muted
    if view.load:
        yield f"load {view.load:g}/s", on.text, False, "command('/load')"
    if engine.limits != view.made_with:
        yield f"budget {engine.limits.budget:,}", on.accent, False, "command('/budget off')"
    if state.tour:
        return  # the tour has the keys
    if view.paused:
        yield "space: go on", on.accent, False, "pause"
    elif view.slow:
        yield "0: full speed", on.accent, False, "command('/slow off')"


def step_ms(state: State) -> str:
    """The mean time of the last 20 steps."""
    columns = state.history[max(0, state.at - 19) : state.at + 1]
    seconds = [column.view.seconds for column in columns]
    return number(1000 * sum(seconds) / len(seconds) if seconds else None)


def why_waiting(state: State, slots: Sequence[SlotView]) -> str:
    """Why the first request in line waits. All others wait for the same reason."""
    view = state.view
    past = state.past
    if view.paused and not past:
        return "paused"
    if view.engine.draining_to and not past:
        return "wait: the slots are being drained"
    if all(slot.request is not None for slot in slots):
        return "wait: every slot is taken"
    if any(slot.phase == "blocked" for slot in slots):
        return f"wait: free slots are shut ({past.view.policy if past else view.engine.policy})"
    return "wait: the next step admits"


def draw_slots(state: State, on: Paper) -> None:
    """A line for each slot: the owner, and the rows of the KV cache, by kind."""
    slots = state.slots()
    rows = fit_slots(state, on.height - 3)
    widths = (11, 9, 7) if on.width >= 70 else (11,)
    right = aligned(("used/rows", "TTFT ms", "tok/s"), widths)
    bar = on.width - 18 - len(right)
    part = "" if len(rows) == len(slots) else f" {rows[0]}–{rows[-1]} of {len(slots)}"
    kinds = on.legend(style.REUSED, style.PREFILL, style.DECODE, style.REMEMBERED)
    on.heading(state.titled(f"Slots{part}"), legend=kinds)
    cache = shorten("rows of the KV cache", bar)
    on.axis((2, "#"), (4, "phase   req"), (18, cache), (18 + bar, right))
    for row in rows:
        draw_slot(state, on, slots[row], bar, widths)
    is_over = not state.view.busy and state.periods and state.periods[-1].over
    if is_over and not state.past:
        last_line(state.periods[-1], on)
    else:
        queue_line(state, slots, on)


def draw_slot(state: State, on: Paper, slot: SlotView, bar: int, widths: Sequence[int]) -> None:
    request = state.requests.get(slot.request)
    request = request and state.then(request)
    max_len = state.view.engine.limits.max_len
    hue = on.text if request else on.muted
    is_selected = slot.slot == state.selected
    how = (is_selected, f"select({slot.slot})")
    phase = state.phase(slot)
    pen = on.pen().put("▌" if is_selected else " ", on.accent)
    pen.put(f"{slot.slot:>2} ", hue, *how)
    pen.put(f"{phase:<8}", on.bad if phase == "blocked" else hue, *how)
    pen.put(f"r{request.id}" if request else "", hue, *how).to(18)
    draw_rows(pen, on.p, slot, max_len, bar)
    right = ""
    if request and slot.prefill.is_long:
        right = prefill_figures(slot.prefill, widths)
    elif request:
        ttft = request.metrics.ttft_s
        rate = request.metrics.tokens_per_s
        figures = (
            f"{slot.used:,}/{max_len:,}",
            "–" if ttft is None else f"{1000 * ttft:,.0f}",
            "–" if rate is None else f"{rate:,.0f}",
        )
        right = aligned(figures, widths)
    elif slot.remembered:  # no request owns these rows: another may reuse or overwrite them
        words = f"({slot.remembered:,} remembered)" if len(widths) > 1 else f"({slot.remembered:,})"
        right = f"{words:>{sum(widths)}}"
    pen.put(right, hue, *how)


def prefill_figures(prefill: PrefillProgress, widths: Sequence[int]) -> str:
    """In the place of a slot's figures, while a long prompt is read: how far, how long, how fast."""
    first, *rest = widths
    left = f"{prefill.left} left" if prefill.left else f"{prefill.total:,}"
    if not rest:
        return f"{left:>{first}}"
    width = first + rest[0]
    words = f"{prefill.done:,}/{prefill.total:,} {prefill.left}".rstrip()
    words = words if len(words) < width else left
    return f"{words:>{width}}" + f"{number(prefill.tokens_per_s):>{rest[1]}}"


def queue_line(state: State, slots: Sequence[SlotView], on: Paper) -> None:
    waiting, line = state.line()
    why = why_waiting(state, slots)
    pen = on.pen().put(f" queue {waiting:,}", bold=True)
    if waiting and pen.width + cell_len(why) + 14 <= on.width:
        pen.put(f"  {why}", on.bad if "shut" in why else on.muted)
    left = waiting  # requests without a name so far
    for request, waited in line:
        text = f"  r{request} {span(waited)}"
        if pen.width + len(text) + 12 > on.width and left > 1:
            break
        pen.put(text)
        left -= 1
    pen.put(f"  +{left:,} more" if left else "", on.muted)


def last_line(period: Period, on: Paper) -> None:
    """The last busy period, in as many phrases as there is room for."""
    pen = on.pen().put(" last:", bold=True, do=TOTALS)
    for i, phrase in enumerate(words(period)):
        text = f"{',' if i else ''} {phrase}"
        if pen.width + cell_len(text) > on.width:
            break
        pen.put(text, do=TOTALS)


def draw_rows(pen: Pen, p: Palette, slot: SlotView, max_len: int, width: int) -> None:
    """The rows of one slot as a bar. Each kind gets one cell at least, if there are rows of this
    kind."""
    prompt = min(slot.used, slot.prompt_tokens)
    kinds = (
        (min(slot.reused, prompt), style.REUSED),
        (prompt, style.PREFILL),
        (slot.used, style.DECODE),
        (slot.remembered, style.REMEMBERED),
    )
    start = drawn = 0
    for stop, kind in kinds:
        if stop > start:
            end = min(width, max(round(stop * width / max_len), drawn + 1))
            pen.put(style.GLYPHS[kind] * (end - drawn), p.cell(kind, slot.request))
            start = stop
            drawn = end
    if slot.prefill.is_long:  # a mark where the prompt will end
        end = max(drawn, min(width - 1, round(slot.prompt_tokens * width / max_len)))
        pen.put(style.GLYPHS[style.EMPTY] * (end - drawn), p.faint)
        pen.put(PROMPT_END * (end < width), p.fill(slot.request))
        drawn = end + 1
    pen.put(style.GLYPHS[style.EMPTY] * (width - drawn), p.faint)


def draw_cells(
    pen: Pen, p: Palette, columns: Sequence[Column], slot: int, cursor: int | None = None
) -> None:
    """One slot's line of a timeline, with each request's number behind the request's first cell.

    The first cell stays the same: so a prefill of one step can be seen, and numbers of neighbours
    never touch. A request with too few cells for the number is shown without. In other cells a
    small number says how many tokens came where some were drafted.
    """
    first = 0
    for request, group in groupby(columns, key=lambda column: column.cells[slot].request):
        stretch = list(group)
        kinds = [column.cells[slot].kind for column in stretch]
        label = "" if request is None or len(str(request)) >= len(kinds) else f" {request}"
        places = []
        for i, kind in enumerate(kinds):
            digit = label[i : i + 1].strip() or tokens_of(stretch[i], slot)
            places.append((kind, digit, first + i == cursor))
        for (kind, digit, here), alike in groupby(places):
            many = sum(1 for _ in alike)
            if digit:
                back = p.ground(kind, request)  # the cell's colour stays behind the digit
                pen.put(digit * many, style.style(style.ink_on(back), back, True, here))
            else:
                pen.put(style.GLYPHS[kind] * many, p.cell(kind, request, here))
        first += len(kinds)


def tokens_of(column: Column, slot: int) -> str:
    """How many tokens came, in a sign: where a step is a column, and some were drafted."""
    right = {drafter: right for drafter, _, right in column.view.drafts}
    is_known = column.steps == 1 and slot in right
    return style.SMALL[min(1 + right[slot], 10)] if is_known else ""


def draw_timeline(state: State, on: Paper) -> None:
    """Slots x steps: the work of each slot in each step. This picture shows the point of
    batching."""
    zoom, columns, cursor = state.window(on.width - 4)
    there = {column.cells[0].kind for column in columns}
    rare = there & {style.UNSEEN, style.FAILED}
    kinds = on.legend(
        *rare, style.PREFILL, style.DECODE, style.BLOCKED, style.HELD, style.GHOST, style.EMPTY
    )
    on.heading("Timeline", f"useful {useful_of(columns):.0f} %", kinds)
    hints = () if columns or state.tour else FIRST
    if state.offers_tour and hints:
        hints = (OFFER, *FIRST)
    hints = [f"{hint} " for hint in hints if cell_len(hint) < on.width - 5]
    for slot in fit_slots(state, on.height - 2):
        hue = on.text if slot == state.selected else on.muted
        pen = on.pen().put(f"{slot:>3} ", hue, do=f"select({slot})")
        draw_cells(pen, on.p, columns, slot, cursor)
        if hints:
            pen.put(hints.pop(0))
        pen.put(style.GLYPHS[style.EMPTY] * (on.width - pen.width), on.faint)
    if cursor is None:
        step_axis(on, columns, zoom)
    else:
        cursor_line(state, on, 4 + cursor)


def cursor_line(state: State, on: Paper, at: int) -> None:
    """Under the timeline: the cursor's step."""
    label = f"▲ step {state.cursor:,}  End: follow "
    if at + len(label) > on.width:  # the label stands at the left of its mark
        at = max(0, at + 1 - len(label))
        label = f"{label[1:]}▲"
    on.pen().to(at).put(label, on.accent, True)


def step_axis(on: Paper, columns: Sequence[Column], zoom: int) -> None:
    """Under the timeline: the numbers of some steps."""
    unit = "step" if zoom == 1 else f"1 column = {zoom} steps"
    every = 20 if zoom == 1 else 16
    last = min(len(columns), on.width - 3 - len(unit) - every)
    ticks = [(4 + i, f"╵{columns[i].step:,}") for i in range(0, last, every)]
    on.axis(*ticks, (on.width - len(unit) - 1, unit))


def draw_stream(state: State, on: Paper, slot: int) -> None:
    """One slot's request: prompt, and the growing end of the text."""
    request = state.owner(slot)
    is_selected = slot == state.selected
    pen = on.pen()
    if request is None:
        pen.put(f"slot {slot}  ", on.muted, is_selected).put("nothing yet", on.muted)
        return
    hue = on.text if is_selected else on.muted
    pen.put(f"slot {slot} r{request.id}", hue, True, f"select({slot})")
    pen.put(f" {request.reason}" if request.reason else "", on.muted)
    pen.put(f" ← {client_of(request)}" if client_of(request) else "", on.muted)
    pen.put(f"  {shorten(prompt_of(request), on.width - pen.width - 3)}", on.muted)
    below = Paper(on.p, on.width, on.height)
    now = state.slots()[slot]
    prefill = now.prefill if now.request == request.id else UNREAD
    if prefill.is_long:
        below.say(f"reading: {prefill.words}", on.muted, indent=0)
    growing = "" if request.reason or prefill.is_long else "▏"
    for kind, text in marked(clean(request.text) + growing, request.is_thinking):
        for line in wrap(text, on.width - 1):
            below.pen().put(line, hue_of(on, kind))
    glass = draw_glass(request, on) if on.height > 2 else []
    room = on.room - len(glass)
    on.lines += below.lines[-room:] if room > 0 else []
    on.lines += glass


def draw_glass(request: RequestView, on: Paper) -> list[Line]:
    """JSON under glass: the newest token; then, without the grammar, the likeliest others, the
    forbidden struck through. A blank is drawn (␣), for a token may be nothing else."""
    pen = Pen()
    for i, (text, probability, is_allowed) in enumerate(request.glass):
        said = clean(repr(text)[1:-1]).replace(" ", "␣")
        words = f"{'✓' if is_allowed else '✗'}{said} {probability:.0%}"
        if pen.width + cell_len(words) + 2 > on.width:
            break
        if i == 1:
            pen.put("│ ", on.faint)
        pen.put(words, on.accent if is_allowed else Style(color=on.muted, strike=True)).put("  ")
    return [pen.line] if pen.line else []


def hue_of(on: Paper, kind: str) -> str:
    """Of a part of an answer: thoughts are dim, and calls of tools stand out."""
    return {"thought": on.muted, "call": on.accent}.get(kind, on.text)


def draw_streams(state: State, on: Paper) -> None:
    """All slots' texts, if there are two lines for each of them; else only the selected slot's."""
    count = len(state.view.engine.slots)
    across = max(1, min(count, (on.width + 2) // 30))
    tall = (on.height - 1) // math.ceil(count / across)  # lines for each slot
    slots: Sequence[int] = range(count)
    if tall < 2:
        across = 1
        tall = on.height - 1
        slots = [state.selected]
    wide = on.width // across
    on.heading(state.titled("Answers"), "y copies" if len(slots) == 1 else "")
    for first in range(0, len(slots), across):
        beside = []
        for slot in slots[first : first + across]:
            beside.append(Paper(on.p, wide - 2, tall))
            draw_stream(state, beside[-1], slot)
        for row in range(tall):
            line: Line = []
            for paper in beside:
                part = Strip(paper.lines[row] if row < len(paper.lines) else [])
                line += [Segment(" "), *part.adjust_cell_length(wide - 1)]
            on.lines.append(line)


def draw_loading(state: State, on: Paper) -> None:
    """The stages of loading; or the fault, and the remedy."""
    view = state.view
    indent = max(2, (on.width - 70) // 2)
    say = partial(on.say, indent=indent)
    say("nanobatch", bold=True)
    say("watch an LLM serving engine work\n", on.muted)
    *before, last = view.done or ("starting",)
    for stage in before:
        say(f"✓ {stage}", on.muted)
    say(f"{'✗' if view.stage == 'failed' else '…'} {last}")
    if view.error:
        say(f"\n{view.error}", on.bad, bold=True)
    else:
        on.lines += [[]] * bool(state.waiting)
        for line in state.waiting[-WAITING:]:
            words = shorten(line, on.width - 2 * indent - 24)
            say(f"  {words}  waits for the model", on.accent)
        say(state.printed and f"  {state.printed}", on.muted)
        if view.door:
            say(f"\n{view.door.address}/v1 is open, and answers 503 until then", on.muted)
    say("\nq quits", on.muted, do="quit")
    on.lines[:0] = [[]] * max(0, on.room // 3)


def draw_small(state: State, on: Paper) -> None:
    for part in wrap("nanobatch needs 60×20 characters; q quits", on.width):
        on.pen().put(part)


def draw_mark(state: State, on: Paper) -> None:
    on.pen().put(" ❯", on.accent if state.typing else on.faint, state.typing)


def draw_settings(state: State, on: Paper) -> None:
    """How the next prompt is fired; before the first, the key for the box. For a while after
    a key, the key's effect."""
    if state.said:
        words = shorten(state.said, on.width - 2)
        on.pen().to(on.width - 1 - cell_len(words)).put(words, on.accent, do="settings")
        return
    settings = state.settings
    seed = "–" if settings.seed is None else settings.seed
    usual = state.view.temperature
    temperature = usual if settings.temperature is None else settings.temperature
    first = "" if state.has_typed else "press i to type"
    words = first
    for part in (
        f"temp {temperature:g}",
        f"max {settings.max_tokens:,} tok",
        f"seed {seed}",
    ):
        longer = f"{words} · {part}" if words else part
        if cell_len(longer) > on.width - 2:
            break
        words = longer
    pen = on.pen().to(on.width - 1 - cell_len(words))
    pen.put(first, on.accent, True, "prompt")
    pen.put(words.removeprefix(first), on.muted, do="settings")
