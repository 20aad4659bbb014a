"""Conversations of this screen: questions and their answers.

A model remembers nothing, so each question is sent with the turns before it. The model sees the
same turns as the reader, except for dropped turns and failed answers, which the page marks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from cli.terminal_chat import Conversation
from engine.snapshot import RequestView
from screen.engine_view import AnswerRef
from text.tool_parser import split_reasoning


@dataclass
class Turn:
    """A question and its answer."""

    number: int  # number of the question, across all conversations
    question: str
    request: RequestView | None = None  # the request in the newest view; None: not queued yet
    is_dropped: bool = False  # no longer sent to the model
    is_stopped: bool = False  # the answer was cancelled

    @property
    def runs(self) -> bool:
        return self.request is None or self.request.reason is None


@dataclass
class Chat:
    """A conversation: its system message, its turns, and a waiting question."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    waiting: str = ""  # a question that waits for the running answer, or for room in the slot
    why: str = ""  # why there is no room
    below: int = 0  # number of lines below the visible ones

    @property
    def runs(self) -> Turn | None:
        """The turn whose answer is still running, if any."""
        return self.turns[-1] if self.turns and self.turns[-1].runs else None

    def take_back(self) -> str:
        """Remove and return the waiting question."""
        waiting = self.waiting
        self.waiting = self.why = ""
        return waiting

    def messages(self, question: str) -> list[dict[str, str]]:
        """Return the messages for the model, ending with this question."""
        said = Conversation()
        said.system = self.system
        for turn in self.turns:
            if not (turn.is_dropped or turn.request.error):
                thought, answer = split_reasoning(turn.request.text, turn.request.is_thinking)
                said.add(turn.question, answer, thought)
        return said.messages(question)


class ChatHistory:
    """All conversations of a screen. One of them is open."""

    def __init__(self) -> None:
        self.all = [Chat()]
        self.at = 0  # index of the open conversation
        self.asked = 0  # number of questions so far
        self.led = 0  # number of the question whose slot was selected last
        self.unfolded = False  # reasoning is shown in full

    @property
    def open(self) -> Chat:
        return self.all[self.at]

    def running(self) -> Iterator[Turn]:
        return (chat.runs for chat in self.all if chat.runs)

    def begin_chat(self) -> None:
        """Begin a conversation with the same system message, unless the open one is empty."""
        if self.open.turns:
            self.all.append(Chat(self.open.system, waiting=self.open.take_back()))
            self.at = len(self.all) - 1

    def add(self, chat: Chat) -> int:
        """Begin a turn with the waiting question. Return the question's number."""
        self.asked += 1
        chat.turns.append(Turn(self.asked, chat.waiting))
        chat.waiting = ""
        chat.below = 0
        return self.asked

    def refuse(self, number: int, why: str) -> None:
        """Remove a refused question. If it does not fit (`why`), keep it waiting."""
        for chat in self.all:
            for turn in chat.turns:
                if turn.number == number:
                    chat.turns.remove(turn)
                    chat.why = why
                    if why:  # a question typed in the meantime is appended
                        chat.waiting = f"{turn.question}\n{chat.waiting}".strip()
                    return

    def absorb(self, answers: Mapping[int, AnswerRef], requests: Mapping[int, RequestView]) -> None:
        """Update running turns. `answers` are by question number, `requests` by id."""
        for turn in self.running():
            answer = answers.get(turn.number)
            request = requests.get(answer.request, turn.request) if answer else None
            if request and answer.text is not None:
                reason = request.reason if answer.is_whole else None
                request = replace(request, text=answer.text, reason=reason)
            turn.request = request

    def lose(self) -> None:
        """Mark all running answers as failed, because the engine is gone."""
        for turn in self.running():
            if turn.request:
                turn.request = replace(turn.request, reason="error", error="the server has gone")
