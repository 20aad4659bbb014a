"""One answer as it streams: a list of items, each reasoning, content or a tool call.

    the model writes    <think>Hm.</think>I look.<tool_call>{"name": "add", ...
    item kinds          reasoning           content   tool_call
    chat                reasoning_content   content   tool_calls
    Responses           reasoning           message   function_call
    Messages            thinking            text      tool_use

An item starts, grows and stops. Only one item is open at a time, and all have stopped when the answer
is complete. The adapters only translate these changes.
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
    place: int = 0  # index among all items
    nth: int = 0  # index among the items of the same kind
    name: str = ""  # the tool's name, for a tool call
    # The tool call's id. Some templates require nine letters or digits
    id: str = field(default_factory=lambda: secrets.token_hex(5)[:9])
    status: str = "in_progress"  # later "completed", or "incomplete" if it was cut off
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text received so far. For a tool call, its arguments as JSON."""
        return "".join(self.pieces)


class Change(NamedTuple):
    """A change of an item: it starts, grows or stops."""

    kind: str  # "start", "delta" or "stop"
    item: Item
    text: str = ""  # the new text of a delta
    words: Sequence[Word] | None = None  # log probabilities, if requested


class Choice:
    """One answer to a prompt. A request may ask for several answers.

    `words`: given only if log probabilities are requested.
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
        """The handle's finish reason, or "tool_calls" if the answer ends after a call."""
        reason = self.handle.finish_reason
        has_called = any(item.kind == "tool_call" for item in self.items)
        is_over = reason == "stop" or (reason == "length" and self._parser.is_over)
        is_over &= not self._parser.is_in_call  # the model may have stopped in the middle of a call
        return "tool_calls" if has_called and is_over else reason

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens."""
        end = self._parser.reasoning_length
        return end and sum(place <= end for place in accumulate(self.handle.lengths))

    def text(self, kind: str) -> str:
        """Return the joined text of all items of a kind."""
        return "".join(item.text for item in self.items if item.kind == kind)

    def parse_whole(self) -> None:
        """Parse a complete answer."""
        for piece in (self.handle.text, None):
            for change in self.grow(piece):
                if change.words:
                    self.words += change.words

    def grow(self, piece: str | None) -> Iterator[Change]:
        """Yield the changes that a piece of text causes. None marks the end of the answer."""
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
        if words:  # tokens of a mark such as <think>, whose text belongs to no item
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
    """One token of an answer: its text and offset in the answer, its log probability, and the log
    probabilities of the likeliest tokens."""

    text: str
    offset: int
    logprob: float
    top: list[tuple[str, float]]


class Words:
    """Splits an answer's text into the texts of its tokens.

    A token cannot be decoded on its own: its bytes may end in the middle of a character, and a
    decoder drops the space before the first word. So a token's text is the text that it adds to the
    answer. Text is held back while a stop string may still cut it off, and so is its token.

    A token is decoded only when its text is released: thousands of tokens may be queued for a slow
    client, and texts take more memory than tokens.
    """

    def __init__(self, text: Tokenizer, handle: Handle):
        self._text = text
        self._handle = handle
        self._stream = text.stream(())
        self._tokens: list[int] = []
        self._waiting: list[Word] = []
        self._length = 0  # characters decoded
        self._shown = 0  # characters released

    def _read(self, length: float) -> None:
        """Decode tokens until their texts have this total length.

        The newest token may not have its log probability yet.
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
        """Release `count` more characters and return the words that are now complete."""
        self._shown += count
        self._read(self._shown)
        # If the answer ends in the middle of a character, the last token gets the replacement character
        complete = self._waiting[: len(self._waiting) - self._stream.open]
        released = []
        for word in complete:
            # A token without text is released with the text after it. So the end token, which has no
            # text after it, is never released
            if word.offset + max(len(word.text), 1) > self._shown:
                break
            released.append(word)
        self._waiting = self._waiting[len(released) :]
        return released

    def finish(self) -> list[Word]:
        """Return the remaining words of a complete answer, without the tokens after its end, such as
        the tokens of a stop string."""
        self._read(math.inf)
        text = self._handle.text
        left = [word for word in self._waiting if word.offset < len(text)]
        if left:  # the last word may be cut off by a stop string, or end in a broken character
            last = left.pop()
            left.append(last._replace(text=text[last.offset :]))
        self._waiting = []
        return left
