"""An answer taken apart: what a model says, what it thinks, and which tools it calls.

The problem. A model writes all three into one text, and marks them as in its training:

    <think>I should add.</think>It is a sum.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>

A client wants them apart, and as they come. A mark may begin in one piece of text and end in
another, and a model may write half a mark, a mark inside a thought, or a call that never ends.

The way out. One machine over text reads characters, not tokens, because a mark's last character may
be in a token together with what follows. It has three states: answer, thought, call. The marks are
data: a `Format` for each way to write a call. Nobody has to tell which format a model speaks: its
chat template is asked to write a call, and the format is the one that reads this call back.

What this file keeps. However an answer is cut into pieces, its parts join to the same texts. A
character costs the same however long the answer is. What turns out to be no call is text, whole.
White space beside a mark belongs to the mark.

Where next: `tokens.py`, which knows the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple


class Part(NamedTuple):
    """A piece of an answer."""

    # "answer", "thought", "call" (the text is a tool's name), "arguments" (of the newest call)
    kind: str
    text: str


class Format(NamedTuple):
    """How a family of models writes a call. Its body is JSON, as in
    {"name": "add", "arguments": {"a": 1}}."""

    name: str
    opens: str  # the mark before a call
    closes: str = ""  # the mark behind it, if there is one
    between: str = ""  # characters that may stand around the bodies of several calls
    key: str = "arguments"  # their name in what the template writes
    is_bare: bool = False  # an answer may begin with a call that has no mark
    is_named: bool = False  # the tool's name may stand before a body that is its arguments alone
    is_single: bool = False  # the template takes one call in a message


FORMATS = (
    Format("Hermes", "<tool_call>", "</tool_call>"),
    Format("Mistral", "[TOOL_CALLS]", between="[,]", is_named=True),
    Format(
        "Llama 3", "<|python_tag|>", between=";,", key="parameters", is_bare=True, is_single=True
    ),
)
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
# Some tokenizers have marks as special tokens, which are not shown as text elsewhere.
MARKS = frozenset(
    ["[ARGS]", "[CALL_ID]", *sum(THOUGHTS, ()), *(f.opens for f in FORMATS), "</tool_call>"]
)
NAME = re.compile(r"\s*([\w.-]{1,128})(\[CALL_ID\]\w*)?(\[ARGS\])?\s*")


class Speech(NamedTuple):
    """How one model speaks."""

    thought: tuple[str, str] | None = None  # the marks around a thought
    format: Format | None = None
    why: str = ""  # if there is no format: why the model can be given no tools
    # What stands between a tool's name and its arguments, if the name stands before the body
    behind_name: str | None = None

    def parser(
        self, tools: Collection[str] = (), is_thinking: bool = False, is_single: bool = False
    ) -> Parser | None:
        """A machine for one answer, if there is anything to take apart.

        `tools`: their names; without any, what looks like a call is text.
        `is_thinking`: the prompt has opened a thought already.
        `is_single`: at most one call is wanted.
        """
        if not self.thought and not tools:
            return None
        return Parser(self, tools, is_thinking, is_single)

    def is_thinking(self, prompt: str) -> bool:
        """Some templates open a thought at the end of the prompt."""
        return self.thought is not None and prompt.rstrip().endswith(self.thought[0])


# --- which format does a model speak? -----------------------------------------------------------

# Mistral's templates want ids of nine letters
CALL = {"id": "abcdefghi", "type": "function"}
CALL |= {"function": {"name": "is_called", "arguments": {"n": 7}}}
PROBE = [
    {"role": "user", "content": "Call it."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "is_called", "tool_call_id": "abcdefghi", "content": "8"},
]
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
LISTED = {"name": "is_listed", "description": "It adds one.", "parameters": NUMBER}
TOOLS = [{"type": "function", "function": LISTED}]


def learn(source: str | None, render: Callable[[list, list], str]) -> Speech:
    """How a model with this chat template speaks. `render` makes a prompt of messages and tools."""
    if source is None:
        return Speech(why="this model has no chat template, so it can be given no tools")
    thought = next((marks for marks in THOUGHTS if marks[1] in source), None)
    try:
        text = render(PROBE, TOOLS)
    except ValueError as error:
        return Speech(thought, why=f"this model can be given no tools: {error}")
    if "is_listed" not in text or "is_called" not in text:
        return Speech(thought, why="this model's chat template takes no tools")
    place = text.index("is_called")
    for format in FORMATS:
        if reads_back(format, text, place):
            is_named = not text[:place].endswith('"')
            behind = "[ARGS]" if "[ARGS]" in text[place:] else ""
            return Speech(thought, format, behind_name=behind if is_named else None)
    written = " ".join(text[max(place - 40, 0) : place + 40].split())
    known = ", ".join(format.name for format in FORMATS)
    why = f"this model writes a call as {written!r}, but only these formats are known: {known}"
    return Speech(thought, why=why)


def reads_back(format: Format, text: str, place: int) -> bool:
    """Does a format find the call that a template has written? `place` is that of the name."""
    begin = text.rfind(format.opens, 0, place)
    if format.is_bare and begin < 0:
        begin = text.rfind("{", 0, place)
    if begin < 0 or (f'"{format.key}"' not in text[place:] and not format.is_named):
        return False
    parts = Parser(Speech(format=format), ["is_called"]).push(text[begin:])
    calls = joined(parts)[:2]
    if [part.kind for part in calls] != ["call", "arguments"] or calls[0].text != "is_called":
        return False
    return loads(calls[1].text) == {"n": 7}


def joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring pieces of one kind as one. Each call stays a call of its own."""
    whole: list[Part] = []
    texts: list[list[str]] = []
    for part in parts:
        if whole and whole[-1].kind == part.kind != "call":
            texts[-1].append(part.text)
        else:
            whole.append(part)
            texts.append([part.text])
    return [Part(part.kind, "".join(text)) for part, text in zip(whole, texts, strict=True)]


# --- calls that have to come --------------------------------------------------------------------

# White space between the parts of JSON: a model that may write more could write nothing else
FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def grammar(
    speech: Speech,
    tools: Sequence[Mapping[str, Any]],
    *,
    answer: Mapping[str, Any] | None = None,
    is_single: bool = False,
    is_thinking: bool = False,
    special: Mapping[str, int] = {},
) -> str:
    """In the notation of `grammar.py`: an answer that calls these tools, behind a thought if the
    model thinks.

    `answer`: a JSON schema of what may be said instead.
    `special`: the ids of marks that are special tokens.
    """

    def mark(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else json.dumps(text)

    rules = []
    ways = []
    if answer is not None:
        ways.append("answer")
        rules.append(f"answer: %json {json.dumps({**answer, 'x-guidance': FORM})}")
    if tools:
        ways.append("calls")
        bodies = [body_rule(speech, tool["function"], mark) for tool in tools]
        rules.append(f"body: {' | '.join(bodies)}")
        rules.append(f"calls: {calls_rule(speech, is_single, mark)}")
    start = ""
    if speech.thought:
        start = "thought SPACE" if is_thinking else "thought? SPACE"
        opens, closes = speech.thought
        opens = "" if is_thinking else opens
        if closes in special:
            rules.append(f"thought: {opens and mark(opens)} TEXT {mark(closes)}")
            rules.append("TEXT: /(?s:.*)/")
        else:
            text = f"{re.escape(opens)}(?s:.*){re.escape(closes)}".replace("/", r"\/")
            rules.append(f"thought[lazy]: /{text}/")
        rules.append(r"SPACE: /[ \n]{0,4}/")
    return "\n".join([f"start: {start} ({' | '.join(ways)})", *rules])


def body_rule(speech: Speech, function: Mapping[str, Any], mark: Callable[[str], str]) -> str:
    name = function["name"]
    parameters = dict(function["parameters"])
    if speech.behind_name is not None:
        behind = mark(speech.behind_name) if speech.behind_name else ""
        return f"{json.dumps(name)} {behind} %json {json.dumps({**parameters, 'x-guidance': FORM})}"
    key = speech.format.key
    # What parameters refer to is looked for in the whole schema's own definitions
    whole = {name: parameters.pop(name) for name in ("$defs", "definitions") if name in parameters}
    whole |= {"type": "object", "properties": {"name": {"const": name}, key: parameters}}
    whole |= {"required": ["name", key], "additionalProperties": False, "x-guidance": FORM}
    return f"%json {json.dumps(whole)}"


def calls_rule(speech: Speech, is_single: bool, mark: Callable[[str], str]) -> str:
    format = speech.format
    opens = mark(format.opens)
    if format.is_single:
        return "body"
    if format.closes:
        call = rf'{opens} "\n" body "\n" {mark(format.closes)}'
        return call if is_single else rf'{call} ("\n" {call})*'
    if speech.behind_name is not None:
        return f"{opens} body" if is_single else f"({opens} body)+"
    return f'{opens} "[" body "]"' if is_single else f'{opens} "[" body (", " body)* "]"'


# --- for those who watch ------------------------------------------------------------------------


def marked(text: str) -> list[Part]:
    """The thought of an answer, what it says, and its calls: with their marks, and without to know
    the model. (Of a thought that the prompt has begun, the end alone is seen.)"""
    start = 0
    for opens, closes in THOUGHTS:
        place = text.find(closes)
        if place >= 0:
            start = place + len(closes)
        elif text.lstrip().startswith(opens):
            start = len(text)
    places = [text.find(format.opens, start) for format in FORMATS]
    end = min((place for place in places if place >= 0), default=len(text))
    answer = text[start:end]
    answer = answer.lstrip("\n") if start else answer
    answer = answer.rstrip("\n") if end < len(text) else answer
    parts = [("thought", text[:start]), ("answer", answer), ("call", text[end:])]
    return [Part(*part) for part in parts if part[1]]


# --- the machine --------------------------------------------------------------------------------


class Parser:
    """Takes one answer apart: `push` takes a piece of its text, `finish` gives what was held back.

    A state is a method. It takes from `self._text` what it understands, appends to `self._parts`,
    and says whether it came further; if not, more text is needed.
    """

    def __init__(
        self,
        speech: Speech,
        tools: Collection[str],
        is_thinking: bool = False,
        is_single: bool = False,
    ):
        self.thought = 0  # so many characters of the answer are thoughts, with their marks
        self.calls = 0  # so many have begun
        self._marks = speech.thought
        self._format = speech.format if tools else None
        self._tools = tools
        self._is_single = is_single or (speech.format is not None and speech.format.is_single)
        self._state = self._think if is_thinking else self._begin
        self._text = ""  # what has not been understood yet
        self._parts: list[Part] = []
        self._length = 0  # of all text so far
        self._space = ""  # white space that may belong to the mark behind it
        self._is_behind_mark = is_thinking  # nothing but white space has come since
        self._call: Body | None = None
        # Of what may turn out to be no call: all that is not in its body. None: it is one
        self._raw: list[str] | None = None

    def push(self, piece: str) -> list[Part]:
        self._length += len(piece)
        self._text += piece
        while self._text and self._state():
            pass
        parts = self._parts
        self._parts = []
        return joined(parts)

    def finish(self) -> list[Part]:
        """At the end of the answer: what may have become a mark has not, and is text."""
        kind = "answer"
        if self._state == self._think:
            self.thought = self._length
            kind = "thought"
        is_call = self._state in (self._between, self._read, self._drop)
        if is_call and self._raw is not None:
            self._give_up()
            is_call = False
        if not is_call:
            self._say(kind, self._text)
            self._parts.append(Part(kind, self._space))
        self._text = ""
        parts = [part for part in self._parts if part.text]
        self._parts = []
        return joined(parts)

    # --- the states

    def _begin(self) -> bool:
        """An answer may begin with a thought, or with a call that has no mark."""
        start = self._text.lstrip()
        opens = self._marks[0] if self._marks else "\0"
        if start.startswith(opens):
            self._enter(self._think, start.removeprefix(opens))
        elif opens.startswith(start):  # nothing, too
            return False
        elif self._format and self._format.is_bare and start[0] == "{":
            self._raw = [self._text[: len(self._text) - len(start)]]
            self._text = start
            self._state = self._between
        else:
            self._state = self._answer
        return True

    def _answer(self) -> bool:
        mark = self._format.opens if self._format else None
        if not self._say_up_to("answer", mark):
            return False
        self._raw = [self._space, mark]
        self._enter(self._between, self._text)
        return True

    def _think(self) -> bool:
        if not self._say_up_to("thought", self._marks[1]):
            return False
        self.thought = self._length - len(self._text)
        self._enter(self._begin, self._text)
        return True

    def _between(self) -> bool:
        """Behind a mark or a call: another call, the closing mark, or neither."""
        format = self._format
        rest = self._text.lstrip()
        self._keep(self._text[: len(self._text) - len(rest)])
        self._text = rest
        for mark in filter(None, (format.closes, format.opens)):
            if rest.startswith(mark):
                if mark == format.opens and self._raw is None:
                    self._raw = []
                self._take_away(mark)
                if mark == format.closes:
                    self._end_calls()
                return True
            if mark.startswith(rest):
                return False
        if rest[0] == "{":
            self._raw = self._raw or []
            self._call = Body(self._tools if format.is_bare else None)
            self._state = self._read
        elif rest[0] in format.between:
            self._take_away(rest[0])
        elif format.is_named and self._raw and self._may_be_name():
            return self._state == self._read
        else:
            self._end_calls()
        return True

    def _may_be_name(self) -> bool:
        """Does a call begin whose name stands before its body? It may not be complete."""
        head, brace, _ = self._text.partition("{")
        found = NAME.match(head)
        if not found:
            return False
        if brace and found.end() == len(head):
            self._take_away(head)
            self._call = Body(None, found[1])
            self._state = self._read
            return True
        return not brace and len(head) < 200 and not re.search(r"[^\w.\[\]\s-]", head)

    def _read(self) -> bool:
        """The body of a call."""
        for place, character in enumerate(self._text, start=1):
            self._call.push(character)
            if self._call.is_over:
                self._text = self._text[place:]
                self._tell()
                self._end_body()
                return True
        self._text = ""
        self._tell()
        return False

    def _drop(self) -> bool:
        """One call was wanted, and has come."""
        self._text = ""
        return False

    # --- what they share

    def _enter(self, state: Callable[[], bool], text: str) -> None:
        """Behind a mark."""
        self._state = state
        self._text = text
        self._space = ""
        self._is_behind_mark = True

    def _say_up_to(self, kind: str, mark: str | None) -> bool:
        """Say the text before a mark, and take the mark away. Without one, all is said but an end
        that may be the beginning of the mark."""
        text = self._text
        place = text.find(mark) if mark else -1
        if place >= 0:
            self._text = text[place + len(mark) :]
            self._say(kind, text[:place])
            return True
        held = 0
        if mark:
            longest = min(len(text), len(mark) - 1)
            held = next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)
        self._text = text[len(text) - held :]
        self._say(kind, text[: len(text) - held])
        return False

    def _say(self, kind: str, text: str) -> None:
        """White space waits: it belongs to a mark, if one follows."""
        if self._is_behind_mark:
            text = text.lstrip()
        if not text:
            return
        self._is_behind_mark = False
        text = self._space + text
        words = text.rstrip()
        self._space = text[len(words) :]
        if words:
            self._parts.append(Part(kind, words))

    def _tell(self) -> None:
        for part in self._call.take():
            self._raw = None
            self.calls += part.kind == "call"
            self._parts.append(part)

    def _keep(self, text: str) -> None:
        """In case that it is text after all."""
        if self._raw is not None and text:
            self._raw.append(text)

    def _take_away(self, mark: str) -> None:
        self._keep(mark)
        self._text = self._text.removeprefix(mark)

    def _end_body(self) -> None:
        if not self._call.is_call:
            self._give_up()
        elif self._is_single:
            self._state = self._drop
        else:
            self._enter(self._between, self._text)
        self._call = None

    def _end_calls(self) -> None:
        """No more calls here. If there was none at all, its marks were text."""
        if self._raw is None:
            self._enter(self._begin, self._text)
        else:
            self._give_up()

    def _give_up(self) -> None:
        """What looked like a call is text."""
        body = self._call.raw if self._call else []
        self._state = self._answer
        self._is_behind_mark = False
        self._say("answer", "".join([*self._raw, *body]))


ARGUMENTS = ("arguments", "parameters")


class Body:
    """The JSON of one call, read a character at a time, so that long arguments can be told as they
    come.

    Only the outer object is looked at closely; of what is inside, brackets and texts are counted.
    """

    def __init__(self, names: Collection[str] | None, name: str | None = None):
        """`names`: those that a tool may have, if not any. `name`: it stood before the body."""
        self.raw: list[str] = []
        self.is_over = False  # complete, or no call
        self._is_told = False  # its name has been given out
        self._names = names
        self._name = name
        self._end = 0  # how many brackets are open when it is complete
        self._depth = 0
        self._in_text = False
        self._is_escaped = False
        self._key: str | None = None  # the field whose value comes
        self._part: list[str] = []  # of a key, or of a value
        self._fresh: list[str] = []  # of the arguments, not given out yet
        self._has_arguments = False
        if name is not None:
            self._key = ARGUMENTS[0]
            self._depth = 1
            self._end = 1

    @property
    def is_call(self) -> bool:
        """Is it clear by now that this is a call?"""
        return self._name is not None and self._has_arguments

    def take(self) -> list[Part]:
        """What has come since."""
        if not self.is_call:
            return []
        parts = []
        if not self._is_told:
            self._is_told = True
            parts.append(Part("call", self._name))
        if self._fresh:
            parts.append(Part("arguments", "".join(self._fresh)))
            self._fresh = []
        return parts

    def push(self, character: str) -> None:
        self.raw.append(character)
        if self._in_text:
            self._add(character)
            self._in_text = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
        elif character == '"':
            self._in_text = True
            self._add(character)
        elif character in "{[":
            self._depth += 1
            if self._depth > 1:
                self._add(character)
        elif character in "}]":
            self._close(character)
        elif self._depth == 1 and character in ",:":
            self._divide(character)
        elif self._key is not None or not character.isspace():
            self._add(character)
            # A key is a text
            self.is_over = self._key is None and not self.is_call

    def _add(self, character: str) -> None:
        if self._is_streamed:
            self._fresh.append(character)
        elif self._part or not character.isspace():
            self._part.append(character)
            if self._key in ARGUMENTS and self._part == ["{"]:
                self._fresh.append("{")
                self._has_arguments = True

    @property
    def _is_streamed(self) -> bool:
        """Arguments that are an object go out as they come."""
        return self._key in ARGUMENTS and self._part[:1] == ["{"]

    def _close(self, character: str) -> None:
        if self._depth > 1:
            self._add(character)
        self._depth -= 1
        if self._depth == self._end:
            self._end_value()
            if not self._has_arguments and self._names is None:
                self._has_arguments = True
                self._fresh.append("{}")
            self.is_over = True

    def _divide(self, character: str) -> None:
        if character == ",":
            self._end_value()
        elif self._key is None:
            key = loads("".join(self._part))
            self._part = []
            self._key = key if isinstance(key, str) else ""

    def _end_value(self) -> None:
        value = None if self._is_streamed else loads("".join(self._part))
        if self._key == "name" and isinstance(value, str) and value and self._name is None:
            self.is_over = self._names is not None and value not in self._names
            self._name = None if self.is_over else value
        elif self._key in ARGUMENTS and value is not None and not self._has_arguments:
            self._has_arguments = True
            self._fresh.append(value if isinstance(value, str) else json.dumps(value))
        self._key = None
        self._part = []


def loads(text: str) -> Any:
    """JSON, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
