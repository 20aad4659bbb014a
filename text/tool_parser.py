"""An answer taken apart: what a model says, what it thinks, and which tools it calls.

The problem. A model writes all three into one text, and marks them as in its training:

    <think>I should add.</think>It is a sum.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>

A client wants them apart, and as they come. A mark may begin in one piece of text and end in
another, and a model may write half a mark, a mark inside a thought, or a call that never ends. And
newer models write no JSON. They write each argument between tags of its own, as it is:

    <tool_call><function=add><parameter=a>1</parameter></function></tool_call>

The way out. One machine over text reads characters, not tokens, because a mark's last character may
be in a token together with what follows. Its program reads like a description of an answer, from
the beginning to the end, and stops in the middle of any line of it until more text has come. The
marks are data: a `Format` for each way to write a call. Nobody has to tell which format a model
speaks: its chat template is asked to write a call, and the format is the one that reads this call
back. What stands between the marks is learned from the same call, tags too. Whether an argument in
tags is a text or a number, the tool's schema says.

What this file keeps. However an answer is cut into pieces, its parts join to the same texts. A
character costs the same however long the answer is. What turns out to be no call is text, whole.
White space beside a mark belongs to the mark.

Where next: `tokens.py`, which knows the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from text.tool_formats import (
    FORMATS,
    JSONS,
    PROBE,
    PYTHONS,
    SILENT,
    THOUGHTS,
    TOOLS,
    Format,
    Speech,
    Tags,
    kinds_of,
    with_layout,
)


class Part(NamedTuple):
    """A piece of an answer."""

    # "answer", "thought", "call" (the text is a tool's name), "arguments" (of the newest call)
    kind: str
    text: str


# --- for those who watch ------------------------------------------------------------------------


OPENINGS = tuple(opens for opens, _ in THOUGHTS)
CLOSING = re.compile("|".join(re.escape(closes) for _, closes in THOUGHTS))
CALLING = re.compile("|".join(re.escape(format.opens) for format in FORMATS))


def marked(text: str, is_thinking: bool = False) -> list[Part]:
    """The thought of an answer, what it says, and its calls: with their marks, and without to know
    the model. `is_thinking`: the prompt has opened the thought."""
    closing = CLOSING.search(text)
    is_open = is_thinking or text.lstrip().startswith(OPENINGS)
    thought = text if is_open else ""
    if closing:
        thought = text[: closing.end()]
    call = CALLING.search(text, len(thought))
    end = call.start() if call else len(text)
    answer = text[len(thought) : end]
    if thought or call:
        answer = answer.strip("\n")
    parts = Part("thought", thought), Part("answer", answer), Part("call", text[end:])
    return [part for part in parts if part.text]


def apart(text: str, is_thinking: bool = False) -> tuple[str, str]:
    """The thought of an answer, without its marks, and the rest of the answer, line breaks and all:
    a model is shown again what it has said."""
    thought = dict(marked(text, is_thinking)).get("thought", "")
    answer = text[len(thought) :]
    answer = answer.lstrip("\n") if thought else answer
    for mark in chain(*THOUGHTS):
        thought = thought.replace(mark, "")
    return thought.strip(), answer


# --- the machine --------------------------------------------------------------------------------

# So many characters may stand before a body, or in it before its arguments; so much white space
# belongs to a mark
HEAD = 300
NAME = r"[\w.-]{1,128}"  # of a tool
KEY = r"[^<>\"\n]{1,128}"  # of an argument in tags
# Separators of calls, and the tool's name, if it stands before the body
BEFORE = rf"[\s,;\[]*(?:({NAME})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*)?(?={{)"
# Calls in JSON begin so, piece by piece, since an answer may end or pause after any. A body that
# begins otherwise is read whole before it can be told
GAP = r"\s{0,20}"
BODY = [r"\{", GAP, *'"name"', GAP, ":", GAP, '"', rf"({NAME})", '"', GAP, ",", GAP]
BODY += ['"', "(arguments|parameters)", '"', GAP, ":", GAP]
# Without a mark they begin a line. Models write them so that were trained little on calls: as they
# are, in a list, or in a block of code. Then the first argument or the end must follow, too
FENCE = "```"
FENCED = [r"[ \t]{0,20}", *FENCE, *(f"(?i:{letter})" for letter in "json"), r"[\s\[]{1,20}"]
LISTED = [r"[\s,;\[]{0,20}"]
BARE = [*BODY, r"\{", GAP, r'["}]']
LINE = r"(?:\A|(?<=\n))"


def begun(pieces: Sequence[str]) -> str:
    """A pattern for the beginnings of a text that is made of these pieces."""
    pattern = ""
    for piece in reversed(pieces):
        piece = piece.replace("(arguments|parameters)", "[a-z]{1,10}")
        pattern = f"(?:{piece}{pattern})?"
    return pattern


BODY_BEGINS = re.compile("".join(BODY) + r"(?=\{)")
BODY_MAY_BEGIN = re.compile(begun(BODY) + r"\Z")
BARE_BEGINS = re.compile(f"{LINE}(?:{''.join(FENCED)}|{LISTED[0]})(?P<body>{''.join(BARE)})")
BARE_MAY_BEGIN = re.compile(f"{LINE}(?:{begun([*FENCED, *BARE])}|{begun([*LISTED, *BARE])})\\Z")
T = TypeVar("T")
Reading = Generator[None, None, T]


class Parser:
    """Takes one answer apart: `push` takes a piece of its text.

    `tools`: by name, the schema of the arguments. Without any, what looks like a call is text.
    `is_thinking`: the prompt has opened a thought already.
    `is_single`: at most one call is wanted.
    `is_strict`: a call without its mark is text, because the answer may be JSON of a schema.
    """

    def __init__(
        self,
        speech: Speech,
        tools: Mapping[str, Mapping[str, Any]] = {},
        is_thinking: bool = False,
        is_single: bool = False,
        is_strict: bool = False,
    ):
        self._reader = Reader(speech, tools, is_thinking, is_single, is_strict)
        # The generator refers to the reader, and nothing there refers to the generator. Else an
        # answer that is cut off would stay in memory until the collector comes.
        self._reading = self._reader.read()

    @property
    def thought(self) -> int:
        """So many characters of the answer are thoughts, with their marks."""
        return self._reader.thought

    @property
    def is_over(self) -> bool:
        """One call is wanted, and it has come. What follows is dropped."""
        return self._reader.is_over

    def push(self, piece: str | None, is_cut: bool = False) -> list[Part]:
        """What a piece of the answer tells. None is its end: what may have become a mark has not,
        and is text. But if the end is where `max_tokens` cut the answer, the beginning of a call is
        no text: it is dropped."""
        self._reader.add(piece, is_cut)
        next(self._reading, None)
        return self._reader.take()

    def ends(self, piece: str) -> bool:
        """Is the answer over with this piece?"""
        self.push(piece)
        return self.is_over


class Reader:
    """What a parser has understood of its answer.

    `read` reads the answer from its beginning to its end. It takes from `self._text` what it
    understands. Where that is not enough it yields, and goes on when the next piece has come. So do
    the methods that it is made of: each reads a part of the answer.
    """

    def __init__(
        self,
        speech: Speech,
        tools: Mapping[str, Mapping[str, Any]],
        is_thinking: bool,
        is_single: bool,
        is_strict: bool,
    ):
        self.is_complete = False  # no more text will come
        self.is_cut = False  # because `max_tokens` have come
        self.is_over = False  # what follows is not wanted
        self.thought = 0  # so many characters of the answer are thoughts, with their marks
        self.calls = 0  # so many have begun
        self._marks = speech.thought
        self._format = (tools and speech.format) or SILENT
        self._tools = tools
        self._is_single = is_single or self._format.is_bare
        self._reads_bare = bool(self._format.opens and not self._format.tags and not is_strict)
        self._is_line_start = True
        self._is_fenced = False  # a block of code has been opened for calls
        # What has not been understood yet. Of a thought that the prompt has opened: its mark
        self._text = self._marks[0] if is_thinking else ""
        self._length = 0  # of all text so far
        self._parts: list[Part] = []

    def add(self, piece: str | None, is_cut: bool) -> None:
        self.is_complete = piece is None
        self.is_cut = is_cut
        self._text += piece or ""
        self._length += len(piece or "")

    def take(self) -> list[Part]:
        """What has been understood since."""
        parts = self._parts
        self._parts = []
        return parts

    def read(self) -> Reading[None]:
        """The whole answer. A thought may stand at the beginning and behind a mark, and so may any
        form of a call, if the model's own has no mark."""
        is_start = True
        while self._text or not self.is_complete:
            if is_start and self._marks and (yield from self._skip(self._marks[0])):
                yield from self._say_up_to(partial(self._say, "thought"), self._marks[1])
                self.thought = self._length - len(self._text)
                self._is_line_start = True
                yield from self._skip_space()
            elif is_start and self._format.is_bare and (yield from self._begins_with("{")):
                is_start = yield from self._calls("")
            elif (opening := (yield from self._answer())) is not None:
                is_start = yield from self._calls(opening)
            if self.calls and self._is_single:
                self.is_over = not self.is_complete  # at the end, the call may be cut off
                return

    def _wait(self, look: Callable[[str], T | None]) -> Reading[T | None]:
        """What `look` says of the text that comes next. It says None as long as more text may
        tell."""
        while (found := look(self._text[:HEAD])) is None:
            if len(self._text) >= HEAD or self.is_complete:
                break
            yield
        return found

    def _begins_with(self, mark: str) -> Reading[bool | None]:
        """Does this mark come next, perhaps behind white space?"""
        return (yield from self._wait(lambda text: begins(text.lstrip(), mark)))

    def _take(self, mark: str, rest: str = "") -> Reading[re.Match | None]:
        """Take a mark away, the white space before it, and what has to stand behind it: a pattern.
        None, if they do not come next. That is clear when something else stands in the mark's place,
        and for `rest` at the latest when `HEAD` characters have come."""
        mark = mark.strip()
        pattern = re.compile(rf"\s*{re.escape(mark)}{rest}")

        def look(text: str) -> re.Match | bool | None:
            return False if begins(text.lstrip(), mark) is False else pattern.match(text)

        found = yield from self._wait(look)
        if not found:
            return None
        self._text = self._text[found.end() :]
        return found

    def _skip(self, mark: str) -> Reading[bool]:
        """Take a mark away, if it comes next, and the white space around it."""
        if not (yield from self._take(mark)):
            return False
        yield from self._skip_space()
        return True

    def _skip_space(self) -> Reading[None]:
        """All of it behind a mark, however long: it is gone as it comes, so nothing is held back."""
        self._text = self._text.lstrip()
        while not self._text and not self.is_complete:
            yield
            self._text = self._text.lstrip()

    def _say_up_to(self, say: Callable[[str], None], mark: str) -> Reading[str]:
        """Say the text before a mark, and take the mark away. Returns the mark, and the white space
        before it; nothing, if the answer ends without one.

        What may be the beginning of the mark has to wait, and so has white space.
        """
        while not mark or mark not in self._text:
            words = self._text
            if mark and not self.is_complete:
                words = without_space(words.removesuffix(beginning(mark, words)))
            say(words)
            self._text = self._text[len(words) :]
            if self.is_complete:
                return ""
            yield
        before, _, self._text = self._text.partition(mark)
        words = without_space(before)
        say(words)
        return before[len(words) :] + mark

    def _answer(self) -> Reading[str | None]:
        """Say the answer up to a call. Returns what opens the call, and the white space before it;
        None, if the answer ends without one. What may be the beginning of a call has to wait, and
        so has white space."""
        while not (place := self._next_call()):
            words = self._text
            left = words[self._undecided() :]
            is_held = not self.is_complete or (self.is_cut and left.strip())
            if self._format.opens and is_held:
                words = without_space(words.removesuffix(left))
            self._say("answer", words)
            self._text = "" if self.is_complete else self._text[len(words) :]
            if self.is_complete:
                return None
            yield
        start, end = place
        words = without_space(self._text[:start])
        self._say("answer", words)
        opening = self._text[len(words) : end]
        self._text = self._text[end:]
        return opening

    def _next_call(self) -> tuple[int, int] | None:
        """Where the next call's mark begins and ends. Without a mark: where what stands before the
        body does, which may be nothing."""
        mark = self._format.opens
        place = self._text.find(mark) if mark else -1
        if self._reads_bare:
            end = len(self._text) if place < 0 else place
            for found in BARE_BEGINS.finditer(self._text, not self._is_line_start, end):
                if found[2] in self._tools:
                    return after_space(found), found.start("body")
        return None if place < 0 else (place, place + len(mark))

    def _undecided(self) -> int:
        """Where the end of the text begins that may become the beginning of a call."""
        mark = self._format.opens
        place = len(self._text) - len(beginning(mark, self._text))
        if self._reads_bare and not self._text.isspace():  # white space waits anyway
            found = BARE_MAY_BEGIN.search(self._text, not self._is_line_start)
            place = min(place, after_space(found)) if found else place
        return place

    def _calls(self, opening: str) -> Reading[bool]:
        """Calls behind a mark, or one that has none. False if there is none: then the mark is text."""
        count = self.calls
        is_marked = bool(self._format.opens) and self._format.opens in opening
        self._is_fenced |= FENCE in opening
        is_tagged = self._format.tags and not (yield from self._begins_with("{"))
        read = self._call_in_tags if is_tagged else self._call_in_json
        while (taken := (yield from read())) is None:
            opening = ""
            if self._is_single or (yield from self._close()) or not is_marked:
                return True
        if self.is_cut and self._is_begun(opening, taken + self._text):
            self._text = ""
        else:
            self._say("answer", opening + taken)
        return self.calls > count

    def _is_begun(self, opening: str, rest: str) -> bool:
        """Was the answer cut off in a call, of which this is the beginning?"""
        closes = self._format.closes
        is_closed = len(closes) > 1 and closes in rest
        return not is_closed and (bool(opening) or rest.lstrip(" \n,;[").startswith("{"))

    def _call_in_tags(self) -> Reading[str | None]:
        """One call. Returns None. But if it is no call, what has been taken away, here nothing."""
        tags = self._format.tags
        rest = rf"({NAME})\s*{ending(tags.behind_name)}"
        found = yield from self._take(tags.before_name, rest)
        if not found:
            return ""
        name = found[1]
        self._begin(name)
        yield from self._arguments(tags, self._tools.get(name, {}))
        yield from self._skip(tags.end)
        return None

    def _arguments(self, tags: Tags, schema: Mapping[str, Any]) -> Reading[None]:
        """As JSON, which has no end if the answer ends in an argument. A text is told as it comes,
        and any other value when it is complete."""
        said = "{"
        rest = rf"({KEY})\s*{ending(tags.behind_key)}"
        while found := (yield from self._take(tags.before_key, rest)):
            key = found[1]
            kinds = kinds_of(schema, key)
            said += json.dumps(key, ensure_ascii=False) + ": "
            value: list[str] = []
            if kinds == {"string"}:
                self._say("arguments", said + '"')
                is_complete = yield from self._value(tags, self._quote)
                said = '"'
            else:
                self._say("arguments", said)
                is_complete = yield from self._value(tags, value.append)
                said = as_json_value("".join(value), kinds)
            if not is_complete:
                return
            self._say("arguments", said)
            said = ", "
        self._say("arguments", "{}" if said == "{" else "}")

    def _quote(self, piece: str) -> None:
        self._say("arguments", json.dumps(piece, ensure_ascii=False)[1:-1])

    def _value(self, tags: Tags, say: Callable[[str], None]) -> Reading[bool]:
        """Say a value as it comes, without the line breaks of its form. False, if the answer ends in
        it. The mark behind a value may stand in the value, too: it is the end only where the next
        argument follows, or the call's end."""
        line = "\n" if tags.behind_value.startswith("\n") else ""
        mark = tags.behind_value.strip()
        nexts = [tags.before_key.strip(), tags.end.strip(), self._format.closes]
        wrap, unwrap = self._format.wrap
        if wrap and (yield from self._take(wrap)):
            mark = unwrap + mark
        if tags.behind_key.endswith("\n"):
            while not self._text and not self.is_complete:
                yield
            self._text = self._text.removeprefix("\n")
        while found := (yield from self._say_up_to(say, mark)):
            if (yield from self._wait(lambda text: follows(text, nexts, self.is_complete))):
                say(found.removesuffix(mark).removesuffix(line))
                return True
            say(found)
        return False

    def _call_in_json(self) -> Reading[str | None]:
        """One call. Returns None. But if it is no call, what has been taken away."""
        before = yield from self._take("", BEFORE)
        if not before:
            return ""
        name = before[1]
        if name and not self._format.is_named:
            return before[0]
        found = None if name else (yield from self._wait(body_begins))
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
        return None

    def _close(self) -> Reading[bool]:
        """The mark behind a call. It may be missing, and the answer may be cut off in it. A list of
        calls, or their block of code, may end before it."""
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
        """A call in which the name and the arguments do not stand first, or not in this order."""
        body = yield from self._object()
        match loads(body):
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
        self._say("arguments", given if isinstance(given, str) else json.dumps(given))
        return None

    def _object(self, depth: int = 0, kind: str = "") -> Reading[str]:
        """Take a JSON object away. Brackets are counted, but for those in texts. `depth`: so many of
        its braces have been taken. `kind`: as what it is said as it comes, if at all."""
        taken = []
        in_text = is_escaped = False
        while True:
            end = 0
            for character in self._text:
                end += 1
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
            taken.append(self._text[:end])
            self._text = self._text[end:]
            if kind:
                self._say(kind, taken[-1])
            if depth == 0 or self.is_complete:
                return "".join(taken)
            yield

    def _begin(self, tool: str) -> None:
        self.calls += 1
        self._is_line_start = True
        self._say("call", tool)

    def _say(self, kind: str, text: str) -> None:
        """Neighbouring pieces of one kind are one. Each call is a call of its own."""
        if kind == "answer" and text:
            self._is_line_start = text.endswith("\n")
        if self._parts and self._parts[-1].kind == kind != "call":
            text = self._parts.pop().text + text
        if text:
            self._parts.append(Part(kind, text))


def beginning(mark: str, text: str) -> str:
    """The end of a text that may be the beginning of a mark; the longest there is."""
    first = len(text) - len(mark) + 1
    for place in range(max(first, 0), len(text)):
        if mark.startswith(text[place:]):
            return text[place:]
    return ""


def begins(text: str, mark: str) -> bool | None:
    """Does a text begin with this mark? None, if it yet may."""
    if text.startswith(mark):
        return True
    return None if mark.startswith(text) else False


def after_space(found: re.Match) -> int:
    """Where what was found begins, but for white space."""
    return found.end() - len(found[0].lstrip())


def body_begins(text: str) -> re.Match | bool | None:
    """How a call in JSON begins, up to its arguments. False, if the body must be read whole. None,
    if more text has to come first."""
    return BODY_BEGINS.match(text) or (None if BODY_MAY_BEGIN.match(text) else False)


def ending(mark: str) -> str:
    """A pattern for the mark behind a name. Without a mark, any other tag ends the name."""
    return re.escape(mark.strip()) or "(?=<)"


def follows(text: str, marks: Sequence[str], is_complete: bool) -> bool | None:
    """Does one of these marks come next? None, if more text has to come first."""
    found = {begins(text.lstrip(), mark) for mark in marks if mark}
    if True in found:
        return True
    may_come = None in found and len(text) < HEAD
    if may_come and not is_complete:
        return None
    return may_come


def without_space(text: str) -> str:
    """Without the white space at its end, but for more than may belong to a mark: a model that
    writes nothing else would let all of it be looked at for each token."""
    return text[: max(len(text.rstrip()), len(text) - HEAD)]


# --- values in tags -----------------------------------------------------------------------------


def as_json_value(text: str, kinds: Collection[str]) -> str:
    """A value as JSON: as it stands, if it is JSON of one of these types; else a text."""
    source = text.strip()
    source = PYTHONS.get(source, source)
    try:
        found = json.loads(source, parse_constant=JSONS.__getitem__)  # NaN is no JSON
    except (ValueError, KeyError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = JSONS[type(found)]
    is_number = kind == "integer" and "number" in kinds
    if kind in kinds - {"string"} or is_number or "string" not in kinds:
        return source
    return json.dumps(text, ensure_ascii=False)


def loads(text: str) -> Any:
    """JSON, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# --- which format does a model speak? -----------------------------------------------------------


def learn(source: str | None, render: Callable[[list, list], str]) -> Speech:
    """How a model with this chat template speaks. `render` makes a prompt of messages and tools."""
    if source is None:
        return Speech(why="this model has no chat template, so it can be given no tools")
    thought = next((marks for marks in THOUGHTS if marks[1] in source), None)
    try:
        text = render(PROBE, TOOLS)
    except ValueError as error:
        return Speech(thought, why=f"this model can be given no tools: {error}")
    if "is_listed" not in text:
        return Speech(thought, why="this model's chat template takes no tools")
    if "is_called" not in text:
        return Speech(thought, why="this model's chat template writes no calls of tools")
    place = text.index("is_called")
    for format in FORMATS:
        if written := as_written(format, text, place):
            return Speech(thought, written)
    around = text[max(place - 40, 0) : place + 40]
    written = " ".join(around.split())
    known = ", ".join(format.name for format in FORMATS)
    why = f"this model writes a call as {written!r}, but only these formats are known: {known}"
    return Speech(thought, why=why)


def as_written(format: Format, text: str, place: int) -> Format | None:
    """The format, with all that is to be learned from a template's call; nothing, if the format
    does not read this call back. `place` is that of the name."""
    begin = text.rfind(format.opens, 0, place)
    if format.is_bare and begin < 0 and f'"{format.key}"' in text[place:]:
        begin = text.rfind("{", 0, place)
    if begin < 0:
        return None
    format = with_layout(format, text[begin:], place - begin)
    parser = Parser(Speech(format=format), {"is_called": {}}, is_strict=True)
    first = dict(reversed(parser.push(text[begin:])))  # of each kind
    is_read = first.get("call") == "is_called" and loads(first.get("arguments", "")) == {"n": 7}
    return format if is_read else None
