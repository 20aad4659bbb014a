"""What all protocols share: the parsed request, the protocol adapter, server-sent events.

OpenAI's two protocols (`openai.py`, `responses.py`) and Anthropic's (`anthropic.py`) ask for the
same in different words. An adapter turns a body into a `ParsedRequest`, and the items of an answer
(`choice.py`) into the events of a stream or into one JSON body.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from engine.prefill_progress import PrefillProgress
from server.body_reader import APIError
from server.choice import Choice
from text.tokenizer import ChatPrompt


def shutting_down() -> APIError:
    return APIError(503, "the server is shutting down", "draining", Retry_After="5")


# json.dumps would make an encoder each time
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def dump(body: Any) -> bytes:
    """JSON as UTF-8. A message may quote half a surrogate pair, which UTF-8 cannot encode."""
    return ENCODER.encode(body).encode(errors="replace")


def dump_large(body: Any) -> bytes:
    """The same bytes for a body that may be huge: no other thread runs during `dump`."""
    return "".join(ENCODER.iterencode(body)).encode(errors="replace")


# --- requests and answers -------------------------------------------------------------------------


class ParsedRequest(NamedTuple):
    """A validated body. Each prompt is a text, a `Chat` or token ids, and gets `n` choices."""

    prompts: list
    chat: ChatPrompt | None = None  # the conversation, if that is what the prompt is
    settings: Mapping[str, Any] = {}  # for `SamplingParams`
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    usage: bool = False  # at the end of a stream
    progress: bool = False  # of the prompt, in a stream
    must_call: Sequence[dict] = ()  # one of these tools must be called
    is_single: bool = False  # at most one call
    fields: Mapping[str, Any] = {}  # the body's fields that are not null


class Usage(NamedTuple):
    """Token counts of a request."""

    prompt: int
    cached: int  # of the prompt
    output: int
    reasoning: int  # of the answer


class PromptProgress(NamedTuple):
    """How far a prompt has been read, for the waiting client."""

    prefill: PrefillProgress
    before: int  # waiting requests ahead of this one
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
    """Parses a body of one protocol and writes one answer: a whole body, or the events of a stream.

    `parse_request` makes a `ParsedRequest` from a body, as a `BodyReader`. `whole` takes all
    choices and their `Usage`. The events of a stream: `first`; `changed` for each change of a
    choice's items; `last` when a choice has ended; `close` at the end, or `fail`.
    """

    prompt: str  # the body's field for a prompt
    form: str  # and for a JSON schema
    prefix: str  # of the answer's id

    def __init__(self, parsed: ParsedRequest, name: str, model: str):
        """`name`: the request's number and a suffix of this process."""
        self.id = self.prefix + name
        self._name = name
        self._model = model
        self._parsed = parsed

    def first(self, choices: int, usage: Callable[[], Usage]) -> bytes:
        return b""

    def last(self, index: int, choice: Choice) -> bytes:
        return b""


# --- events ---------------------------------------------------------------------------------------


def event(body: dict | str) -> bytes:
    """A server-sent event."""
    return b"data: " + (body.encode() if isinstance(body, str) else dump(body)) + b"\n\n"


def named_event(body: dict) -> bytes:
    """The same with the body's type as the event's name."""
    return b"event: " + body["type"].encode() + b"\n" + event(body)
