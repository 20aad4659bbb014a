"""The chat template: a program of another author's, compiled and run within limits.

The problem. A template comes with the weights, from anywhere. It is a program in Jinja's language,
which makes one text of a conversation. Jinja's sandbox keeps it away from files and from Python's
own names. But within the sandbox it may loop for ever, or ask for a text of gigabytes, and the
process would die of it with all its requests.

The way out. A template may take so many seconds of a processor (`SECONDS`) and make so many
characters (`SIZE`). The time is looked at by a trace function, as a debugger has it: Python calls
it at each line of the template, and at each call of a function, in this thread alone. (A signal
would come to the main thread only.) The characters are counted before they are made: the sandbox
hands us every operator and call, and the filters are wrapped.

What this cannot bound: an operation that is written in C, such as a sort or a slice of a very long
text, cannot be stopped while it runs. The sizes keep each of them short, but one expression may
chain many.

Where next: `tokens.py`, which says when a template is used.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

SECONDS = 5.0  # of a processor; an honest template takes milliseconds
SIZE = 100_000_000  # characters, all intermediate texts together
SOURCE = 1_000_000  # characters; the longest templates that are published have some ten thousand
# Filters and methods of texts whose result may be many times as long as what goes in.
GROWING = "batch center expandtabs format format_map indent join ljust replace rjust slice tojson translate urlize"
GROWING = frozenset(f"{GROWING} wordwrap xmlattr zfill".split())
# Those that make no text of their own: a template may ask in each turn how many turns there are.
LOOKING = frozenset(["count", "endswith", "first", "last", "length", "startswith"])


# --- the limits ---------------------------------------------------------------------------------


class LimitError(jinja2.TemplateError):
    """A template wants more than it may have."""


class Meter(threading.local):
    """What is left to the template that runs in this thread."""

    until = 0.0
    left = 0


meter = Meter()


def spend(characters: int) -> None:
    meter.left -= characters
    if meter.left < 0:
        raise LimitError(f"it makes more than {SIZE:,} characters; give plain text")


def limited(function: Callable, *arguments: Any, **options: Any) -> Any:
    """Call a function that runs a template, or compiles one."""

    def watch(frame, event, argument):
        if time.thread_time() > meter.until:
            raise LimitError(f"it takes more than {SECONDS:g} s; give plain text")
        # Elsewhere calls alone will do
        return watch if frame.f_code.co_filename == "<template>" else None

    meter.until, meter.left = time.thread_time() + SECONDS, SIZE
    before = sys.gettrace()
    sys.settrace(watch)
    try:
        return function(*arguments, **options)
    finally:
        sys.settrace(before)


# --- how many characters? -----------------------------------------------------------------------


def size(value: Any) -> int:
    """About how long a value is as text. A container counts with all that is in it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return size(list(value.items()))
    if isinstance(value, (list, tuple)):
        return sum(map(size, value)) + 2 * len(value)
    return value.bit_length() // 3 + 1 if isinstance(value, int) else 8


def width(value: Any) -> int:
    """How many characters an argument may ask for: a number, as many as it says."""
    if isinstance(value, (list, tuple)):
        return max(map(width, value), default=0)
    return abs(value) if isinstance(value, int) else size(value)


def made_by_call(name: str, value: Any, arguments: Iterable[Any]) -> int:
    """By a filter, or a method of a text."""
    if name in LOOKING:
        return 1
    most = max(map(width, arguments), default=1) if name in GROWING else 1
    asked = (
        map(int, re.findall(r"\d{4,}", value))
        if name.startswith("format") and isinstance(value, str)
        else ()
    )
    return size(value) * max(most, 1) + sum(asked)  # "%9999d"


def made_by_operator(operator: str, left: Any, right: Any) -> int:
    if operator == "%":
        return made_by_call("format", left, [right]) if isinstance(left, str) else 1
    # To multiply long numbers takes long, too
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return {"+": 1, "*": size(left) * size(right), "**": (size(left) * width(right)) ** 2}[
            operator
        ]
    # An entry of a list takes eight bytes.
    lengths = [
        len(v) * (1 if isinstance(v, str) else 8)
        for v in (left, right)
        if isinstance(v, (str, list, tuple))
    ]
    return sum(lengths) * (
        max(width(left), width(right)) if operator == "*" and len(lengths) == 1 else 1
    )


# --- the sandbox --------------------------------------------------------------------------------


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with the options of Hugging Face, which counts what a template makes."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self):
        extensions = ["jinja2.ext.loopcontrols", Generation]
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=finalize
        )
        del self.globals["lipsum"]  # makes texts of any length
        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
        self.filters = {
            name: counted(name, filter)
            for name, filter in {**self.filters, "tojson": tojson}.items()
        }

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        spend(made_by_operator(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context, callee: Any, *arguments: Any, **options: Any) -> Any:
        method = getattr(callee, "__wrapped__", callee)  # the sandbox wraps `format`
        if isinstance(text := getattr(method, "__self__", None), str):
            spend(made_by_call(method.__name__, text, (*arguments, *options.values())))
        return super().call(context, callee, *arguments, **options)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Joins what a template, a macro or a block has written."""
        return "".join(finalize(piece) for piece in pieces)

    def _parse(self, *arguments) -> nodes.Template:
        return Joins().visit(super()._parse(*arguments))


class Joins(NodeTransformer):
    """Makes of `a ~ b` a filter, which is counted."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        parts = nodes.List(self.generic_visit(node).nodes, lineno=node.lineno)
        return nodes.Filter(
            parts, "join", [], [], None, None, lineno=node.lineno, environment=node.environment
        )


class Generation(jinja2.ext.Extension):
    """{% generation %} marks what the assistant said, for training. Here it is replaced by what it
    encloses."""

    tags: ClassVar = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body, lineno=line)


def counted(name: str, filter: Callable) -> Callable:
    gets_context = hasattr(filter, "jinja_pass_arg")  # as its first argument

    @functools.wraps(filter)
    def run(*arguments: Any, **options: Any) -> Any:
        arguments = [
            list(value) if isinstance(value, (Iterator, range)) else value for value in arguments
        ]
        value, *others = arguments[gets_context:]
        spend(made_by_call(name, value, (*others, *options.values())))
        return filter(*arguments, **options)

    return run


def finalize(value: Any) -> Any:
    """Called with every value that is written out."""
    spend(size(value) + 1)
    return value


def raise_exception(message: str):
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class Template:
    """A chat template. Making one and rendering it may raise anything: it is another author's
    program."""

    def __init__(self, source: str):
        if len(source) > SOURCE:
            raise LimitError(f"it is {len(source):,} characters long, more than {SOURCE:,}")
        self._template = limited(Sandbox().from_string, source)

    def render(self, **variables: Any) -> str:
        return limited(self._template.render, **variables)
