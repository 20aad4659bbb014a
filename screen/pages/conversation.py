"""The conversation, which replaces most panes. Some stay visible above or next to it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from base.installation import command
from cli.terminal_chat import figures, room_left
from screen.chat_history import Chat, Turn
from screen.draw.canvas import Canvas
from screen.draw.style import clean, count, shorten, wrap
from screen.page import Page
from screen.state import State
from text.tool_parser import split_reasoning

if TYPE_CHECKING:
    from screen.commands import Session

WIDEST = 100  # longer lines are hard to read
THOUGHT = 3  # visible lines of a thought while the model thinks


def draw(state: State, on: Canvas) -> None:
    chats = state.chats
    chat = chats.open
    body = Canvas(on.p, min(on.width, WIDEST), on.height)
    body.say(chat.system and f"system: {chat.system}\n", on.muted)
    if not state.view.has_chat:
        body.say("This model has no chat template: each question is sent alone.\n", on.muted)
    for before, turn in pairwise([None, *chat.turns]):
        draw_turn(state, body, turn, before)
    draw_rest(state, body, chat)
    above = max(0, len(body.lines) - on.height + 1)
    chat.below = max(0, min(chat.below, above))
    above -= chat.below
    note = f"{above:,} lines above, {chat.below:,} below: PgUp" if above or chat.below else ""
    number = f"{chats.at + 1} of {len(chats.all)}: " if len(chats.all) > 1 else ""
    title = shorten(chat.turns[0].question, 40) if chat.turns else "nothing was said yet"
    on.heading(f"Conversation {number}{title}", note)
    on.lines += body.lines[above : len(body.lines) - chat.below]


def draw_turn(state: State, on: Canvas, turn: Turn, before: Turn | None) -> None:
    from screen.draw import markdown  # takes 30 ms, too long before the first frame

    hue = on.muted if turn.is_dropped else on.text
    if turn.is_dropped:
        on.say("left out: the model no longer sees this question and its answer", on.bad)
    on.say(f"❯ {clean(turn.question)}\n", hue, True)
    r = turn.request
    if r is None:
        on.say("waits for the engine", on.muted)
        on.pen()
        return
    now = state.then(r) if state.past else r
    thought, answer = split_reasoning(now.text, now.is_thinking)
    draw_thought(state, on, thought, turn.runs and not answer)
    if answer:
        on.lines += markdown.lines_of(answer, on.width, on.p, hue, turn.runs)
        on.pen()
    on.say(clean(r.error or ""), on.bad)
    if r.reason:
        on.say(told(state, turn, before), on.muted)
    elif not now.text:
        slot = next((slot for slot in state.slots() if slot.request == r.id), None)
        words = "in line"
        if slot and slot.prefill.is_long:
            words = f"reading: {slot.prefill.words}"
        elif slot:
            words = f"reading: {slot.used:,} of {slot.prompt_tokens:,} tokens"
        on.say(words, on.muted)
    on.pen()


def draw_thought(state: State, on: Canvas, thought: str, is_open: bool) -> None:
    """Draw a thought in a dim colour, folded once it is finished."""
    if not thought:
        return
    words = f" ▸ thought: {count(len(thought.split()), 'word')}"
    on.pen().put(words, on.muted, do="command('/thoughts')")
    lines = wrap(clean(thought), on.width - 4)
    shown = lines if state.chats.unfolded else lines[-THOUGHT:] if is_open else []
    on.say("\n".join([*shown, ""]), on.muted, indent=3)


def told(state: State, turn: Turn, before: Turn | None) -> str:
    """Return the figures of a turn and, for the last one, the tokens left in the slot."""
    r = turn.request
    m = r.metrics
    where = f"slot {before.request.slot}" if before else "a slot"
    left = ""
    if turn is state.chats.open.turns[-1]:
        length = state.view.engine.limits.max_len
        left = room_left(length - m.prompt_tokens - m.output_tokens, length)
    return figures(m, r.reason, where) + left


def draw_rest(state: State, on: Canvas, chat: Chat) -> None:
    """Draw a waiting question, or how to begin a conversation."""
    if chat.waiting:
        on.say(f"❯ {shorten(chat.waiting, on.width - 4)}", on.muted)
        on.say(chat.why or "waits for the answer above", on.bad if chat.why else on.muted)
    elif not chat.turns:
        begin = "Type a question" if state.typing else "i begins a question"
        on.say(
            f"{begin}: Enter asks it, ctrl+j begins another line.\n"
            "/system TEXT sets the system message. /new begins another conversation, and "
            "ctrl+n leads from one to the next: several at once share each step.",
            on.muted,
        )


def obey(session: Session, rest: str) -> None:
    if not session.has_chats:
        raise ValueError(
            f"a conversation needs a screen; {command('ask.py')} --chat has one in lines"
        )


PAGE = Page(
    "talk",
    "o",
    "Talk",
    "the conversation, large, with the engine beside it; again: back to the panes",
    draw,
    obey=obey,
    pane=draw,
    is_view=True,
)
