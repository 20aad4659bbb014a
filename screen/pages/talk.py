"""The conversation: large, with the engine as a strip beside it.

The problem. Somebody who has a model wants to talk with it, and an answer of two lines in a grid of
eight is no place to read. But whoever reads wants to see the engine at work, too.

What this file keeps. All that was said stands there, as it streams; thoughts are dim, and folded when
they are over. What the model is not shown any more is marked.

Where next: `talks.py`, what a conversation is; `markdown.py`; `places.py`, where the strip goes.
"""

from __future__ import annotations

from parts.checks import read_whole
from parts.dialogue import figures, room_left
from parts.text.speech import marked, unmarked
from screen.ink import clean, count, shorten, wrap
from screen.page import Desk, Page
from screen.paper import Paper
from screen.state import State
from screen.talks import Talk, Turn

WIDEST = 100  # longer lines are hard to read
THOUGHT = 3  # so many lines of a thought are shown while the model thinks


def draw(state: State, on: Paper) -> None:
    talks, talk = state.talks, state.talks.open
    body = Paper(on.p, min(on.width, WIDEST), on.height)
    if talk.system:
        body.say(f"system: {talk.system}", on.muted)
        body.pen()
    if not state.view.speaks:
        body.say("This model has no chat template: each question stands alone.", on.muted)
        body.pen()
    for i, turn in enumerate(talk.turns):
        draw_turn(state, body, turn, talk.turns[i - 1] if i else None)
    draw_rest(state, body, talk)
    below = max(0, min(state.above, len(body.lines) - on.height + 1))
    state.above = below
    end = len(body.lines) - below
    start = max(0, end - on.height + 1)
    note = f"{count(below, 'line')} below, PgDn" if below else f"↑ {start:,} PgUp" if start else ""
    number = f"{talks.at + 1} of {len(talks.all)}: " if len(talks.all) > 1 else ""
    on.heading(f"Conversation {number}{talk.title}", note, do="page('talk')")
    on.lines += body.lines[start:end]


def draw_turn(state: State, on: Paper, turn: Turn, before: Turn | None) -> None:
    from screen import markdown  # 30 ms, that a first frame need not wait for

    hue = on.muted if turn.is_dropped else on.text
    if turn.is_dropped:
        on.say("╌╌ forgotten: the model is not shown this any more", on.bad)
    for i, line in enumerate(wrap(clean(turn.question), on.width - 4)):
        on.pen().put(" ❯ " if not i else "   ", on.accent).put(line, hue, True)
    on.pen()
    r = turn.request
    if r is None:
        on.say("waits for the engine", on.muted)
        on.pen()
        return
    now = state.then(r) if state.past else r
    parts = marked(now.text, now.is_thinking)
    for kind, text in parts:
        if kind == "thought":
            draw_thought(state, on, unmarked(text), len(parts) == 1 and not r.reason)
        else:
            on.lines += markdown.lines_of(text, on.width, on.p, hue, turn.runs)
            on.pen()
    on.say(clean(r.error or ""), on.bad)
    if r.reason:
        on.say(told(state, turn, before), on.muted)
    elif not now.text:
        slot = next((slot for slot in state.slots() if slot.request == r.id), None)
        read = f"reading: {slot.used:,} of {slot.prompt_tokens:,} tokens" if slot else "in line"
        on.say(read, on.muted)
    on.pen()


def draw_thought(state: State, on: Paper, thought: str, is_open: bool) -> None:
    """Dim, and folded when it is over."""
    lines = wrap(clean(thought), on.width - 4)
    words = f"▸ thought: {count(len(thought.split()), 'word')}"
    on.pen().to(1).put(words, on.muted, do="command('/thoughts')")
    shown = lines if state.talks.unfolded else lines[-THOUGHT:] if is_open else []
    for line in shown:
        on.pen().to(3).put(line, on.muted)
    on.pen()


def told(state: State, turn: Turn, before: Turn | None) -> str:
    """What a turn took, and what its conversation leaves of a slot."""
    r, m = turn.request, turn.request.metrics
    where = "a slot"
    if before and before.request and before.request.slot is not None:
        where = f"slot {before.request.slot}"
    left = ""
    if turn is state.talks.open.turns[-1]:
        length = state.view.engine.limits.max_len
        left = room_left(length - m.prompt_tokens - m.output_tokens, length)
    return figures(m, r.reason, where) + left


def draw_rest(state: State, on: Paper, talk: Talk) -> None:
    """Behind the last turn: what waits, or how to begin."""
    if talk.waiting:
        on.say(f"❯ {shorten(talk.waiting, on.width - 4)}", on.muted)
        on.say(talk.why or "waits for the answer above", on.bad if talk.why else on.muted)
    elif not talk.turns:
        on.say("Type a question: Enter asks it, alt+enter begins another line.", on.muted)
        on.say(
            "/system TEXT tells the model who it is. /new begins another conversation, and "
            "ctrl+n leads from one to the next: several at once share each step.",
            on.muted,
        )


def obey(desk: Desk, rest: str) -> None:
    """Open a conversation, by its number."""
    if not desk.talks:
        raise ValueError("a conversation needs a screen; python ask.py --chat has one in lines")
    talks = desk.state.talks
    if rest:
        talks.at = read_whole("talk", rest, 1, len(talks.all)) - 1
    desk.state.above = 0


PAGE = Page(
    "talk",
    "o",
    "Talk",
    "the conversation, large, with the engine beside it; again: back to the panes",
    draw,
    obey=obey,
    example="1",
    is_view=True,
)
