"""One answer as it comes: a row of items, each a thought, a text, or a call of a tool.

The problem. A handle has text. Clients want to know what each piece of it belongs to, and each
protocol has other words for that:

    the model writes    <think>Hm.</think>I look.<tool_call>{"name": "add", ...
    here                thought             answer    call
    chat                reasoning_content   content   tool_calls
    Responses           reasoning           message   function_call
    Messages            thinking            text      tool_use

The way out. What happens to an item is found out once, here: it starts, it grows, it stops. A
protocol only has to say so in its own words.

What this file keeps. One item is open at a time. What has started stops, if the answer is complete.

Where next: `protocol.py`, what the protocols share.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from parts.api.handle import Handle
from parts.text.speech import Parser
from parts.text.tokens import Text


@dataclass
class Item:
    """A part of an answer that is told apart."""

    kind: str  # "thought", "answer" or "call"
    place: int = 0  # so many items stand before it
    nth: int = 0  # and so many of its kind
    name: str = ""  # of the tool that is called
    # Of a call. The templates of some models want nine letters or digits
    id: str = field(default_factory=lambda: secrets.token_hex(5)[:9])
    status: str = "in_progress"  # then "completed", or "incomplete": it has been cut off
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """So far. Of a call: its arguments, in JSON."""
        return "".join(self.pieces)


class Change(NamedTuple):
    """What happens to an item."""

    kind: str  # "start", "delta" or "stop"
    item: Item
    text: str = ""  # by which it grows
    words: Sequence[Word] | None = None  # with their log probabilities, if these are wanted


class Choice:
    """One answer to one prompt. A request may ask for several.

    `words`: only if log probabilities are wanted.
    """

    def __init__(self, handle: Handle, parser: Parser, words: Words | None):
        self.handle = handle
        self.items: list[Item] = []
        self.words: list[Word] | None = None if words is None else []
        self.times: list[float] = []  # when its pieces came here
        self.has_ended = False  # its end has been taken
        self._parser = parser
        self._new_words = words
        self._seen = 0  # so many of the handle's pieces have been taken

    @property
    def reason(self) -> str:
        """Why it has ended."""
        reason = self.handle.finish_reason
        has_called = any(item.kind == "call" for item in self.items)
        return "tool_calls" if has_called and reason == "stop" else reason

    @property
    def thought(self) -> int:
        """So many tokens are thoughts."""
        end = self._parser.thought
        return end and sum(place <= end for place in accumulate(self.handle.lengths))

    def text(self, kind: str) -> str:
        """All items of a kind as one."""
        return "".join(item.text for item in self.items if item.kind == kind)

    def has_news(self, is_streamed: bool) -> bool:
        """Is there anything that `news` would give?"""
        if self.has_ended:
            return False
        has_grown = is_streamed and len(self.handle.pieces) > self._seen
        return has_grown or self.handle.finish_reason is not None

    def news(self, is_streamed: bool) -> Iterator[str | None]:
        """The pieces of text that have come since, if they are streamed. At the end, None."""
        if self.has_ended:
            return
        ends = self.handle.finish_reason is not None  # asked first: then all pieces are there
        if is_streamed:
            for piece in self.handle.pieces[self._seen :]:
                self._seen += 1
                self.times.append(time.perf_counter())
                yield piece
        if ends:
            self.has_ended = True
            yield None

    def read(self) -> None:
        """The whole answer at once, when it is complete."""
        for piece in (self.handle.text, None):
            for change in self.grow(piece):
                if change.words:
                    self.words += change.words

    def grow(self, piece: str | None) -> Iterator[Change]:
        """What a piece of text does to the items. None: the answer is complete."""
        words = self._release(piece)
        parts = self._parser.finish() if piece is None else self._parser.push(piece)
        for kind, text in parts:
            if kind == "call":
                yield from self._start(kind, text)
                continue
            is_open = kind == "arguments" or (self.items and self.items[-1].kind == kind)
            if not is_open:
                yield from self._start(kind)
            item = self.items[-1]
            item.pieces.append(text)
            yield Change("delta", item, text, words)
            words = None if words is None else []
        if words:  # of tokens that are a mark, or a part of one
            yield Change("delta", Item("answer"), "", words)
        if piece is None:
            is_cut = self.handle.finish_reason == "length"
            yield from self._stop("incomplete" if is_cut else "completed")

    def _start(self, kind: str, name: str = "") -> Iterator[Change]:
        yield from self._stop("completed")
        alike = (item.nth + 1 for item in reversed(self.items) if item.kind == kind)
        nth = next(alike, 0)
        item = Item(kind, len(self.items), nth, name)
        self.items.append(item)
        yield Change("start", item)

    def _stop(self, status: str) -> Iterator[Change]:
        if self.items:
            self.items[-1].status = status
            yield Change("stop", self.items[-1])

    def _release(self, piece: str | None) -> Sequence[Word] | None:
        if self._new_words is None:
            return None
        if piece is None:
            return self._new_words.finish()
        return self._new_words.release(len(piece))


# --- the tokens of an answer as text ------------------------------------------------------------


class Word(NamedTuple):
    """One token of an answer: its text, where that begins in the answer, and what the model thought
    of it."""

    text: str
    offset: int
    logprob: float
    top: list[tuple[str, float]]


class Words:
    """An answer's tokens as texts that join to the answer, as they come.

    A token is often no text by itself: its bytes may end within a character, and a decoder drops
    the space before a first word. So each token's text is what it adds to those before it. A token
    whose text may be cut off by a stop text waits, as its text does.

    Tokens become texts when these are released. A client that reads slowly may let thousands wait,
    and their texts take more than the tokens.
    """

    def __init__(self, text: Text, handle: Handle):
        self._text = text
        self._handle = handle
        self._stream = text.stream(())
        self._tokens: list[int] = []
        self._waiting: list[Word] = []
        self._length = 0  # characters of all texts so far
        self._shown = 0  # characters that have been shown

    def _read(self, length: float) -> None:
        """Read the next tokens of the answer, until the texts so far are so long.

        The newest token may lack its log probability for a moment.
        """
        tokens = self._handle.tokens
        logprobs = self._handle.logprobs
        while self._length < length and len(self._tokens) < min(len(tokens), len(logprobs)):
            token = tokens[len(self._tokens)]
            logprob, top, _ = logprobs[len(self._tokens)]
            before = self._tokens[-4:]
            piece = self._stream.push(token)
            others = [id for id, _ in top if id != token]
            texts = dict(zip(others, self._text.after(before, others), strict=True))
            likely = [(texts.get(id, piece), value) for id, value in top]
            self._tokens.append(token)
            self._waiting.append(Word(piece, self._length, logprob, likely))
            self._length += len(piece)

    def release(self, count: int) -> list[Word]:
        """Those whose text has been shown, now that so many more characters have."""
        self._shown += count
        self._read(self._shown)
        # If the answer ends within a character, what is shown of that belongs to the last token
        complete = self._waiting[: len(self._waiting) - self._stream.open]
        released = []
        for word in complete:
            # One without a text of its own waits for the text after it: it may be the end token,
            # which is not shown
            if word.offset + max(len(word.text), 1) > self._shown:
                break
            released.append(word)
        self._waiting = self._waiting[len(released) :]
        return released

    def finish(self) -> list[Word]:
        """The rest, when the answer is complete. Tokens behind its end, such as a stop text's, are
        left out."""
        self._read(math.inf)
        text = self._handle.text
        left = [word for word in self._waiting if word.offset < len(text)]
        if left:  # it may be cut off, or a broken character
            last = left.pop()
            left.append(last._replace(text=text[last.offset :]))
        self._waiting = []
        return left
