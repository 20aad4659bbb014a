"""The common part of all protocols: wishes, and events.

The problem. Three protocols ask for the same, each in its own words: OpenAI's older protocol
(`openai.py`), OpenAI's newer one (`responses.py`), and Anthropic's (`messages.py`). None knows the
others.

What this file keeps. A protocol turns a body into a `ParsedRequest`, or refuses the body. The answer comes
back as the items of `choice.py`, and the protocol turns the items into events, or into one JSON.

Where next: `openai.py`, the protocol that every client speaks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from runtime.progress import PrefillProgress
from server.choice import Choice
from server.schema import APIError
from text.tokenizer import Chat

MAX_LOGPROBS = 200_000  # log probabilities in one answer, over all choices


def ending() -> APIError:
    return APIError(503, "the server is ending", "draining", Retry_After="5")


# `json.dumps` would make an encoder each time
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def dump(body: Any) -> bytes:
    """JSON as UTF-8. A message may quote half a surrogate pair, and UTF-8 has no bytes for half."""
    return ENCODER.encode(body).encode(errors="replace")


def dump_politely(body: Any) -> bytes:
    """The same bytes, of a body that may be huge: during a call of `dump` no other thread runs."""
    return "".join(ENCODER.iterencode(body)).encode(errors="replace")


# --- a wish, and the parts of an answer ---------------------------------------------------------


class ParsedRequest(NamedTuple):
    """A body, understood. Each prompt is a text, a `Chat`, or token ids; each gets `n` choices."""

    prompts: list
    settings: Mapping[str, Any] = {}  # for `SamplingParams`
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    usage: bool = False  # at the end of the stream
    progress: bool = False  # of the prompt, in the stream
    must_call: Sequence[dict] = ()  # one of these tools has to be called
    is_single: bool = False  # at most one call may come
    fields: Mapping[str, Any] = {}  # the body's fields that are not null

    @property
    def chat(self) -> Chat | None:
        """The only prompt, if it is one."""
        return self.prompts[0] if isinstance(self.prompts[0], Chat) else None

    @property
    def is_many(self) -> bool:
        """Vectors are wanted, perhaps thousands."""
        return "embeds" in self.settings

    @property
    def most_tokens(self) -> int:
        """How long an answer may be. Log probabilities of 20 tokens beside each token take
        kilobytes."""
        top = self.settings.get("logprobs")
        if top is None:
            return sys.maxsize
        return MAX_LOGPROBS // (self.n * len(self.prompts) * (1 + top))


class Usage(NamedTuple):
    """The tokens of a request."""

    prompt: int
    cached: int  # of the prompt
    output: int
    reasoning: int  # of the answer


class Progress(NamedTuple):
    """How far a prompt has been read, for the client that waits for it."""

    prefill: PrefillProgress
    before: int  # so many requests stand in line before this one
    seconds: float  # since the request came

    @property
    def comment(self) -> bytes:
        words = f"prompt {self.prefill.done}/{self.prefill.total}"
        if self.prefill.is_long and self.prefill.pace:
            words += f", {self.prefill.pace}"
        if self.before:
            words += f", {self.before} before you"
        return f": {words}\n\n".encode()


class ProtocolAdapter:
    """A protocol understands a body, and writes one answer: one whole body, or the events of a
    stream.

    `parse_request` makes a `ParsedRequest` of a body and the model's names. `whole` has all choices, and their
    `Usage`. The events: `first`; `changed` for each change of a choice's items; `last`, when a
    choice has ended; `close` at the end, or `fail`.
    """

    prompt: str  # the body's field for a prompt
    form: str  # and for a JSON schema
    prefix: str  # of the answer's id

    def __init__(self, parsed: ParsedRequest, name: str, model: str):
        """`name`: the answer's number, and a suffix of this process."""
        self.id = self.prefix + name
        self._name = name
        self._model = model
        self._parsed = parsed

    def first(self, choices: int, usage: Usage) -> bytes:
        return b""

    def last(self, index: int, choice: Choice) -> bytes:
        return b""


# --- events -------------------------------------------------------------------------------------


def event(body: dict | str) -> bytes:
    """One server-sent event."""
    return b"data: " + (body.encode() if isinstance(body, str) else dump(body)) + b"\n\n"


def named_event(body: dict) -> bytes:
    """The same, with the type as the event's name."""
    return b"event: " + body["type"].encode() + b"\n" + event(body)
