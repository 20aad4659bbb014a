"""One answer as it streams: a list of items, each reasoning, content or a tool call.

    the model writes    <think>Hm.</think>I look.<tool_call>{"name": "add", ...
    item kinds          reasoning           content   tool_call
    chat                reasoning_content   content   tool_calls
    Responses           reasoning           message   function_call
    Messages            thinking            text      tool_use

An item starts, grows and stops. One item is open at a time, and when the answer is complete, each
has stopped. The adapters only translate these changes.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from engine.handle import Handle
from text.tokenizer import Tokenizer
from text.tool_parser import OutputParser


@dataclass
class Item:
    """A part of an answer: reasoning, content, or a tool call."""

    kind: str  # "reasoning", "content" or "tool_call"
    place: int = 0  # its position among all items
    nth: int = 0  # and among those of its kind
    name: str = ""  # of the tool
    # Of a call. Some templates require nine letters or digits
    id: str = field(default_factory=lambda: secrets.token_hex(5)[:9])
    status: str = "in_progress"  # then "completed", or "incomplete" if it was cut off
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """So far. Of a call: its arguments as JSON."""
        return "".join(self.pieces)


class Change(NamedTuple):
    """An item starts, grows or stops."""

    kind: str  # "start", "delta" or "stop"
    item: Item
    text: str = ""  # the new text of a delta
    words: Sequence[Word] | None = None  # log probabilities, if the request wants them


class Choice:
    """One answer to a prompt. A request may ask for several.

    `words`: only if the request wants log probabilities.
    """

    def __init__(
        self,
        handle: Handle,
        parser: OutputParser,
        words: Words | None,
    ):
        self.handle = handle
        self.items: list[Item] = []
        self.words: list[Word] | None = None if words is None else []
        self._parser = parser
        self._new_words = words

    @property
    def reason(self) -> str:
        """The finish reason."""
        reason = self.handle.finish_reason
        has_called = any(item.kind == "tool_call" for item in self.items)
        is_over = reason == "stop" or (reason == "length" and self._parser.is_over)
        is_over &= not self._parser.is_in_call  # the model may end its answer anywhere
        return "tool_calls" if has_called and is_over else reason

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens."""
        end = self._parser.reasoning_length
        return end and sum(place <= end for place in accumulate(self.handle.lengths))

    def text(self, kind: str) -> str:
        """All items of a kind, joined."""
        return "".join(item.text for item in self.items if item.kind == kind)

    def parse_whole(self) -> None:
        """Parse a complete answer at once."""
        for piece in (self.handle.text, None):
            for change in self.grow(piece):
                if change.words:
                    self.words += change.words

    def grow(self, piece: str | None) -> Iterator[Change]:
        """The changes by a piece of text. None: the answer is complete."""
        words = self._release(piece)
        is_cut = self.handle.finish_reason == "length"
        parts = self._parser.push(piece, piece is None and is_cut)
        for kind, text in parts:
            if kind == "tool_call":
                yield from self._start(kind, text)
                continue
            is_open = kind == "arguments" or (self.items and self.items[-1].kind == kind)
            if not is_open:
                yield from self._start(kind)
            item = self.items[-1]
            item.pieces.append(text)
            yield Change("delta", item, text, words)
            words = None if words is None else []
        if words:  # of a mark's tokens, such as <think>: no item has their text
            yield Change("delta", Item("content"), "", words)
        if piece is None:
            is_whole = self._parser.is_over or not (is_cut or self._parser.is_in_call)
            yield from self._stop("completed" if is_whole else "incomplete")

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


# --- the tokens of an answer as text --------------------------------------------------------------


class Word(NamedTuple):
    """One token of an answer: its text, that text's offset in the answer, and its log probability
    with those of the likeliest tokens."""

    text: str
    offset: int
    logprob: float
    top: list[tuple[str, float]]


class Words:
    """An answer's tokens as texts, which join to the answer.

    A token often has no text of its own: its bytes may end within a character, and a decoder drops
    the space before a first word. So a token's text is what the answer gains by it. Text that a
    stop string may yet cut off waits, and its token waits as well.

    A token is decoded only when its text is released: for a client that reads slowly, thousands of
    tokens may wait, and texts take more memory.
    """

    def __init__(self, text: Tokenizer, handle: Handle):
        self._text = text
        self._handle = handle
        self._stream = text.stream(())
        self._tokens: list[int] = []
        self._waiting: list[Word] = []
        self._length = 0  # characters of all texts
        self._shown = 0  # characters shown

    def _read(self, length: float) -> None:
        """Decode the next tokens until the texts have this length.

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
        """The words that are shown completely after `count` more characters."""
        self._shown += count
        self._read(self._shown)
        # If the answer ends within a character, the replacement character is the last token's
        complete = self._waiting[: len(self._waiting) - self._stream.open]
        released = []
        for word in complete:
            # A token without text waits for the text after it. The end token has none, and is never
            # shown
            if word.offset + max(len(word.text), 1) > self._shown:
                break
            released.append(word)
        self._waiting = self._waiting[len(released) :]
        return released

    def finish(self) -> list[Word]:
        """The rest of a complete answer, without tokens after its end, such as those of a stop
        string."""
        self._read(math.inf)
        text = self._handle.text
        left = [word for word in self._waiting if word.offset < len(text)]
        if left:  # its text may be cut off, or be a broken character
            last = left.pop()
            left.append(last._replace(text=text[last.offset :]))
        self._waiting = []
        return left
