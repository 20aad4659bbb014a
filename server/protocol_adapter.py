"""Code that all protocols share: the parsed request, the adapter's base class, server-sent events.

OpenAI's protocols (`openai.py`, `responses.py`) and Anthropic's (`anthropic.py`) express the same
requests in different formats. An adapter converts a body to a `ParsedRequest`, and the items of an
answer (`choice.py`) to the events of a stream or to a single JSON body.
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


# Created once; json.dumps would create an encoder for each call
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def dump(body: Any) -> bytes:
    """Serialize to JSON in UTF-8. Lone surrogates, which a message may quote, become question marks."""
    return ENCODER.encode(body).encode(errors="replace")


def dump_large(body: Any) -> bytes:
    """Return the same bytes as `dump`, but let other threads run during the encoding of a huge body."""
    return "".join(ENCODER.iterencode(body)).encode(errors="replace")


# --- requests and answers -------------------------------------------------------------------------


class ParsedRequest(NamedTuple):
    """A validated body. Each prompt is a text, a `ChatPrompt` or token ids, and gets `n` choices."""

    prompts: list
    chat: ChatPrompt | None = None  # the prompt, if it is a conversation
    settings: Mapping[str, Any] = {}  # arguments for `SamplingParams`
    grammar_field: str = ""  # the body's field that contains the grammar of `settings`
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    usage: bool = False  # end a stream with the usage
    progress: bool = False  # report the prompt's progress in a stream
    must_call: Sequence[dict] = ()  # tools of which the model must call one
    is_single: bool = False  # allow at most one tool call
    fields: Mapping[str, Any] = {}  # fields of the body that the adapter needs again


class Usage(NamedTuple):
    """Token counts of a request."""

    prompt: int
    cached: int  # part of the prompt
    output: int
    reasoning: int  # part of the output


class PromptProgress(NamedTuple):
    """The progress of a prompt, as reported to the waiting client."""

    prefill: PrefillProgress
    before: int  # number of waiting requests ahead of this one
    seconds: float  # since the request arrived

    @property
    def comment(self) -> bytes:
        words = f"prompt {self.prefill.done}/{self.prefill.total}"
        if self.prefill.is_long and self.prefill.pace:
            words += f", {self.prefill.pace}"
        if self.before:
            words += f", {self.before} before you"
        return f": {words}\n\n".encode()


class ProtocolAdapter:
    """Parses a body of one protocol and writes the answer, as a complete body or as a stream of events.

    `parse_request` converts a `BodyReader` to a `ParsedRequest`. `whole` returns a complete body from all
    choices and their `Usage`. The other methods return the events of a stream: `first` at the start,
    `changed` for each change of a choice's items, `last` when a choice has finished, and `close` or
    `fail` at the end.
    """

    prompt: str  # the name of the body's prompt field
    prefix: str  # prefix of the answer's id
    # The error for an oversized prompt. Agents search it for these words, with numbers without commas, to
    # decide whether to shorten the conversation
    too_long = "this model's maximum context length is {max_len} tokens, but {param} has {tokens}"

    def __init__(self, parsed: ParsedRequest, name: str, model: str):
        """`name`: the request's number with the model's suffix, unique among servers."""
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
    """Return a server-sent event."""
    return b"data: " + (body.encode() if isinstance(body, str) else dump(body)) + b"\n\n"


def named_event(body: dict) -> bytes:
    """Return a server-sent event with the body's type as its name."""
    return b"event: " + body["type"].encode() + b"\n" + event(body)
