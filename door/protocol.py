"""What all protocols share: how a body is read and refused, what one asks for, and events.

The problem. Three protocols ask for the same, each in its own words: OpenAI's older one
(`openai.py`), its newer one (`responses.py`), and Anthropic's (`messages.py`). None of them knows
the others.

What this file keeps. A protocol turns a body into a `Wish`, or refuses it. What comes back are the
items of `choice.py`, which the protocol's shape turns into its own events, or into one JSON.

Where next: `openai.py`, the protocol that every client speaks.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from door.choice import Change, Choice
from parts.checks import shown, whole

# The most of each in one request
STOPS, STOP_LENGTH, TOOLS = 16, 1000, 128
MESSAGES = 2048  # and their parts, together
MARKS = 100_000  # brackets, braces and colons of a body, in texts, too
SCORES = 200_000  # log probabilities in one answer, over all its choices

# They change nothing in an answer: a user's name, notes for a bill, hints for a cache.
NO_WISH = {
    "client_metadata",
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
}


class Refusal(Exception):
    """An answer that is an error. OpenAI's clients make an exception of their own of each
    status."""

    TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}  # noqa: RUF012

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        **headers: str | None,
    ):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = {name.replace("_", "-"): value for name, value in headers.items() if value}

    @property
    def body(self) -> dict:
        kind = self.TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


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
    must_call: tuple[str, ...] = ()  # one of these tools has to be called
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


class Shape(Protocol):
    """The bodies of one answer, in one protocol: a whole one, or the events of a stream."""

    id: str

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict: ...

    def first(self, choices: int, usage: Usage) -> bytes: ...

    def tell(self, index: int, change: Change) -> bytes: ...

    def last(self, index: int, choice: Choice) -> bytes: ...

    def close(self, usage: Usage) -> bytes: ...

    def fail(self, refusal: Refusal) -> bytes: ...


class Speaks(NamedTuple):
    """A protocol."""

    understand: Callable[[bytes, Sequence[str]], Wish]  # a body, and the names of the models here
    shape: Callable[[Wish, int, str, str], Shape]  # of a wish: its number, a suffix, the model
    form: str  # the field that has a JSON schema


# --- reading a body -----------------------------------------------------------------------------


def read_json(body: bytes) -> dict[str, Any]:
    # Of 4 MiB of "[]," Python makes a million lists, and lets no other thread run for half a second
    marks = sum(map(body.count, (b"[", b"{", b":")))
    if marks > MARKS:
        words = f"the body has {marks:,} brackets, braces and colons, but there may be at most {MARKS:,}"
        raise Refusal(413, words, "request_too_large")

    def no_number(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        given = json.loads(body.decode("utf-8-sig"), parse_constant=no_number)
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is no UTF-8 at byte {error.start}", "invalid_json") from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deep", "invalid_json") from None
    except ValueError as error:
        raise Refusal(
            400, f"the body is no valid JSON: {str(error)[:200]}", "invalid_json"
        ) from None
    if not isinstance(given, dict):
        raise Refusal(
            400, f"the body is {shown(given)}, but it must be a JSON object", "invalid_json"
        )
    return given


def refuse_what_cannot_be_kept(
    asked: dict[str, Any], known: set[str], neutral: Mapping[str, Sequence]
) -> None:
    """`known`: fields that are understood. `neutral`: values that ask for nothing. So does
    everything that is null, false, zero or empty."""
    for name, value in asked.items():
        if name in known or name in NO_WISH or not value or value in neutral.get(name, ()):
            continue
        if name == "best_of" and value == asked.get("n"):
            continue
        words = f"{shown(name).strip(chr(39))} = {shown(value)} is not supported here; leave it out"
        raise Refusal(400, words, "unsupported_parameter", name[:100])


def check_model(model: Any, names: Sequence[str]) -> None:
    if not isinstance(model, str):
        raise bad("model", model, "a string")
    if model not in names:
        words = f"the model {shown(model, 200)} does not exist here; there is {names[0]!r}, also as 'default'"
        raise Refusal(404, words, "model_not_found", "model")


def read_stop(stop: Any, name: str = "stop") -> list[str]:
    """Texts alone: `Sampling` would take a number for a token id."""
    stops = [stop] if isinstance(stop, str) else stop
    if isinstance(stops, list):
        check_count(name, len(stops), "texts", STOPS)
    if not isinstance(stops, list) or not all(
        isinstance(text, str) and 0 < len(text) <= STOP_LENGTH for text in stops
    ):
        raise bad(
            name,
            stop,
            f"a text or a list of texts, none empty or longer than {STOP_LENGTH:,} characters",
        )
    return stops


def read_text(place: str, content: Any, param: str, kinds: Sequence[str] = ("text",)) -> str:
    """A text, or parts of text, which are of one of these kinds."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            words = f"{place} has a part of type {shown(kind)}, but only text can be read here"
            raise Refusal(400, words, "unsupported_content", param)
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise bad(f"{place}.content", content, "a text or a list of parts of text", param)
        texts.append(part["text"])
    return "".join(texts)


def read_schema(name: str, form: Any, inner: str | None) -> dict[str, Any] | None:
    """The JSON schema that an answer has to fit; None if any text will do. `inner`: the field of
    the form that has the schema, if not the form itself."""
    form = form or {"type": "text"}
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise bad(name, form, "of the type json_schema, json_object or text", name)
    own = form.get(inner) if inner else form
    schema = own.get("schema") if isinstance(own, dict) else None
    if not isinstance(schema, dict):
        place = f"{name}.{inner}" if inner else name
        raise bad(f"{place}.schema", schema, "a schema", name)
    return schema


def check_length(name: str, messages: Any, part: str) -> None:
    """A conversation of one message at least, and not of too many. `part`: where their parts
    are."""
    if not isinstance(messages, list) or not messages:
        raise bad(name, messages, "a list of at least one message")
    objects = [message for message in messages if isinstance(message, dict)]
    contents = (message.get(field) for message in objects for field in (part, "tool_calls"))
    parts = sum(len(content) for content in contents if isinstance(content, list))
    # A template takes time for each message, be it empty or not
    check_count(name, len(messages) + parts, "messages and parts of messages", MESSAGES)


# --- tools --------------------------------------------------------------------------------------


def read_tools(
    tools: Any, inner: str | None = None, schema: str = "parameters", type: str = "function"
) -> list[dict]:
    """Tools as templates take them. Their fields stand in `inner`, or in the tool itself; `schema`
    is the field of their parameters, and `type` the only one that can be called."""
    if tools in (None, []):
        return []
    if not isinstance(tools, list):
        raise bad("tools", tools, "a list of tools")
    check_count("tools", len(tools), "tools", TOOLS)
    found = []
    for i, tool in enumerate(tools):
        kind = tool.get("type", type) if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != type:
            words = f"tools[{i}] is of type {shown(kind)}, but only functions can be called here"
            raise Refusal(400, words, "unsupported_parameter", "tools")
        own = (tool.get(inner) if inner else tool) if isinstance(tool, dict) else None
        if not isinstance(own, dict):
            raise bad(f"tools[{i}]", tool, "an object that describes a function", "tools")
        found.append({"type": "function", "function": read_function(f"tools[{i}]", own, schema)})
    return found


def read_function(place: str, given: dict, schema: str) -> dict:
    name = given.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[a-zA-Z0-9_.-]{1,128}", name):
        what = "a name of letters, digits, '_', '-' and '.', of at most 128"
        raise bad(f"{place}: name", name, what, "tools")
    about = given.get("description") or ""
    if not isinstance(about, str):
        raise bad(f"{place}: description", about, "a text", "tools")
    parameters = given.get(schema) or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise bad(f"{place}: {schema}", parameters, "a JSON schema", "tools")
    return {"name": name, "description": about, "parameters": parameters}


def choose_tools(tools: list[dict], kind: Any, name: Any) -> tuple[list[dict], tuple[str, ...]]:
    """Which tools a model is given, and which of them one has to be called. `kind`: "none",
    "auto", "required", or "function" with a `name`."""
    names = tuple(tool["function"]["name"] for tool in tools)
    if kind == "none":
        return [], ()
    if kind == "auto":
        return tools, ()
    if not tools and kind in ("required", "function"):
        words = "tool_choice asks for a call, but there are no tools"
        raise Refusal(400, words, "invalid_value", "tool_choice")
    if kind == "required":
        return tools, names
    if kind == "function" and name in names:
        return tools, (name,)
    wrong = name if kind == "function" else kind
    raise bad("tool_choice", wrong, "none, auto, required, or the name of a tool", "tool_choice")


def call_of(place: str, id: Any, name: Any, arguments: Any) -> dict:
    """A call that an assistant has made, as templates take it. The arguments may be an object, or
    JSON of one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise bad(f"{place}: arguments", arguments, "JSON of an object", "messages") from None
    if not isinstance(arguments, dict):
        raise bad(f"{place}: arguments", arguments, "JSON of an object", "messages")
    for field, value in (("id", id), ("name", name)):
        if not isinstance(value, str) or not value:
            raise bad(f"{place}: the call's {field}", value, "a text", "messages")
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


# --- small things -------------------------------------------------------------------------------


def boolean(asked: dict[str, Any], name: str, param: str | None = None) -> bool:
    value = asked.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad(name, value, "true or false", param)
    return bool(value)


def number(asked: dict[str, Any], name: str, least: int, most: int) -> int:
    try:
        return whole(name, asked[name], least, most)
    except ValueError as error:
        raise Refusal(400, str(error), "invalid_value", name) from None


def check_count(name: str, count: int, what: str, most: int) -> None:
    """Refuse too many of something before any of them is looked at."""
    if count > most:
        words = f"{name} has {count:,} {what}, but there may be at most {most:,}"
        raise Refusal(400, words, "invalid_value", name)


def bad(name: str, value: Any, what: str, param: str | None = None) -> Refusal:
    words = (
        f"{name} is missing; give {what}"
        if value is None
        else f"{name} = {shown(value)}, but it must be {what}"
    )
    return Refusal(
        400, words, "missing_parameter" if value is None else "invalid_value", param or name
    )


def event(body: dict | str) -> bytes:
    """One server-sent event."""
    return b"data: " + (body.encode() if isinstance(body, str) else dump(body)) + b"\n\n"


def named_event(body: dict) -> bytes:
    """With the type as its name."""
    return b"event: " + body["type"].encode() + b"\n" + event(body)
