"""Conversations: what was asked from this screen, and what was answered.

The problem. A model remembers nothing, so each question is sent with all that was said before. And the
engine's requests are forgotten after a while, while a conversation stays.

What this file keeps. The model is shown what the page shows, but for what is marked there: turns that
were dropped, and answers that failed. Nothing is ever dropped but by the user.

Where next: `state.py`, which keeps the conversations; `pages/talk.py`, which draws them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from parts.api.views import RequestView
from parts.dialogue import Conversation
from parts.text.speech import apart


@dataclass
class Turn:
    """A question and its answer."""

    number: int  # of the question, among all of this screen's
    question: str
    request: RequestView | None = None  # as the newest view has it; None: not in line yet
    is_dropped: bool = False  # the model is not shown it any more
    is_stopped: bool = False  # its answer has been told to end

    @property
    def runs(self) -> bool:
        return self.request is None or self.request.reason is None


@dataclass
class Talk:
    """A conversation."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    waiting: str = ""  # a question that waits: for the answer that runs, or for room in the slot
    why: str = ""  # why there is no room
    below: int = 0  # so many of its last lines are below what is in sight

    @property
    def runs(self) -> Turn | None:
        """The turn whose answer runs."""
        return self.turns[-1] if self.turns and self.turns[-1].runs else None

    def take(self) -> str:
        """The question that waits. It waits no more."""
        waiting = self.waiting
        self.waiting = self.why = ""
        return waiting

    def messages(self, question: str) -> list[dict[str, str]]:
        """What the model is shown."""
        said = Conversation()
        said.system = self.system
        for turn in self.turns:
            if not (turn.is_dropped or turn.request.error):
                thought, answer = apart(turn.request.text, turn.request.is_thinking)
                said.add(turn.question, answer, thought)
        return said.messages(question)


class Talks:
    """All conversations of a screen. One of them is open."""

    def __init__(self) -> None:
        self.all = [Talk()]
        self.at = 0  # the open one
        self.asked = 0  # so many questions so far
        self.led = 0  # the question whose slot was selected last
        self.unfolded = False  # thoughts are shown whole

    @property
    def open(self) -> Talk:
        return self.all[self.at]

    def running(self) -> Iterator[Turn]:
        return (talk.runs for talk in self.all if talk.runs)

    def begin(self) -> None:
        """Another conversation, with the same system message. One in which nothing was said is as
        good."""
        if self.open.turns:
            self.all.append(Talk(self.open.system, waiting=self.open.take()))
            self.at = len(self.all) - 1

    def add(self, talk: Talk) -> int:
        """What waits is asked. Answers with the number of the question."""
        self.asked += 1
        talk.turns.append(Turn(self.asked, talk.waiting))
        talk.waiting = ""
        talk.below = 0
        return self.asked

    def refuse(self, number: int, why: str) -> None:
        """A question could not be fired. `why`: it waits for room."""
        for talk in self.all:
            for turn in talk.turns:
                if turn.number == number:
                    talk.turns.remove(turn)
                    talk.why = why
                    if why:  # the one that was typed meanwhile goes with it
                        talk.waiting = f"{turn.question}\n{talk.waiting}".strip()
                    return

    def absorb(
        self,
        numbers: Mapping[int, int],
        requests: Mapping[int, RequestView],
        heard: Mapping[int, tuple[str, bool]],
    ) -> None:
        """`numbers`: of each question, that of its request. `heard`: of requests whose text the view
        lacks, what has come of it, and whether that is all."""
        for turn in self.running():
            request = requests.get(numbers.get(turn.number), turn.request)
            if request and request.id in heard:
                text, is_whole = heard[request.id]
                reason = request.reason if is_whole else None
                request = replace(request, text=text, reason=reason)
            turn.request = request

    def lose(self) -> None:
        """The engine is gone, and all that ran there."""
        for turn in self.running():
            if turn.request:
                turn.request = replace(turn.request, reason="error", error="the server has gone")
