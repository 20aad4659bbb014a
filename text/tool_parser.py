"""Reasoning parser and tool parser: split an answer into reasoning, content and tool calls as it
streams.

The problem. A model writes all three into one text, with the marks of its training:

    <think>I should add.</think>It is a sum.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>

A client wants them separately, as they stream. A mark may begin in one piece of text and end in
another, and a model may write half a mark, a mark inside its reasoning, or a call that never ends.
Newer models do not write JSON, but put each argument between tags without quotes:

    <tool_call><function=add><parameter=a>1</parameter></function></tool_call>

The solution. One state machine reads characters, not tokens, because a mark's last character may
share a token with the text after it. It is a generator whose code reads like a description of an
answer from start to end, and it can pause anywhere until more text arrives. The marks are data
(`tool_formats.py`). The format of a model is detected, not configured: its chat template renders a
call, and the format that parses this call back is the model's. The tool's schema says whether an
argument in tags is a string or a number.

The invariant: however an answer is cut into pieces, its parts join to the same texts. The cost of a
character does not depend on the length of the answer. Text that turns out not to be a call is
content, without loss. Whitespace next to a mark belongs to the mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from base.strings import beginning, json_or_none
from text.tool_formats import (
    FORMATS,
    HARMONY,
    HARMONY_ENDS,
    HARMONY_REASONING,
    JSONS,
    PROBE,
    PYTHONS,
    REASONING_MARKS,
    SILENT,
    TOOLS,
    OutputFormat,
    Tags,
    ToolFormat,
    kinds_of,
    with_layout,
)


class ParsedPart(NamedTuple):
    """A piece of an answer."""

    # "content", "reasoning", "tool_call" (the text is a tool's name) or "arguments" (of the latest
    # call)
    kind: str
    text: str


# --- for display ----------------------------------------------------------------------------------


OPENINGS = tuple(opens for opens, _ in REASONING_MARKS)
CLOSING = re.compile("|".join(re.escape(closes) for _, closes in REASONING_MARKS))
CALLING = re.compile("|".join(re.escape(format.opens) for format in FORMATS))


def split_output(text: str, is_thinking: bool = False) -> list[ParsedPart]:
    """Split an answer into reasoning, content and calls, marks included, for display. The model's
    format need not be known.

    `is_thinking`: the prompt has opened the reasoning.
    """
    if is_harmony(text):
        return harmony_output(text)
    closing = CLOSING.search(text)
    is_open = is_thinking or text.lstrip().startswith(OPENINGS)
    reasoning = text if is_open else ""
    if closing:
        reasoning = text[: closing.end()]
    call = CALLING.search(text, len(reasoning))
    end = call.start() if call else len(text)
    answer = text[len(reasoning) : end]
    if reasoning or call:
        answer = answer.strip("\n")
    parts = (
        ParsedPart("reasoning", reasoning),
        ParsedPart("content", answer),
        ParsedPart("tool_call", text[end:]),
    )
    return [part for part in parts if part.text]


def split_reasoning(text: str, is_thinking: bool = False) -> tuple[str, str]:
    """Return the reasoning of an answer without its marks, and the rest without the line breaks before it,
    which becomes part of the next prompt."""
    if is_harmony(text):
        parts = dict(harmony_output(text))
        return parts.get("reasoning", ""), parts.get("content", "")
    reasoning = dict(split_output(text, is_thinking)).get("reasoning", "")
    answer = text[len(reasoning) :]
    answer = answer.lstrip("\n") if reasoning else answer
    for mark in chain(*REASONING_MARKS):
        reasoning = reasoning.replace(mark, "")
    return reasoning.strip(), answer


def is_harmony(text: str) -> bool:
    return text.lstrip().startswith("<|channel|>")


def harmony_output(text: str) -> list[ParsedPart]:
    """Split an answer in Harmony into at most one part of each kind, without marks."""
    parser = OutputParser(OutputFormat(HARMONY_REASONING, HARMONY), {"": {}})
    found = dict.fromkeys(("reasoning", "content", "tool_call"), "")
    for kind, piece in parser.push(text) + parser.push(None):
        found["tool_call" if kind == "arguments" else kind] += piece
    return [ParsedPart(*part) for part in found.items() if part[1]]


# --- the state machine ----------------------------------------------------------------------------

# Maximum number of characters before a body or before its arguments, and of whitespace that
# belongs to a mark
HEAD = 300
NAME = r"[\w.-]{1,128}"  # a tool's name
BARE_KEY = re.compile(r'([{,]\s*)([^\s"{}\[\],:][^"{}\[\],:]{0,127}?)\s*:')
KEY = r"[^<>\"\n]{1,128}"  # an argument's name in tags
# Separators between calls, and the tool's name if it precedes the body
BEFORE = rf"[\s,;\[]*(?:({NAME})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*)?(?={{)"
# The start of a call in JSON, in pieces, because an answer may end or pause after any of them. A
# body that starts differently is recognized only when it is complete. Qwen 2.5 Coder's template shows the
# form of a call in doubled braces, and its models close one or both
GAP = r"\s{0,20}"
BODY = [r"\{", r"\{?", GAP, *'"name"', GAP, ":", GAP, '"', rf"({NAME})", '"', GAP, ",", GAP]
BODY += ['"', "(arguments|parameters)", '"', GAP, ":", GAP]
# Models with little training on calls write them at the start of a line without a mark: bare, in a
# list, or in a code block. To recognize these, the pattern extends to the first key or the closing brace
FENCE = "```"
FENCED = [r"[ \t]{0,20}", *FENCE, *(f"(?i:{letter})" for letter in "json"), r"[\s\[]{1,20}"]
LISTED = [r"[\s,;\[]{0,20}"]
BARE = [*BODY, r"\{", GAP, r'["}]']
LINE = r"(?:\A|(?<=\n))"


def begun(pieces: Sequence[str]) -> str:
    """Return a pattern that matches any prefix of the concatenated pieces."""
    pattern = ""
    for piece in reversed(pieces):
        piece = piece.replace("(arguments|parameters)", "[a-z]{1,10}")
        pattern = f"(?:{piece}{pattern})?"
    return pattern


BODY_BEGINS = re.compile("".join(BODY) + r"(?=\{)")
BODY_MAY_BEGIN = re.compile(begun(BODY) + r"\Z")
BARE_BEGINS = re.compile(f"{LINE}(?:{''.join(FENCED)}|{LISTED[0]})(?P<body>{''.join(BARE)})")
BARE_MAY_BEGIN = re.compile(f"{LINE}(?:{begun([*FENCED, *BARE])}|{begun([*LISTED, *BARE])})\\Z")
# A word in the header of a Harmony message. The recipient may precede or follow the channel
HEADER_WORD = re.compile(
    r"to=([\w.-]{1,140})|<\|channel\|>(\w+)|(?:<\|constrain\|>)?\w+|<\|constrain\|>"
)
HEADER_BEGINS = ("<|channel|>", "<|message|>", "to=")
MESSAGE_ENDS = ("<|end|>", "<|start|>", *HARMONY_ENDS)
T = TypeVar("T")
Reading = Generator[None, None, T]


class OutputParser:
    """The parser of one answer. `push` takes a piece of its text and returns the new parts.

    `tools`: name -> schema of the arguments. Without tools, calls are content.
    `is_thinking`: the prompt has opened the reasoning.
    `is_single`: stop after one call.
    `is_strict`: a call without its mark is content, because the answer may be JSON of a schema.
    """

    def __init__(
        self,
        output_format: OutputFormat,
        tools: Mapping[str, Mapping[str, Any]] = {},
        is_thinking: bool = False,
        is_single: bool = False,
        is_strict: bool = False,
    ):
        self._reader = ParserState(output_format, tools, is_thinking, is_single, is_strict)
        # The generator refers to the state, so the state must not refer to the generator: a cycle
        # would keep an aborted answer in memory until the garbage collector runs.
        self._reading = self._reader.parse()

    @property
    def reasoning_length(self) -> int:
        """The number of characters of reasoning, marks included."""
        return self._reader.reasoning_length

    @property
    def is_over(self) -> bool:
        """True after the first call if only one is allowed. Later text is dropped."""
        return self._reader.is_over

    @property
    def is_in_call(self) -> bool:
        """True inside the arguments of the latest call."""
        return self._reader.is_in_call

    def push(self, piece: str | None, is_cut: bool = False) -> list[ParsedPart]:
        """Add a piece and return the new parts of the answer. None ends the answer, and an incomplete
        mark is content. But if `max_tokens` cut the answer off (`is_cut`), an incomplete call is
        dropped."""
        self._reader.add(piece, is_cut)
        next(self._reading, None)
        return self._reader.pop_parts()

    def ends(self, piece: str) -> bool:
        """Add a piece and return True if the answer is then over."""
        self.push(piece)
        return self.is_over


class ParserState:
    """The state of a parser.

    `parse` reads the answer from start to end. It consumes `self._text`, yields when it needs more
    text, and continues when the next piece arrives. The methods that it calls do the same for a
    part of the answer.
    """

    def __init__(
        self,
        output_format: OutputFormat,
        tools: Mapping[str, Mapping[str, Any]],
        is_thinking: bool,
        is_single: bool,
        is_strict: bool,
    ):
        self.is_complete = False  # no more text will arrive
        self.is_cut = False  # `max_tokens` cut the answer off
        self.is_over = False  # later text is dropped
        self.is_in_call = False  # the latest call's arguments are incomplete
        self.reasoning_length = 0  # characters of reasoning, marks included
        self.calls = 0  # number of calls so far
        self._marks = output_format.reasoning
        self._format = (tools and output_format.tools) or SILENT
        self._tools = tools
        self._is_single = is_single or self._format.is_bare
        has_own = self._format.tags or self._format.quote
        self._reads_bare = bool(self._format.opens and not has_own and not is_strict)
        self._is_line_start = True
        self._is_fenced = False  # a code block of calls is open
        # Text not parsed yet. It begins with the reasoning mark if the prompt has opened the reasoning
        self._text = self._marks[0] if is_thinking else ""
        self._length = 0  # length of all text so far
        self._parts: list[ParsedPart] = []
        self._is_harmony = output_format.is_harmony
        self._last_message = ""  # the kind of the last message in Harmony
        self._is_new = True  # nothing of the current message has been emitted

    def add(self, piece: str | None, is_cut: bool) -> None:
        self.is_complete = piece is None
        self.is_cut = is_cut
        self._text += piece or ""
        self._length += len(piece or "")

    def pop_parts(self) -> list[ParsedPart]:
        """Return the parts since the last call of this method."""
        parts = self._parts
        self._parts = []
        return parts

    def parse(self) -> Reading[None]:
        """Parse the answer. Reasoning may occur at the start and after a call, and so may a call
        without a mark if the model's own format allows it."""
        if self._is_harmony:
            yield from self._messages()
            return
        is_start = True
        while self._text or not self.is_complete:
            if is_start and self._marks and (yield from self._skip(self._marks[0])):
                yield from self._emit_up_to(partial(self._emit, "reasoning"), self._marks[1])
                self.reasoning_length = self._length - len(self._text)
                self._is_line_start = True
                yield from self._skip_space()
            elif is_start and self._format.is_bare and (yield from self._begins_with("{")):
                is_start = yield from self._calls("")
            elif (opening := (yield from self._content())) is not None:
                is_start = yield from self._calls(opening)
            if self.calls and self._is_single:
                # If the answer has ended, the call may be cut off
                self.is_over = not self.is_complete
                return

    def _messages(self) -> Reading[None]:
        """Parse an answer in Harmony. Messages in the channel "analysis" are reasoning, messages with a
        recipient are calls, and all others are content."""
        while self._text or not self.is_complete:
            header = yield from self._wait(match_header)
            self._is_new = True
            if header:
                self._text = self._text.removeprefix(header.text)
                yield from self._skip_space()
                yield from self._message(header)
            elif self.is_cut and begins_header(self._text) is not False:
                self._text = ""
            elif self._text.startswith(HARMONY.opens):
                self._text = self._text.removeprefix(HARMONY.opens)
            else:
                if self._text.startswith("<|start|>"):  # a message with another role
                    self._text = self._text.removeprefix("<|start|>")
                    self._say("content", "<|start|>")
                yield from self._body(partial(self._say, "content"))
            if self.calls and self._is_single:
                self.is_over = not self.is_complete
                return

    def _message(self, header: Header) -> Reading[None]:
        recipient = header.recipient
        is_call = recipient.startswith("functions.") and self._format is not SILENT
        if is_call and self._text.startswith("{"):
            self._begin(recipient.removeprefix("functions."))
            self._last_message = ""
            yield from self._object(kind="arguments")
            if not self._is_single:
                yield from self._body(lambda text: None)
            return
        if is_call and self.is_cut and not self._text:
            return
        kind = "content" if is_call or header.channel != "analysis" else "reasoning"
        if recipient and kind == "content":
            self._say(kind, header.text)
        yield from self._body(partial(self._say, kind))
        if kind == "reasoning":
            self.reasoning_length = self._length - len(self._text)

    def _say(self, kind: str, text: str) -> None:
        """Emit text of a message. A blank line separates it from an earlier message of the same kind."""
        if text:
            is_next = self._is_new and self._last_message == kind
            self._is_new = False
            self._last_message = kind
            self._emit(kind, "\n\n" * is_next + text)

    def _body(self, emit: Callable[[str], None]) -> Reading[None]:
        """Emit the text up to the end of a Harmony message, and consume the mark there."""
        while True:
            places = [(self._text.find(mark), mark) for mark in MESSAGE_ENDS if mark in self._text]
            if places:
                place, mark = min(places)
                emit(strip_held_space(self._text[:place]))
                self._text = self._text[place:]
                if mark != "<|start|>":
                    self._text = self._text.removeprefix(mark)
                return
            words = self._text
            held = max((beginning(mark, words) for mark in MESSAGE_ENDS), key=len)
            if not self.is_complete or (self.is_cut and held):
                words = strip_held_space(words.removesuffix(held))
            emit(words)
            self._text = "" if self.is_complete else self._text[len(words) :]
            if self.is_complete:
                return
            yield

    def _wait(self, recognize: Callable[[str], T | None]) -> Reading[T | None]:
        """Call `recognize` with the upcoming text until it returns a result, and return that. `recognize`
        returns None while more text may change the result; so does this method if the answer ends, or after
        `HEAD` characters."""
        while (found := recognize(self._text[:HEAD])) is None:
            if len(self._text) >= HEAD or self.is_complete:
                break
            yield
        return found

    def _begins_with(self, mark: str) -> Reading[bool | None]:
        """True if this mark comes next, perhaps after whitespace; None if the answer ends within it."""
        return (yield from self._wait(lambda text: begins(text.lstrip(), mark)))

    def _consume(self, mark: str, rest: str = "") -> Reading[re.Match | None]:
        """Consume whitespace, a mark, and the pattern `rest` after it. Return the match; None as soon as the
        text differs from the mark, or after `HEAD` characters without a match of `rest`."""
        mark = mark.strip()
        pattern = re.compile(rf"\s*{re.escape(mark)}{rest}")

        def recognize(text: str) -> re.Match | bool | None:
            return False if begins(text.lstrip(), mark) is False else pattern.match(text)

        found = yield from self._wait(recognize)
        if not found:
            return None
        self._text = self._text[found.end() :]
        return found

    def _skip(self, mark: str) -> Reading[bool]:
        """Consume a mark and the whitespace around it. Return False if the mark does not come next."""
        if not (yield from self._consume(mark)):
            return False
        yield from self._skip_space()
        return True

    def _skip_space(self) -> Reading[None]:
        """Drop the whitespace after a mark as it arrives, so that nothing is held back."""
        self._text = self._text.lstrip()
        while not self._text and not self.is_complete:
            yield
            self._text = self._text.lstrip()

    def _emit_up_to(self, emit: Callable[[str], None], mark: str) -> Reading[str]:
        """Emit the text before a mark and consume the mark. Return the mark with the whitespace
        before it; empty if the answer ends without a mark.

        Whitespace and text that may be the start of the mark are held back.
        """
        while not mark or mark not in self._text:
            words = self._text
            if mark and not self.is_complete:
                words = strip_held_space(words.removesuffix(beginning(mark, words)))
            emit(words)
            self._text = self._text[len(words) :]
            if self.is_complete:
                return ""
            yield
        before, _, self._text = self._text.partition(mark)
        words = strip_held_space(before)
        emit(words)
        return before[len(words) :] + mark

    def _content(self) -> Reading[str | None]:
        """Emit content up to a call. Return the text that opens the call, with the whitespace before
        it; None if the answer ends without a call. Whitespace and text that may be the start of a call
        are held back."""
        while not (place := self._next_call()):
            words = self._text
            left = words[self._undecided() :]
            is_held = not self.is_complete or (self.is_cut and left.strip())
            if self._format.opens and is_held:
                words = strip_held_space(words.removesuffix(left))
            self._emit("content", words)
            self._text = "" if self.is_complete else self._text[len(words) :]
            if self.is_complete:
                return None
            yield
        start, end = place
        words = strip_held_space(self._text[:start])
        self._emit("content", words)
        opening = self._text[len(words) : end]
        self._text = self._text[end:]
        return opening

    def _next_call(self) -> tuple[int, int] | None:
        """Return start and end of the next call's mark, or of the text before the body if the call has
        no mark. None if no call has begun."""
        mark = self._format.opens
        place = self._text.find(mark) if mark else -1
        if self._reads_bare:
            end = len(self._text) if place < 0 else place
            for found in BARE_BEGINS.finditer(self._text, not self._is_line_start, end):
                if found[2] in self._tools:
                    return after_space(found), found.start("body")
        return None if place < 0 else (place, place + len(mark))

    def _undecided(self) -> int:
        """Return the index from which the text may become the start of a call."""
        mark = self._format.opens
        place = len(self._text) - len(beginning(mark, self._text))
        if self._reads_bare and not self._text.isspace():  # whitespace is held back anyway
            found = BARE_MAY_BEGIN.search(self._text, not self._is_line_start)
            place = min(place, after_space(found)) if found else place
        return place

    def _calls(self, opening: str) -> Reading[bool]:
        """Parse calls after a mark, or a call without a mark. Return False if there is none, so that
        the mark is content."""
        count = self.calls
        is_marked = bool(self._format.opens) and self._format.opens in opening
        self._is_fenced |= FENCE in opening
        is_tagged = self._format.tags and not (yield from self._begins_with("{"))
        read = self._call_in_tags if is_tagged else self._call_in_json
        if self._format.quote:
            read = self._call_in_quotes
        while (taken := (yield from read())) is None:
            opening = ""
            if self._is_single or (yield from self._close()) or not is_marked:
                return True
        if self.is_cut and self._is_begun(opening, taken + self._text):
            self._text = ""
        else:
            self._emit("content", opening + taken)
        return self.calls > count

    def _is_begun(self, opening: str, rest: str) -> bool:
        """True if this is the start of a call within which the answer was cut off."""
        closes = self._format.closes
        is_closed = len(closes) > 1 and closes in rest
        return not is_closed and (bool(opening) or rest.lstrip(" \n,;[").startswith("{"))

    def _call_in_tags(self) -> Reading[str | None]:
        """Parse a call in tags. Return None, or an empty text if it is not a call: then no text was
        consumed."""
        tags = self._format.tags
        rest = rf"({NAME})\s*{ending(tags.after_name)}"
        found = yield from self._consume(tags.before_name, rest)
        if not found:
            return ""
        name = found[1]
        self._begin(name)
        yield from self._arguments(tags, self._tools.get(name, {}))
        yield from self._skip(tags.end)
        return None

    def _arguments(self, tags: Tags, schema: Mapping[str, Any]) -> Reading[None]:
        """Emit arguments in tags as JSON, which stays open if the answer ends within an argument. Emit
        strings as they arrive, and other values when they are complete."""
        said = "{"
        rest = rf"({KEY})\s*{ending(tags.after_key)}"
        while found := (yield from self._consume(tags.before_key, rest)):
            key = found[1]
            kinds = kinds_of(schema, key)
            said += json.dumps(key, ensure_ascii=False) + ": "
            value: list[str] = []
            if kinds == {"string"}:
                self._emit("arguments", said + '"')
                is_complete = yield from self._value(tags, self._quote)
                said = '"'
            else:
                self._emit("arguments", said)
                is_complete = yield from self._value(tags, value.append)
                said = as_json_value("".join(value), kinds)
            if not is_complete:
                return
            self._emit("arguments", said)
            said = ", "
        self._emit("arguments", "{}" if said == "{" else "}")
        self.is_in_call = False

    def _quote(self, piece: str) -> None:
        self._emit("arguments", json.dumps(piece, ensure_ascii=False)[1:-1])

    def _value(self, tags: Tags, emit: Callable[[str], None]) -> Reading[bool]:
        """Emit a value as it arrives, without the line breaks of its layout. Return False if the answer
        ends within it. The closing mark may also occur inside the value, so it ends the value only if
        the next argument or the end of the call follows."""
        line = "\n" if tags.after_value.startswith("\n") else ""
        mark = tags.after_value.strip()
        nexts = [tags.before_key.strip(), tags.end.strip(), self._format.closes]
        wrap, unwrap = self._format.wrap
        if wrap and (yield from self._consume(wrap)):
            mark = unwrap + mark
        if tags.after_key.endswith("\n"):
            while not self._text and not self.is_complete:
                yield
            self._text = self._text.removeprefix("\n")
        while found := (yield from self._emit_up_to(emit, mark)):
            if (yield from self._wait(lambda text: follows(text, nexts, self.is_complete))):
                emit(found.removesuffix(mark).removesuffix(line))
                return True
            emit(found)
        return False

    def _call_in_quotes(self) -> Reading[str | None]:
        """Parse a call whose strings are between marks, when it is complete. Return None, or the text
        consumed so far if it is not a call."""
        found = yield from self._consume("call:", rf"({NAME})(?={{)")
        if not found:
            return ""
        quote = self._format.quote
        marks = re.compile(rf"{re.escape(quote)}|[{{}}\[\]]")
        taken = ""
        depth = 0
        in_text = False
        while not taken or (depth and not self.is_complete):
            end = len(self._text) - len(beginning(quote, self._text))
            for mark in marks.finditer(self._text, 0, end):
                in_text ^= mark[0] == quote
                if not in_text and mark[0] != quote:
                    depth += 1 if mark[0] in "{[" else -1
                if depth == 0:
                    end = mark.end()
                    break
            taken += self._text[:end]
            self._text = self._text[end:]
            if depth and not self.is_complete:
                yield
        arguments = quoted_as_json(taken, quote)
        if arguments is None:
            return found[0] + taken
        self._begin(found[1])
        self._emit("arguments", arguments)
        self.is_in_call = False
        return None

    def _call_in_json(self) -> Reading[str | None]:
        """Parse a call in JSON. Return None, or the text consumed so far if it is not a call."""
        before = yield from self._consume("", BEFORE)
        if not before:
            return ""
        name = before[1]
        if name and not self._format.is_named:
            return before[0]
        found = None if name else (yield from self._wait(match_body_start))
        if found:
            self._text = self._text[found.end() :]
            name = found[1]
            if self._format.is_bare and name not in self._tools:
                return before[0] + found[0]
        if not name:
            body = yield from self._late_body()
            return body and before[0] + body
        self._begin(name)
        yield from self._object(kind="arguments")
        if found:
            yield from self._object(depth=1)
            if found[0].startswith("{{"):
                yield from self._skip("}")
        return None

    def _close(self) -> Reading[bool]:
        """Consume the mark after a call, and return whether it was there. It may be missing, or cut off
        at the end of the answer. A list or code block of calls may end before it."""
        mark = self._format.closes
        yield from self._skip_space()
        is_closed = (yield from self._skip("]")) and mark == "]"
        if self._is_fenced and (yield from self._skip(FENCE)):
            self._is_fenced = False
        if mark != "]":
            is_closed = yield from self._skip(mark)
        ends = [mark, FENCE, self._format.tags.end.strip() if self._format.tags else ""]
        if self.is_complete and not is_closed and any(end.startswith(self._text) for end in ends):
            self._text = ""
        return is_closed

    def _late_body(self) -> Reading[str | None]:
        """Parse a call that does not begin with name and arguments in this order. Return None, or the
        text consumed so far if it is not a call."""
        body = yield from self._object()
        match json_or_none(body):
            case {"name": str(name), "arguments": given} | {"name": str(name), "parameters": given}:
                pass
            case {"name": str(name)}:
                given = None
            case _:
                return body
        is_known = name in self._tools and isinstance(given, dict)
        if not name or (self._format.is_bare and not is_known):
            return body
        self._begin(name)
        given = {} if given is None else given
        self._emit("arguments", given if isinstance(given, str) else json.dumps(given))
        self.is_in_call = False
        return None

    def _object(self, depth: int = 0, kind: str = "") -> Reading[str]:
        """Consume a JSON object by counting brackets outside strings, and return it.

        `depth`: number of open brackets that were consumed before.
        `kind`: if given, emit the object as this kind as it arrives. Control characters in its strings,
        which JSON forbids and small models write, are then escaped.
        """
        taken = []
        in_text = is_escaped = False
        while True:
            end = 0
            written = []
            for character in self._text:
                end += 1
                if kind and in_text and character < " ":
                    # After a backslash, the rest of the escape
                    character = json.dumps(character)[1 + is_escaped : -1]
                written.append(character)
                if is_escaped:
                    is_escaped = False
                elif in_text:
                    is_escaped = character == "\\"
                    in_text = character != '"'
                elif character == '"':
                    in_text = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                if depth == 0:
                    break
            taken.append("".join(written))
            self._text = self._text[end:]
            if kind:
                self._emit(kind, taken[-1])
                self.is_in_call = depth > 0
            if depth == 0 or self.is_complete:
                return "".join(taken)
            yield

    def _begin(self, tool: str) -> None:
        self.calls += 1
        self.is_in_call = True
        self._is_line_start = True
        self._emit("tool_call", tool)

    def _emit(self, kind: str, text: str) -> None:
        """Add a part to the result. Adjacent parts of the same kind are joined, except calls."""
        if kind == "content" and text:
            self._is_line_start = text.endswith("\n")
        if self._parts and self._parts[-1].kind == kind != "tool_call":
            text = self._parts.pop().text + text
        if text:
            self._parts.append(ParsedPart(kind, text))


def begins(text: str, mark: str) -> bool | None:
    """True if a text begins with this mark, None if it may with more text, else False."""
    if text.startswith(mark):
        return True
    return None if mark.startswith(text) else False


def begins_header(text: str) -> bool | None:
    """True if a text begins like the header of a Harmony message, None if it may with more text, else False."""
    text = text.lstrip()
    is_started = begins(text, HARMONY.opens)
    rest = text.removeprefix(HARMONY.opens).lstrip()
    found = {begins(rest, mark) for mark in HEADER_BEGINS}
    return True if True in found else None if None in {is_started, *found} else False


class Header(NamedTuple):
    """The header of a Harmony message."""

    text: str
    recipient: str
    channel: str


def match_header(text: str) -> Header | bool | None:
    """Return the header at the start of a text, False if there is none, None if more text is needed."""
    is_begun = begins_header(text)
    if not is_begun:
        return is_begun
    head, mark, _ = text.partition("<|message|>")
    if not mark:
        return None
    words = head.lstrip().removeprefix(HARMONY.opens).replace("<|", " <|").split()
    found = [HEADER_WORD.fullmatch(word) for word in words]
    if not all(found):
        return False
    recipient, channel = (next((each[n] for each in found if each[n]), "") for n in (1, 2))
    return Header(head + mark, recipient, channel)


def after_space(found: re.Match) -> int:
    """Return the start of a match after its leading whitespace."""
    return found.end() - len(found[0].lstrip())


def match_body_start(text: str) -> re.Match | bool | None:
    """Match the start of a call in JSON, up to its arguments. Return False if only the complete body
    can tell whether it is a call, and None if more text is needed."""
    return BODY_BEGINS.match(text) or (None if BODY_MAY_BEGIN.match(text) else False)


def ending(mark: str) -> str:
    """Return a pattern for the mark after a name. Without a mark, any tag ends the name."""
    return re.escape(mark.strip()) or "(?=<)"


def follows(text: str, marks: Sequence[str], is_complete: bool) -> bool | None:
    """True if one of these marks comes next, None if more text is needed, else False. At the end of the answer,
    the beginning of a mark is enough."""
    found = {begins(text.lstrip(), mark) for mark in marks if mark}
    if True in found:
        return True
    may_come = None in found and len(text) < HEAD
    if may_come and not is_complete:
        return None
    return may_come


def strip_held_space(text: str) -> str:
    """Strip trailing whitespace that may belong to a mark, which is at most `HEAD` characters.

    Without this limit, each token of a model that writes only whitespace would cost more than the
    last.
    """
    return text[: max(len(text.rstrip()), len(text) - HEAD)]


# --- values in tags and between marks -------------------------------------------------------------------------------


def quoted_as_json(text: str, quote: str) -> str | None:
    """Return an object whose strings are between marks as JSON; None if it is not one."""
    pieces = text.split(quote)
    for index, piece in enumerate(pieces):
        if index % 2:
            pieces[index] = json.dumps(piece, ensure_ascii=False)
        else:
            piece = re.sub(r"\b(True|False|None)\b", lambda found: PYTHONS[found[0]], piece)
            pieces[index] = BARE_KEY.sub(r'\1"\2":', piece)
    found = "".join(pieces)
    try:
        parsed = json.loads(found, parse_constant=JSONS.__getitem__)  # NaN is not JSON
    except (ValueError, KeyError, RecursionError):
        return None
    return found if isinstance(parsed, dict) else None


def as_json_value(text: str, kinds: Collection[str]) -> str:
    """Return a value as JSON: unchanged if it is JSON of one of these types, or any JSON if they do not include
    strings; else as a string."""
    source = text.strip()
    source = PYTHONS.get(source, source)
    try:
        found = json.loads(source, parse_constant=JSONS.__getitem__)  # NaN is not JSON
    except (ValueError, KeyError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = JSONS[type(found)]
    is_number = kind == "integer" and "number" in kinds
    if kind in kinds - {"string"} or is_number or "string" not in kinds:
        return source
    return json.dumps(text, ensure_ascii=False)


# --- detecting a model's format -------------------------------------------------------------------


def detect_format(source: str | None, render: Callable[[list, list], str]) -> OutputFormat:
    """Detect how a model with this chat template writes reasoning and calls. `render` renders messages
    and tools."""
    if source is None:
        return OutputFormat(why="this model has no chat template, so it cannot use tools")
    reasoning = next((marks for marks in REASONING_MARKS if marks[1] in source), None)
    formats = FORMATS
    if HARMONY_REASONING[0] in source:
        reasoning, formats = HARMONY_REASONING, (HARMONY,)
    try:
        text = render(PROBE, TOOLS)
    except ValueError as error:
        return OutputFormat(reasoning, why=f"this model cannot use tools: {error}")
    if "is_listed" not in text:
        return OutputFormat(reasoning, why="this model's chat template does not accept tools")
    if "is_called" not in text:
        return OutputFormat(reasoning, why="this model's chat template does not write tool calls")
    place = text.index("is_called")
    for format in formats:
        if written := as_written(format, text, place):
            return OutputFormat(reasoning, written)
    around = text[max(place - 40, 0) : place + 40]
    written = " ".join(around.split())
    known = ", ".join(format.name for format in FORMATS)
    why = f"this model writes a call as {written!r}, but only these formats are known: {known}"
    return OutputFormat(reasoning, why=why)


def as_written(format: ToolFormat, text: str, place: int) -> ToolFormat | None:
    """Return the format with the layout of the call in `text`; None if the format does not parse this
    call back.

    `text`: a conversation with a call, rendered by the chat template.
    `place`: the index of the tool's name in it.
    """
    begin = text.rfind(format.opens, 0, place)
    if format.is_bare and begin < 0 and f'"{format.key}"' in text[place:]:
        begin = text.rfind("{", 0, place)
    if begin < 0:
        return None
    reasoning = HARMONY_REASONING if format is HARMONY else None
    if not reasoning:
        format = with_layout(format, text[begin:], place - begin)
    parser = OutputParser(OutputFormat(reasoning, format), {"is_called": {}}, is_strict=True)
    first = dict(reversed(parser.push(text[begin:])))  # the first part of each kind
    is_read = first.get("tool_call") == "is_called" and json_or_none(
        first.get("arguments", "")
    ) == {"n": 7}
    return format if is_read else None
