"""An answer taken apart: what a model says, what it thinks, and which tools it calls.

The problem. A model writes all three into one text, and marks them as in its training:

    <think>I should add.</think>It is a sum.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>

A client wants them apart, and as they come. A mark may begin in one piece of text and end in
another, and a model may write half a mark, a mark inside a thought, or a call that never ends.

The way out. One machine over text reads characters, not tokens, because a mark's last character may
be in a token together with what follows. Its program reads like a description of an answer, from
the beginning to the end, and stops in the middle of any line of it until more text has come. The
marks are data: a `Format` for each way to write a call. Nobody has to tell which format a model
speaks: its chat template is asked to write a call, and the format is the one that reads this call
back.

What this file keeps. However an answer is cut into pieces, its parts join to the same texts. A
character costs the same however long the answer is. What turns out to be no call is text, whole.
White space beside a mark belongs to the mark.

Where next: `tokens.py`, which knows the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar


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
    closes: str  # the mark behind it, if there is one
    # What stands before the first body, between two, and behind the last one. The first is taken
    # from the model's template
    layout: tuple[str, str, str]
    key: str = "arguments"  # their name in what the template writes
    # An answer may begin with a call that has no mark. The template takes no other beside it
    is_bare: bool = False
    is_named: bool = False  # the tool's name may stand before a body that is its arguments alone


FORMATS = (
    Format(
        "Hermes",
        opens="<tool_call>",
        closes="</tool_call>",
        layout=("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    ),
    Format(
        "Mistral",
        opens="[TOOL_CALLS]",
        closes="]",
        layout=("[TOOL_CALLS][", ", ", "]"),
        is_named=True,
    ),
    Format(
        "Llama 3",
        opens="<|python_tag|>",
        closes="",
        layout=("", "", ""),
        key="parameters",
        is_bare=True,
    ),
)
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
# Some tokenizers have marks as special tokens, which are not shown as text elsewhere.
MARKS = frozenset(
    [
        "[ARGS]",
        "[CALL_ID]",
        "</tool_call>",
        *(format.opens for format in FORMATS),
        *THOUGHTS[0],
        *THOUGHTS[1],
    ]
)


class Speech(NamedTuple):
    """How one model speaks."""

    thought: tuple[str, str] | None = None  # the marks around a thought
    format: Format | None = None
    why: str = ""  # if there is no format: why the model can be given no tools
    # What stands between a tool's name and its arguments, if the name stands before the body
    behind_name: str | None = None

    def is_thinking(self, prompt: str) -> bool:
        """Some templates open a thought at the end of the prompt."""
        if not self.thought:
            return False
        return prompt.rstrip().endswith(self.thought[0])


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
    if "is_listed" not in text:
        return Speech(thought, why="this model's chat template takes no tools")
    if "is_called" not in text:
        return Speech(thought, why="this model's chat template writes no calls of tools")
    place = text.index("is_called")
    for format in FORMATS:
        begin = begin_of_call(format, text, place)
        if begin is None:
            continue
        if text[place - 1] == '"':
            start = text[begin : text.index("{", begin)]
            layout = (start, *format.layout[1:])
            return Speech(thought, format._replace(layout=layout))
        start = text[begin:place]
        layout = (start, start, "")
        behind = text[place + len("is_called") : text.index("{", place)]
        return Speech(thought, format._replace(layout=layout), behind_name=behind)
    around = text[max(place - 40, 0) : place + 40]
    written = " ".join(around.split())
    known = ", ".join(format.name for format in FORMATS)
    why = f"this model writes a call as {written!r}, but only these formats are known: {known}"
    return Speech(thought, why=why)


def begin_of_call(format: Format, text: str, place: int) -> int | None:
    """Where the call begins that a template has written, if it can be read back in this format.
    `place` is that of the name."""
    begin = text.rfind(format.opens, 0, place)
    if format.is_bare and begin < 0:
        begin = text.rfind("{", 0, place)
    has_key = f'"{format.key}"' in text[place:]
    if begin < 0 or not (has_key or format.is_named):
        return None
    parser = Parser(Speech(format=format), ["is_called"])
    first = dict(reversed(parser.push(text[begin:])))  # of each kind
    if first.get("call") != "is_called" or loads(first.get("arguments", "")) != {"n": 7}:
        return None
    return begin


def joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring pieces of one kind as one. Each call stays a call of its own."""
    whole = []
    for kind, same in groupby(parts, key=lambda part: part.kind):
        texts = [part.text for part in same]
        texts = texts if kind == "call" else ["".join(texts)]
        whole += [Part(kind, text) for text in texts]
    return whole


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

    def spelled(text: str) -> str:
        marks = "|".join(map(re.escape, special))
        pieces = re.split(f"({marks})", text) if marks else [text]
        known = {piece: f"<[{special[piece]}]>" for piece in pieces if piece in special}
        return " ".join(known.get(piece, json.dumps(piece)) for piece in pieces if piece)

    rules = {}
    if answer is not None:
        rules["answer"] = as_json(answer)
    if tools:
        bodies = [body_rule(speech, tool["function"], spelled) for tool in tools]
        start, between, end = speech.format.layout
        more = f"({spelled(between)} body)*"
        if is_single or speech.format.is_bare:
            more = ""
        rules["calls"] = f"{spelled(start)} body {more} {spelled(end)}"
        rules["body"] = " | ".join(bodies)
    ways = " | ".join(name for name in ("answer", "calls") if name in rules)
    if not speech.thought:
        rules["start"] = ways
    else:
        opens, closes = speech.thought
        opens = "" if is_thinking else opens
        rules["start"] = f"{'thought' if is_thinking else 'thought?'} SPACE ({ways})"
        rules["SPACE"] = r"/[ \n]{0,4}/"
        if closes in special:
            rules["thought"] = f"{spelled(opens)} TEXT {spelled(closes)}"
            rules["TEXT"] = "/(?s:.*)/"
        else:
            text = f"{re.escape(opens)}(?s:.*){re.escape(closes)}".replace("/", r"\/")
            rules["thought[lazy]"] = f"/{text}/"
    return "\n".join(f"{name}: {rule}" for name, rule in rules.items())


def body_rule(speech: Speech, function: Mapping[str, Any], spelled: Callable[[str], str]) -> str:
    name = function["name"]
    # With an id it is a document of its own: "#" refers to it, wherever it stands
    parameters = {"$id": f"tool:{name}", "type": "object", **function["parameters"]}
    if speech.behind_name is not None:
        before, id, behind = speech.behind_name.partition(CALL["id"])
        behind = spelled(behind)
        before = f"({spelled(before)} /[a-zA-Z0-9]{{9}}/)?" if id else spelled(before)
        return f"{spelled(name)} {before} {behind} {as_json(parameters)}"
    key = speech.format.key
    body = {"type": "object", "properties": {"name": {"const": name}, key: parameters}}
    return as_json({**body, "required": ["name", key], "additionalProperties": False})


def as_json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': FORM})}"


# --- for those who watch ------------------------------------------------------------------------


CLOSING = re.compile("|".join(re.escape(closes) for _, closes in THOUGHTS))
CALLING = re.compile("|".join(re.escape(format.opens) for format in FORMATS))


def marked(text: str, is_thinking: bool = False) -> list[Part]:
    """The thought of an answer, what it says, and its calls: with their marks, and without to know
    the model. `is_thinking`: the prompt has opened the thought."""
    closing = CLOSING.search(text)
    start = closing.end() if closing else 0
    openings = tuple(opens for opens, _ in THOUGHTS)
    if not closing and (is_thinking or text.lstrip().startswith(openings)):
        start = len(text)
    call = CALLING.search(text, start)
    end = call.start() if call else len(text)
    answer = text[start:end]
    answer = answer.strip("\n") if start or call else answer
    parts = [
        Part("thought", text[:start]),
        Part("answer", answer),
        Part("call", text[end:]),
    ]
    return [part for part in parts if part.text]


# --- the machine --------------------------------------------------------------------------------

# So many characters may stand before a body, or in it before its arguments; so much white space
# belongs to a mark
HEAD = 300
NAME = r"([\w.-]{1,128})"
# Separators of calls, and the tool's name, if it stands before the body
BEFORE = re.compile(rf"[\s,;\[]*(?:{NAME}(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*)?(?={{)")
# How a body begins that need not be read whole before it can be told
BEGINNING = re.compile(rf'{{\s*"name"\s*:\s*"{NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?={{)')
T = TypeVar("T")
Reading = Generator[None, None, T]


class Parser:
    """Takes one answer apart: `push` takes a piece of its text, `finish` gives what was held back.

    `tools`: their names; without any, what looks like a call is text.
    `is_thinking`: the prompt has opened a thought already.
    `is_single`: at most one call is wanted.
    """

    def __init__(
        self,
        speech: Speech,
        tools: Collection[str] = (),
        is_thinking: bool = False,
        is_single: bool = False,
    ):
        self._reader = Reader(speech, tools, is_thinking, is_single)
        # The generator refers to the reader, and nothing there refers to the generator. Else an
        # answer that is cut off would stay in memory until the collector comes.
        self._reading = self._reader.read()

    @property
    def thought(self) -> int:
        """So many characters of the answer are thoughts, with their marks."""
        return self._reader.thought

    def push(self, piece: str) -> list[Part]:
        self._reader.add(piece)
        next(self._reading, None)
        return self._reader.take()

    def finish(self) -> list[Part]:
        """At the end of the answer: what may have become a mark has not, and is text."""
        self._reader.is_complete = True
        return self.push("")


class Reader:
    """What a parser has understood of its answer.

    `read` reads the answer from its beginning to its end. It takes from `self._text` what it
    understands. Where that is not enough it yields, and goes on when the next piece has come. So do
    the methods that it is made of: each reads a part of the answer.
    """

    def __init__(self, speech: Speech, tools: Collection[str], is_thinking: bool, is_single: bool):
        self.is_complete = False  # no more text will come
        self.thought = 0  # so many characters of the answer are thoughts, with their marks
        self.calls = 0  # so many have begun
        self._marks = speech.thought
        self._format = speech.format if tools else None
        self._tools = tools
        self._is_single = is_single or (speech.format is not None and speech.format.is_bare)
        # What has not been understood yet. Of a thought that the prompt has opened: its mark
        self._text = self._marks[0] if is_thinking else ""
        self._length = 0  # of all text so far
        self._parts: list[Part] = []

    def add(self, piece: str) -> None:
        self._length += len(piece)
        self._text += piece

    def take(self) -> list[Part]:
        """What has been understood since."""
        parts = self._parts
        self._parts = []
        return joined(parts) if len(parts) > 1 else parts

    def read(self) -> Reading[None]:
        """The whole answer. A thought, and a call that has no mark, may stand at the beginning and
        behind a mark."""
        opens = self._format.opens if self._format else ""
        is_bare = self._format is not None and self._format.is_bare
        is_start = True
        while self._text or not self.is_complete:
            if is_start and self._marks and (yield from self._skip(self._marks[0])):
                yield from self._say_up_to("thought", self._marks[1])
                self.thought = self._length - len(self._text)
                yield from self._skip_space()
            elif is_start and is_bare and (yield from self._begins_with("{")):
                is_start = yield from self._call("")
            elif mark := (yield from self._say_up_to("answer", opens)):
                is_start = yield from self._call(mark)
            if self.calls and self._is_single:
                return  # what follows is not wanted

    def _begins_with(self, mark: str) -> Reading[bool]:
        """Does this mark come next, perhaps behind white space?"""
        while True:
            text = self._text.lstrip()
            if len(self._text) - len(text) > HEAD:
                return False
            if text.startswith(mark):
                return True
            if self.is_complete or not mark.startswith(text):
                return False
            yield

    def _skip(self, mark: str) -> Reading[bool]:
        """Take a mark away, if it comes next, and the white space around it."""
        if not (yield from self._begins_with(mark)):
            return False
        self._text = self._text.lstrip().removeprefix(mark)
        yield from self._skip_space()
        return True

    def _skip_space(self) -> Reading[None]:
        """All of it behind a mark, however long: it is gone as it comes, so nothing is held back."""
        self._text = self._text.lstrip()
        while not self._text and not self.is_complete:
            yield
            self._text = self._text.lstrip()

    def _say_up_to(self, kind: str, mark: str) -> Reading[str]:
        """Say the text before a mark, and take the mark away. Returns the mark, and the white space
        before it; nothing, if the answer ends without one.

        What may be the beginning of the mark has to wait, and so has white space.
        """
        while not mark or mark not in self._text:
            words = self._text
            if mark and not self.is_complete:
                words = without_space(words.removesuffix(beginning(mark, words)))
            self._say(kind, words)
            self._text = self._text[len(words) :]
            if self.is_complete:
                return ""
            yield
        before, _, self._text = self._text.partition(mark)
        words = without_space(before)
        self._say(kind, words)
        return before[len(words) :] + mark

    def _call(self, mark: str) -> Reading[bool]:
        """Calls behind a mark. False if there is none: then the mark is text."""
        count = self.calls
        text = mark
        while before := (yield from self._find(BEFORE, "{")):
            if before[1] and not self._format.is_named:
                break
            self._text = self._text[before.end() :]
            body = yield from self._body(before[1])
            text = body and text + before[0] + body
            if body or self._is_single or (yield from self._close()):
                break
        self._say("answer", text)
        return self.calls > count

    def _close(self) -> Reading[bool]:
        """The mark behind a call. It may be missing, and the answer may be cut off in it."""
        mark = self._format.closes
        yield from self._skip_space()
        if (yield from self._skip(mark)):
            return True
        if self.is_complete and mark.startswith(self._text):
            self._text = ""
        return False

    def _find(self, pattern: re.Pattern, last: str) -> Reading[re.Match | None]:
        """Wait for a pattern, until it is clear that it does not come: `last` does not stand in
        it."""
        while not (found := pattern.match(self._text, 0, HEAD)):
            if last in self._text or len(self._text) >= HEAD or self.is_complete:
                return None
            yield
        return found

    def _body(self, name: str | None) -> Reading[str]:
        """One call. `name`: that of the tool, if it stood before the body.

        Returns nothing. But if it is no call, what has been taken away.
        """
        found = None if name else (yield from self._find(BEGINNING, "}"))
        if not (name or found):
            return (yield from self._late_body())
        if found:
            name = found[1]
            self._text = self._text[found.end() :]
            if self._format.is_bare and name not in self._tools:
                return found[0]
        self._begin(name)
        yield from self._object(kind="arguments")
        if found:
            yield from self._object(depth=1)
        return ""

    def _late_body(self) -> Reading[str]:
        """A call in which the name and the arguments do not stand first, or not in this order."""
        body = yield from self._object()
        given = loads(body)
        given = given if isinstance(given, dict) else {}
        name = given.get("name")
        arguments = given.get("arguments", given.get("parameters"))
        if self._format.is_bare and (arguments is None or name not in self._tools):
            return body
        if not isinstance(name, str) or not name:
            return body
        self._begin(name)
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        self._say("arguments", arguments)
        return ""

    def _object(self, depth: int = 0, kind: str = "") -> Reading[str]:
        """Take a JSON object away. `depth`: so many of its braces have been taken. `kind`: as what
        it is said as it comes, if at all."""
        braces = Braces(depth)
        taken = []
        while True:
            end = braces.end(self._text)
            taken.append(self._text[:end])
            self._text = self._text[end:]
            if kind:
                self._say(kind, taken[-1])
            if braces.depth == 0 or self.is_complete:
                return "".join(taken)
            yield

    def _begin(self, tool: str) -> None:
        self.calls += 1
        self._say("call", tool)

    def _say(self, kind: str, text: str) -> None:
        if text:
            self._parts.append(Part(kind, text))


def beginning(mark: str, text: str) -> str:
    """The end of a text that may be the beginning of a mark; the longest there is."""
    first = len(text) - len(mark) + 1
    for place in range(max(first, 0), len(text)):
        if mark.startswith(text[place:]):
            return text[place:]
    return ""


def without_space(text: str) -> str:
    """Without the white space at its end, but for more than may belong to a mark: a model that
    writes nothing else would let all of it be looked at for each token."""
    return text[: max(len(text.rstrip()), len(text) - HEAD)]


class Braces:
    """Finds the end of a JSON object. Brackets are counted, but for those in texts."""

    def __init__(self, depth: int):
        self.depth = depth  # so many are open
        self._in_text = False
        self._is_escaped = False

    def end(self, text: str) -> int:
        """How many of the next characters belong to the object."""
        for place, character in enumerate(text, start=1):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_text:
                self._is_escaped = character == "\\"
                self._in_text = character != '"'
            elif character == '"':
                self._in_text = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
            if self.depth == 0:
                return place
        return len(text)


def loads(text: str) -> Any:
    """JSON, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
