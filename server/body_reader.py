"""Validate a client's JSON body, field by field.

A field may be missing, null, of a wrong type, deeply nested, huge, or unknown. `BodyReader` reads
a field as a given type; a wrong value raises `APIError` with the field's path, the value and what
is allowed. It remembers which fields were read, and `reject_unknown` refuses the others unless their
values have no effect. An invalid body never raises any exception other than `APIError`.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from base.strings import json_or_none
from base.validation import shown, whole

MAX_BRACKETS = 100_000  # opening brackets and braces, and colons, in a body, inside strings too
# Limits per request
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_TOOLS = 128
MAX_MESSAGES = 2048  # messages plus their content parts and tool calls
# Fields that do not affect the answer: names, billing metadata, cache hints, and storing, which this
# server never does
IGNORED = {
    "model",  # read before the other fields
    "client_metadata",
    "user",
    "metadata",
    "safety_identifier",
    "store",
    "cache_control",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
}
TOO_LONG = "context_length_exceeded"  # the code of the error for an oversized prompt
KINDS = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}


class Field(NamedTuple):
    """The type, default and bounds of a field."""

    kind: type = object
    default: Any = None  # if the field is missing
    least: int = 0
    most: int = sys.maxsize


class APIError(Exception):
    """An error response. OpenAI's clients raise a different exception for each status."""

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
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = {name.replace("_", "-"): value for name, value in headers.items() if value}

    @property
    def body(self) -> dict:
        kind = self.TYPES.get(self.status, "invalid_request_error")
        error = {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


# A path up to the file name. Folder names may contain spaces
FOLDERS = re.compile(r"(?<![^\s'\"(])(?:/[^\s/][^/\n:;,'\"()]*)*/(?=[^\s/])")


def without_folders(words: str) -> str:
    """Remove the server's folders from file paths in an error message for a client."""
    return FOLDERS.sub("", words)


def invalid(param: str | None, words: str, code: str = "invalid_value") -> APIError:
    return APIError(400, words, code, param)


def param_of(place: str) -> str:
    """Return the name of the top-level field in a path: "messages" for "messages[0].content"."""
    return re.split(r"[.\[]", place, maxsplit=1)[0][:100]


def bad(place: str, value: Any, what: str) -> APIError:
    param = param_of(place)
    if value is None:
        return invalid(param, f"{place} is missing; give {what}", "missing_parameter")
    return invalid(param, f"{place} = {shown(value)}, but it must be {what}")


def check_count(name: str, count: int, what: str, most: int) -> None:
    """Raise APIError if there are too many entries."""
    if count > most:
        raise invalid(name, f"{name} has {count:,} {what}, but at most {most:,} are allowed")


class BodyReader:
    """An object in a client's body. A field that is null counts as missing.

    `place`: the object's path in the body; empty for the body itself.
    """

    def __init__(self, value: Any, place: str = ""):
        if not isinstance(value, dict):
            raise bad(place, value, "an object")
        self.fields = {name: field for name, field in value.items() if field is not None}
        self._place = f"{place}." if place else ""
        self._known: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of any type."""
        self._known.add(name)
        return self.fields.get(name, default)

    def read(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a field of this type. It is required unless a default is given."""
        value = self.get(name, default)
        if type(value) is not kind:
            raise self.bad(name, KINDS[kind])
        return value

    def whole(
        self, name: str, least: int, most: int = sys.maxsize, default: int | None = None
    ) -> int | None:
        value = self.get(name)
        if value is None:
            return default
        place = self._place + name
        try:
            return whole(place, value, least, most)
        except ValueError as error:
            raise invalid(param_of(place), str(error)) from None

    def table(self, fields: Mapping[str, Field]) -> dict[str, Any]:
        """Return the values of these optional fields."""
        found = {}
        for name, (kind, default, least, most) in fields.items():
            if kind is int:
                found[name] = self.whole(name, least, most, default)
            elif kind is object:
                found[name] = self.get(name, default)
            else:
                found[name] = self.read(name, kind, default)
        return found

    def one_of(self, name: str, values: Collection[str], default: str | None = None) -> str:
        value = self.get(name, default)
        if not isinstance(value, str) or value not in values:
            raise self.bad(name, f"one of {', '.join(values)}")
        return value

    def inner(self, name: str) -> BodyReader:
        """Return a field's object, empty if the field is missing. An empty name returns this object."""
        if not name:
            return self
        return BodyReader(self.get(name, {}), self._place + name)

    def items(self, name: str, default: list | None = None) -> list[BodyReader]:
        """Return a field's list of objects."""
        values = self.read(name, list, default)
        return [BodyReader(value, f"{self._place}{name}[{i}]") for i, value in enumerate(values)]

    def text(self, name: str, default: str | None = None, kinds: Sequence[str] = ("text",)) -> str:
        """Return a field's string, or its text parts joined. `kinds`: the accepted types of parts."""
        value = self.get(name, default)
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise self.bad(name, "a string or a list of text parts")
        return text_of(self.items(name), kinds)

    def some(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the subset of these fields that is present."""
        self._known.update(names)
        return {name: self.fields[name] for name in names if name in self.fields}

    def bad(self, name: str, what: str) -> APIError:
        return bad(self._place + name, self.fields.get(name), what)

    def unsupported(self, name: str, words: str) -> APIError:
        """Return an error about a field. `name` comes from the client and may be very long."""
        words = f"{self._place}{shown(name).strip(chr(39))} {words}"
        return invalid(param_of(self._place + name), words, "unsupported_parameter")

    def reject_unknown(
        self, neutral: Mapping[str, Sequence] = {}, ignored: Collection[str] = IGNORED
    ) -> None:
        """Refuse fields that were not read.

        Fields in `ignored`, values in `neutral`, and values that are false, zero or empty are accepted.
        """
        for name, value in self.fields.items():
            asks = any(value.values()) if isinstance(value, dict) else value
            is_known = name in self._known or name in ignored
            if asks and not is_known and value not in neutral.get(name, ()):
                raise self.unsupported(
                    name, f"= {shown(value)} is not supported here; leave it out"
                )


def text_of(parts: Sequence[BodyReader], kinds: Sequence[str] = ("text",)) -> str:
    texts = []
    for part in parts:
        kind = part.read("type", str)
        if kind not in kinds:
            raise part.unsupported("type", f"= {shown(kind)}, but only text is supported here")
        texts.append(part.read("text", str))
    return "".join(texts)


def parse_json(text: str) -> Any:
    """Parse JSON. Reject NaN and numbers such as 1e999: Python accepts them, but would write them
    back as tokens that other parsers reject."""
    return json.loads(text, parse_constant=number_of, parse_float=number_of)


def number_of(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a JSON number")
    return number


def read_json(body: bytes) -> BodyReader:
    # Python parses 4 MiB of "[]," into a million lists, and holds the GIL for half a second
    marks = sum(map(body.count, (b"[", b"{", b":")))
    if marks > MAX_BRACKETS:
        words = f"the body has {marks:,} brackets, braces and colons, but at most {MAX_BRACKETS:,} are allowed"
        raise APIError(413, words, "request_too_large")
    try:
        values = parse_json(body.decode("utf-8-sig"))
        if not isinstance(values, dict):
            raise ValueError(f"it is {shown(values)}, but it must be an object")
        return BodyReader(values)
    except UnicodeDecodeError as error:
        words = f"it is not UTF-8 at byte {error.start}"
    except RecursionError:
        words = "it is nested too deep"
    except ValueError as error:
        words = str(error).partition("; use sys")[0][:200]  # cut Python's advice to the programmer
    raise APIError(400, f"the body is not valid JSON: {words}", "invalid_json")


# --- fields that several protocols have -----------------------------------------------------------


def conversation(request: BodyReader, name: str) -> list[BodyReader]:
    """Return the messages. Their number is limited, because rendering takes time even for an empty
    message."""
    messages = request.read(name, list)
    if not messages:
        raise request.bad(name, "a list of at least one message")
    count = len(messages)
    for message in messages:
        if isinstance(message, dict):
            parts = (message.get("content"), message.get("tool_calls"))
            count += sum(len(part) for part in parts if isinstance(part, list))
    check_count(name, count, "messages and parts of messages", MAX_MESSAGES)
    return request.items(name)


def read_stop(request: BodyReader, name: str) -> list[str]:
    """Return the stop strings. Refuse numbers, which `SamplingParams` would accept as token ids."""
    stops = request.get(name, [])
    stops = [stops] if isinstance(stops, str) else request.read(name, list, [])
    check_count(name, len(stops), "texts", MAX_STOPS)
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_LENGTH:
            what = f"texts, none empty or longer than {MAX_STOP_LENGTH:,} characters"
            raise request.bad(name, what)
    return stops


def read_form(values: BodyReader, name: str, inner: str = "") -> dict[str, Any]:
    """Return the requested JSON format for `SamplingParams.grammar`; empty for plain text.

    `inner`: the format's field that contains the schema; empty if the schema is at the top level.
    """
    form = values.inner(name)
    kind = form.one_of("type", ("text", "json_object", "json_schema"), "text")
    if kind == "text":
        return {}
    if kind == "json_object":
        # llama.cpp allows a schema here, too
        return {"json": form.read("schema", dict, {}) or {"type": "object"}}
    return {"json": form.inner(inner).read("schema", dict)}


def read_tools(
    request: BodyReader,
    inner: str = "",
    schema: str = "parameters",
    type: str = "function",
    words: Mapping[str, str] = {},
) -> tuple[list[dict], list[dict]]:
    """Return the tools in the form that templates expect, and the tools of which one must be called.

    `inner`: the tool's field that contains name and description; empty if they are at the top level.
    `schema`: the name of the parameters field.
    `type`: the only supported type of tool.
    `words`: the protocol's values of `tool_choice` -> "required" or "function".
    """
    tools = request.items("tools", [])
    check_count("tools", len(tools), "tools", MAX_TOOLS)
    found = []
    for tool in tools:
        kind = tool.read("type", str, type)
        if kind != type:
            raise tool.unsupported(
                "type", f"= {shown(kind)}, but only functions are supported here"
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
    return choose_tools(request, found, inner, words)


def choose_tools(
    request: BodyReader, tools: list[dict], inner: str, words: Mapping[str, str]
) -> tuple[list[dict], list[dict]]:
    """Apply `tool_choice`: return the tools to offer, and the tools of which one must be called."""
    kind = request.get("tool_choice", "auto")
    name = None
    if isinstance(kind, dict):
        choice = request.inner("tool_choice")
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
        raise request.bad("tool_choice", "none, auto, required, or the name of one of the tools")
    return tools, wanted


def effort_hint(effort: Any) -> dict[str, str]:
    """Return an effort of low, medium or high as a variable for gpt-oss's template. Any other value leaves the
    template's default."""
    return {"reasoning_effort": effort} if effort in ("low", "medium", "high") else {}


def call_of(id: str, function: BodyReader, field: str = "arguments") -> dict:
    """Return an earlier tool call in the form that templates expect. The arguments may be an object or
    a JSON string. A text that a model wrote in place of JSON becomes an object with this text, because a 400
    would end the conversation."""
    arguments = function.get(field)
    if isinstance(arguments, str):
        parsed = {} if arguments.strip() in ("", "null") else json_or_none(arguments)
        arguments = parsed if isinstance(parsed, dict) else {"arguments": arguments}
    if not isinstance(arguments, dict):
        raise function.bad(field, "an object, or JSON of one")
    called = {"name": function.read("name", str), "arguments": arguments}
    return {"id": id, "type": "function", "function": called}
