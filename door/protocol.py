"""The common part of all protocols: how a body is read and refused, wishes, and events.

The problem. Three protocols ask for the same, each in its own words: OpenAI's older protocol
(`openai.py`), OpenAI's newer one (`responses.py`), and Anthropic's (`messages.py`). None knows the
others.

What this file keeps. A protocol turns a body into a `Wish`, or refuses the body. The answer comes
back as the items of `choice.py`, and the protocol turns the items into events, or into one JSON.

Where next: `openai.py`, the protocol that every client speaks.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from door.choice import Choice
from door.fields import Given, Refusal, bad, check_count, read_json
from parts.api.progress import PrefillProgress
from parts.checks import shown
from parts.program import command
from parts.text.speech import loads
from parts.text.tokens import Chat

# The most of each in one request
STOPS = 16
STOP_LENGTH = 1000
TOOLS = 128
MESSAGES = 2048  # and parts of messages, together
SCORES = 200_000  # log probabilities in one answer, over all choices


def ending() -> Refusal:
    return Refusal(503, "the server is ending", "draining", Retry_After="5")


# `json.dumps` would make an encoder each time
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def dump(body: Any) -> bytes:
    """JSON as UTF-8. A message may quote half a surrogate pair, and UTF-8 has no bytes for half."""
    return ENCODER.encode(body).encode(errors="replace")


def dump_politely(body: Any) -> bytes:
    """The same bytes, of a body that may be huge: during a call of `dump` no other thread runs."""
    return "".join(ENCODER.iterencode(body)).encode(errors="replace")


# --- a wish, and the parts of an answer ---------------------------------------------------------


class Wish(NamedTuple):
    """A body, understood. Each prompt is a text, a `Chat`, or token ids; each gets `n` choices."""

    prompts: list
    settings: Mapping[str, Any] = {}  # for `Sampling`
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    usage: bool = False  # at the end of the stream
    progress: bool = False  # of the prompt, in the stream
    must_call: Sequence[dict] = ()  # one of these tools has to be called
    is_single: bool = False  # at most one call may come
    asked: Mapping[str, Any] = {}  # the body's fields that are not null

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
        return SCORES // (self.n * len(self.prompts) * (1 + top))


class Usage(NamedTuple):
    """The tokens of a request."""

    prompt: int
    cached: int  # of the prompt
    answer: int
    thought: int  # of the answer


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


class Speaks:
    """A protocol understands a body, and writes one answer: one whole body, or the events of a
    stream.

    `understand` makes a `Wish` of a body and the model's names. `whole` has all choices, and their
    `Usage`. The events: `first`; `changed` for each change of a choice's items; `last`, when a
    choice has ended; `close` at the end, or `fail`.
    """

    prompt: str  # the body's field for a prompt
    form: str  # and for a JSON schema
    prefix: str  # of the answer's id

    def __init__(self, wish: Wish, name: str, model: str):
        """`name`: the answer's number, and a suffix of this process."""
        self.id = self.prefix + name
        self._name = name
        self._model = model
        self._wish = wish

    def first(self, choices: int, usage: Usage) -> bytes:
        return b""

    def last(self, index: int, choice: Choice) -> bytes:
        return b""


# --- fields that several protocols have ---------------------------------------------------------


def read_body(body: bytes, names: Sequence[str]) -> Given:
    """`names`: those of the model that is here. A star is any."""
    asked = read_json(body)
    check_model(asked.get("model", names[0]), names)
    return asked


def check_model(model: Any, names: Sequence[str]) -> None:
    if not isinstance(model, str):
        raise bad("model", model, "a text")
    if model not in names and "*" not in names:
        words = f"the model {shown(model, 200)} does not exist here; there is {names[0]!r}, also as 'default'"
        words += f"; {command('serve.py')} --alias gives it more names"
        raise Refusal(404, words, "model_not_found", "model")


def conversation(asked: Given, name: str) -> list[Given]:
    """One message at least, and not too many: a template takes time even for an empty message."""
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
    """The JSON form of an answer, as `Sampling.grammar`; empty if any text will do.

    `inner`: the form's field with the schema; empty if the form holds the schema itself.
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
    """Tools, in the form for templates.

    `inner`: the tool's field with name and description; empty if the tool holds both itself.
    `schema`: the field of the parameters.
    `type`: the only type of tool that can be called.
    """
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
    """By `tool_choice`: the tools for the model, and the tools of which the model must call one.

    `words`: the protocol's own words for "required" and "function".
    """
    kind = asked.get("tool_choice", "auto")
    name = None
    if isinstance(kind, dict):
        choice = asked.inner("tool_choice")
        kind = choice.get("type")
        name = choice.inner(inner).get("name")
    kind = words.get(str(kind), kind)
    if kind == "none":
        return [], []
    if kind == "auto":
        return tools, []
    wanted = tools if kind == "required" else []
    if kind == "function":
        wanted = [tool for tool in tools if tool["function"]["name"] == name]
    if not wanted:
        raise asked.bad("tool_choice", "none, auto, required, or the name of one of the tools")
    return tools, wanted


def call_of(id: str, function: Given, field: str = "arguments") -> dict:
    """An assistant's earlier call, in the form for templates. The arguments may be an object, or
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
    """The same, with the type as the event's name."""
    return b"event: " + body["type"].encode() + b"\n" + event(body)
