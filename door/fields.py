"""A client's body, field by field.

The problem. A body is a stranger's. A field may be missing, null, of another type, nested without
end, or huge. And an unknown field may ask for something. A client with an answer to another question
than its own does not notice.

The way out. An object of the body is a `Given`. A field is read as a text, a number, a list and so
on: a value of another kind becomes a refusal with the place, the value and the right kind. The object
remembers the fields that have been read. All other fields have not been understood. They are
refused, unless they ask for nothing (`refuse_rest`).

What this file keeps. A bad body raises a `Refusal`, and no other exception.

Where next: `protocol.py`, for the fields that all protocols have.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from parts.checks import shown, whole

MARKS = 100_000  # brackets, braces and colons of a body, in texts, too
# These change nothing in an answer: a user's name, notes for a bill, hints for a cache.
NO_WISH = {
    "client_metadata",
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
}
KINDS = {str: "a text", bool: "true or false", list: "a list", dict: "an object"}


class Refusal(Exception):
    """An answer that is an error. OpenAI's clients have an exception for each status."""

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


def invalid(param: str | None, words: str, code: str = "invalid_value") -> Refusal:
    return Refusal(400, words, code, param)


def param_of(place: str) -> str:
    """The body's field around a place: "messages" for "messages[0].content"."""
    return re.split(r"[.\[]", place, maxsplit=1)[0][:100]


def bad(place: str, value: Any, what: str) -> Refusal:
    param = param_of(place)
    if value is None:
        return invalid(param, f"{place} is missing; give {what}", "missing_parameter")
    return invalid(param, f"{place} = {shown(value)}, but it must be {what}")


def check_count(name: str, count: int, what: str, most: int) -> None:
    """Refuse too many of something before any of them is looked at."""
    if count > most:
        raise invalid(name, f"{name} has {count:,} {what}, but there may be at most {most:,}")


class Given:
    """An object of a client's body. A field that is null counts as missing.

    `place`: where the object stands in the body; empty for the body itself.
    """

    def __init__(self, value: Any, place: str = ""):
        if not isinstance(value, dict):
            raise bad(place, value, "an object")
        self.fields = {name: field for name, field in value.items() if field is not None}
        self._place = f"{place}." if place else ""
        self._known: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """A field of any kind."""
        self._known.add(name)
        return self.fields.get(name, default)

    def read(self, name: str, kind: type, default: Any = None) -> Any:
        """A field of this kind. Without a default, the field may not be missing."""
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

    def one_of(self, name: str, values: Collection[str], default: str | None = None) -> str:
        value = self.get(name, default)
        if not isinstance(value, str) or value not in values:
            raise self.bad(name, f"one of {', '.join(values)}")
        return value

    def inner(self, name: str) -> Given:
        """An object in a field; an empty one, if the field is missing. Without a name: this
        object."""
        if not name:
            return self
        return Given(self.get(name, {}), self._place + name)

    def items(self, name: str, default: list | None = None) -> list[Given]:
        """A list of objects in a field."""
        values = self.read(name, list, default)
        return [Given(value, f"{self._place}{name}[{i}]") for i, value in enumerate(values)]

    def text(self, name: str, default: str | None = None, kinds: Sequence[str] = ("text",)) -> str:
        """The text of a field: a plain text, or parts of text of these kinds, joined."""
        value = self.get(name, default)
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise self.bad(name, "a text or a list of parts of text")
        return text_of(self.items(name), kinds)

    def some(self, names: Sequence[str]) -> dict[str, Any]:
        """Of these fields all that are there."""
        self._known.update(names)
        return {name: self.fields[name] for name in names if name in self.fields}

    def bad(self, name: str, what: str) -> Refusal:
        return bad(self._place + name, self.fields.get(name), what)

    def unsupported(self, name: str, words: str) -> Refusal:
        """`name`: any text of the client's, even a whole book."""
        words = f"{self._place}{shown(name).strip(chr(39))} {words}"
        return invalid(param_of(self._place + name), words, "unsupported_parameter")

    def refuse_rest(
        self, neutral: Mapping[str, Sequence] = {}, ignored: Collection[str] = NO_WISH
    ) -> None:
        """Refuse all fields that have not been read. A value that is false, zero or empty asks for
        nothing, and so do `neutral` values and `ignored` fields."""
        for name, value in self.fields.items():
            asks = any(value.values()) if isinstance(value, dict) else value
            is_known = name in self._known or name in ignored
            if asks and not is_known and value not in neutral.get(name, ()):
                raise self.unsupported(
                    name, f"= {shown(value)} is not supported here; leave it out"
                )


def text_of(parts: Sequence[Given], kinds: Sequence[str] = ("text",)) -> str:
    texts = []
    for part in parts:
        kind = part.read("type", str)
        if kind not in kinds:
            raise part.unsupported("type", f"= {shown(kind)}, but only text can be read here")
        texts.append(part.read("text", str))
    return "".join(texts)


def strict(text: str) -> Any:
    """JSON. Python would read NaN and 1e999, too, and write both so that no other reader knows them."""
    return json.loads(text, parse_constant=number_of, parse_float=number_of)


def number_of(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of JSON")
    return number


def read_json(body: bytes) -> Given:
    # Of 4 MiB of "[]," Python makes a million lists, and lets no other thread run for half a second
    marks = sum(map(body.count, (b"[", b"{", b":")))
    if marks > MARKS:
        words = f"the body has {marks:,} brackets, braces and colons, but there may be at most {MARKS:,}"
        raise Refusal(413, words, "request_too_large")
    try:
        given = strict(body.decode("utf-8-sig"))
        if not isinstance(given, dict):
            raise ValueError(f"it is {shown(given)}, but it must be an object")
        return Given(given)
    except UnicodeDecodeError as error:
        words = f"it is no UTF-8 at byte {error.start}"
    except RecursionError:
        words = "it is nested too deep"
    except ValueError as error:
        words = str(error).partition("; use sys")[0][:200]  # that is no advice for a client
    raise Refusal(400, f"the body is no valid JSON: {words}", "invalid_json")
