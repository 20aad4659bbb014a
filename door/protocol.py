"""What all protocols share: how a body is read and refused, what one asks for, and events.

The problem. Three protocols ask for the same, each in its own words: OpenAI's older one
(`openai.py`), its newer one (`responses.py`), and Anthropic's (`messages.py`). None of them knows
the others.

What this file keeps. A protocol turns a body into a `Wish`, or refuses it. What comes back are the
items of `choice.py`, which the protocol turns into its own events, or into one JSON.

Where next: `openai.py`, the protocol that every client speaks.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from door.choice import Change, Choice
from door.fields import Given, Refusal, bad, check_count, read_json
from parts.checks import shown
from parts.text.speech import loads

# The most of each in one request
STOPS = 16
STOP_LENGTH = 1000
TOOLS = 128
MESSAGES = 2048  # and their parts, together
SCORES = 200_000  # log probabilities in one answer, over all its choices


def ending() -> Refusal:
    return Refusal(503, "the server is ending", "draining", Retry_After="5")


# `json.dumps` would make one each time
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def dump(body: Any) -> bytes:
    """JSON as UTF-8. A message may quote half a surrogate pair, which UTF-8 does not have."""
    return ENCODER.encode(body).encode(errors="replace")


def dump_politely(body: Any) -> bytes:
    """The same bytes, of a body that may be huge: `dump` lets no other thread run until it has
    ended."""
    return "".join(ENCODER.iterencode(body)).encode(errors="replace")


# --- a wish, and what comes of it ---------------------------------------------------------------


class Wish(NamedTuple):
    """What one body asks for. Each prompt is a text, a `Chat`, or token ids; each gets `n`
    choices."""

    prompts: list
    settings: Mapping[str, Any] = {}  # for `Sampling`
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    usage: bool = False  # at the end of the stream
    progress: bool = False  # of the prompt, in the stream
    must_call: Sequence[dict] = ()  # one of these tools has to be called
    is_single: bool = False  # at most one call is wanted
    asked: Mapping[str, Any] = {}  # the body's fields that are not null

    @property
    def most_tokens(self) -> int:
        """How long an answer may be. Log probabilities of 20 tokens beside each one take
        kilobytes."""
        top = self.settings.get("logprobs")
        if top is None:
            return sys.maxsize
        return SCORES // (self.n * len(self.prompts) * (1 + top))


class Usage(NamedTuple):
    """The tokens of a request."""

    prompt: int
    cached: int  # of the prompt's
    answer: int
    thought: int  # of the answer's


class Progress(NamedTuple):
    """How far a prompt has been read."""

    total: int
    cached: int
    read: int
    before: int  # so many wait in line before it
    seconds: float  # since it came

    @property
    def comment(self) -> bytes:
        words = f"prompt {self.read}/{self.total}"
        if self.before:
            words += f", {self.before} before you"
        return f": {words}\n\n".encode()


class Speaks(Protocol):
    """A protocol: it understands a body, and makes the bodies of one answer, a whole one or the
    events of a stream."""

    form: str  # the field that has a JSON schema
    id: str  # the answer's

    @staticmethod
    def understand(body: bytes, names: Sequence[str]) -> Wish: ...

    def __init__(self, wish: Wish, number: int, suffix: str, model: str): ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict: ...

    def first(self, choices: int, usage: Usage) -> bytes: ...

    def tell(self, index: int, change: Change) -> bytes: ...

    def last(self, index: int, choice: Choice) -> bytes: ...

    def close(self, usage: Usage) -> bytes: ...

    def fail(self, refusal: Refusal) -> bytes: ...


# --- what is read alike -------------------------------------------------------------------------


def read_body(body: bytes, names: Sequence[str]) -> Given:
    """`names`: those of the models that are here."""
    asked = read_json(body)
    check_model(asked.get("model", names[0]), names)
    return asked


def check_model(model: Any, names: Sequence[str]) -> None:
    if not isinstance(model, str):
        raise bad("model", model, "a text")
    if model not in names:
        words = f"the model {shown(model, 200)} does not exist here; there is {names[0]!r}, also as 'default'"
        raise Refusal(404, words, "model_not_found", "model")


def conversation(asked: Given, name: str) -> list[Given]:
    """One message at least, and not too many: a template takes time for each, be it empty or
    not."""
    messages = asked.read(name, list)
    if not messages:
        raise asked.bad(name, "a list of at least one message")
    count = len(messages)
    for message in messages:
        if isinstance(message, dict):
            parts = (message.get("content"), message.get("tool_calls"))
            count += sum(len(part) for part in parts if isinstance(part, list))
    check_count(name, count, "messages and parts of messages", MESSAGES)
    return asked.items(name)


def read_stop(asked: Given, name: str) -> list[str]:
    """Texts alone: `Sampling` would take a number for a token id."""
    stops = asked.get(name, [])
    stops = [stops] if isinstance(stops, str) else asked.read(name, list, [])
    check_count(name, len(stops), "texts", STOPS)
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= STOP_LENGTH:
            what = f"texts, none empty or longer than {STOP_LENGTH:,} characters"
            raise asked.bad(name, what)
    return stops


def read_form(given: Given, name: str, inner: str = "") -> dict[str, Any]:
    """The JSON that an answer has to be, as `Sampling.grammar`; empty if any text will do.

    `inner`: the field of the form that has the schema, if it is not the form itself.
    """
    form = given.inner(name)
    kind = form.one_of("type", ("text", "json_object", "json_schema"), "text")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json": {"type": "object"}}
    return {"json": form.inner(inner).read("schema", dict)}


def read_tools(
    asked: Given, inner: str = "", schema: str = "parameters", type: str = "function"
) -> list[dict]:
    """Tools as templates take them. Their fields stand in `inner`, or in the tool itself; `schema`
    is the field of their parameters, and `type` the only one that can be called."""
    tools = asked.items("tools", [])
    check_count("tools", len(tools), "tools", TOOLS)
    found = []
    for tool in tools:
        kind = tool.read("type", str, type)
        if kind != type:
            raise tool.unsupported(
                "type", f"= {shown(kind)}, but only functions can be called here"
            )
        own = tool.inner(inner)
        name = own.read("name", str)
        if not re.fullmatch(r"[a-zA-Z0-9_.-]{1,128}", name):
            raise own.bad("name", "at most 128 letters, digits, '_', '-' and '.'")
        function = {"name": name, "description": own.read("description", str, "")}
        parameters = own.read(schema, dict, {"type": "object", "properties": {}})
        if parameters.get("type", "object") != "object":
            raise own.bad(schema, "a JSON schema of the type 'object'")
        function["parameters"] = parameters
        found.append({"type": "function", "function": function})
    return found


def choose_tools(
    asked: Given, tools: list[dict], inner: str = "", words: Mapping[str, str] = {}
) -> tuple[list[dict], list[dict]]:
    """By `tool_choice`: the tools that a model is given, and those of which one has to be called.

    `words`: what the protocol calls "required" and "function", if something else.
    """
    kind = asked.get("tool_choice", "auto")
    name = None
    if isinstance(kind, dict):
        choice = asked.inner("tool_choice")
        kind = choice.get("type")
        name = choice.inner(inner).get("name")
    kind = words.get(str(kind), kind)
    wanted = tools
    if kind == "function":
        wanted = [tool for tool in tools if tool["function"]["name"] == name]
    if kind == "none":
        return [], []
    if kind == "auto":
        return tools, []
    if kind not in ("required", "function") or not wanted:
        raise asked.bad("tool_choice", "none, auto, required, or the name of one of the tools")
    return tools, wanted


def call_of(id: str, function: Given, field: str = "arguments") -> dict:
    """A call that an assistant has made, as templates take it. The arguments may be an object, or
    JSON of one."""
    arguments = function.get(field)
    if isinstance(arguments, str):
        arguments = loads(arguments or "{}")
    if not isinstance(arguments, dict):
        raise function.bad(field, "an object, or JSON of one")
    called = {"name": function.read("name", str), "arguments": arguments}
    return {"id": id, "type": "function", "function": called}


# --- events -------------------------------------------------------------------------------------


def event(body: dict | str) -> bytes:
    """One server-sent event."""
    return b"data: " + (body.encode() if isinstance(body, str) else dump(body)) + b"\n\n"


def named_event(body: dict) -> bytes:
    """With the type as its name."""
    return b"event: " + body["type"].encode() + b"\n" + event(body)
