"""The status line, the settings of the next prompt, and the screens without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from rich.cells import cell_len

from screen.draw.canvas import Canvas
from screen.draw.style import clean, number, shorten, wrap
from screen.engine_view import View
from screen.state import State

WAITING = 8  # number of newest commands shown while the model loads


def what_is_done(view: View) -> str:
    if view.gone_s is not None:
        return f"✗ gone for {view.gone_s:,.0f} s"
    if view.server and view.server.draining:
        return "⇣ ending"
    if view.engine.draining_to:
        return f"{'▮▮ paused,' if view.paused else '⇣'} draining → {view.engine.draining_to}"
    if view.paused:
        return "▮▮ paused"
    doing = "■ idle"
    if view.busy:
        doing = "▶ running"
    if view.experiment and view.experiment.doing:
        doing = view.experiment.doing
    # Steps per second of real time; all other figures use the engine's clock
    return f"{doing[0]} slow: {view.slow:g} steps/s" if view.slow else doing


def others_of(view: View) -> str:
    """Return how many cores other programs use, because they slow down steps."""
    return f"others: {view.others:.1f} of {view.cores} cores" if view.others else ""


def draw_status(state: State, on: Canvas) -> None:
    """Draw the parts of the status line that fit, in order."""
    pen = on.pen().put(" ")
    for text, *how in parts_of_status(state, on):
        if text and pen.width + cell_len(text) + 1 <= on.width:
            pen.put(text, *how)
            pen.put("  "[: on.width - pen.width])


def parts_of_status(state: State, on: Canvas) -> Iterator[Sequence]:
    """Yield the parts as arguments of `Pen.put`: text, colour, bold, and the action of a click."""
    view = state.view
    engine = view.engine
    past = state.past
    newest = state.history[-1].step if state.history else 0
    yield "nanobatch", on.text, True
    if past:
        yield f"◀ back at step {state.cursor:,} of {newest:,}", on.accent, True, "follow"
    yield shorten(clean(state.model).rstrip("/").rsplit("/", 1)[-1], 28), on.muted
    if view.foreign:
        yield shorten(clean(view.foreign), 20), on.accent
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
    if view.server:
        clients = sum(bool(call.requests) for call in view.server.open)
        address = view.server.address.partition("//")[2]
        yield f"{clients:,} asking at {address}", on.text, False, "page('clients')"
    if not past:
        yield f"step {newest:,}", on.muted
    yield f"{step_ms(state):>5} ms/step", on.muted
    if view.load:
        yield f"load {view.load:g}/s", on.text, False, "command('/load')"
    if engine.limits != view.made_with:
        yield f"budget {engine.limits.budget:,}", on.accent, False, "command('/budget off')"
    if state.strip:
        return  # the strip's page handles the keys
    if view.paused:
        yield "space: go on", on.accent, False, "pause"
    elif view.slow:
        yield "0: full speed", on.accent, False, "command('/slow off')"


def step_ms(state: State) -> str:
    """Return the mean time of the 20 steps up to the cursor, in milliseconds."""
    columns = state.history[max(0, state.at - 19) : state.at + 1]
    seconds = [column.view.seconds for column in columns]
    return number(1000 * sum(seconds) / len(seconds) if seconds else None)


def draw_loading(state: State, on: Canvas) -> None:
    """Draw the stages of loading, or the error and its remedy."""
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
        if view.server:
            say(f"\n{view.server.address}/v1 is open, and answers 503 until then", on.muted)
    say("\nq quits", on.muted, do="quit")
    on.lines[:0] = [[]] * max(0, on.lines_left // 3)


def draw_small(state: State, on: Canvas) -> None:
    for part in wrap("nanobatch needs 60×20 characters; q quits", on.width):
        on.pen().put(part)


def draw_mark(state: State, on: Canvas) -> None:
    on.pen().put(" ❯", on.accent if state.typing else on.faint, state.typing)


def draw_settings(state: State, on: Canvas) -> None:
    """Draw the last message, or the settings of the next prompt and a hint for a new user."""
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
