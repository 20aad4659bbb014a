"""Parsing an answer in each format: random parts that were joined are recovered, however the text is split into
pieces."""

import json
import random
import re
import time
from functools import cache

import pytest
from checkpoints import make_tokenizer
from long_forms import number_of
from tokenizers import AddedToken

from text.detokenizer import StreamingDetokenizer
from text.grammar import Grammars
from text.tool_formats import (
    FORMATS,
    HARMONY,
    HARMONY_ENDS,
    HARMONY_MARKS,
    HARMONY_REASONING,
    MARKS,
    REASONING_MARKS,
    OutputFormat,
    as_json,
    as_lark,
    tool_call_grammar,
)
from text.tool_formats import TOOLS as LISTED
from text.tool_parser import (
    HEAD,
    OutputParser,
    ParsedPart,
    detect_format,
    split_output,
    split_reasoning,
)

ANSWERS = number_of("ANSWERS", 100)  # per format
# Possible arguments of a call in tags
PROPERTIES = {
    "text": {"type": "string"},
    "other text": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/text"}]},
    "maybe": {"type": ["string", "null"]},
    "n": {"type": "integer"},
    "x": {"$ref": "#/$defs/x"},
    "on": {"enum": [True, False]},
    "list": {"type": "array"},
    "of": {"type": "object"},
    "any": {},
}
SCHEMA = {"properties": PROPERTIES, "$defs": {"x": {"type": "number"}}}
TOOLS = dict.fromkeys(["add", "get_weather", "files.read-all"], SCHEMA)
HERMES, MISTRAL, *_, LLAMA = FORMATS
APRIEL = next(format for format in FORMATS if format.name == "Apriel")
# A call in tags, as published templates write it
WRITTEN = {
    "Qwen 3 Coder": "<tool_call>\n<function=is_called>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>",
    "Seed": "<seed:tool_call>\n<function=is_called>\n<parameter=n>7</parameter>\n</function>\n</seed:tool_call>",
    "MiniMax": '<minimax:tool_call>\n<invoke name="is_called">\n<parameter name="n">7</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "GLM": "<tool_call>is_called\n<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
    "newer GLM": "<tool_call>is_called<arg_key>n</arg_key><arg_value>7</arg_value></tool_call>",
    "MiniCPM": '<function name="is_called"><param name="n">7</param></function>',
}


def learned(rendered: str):
    """Return the format that is detected from a template that renders a call like this."""
    return detect_format("", lambda messages, tools: "Tools: is_listed. " + rendered).tools


TAGGED = [learned(rendered)._replace(name=name) for name, rendered in WRITTEN.items()]
IN_GEMMA = "<|tool_call>call:is_called{n:7}<tool_call|>"
GEMMA = learned(IN_GEMMA)
ALL = [HERMES, MISTRAL, LLAMA, APRIEL, GEMMA, *TAGGED]
# Text that resembles a mark, or the end of one
HOSTILE = ["}", "{", "]", "[", '"', "\\", "</", "<tool_ca", "[TOOL_", "<|python", "<thi", "\n", " "]
HOSTILE += [
    "é",
    "🦊",
    "\u2028",
    "</tool_call",
    "[ARGS]",
    '{"name": "add"',
    "<tool_response>",
    ",",
    ";",
]
WORDS = ["fox", "den", "17", "the", "sum", "is"]


def words(dice: random.Random, count: int) -> str:
    return "".join(dice.choice(WORDS + HOSTILE) for _ in range(dice.randrange(1, count)))


def value(dice: random.Random, depth: int = 0):
    kind = dice.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [value(dice, depth + 1) for _ in range(dice.randrange(3))]
    if kind == 6:
        return {words(dice, 3): value(dice, depth + 1) for _ in range(dice.randrange(3))}
    return [dice.randrange(10**6), -1.5e-3, None, dice.random() < 0.5, words(dice, 6)][kind]


def make_call(dice: random.Random, format) -> tuple[str, dict]:
    if format.tags:
        return dice.choice([*TOOLS]), make_arguments(dice, format)
    if format.quote:
        return dice.choice([*TOOLS]), {key: value(dice) for key in dice.sample("abé_", k=3)}
    return dice.choice([*TOOLS]), {words(dice, 2): value(dice) for _ in range(dice.randrange(4))}


def make_arguments(dice: random.Random, format) -> dict:
    """Return some of `PROPERTIES` in random order. A text may contain any mark, but not the mark that ends a
    value followed by a valid continuation."""
    tags = format.tags
    marks = [tags.after_value, tags.after_value.strip(), tags.before_key, tags.end + "<"]
    text = "".join(dice.choice([words(dice, 5), *marks, "\n", "x"]) for _ in range(4)) + "."
    nexts = (tags.before_key, tags.end, format.closes)
    follows = "|".join(re.escape(each.strip()) for each in nexts if each)
    mark = re.escape(tags.after_value.strip())
    text = re.sub(rf"({mark}\s*)(?={follows})", r"\1.", text)
    values = {
        "text": dice.choice([text, "", "7", "null", '"quoted"', "\n two lines \n\n"]),
        "other text": text,
        "maybe": dice.choice([None, "Paris", "7"]),
        "n": dice.randrange(10**6),
        "x": -1.5e-3,
        "on": dice.random() < 0.5,
        "list": [value(dice) for _ in range(3)],
        "of": {words(dice, 3): value(dice)},
        "any": dice.choice([[1, "a"], "some text", 5]),
    }
    keys = dice.sample(sorted(values), k=dice.randrange(5))
    return {key: values[key] for key in keys}


def in_tags(format, calls: list, dice: random.Random) -> str:
    """Write calls like the template, or like a model that is careless with whitespace."""
    tags = format.tags
    bodies = []
    for name, given in calls:
        body = name + tags.after_name
        for key, argument in given.items():
            said = argument if isinstance(argument, str) else json.dumps(argument)
            if argument in (None, True, False) and not isinstance(argument, str | int):
                said = dice.choice([said, str(argument)])  # as Python writes it
            body += f"{tags.before_key}{key}{tags.after_key}{said}{tags.after_value}"
            body += dice.choice(["", "", "\n "])
        bodies.append(body + tags.end)
    start, between, end = format.layout
    return start + dice.choice([between, "\n" + between]).join(bodies) + end


def in_quotes(value) -> str:
    """Write a value as in Gemma 4, whose template writes nested keys with or without quotes."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(in_quotes, value))}]"
    if isinstance(value, dict):
        keys = {key: key if key.isidentifier() else in_quotes(key) for key in value}
        return "{" + ",".join(f"{keys[key]}:{in_quotes(value[key])}" for key in value) + "}"
    return str(value) if value is None else json.dumps(value)


def written(format, calls: list, dice: random.Random) -> str:
    """Write calls like a model of this family."""
    if format.tags:
        return in_tags(format, calls, dice)
    if format.quote:
        said = [f"<|tool_call>call:{name}{in_quotes(given)}<tool_call|>" for name, given in calls]
        return dice.choice(["", "\n"]).join(said)
    layout = {"indent": dice.choice([None, None, 2]), "ensure_ascii": dice.random() < 0.5}

    def body(call) -> str:
        fields = [("name", call[0]), (format.key, call[1])]
        if dice.random() < 0.3:
            fields.reverse()
        if dice.random() < 0.2:
            fields.append(("id", "abcdefghi"))
        return json.dumps(dict(fields), **layout)

    space = dice.choice(["", "\n", "\r\n "])
    if format is HERMES:
        split_output = [f"<tool_call>{space}{body(call)}{space}</tool_call>" for call in calls]
        return "\n".join(split_output)
    if format is LLAMA:
        return dice.choice(["", "<|python_tag|>"]) + "; ".join(map(body, calls))
    if format is APRIEL:
        listed = f"<tool_calls>{space}[{', '.join(map(body, calls))}]{space}</tool_calls>"
        single = [f"<tool_calls>{space}{body(call)}{space}</tool_calls>" for call in calls]
        return dice.choice([listed, "\n".join(single)])
    if dice.random() < 0.5:
        return "[TOOL_CALLS]" + f"[{', '.join(map(body, calls))}]"
    mark = dice.choice(["", "[ARGS]", "[CALL_ID]abcdefghi[ARGS]"])
    named = [f"[TOOL_CALLS]{name}{mark}{json.dumps(given, **layout)}" for name, given in calls]
    return "".join(named)


def make_answer(format, seed: int) -> tuple[str, list[tuple], OutputFormat]:
    """Return a text and its parts: ("reasoning", ...), ("content", ...), ("tool_call", name, arguments)."""
    dice = random.Random(seed)
    marks = dice.choice(REASONING_MARKS)
    text, parts = "", []
    if dice.random() < 0.6:
        reasoning = (words(dice, 12) + dice.choice([format.opens + "{", ""])).replace(marks[1], "")
        text += f"{marks[0]}\n{reasoning}\n{marks[1]}\n\n"
        parts += [("reasoning", reasoning.strip())] if reasoning.strip() else []
    calls = [make_call(dice, format) for _ in range(dice.randrange(4))]
    if not calls or (format is not LLAMA and dice.random() < 0.5):
        answer = "so " + words(dice, 12).replace(format.opens, "")
        # Llama's calls are at the start, or after their mark
        text += answer
        parts.append(("content", answer.rstrip() if calls else answer))
    if calls:
        text += written(format, calls, dice)
        parts += [("tool_call", *call) for call in calls]
    return text, parts, OutputFormat(marks, format)


def joined(parts: list[ParsedPart]) -> list[ParsedPart]:
    """Merge neighbouring pieces of the same kind, but keep calls separate."""
    whole: list[ParsedPart] = []
    for kind, text in parts:
        if whole and whole[-1].kind == kind != "tool_call":
            text = whole.pop().text + text
        whole.append(ParsedPart(kind, text))
    return whole


def parse(
    text: str | list[str], output_format: OutputFormat, is_cut: bool = False, **how
) -> list[tuple]:
    parser = OutputParser(output_format, TOOLS, **how)
    parts: list[ParsedPart] = []
    for piece in [text] if isinstance(text, str) else text:
        parts += parser.push(piece)
    return joined(parts + parser.push(None, is_cut))


def told(parts: list[ParsedPart]) -> list[tuple]:
    """Return the parts with the arguments of calls parsed."""
    found = []
    for part in parts:
        if part.kind == "arguments":
            found[-1] += (json.loads(part.text),)
        else:
            found.append(tuple(part))
    return found


def as_bytes(text: str) -> list[str]:
    """Return the pieces of a stream whose tokens are single bytes."""
    tokenizer = make_tokenizer()
    stream = StreamingDetokenizer(tokenizer)
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(tokens) == len(text.encode())
    return [*map(stream.push, tokens), stream.finish(tokens)]


def parse_however_cut(text: str, output_format: OutputFormat, seed: int, **how) -> list[ParsedPart]:
    """Return the parts of an answer. Assert that they are the same whether it is parsed as a whole, character
    by character, or split at random places."""
    dice = random.Random(seed)
    parts = parse(text, output_format, **how)
    for count in (1, 3, 6):
        cut = sorted(dice.choices(range(len(text) + 1), k=count))
        pieces = [text[a:b] for a, b in zip([0, *cut], [*cut, None], strict=True)]
        assert parse(pieces, output_format, **how) == parts, (seed, cut, text)
    assert parse(list(text), output_format, **how) == parts, (seed, text)
    return parts


@pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)
def test_random_answers_are_parsed_however_cut(format):
    calls = thoughts = 0
    for seed in range(ANSWERS):
        text, expected, output_format = make_answer(format, seed)
        parts = parse_however_cut(text, output_format, seed)
        if format.is_bare:  # its template supports one call in a message, so no more are reported
            first = [i for i, part in enumerate(expected) if part[0] == "tool_call"][:1]
            expected = expected[: first[0] + 1] if first else expected
        assert told(parts) == expected, (seed, text)
        assert seed % 10 or parse(as_bytes(text), output_format) == parts, (seed, text)
        calls += any(part[0] == "tool_call" for part in expected)
        thoughts += expected[0][0] == "reasoning"
    assert calls > 0.6 * ANSWERS and thoughts > 0.5 * ANSWERS


def damaged(text: str, dice: random.Random) -> str:
    place = dice.randrange(len(text)) if text else 0
    return text[:place] + dice.choice(HOSTILE) + text[place + dice.randrange(3) :]


@pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)
def test_damaged_answers_are_parsed_however_cut(format):
    """An answer may end within a mark, a call or the reasoning."""
    kinds = set()
    for seed in range(ANSWERS):
        text, _, output_format = make_answer(format, seed)
        dice = random.Random(-seed)
        text = text[: dice.randrange(len(text) + 1)]
        if seed % 2:
            text = damaged(text, dice)
        parts = parse_however_cut(text, output_format, seed)
        kinds |= {part.kind for part in parts}
        if text.strip() and not any(text.strip() == marks[0] for marks in REASONING_MARKS):
            length = sum(len(part.text) for part in parts)
            assert length > 0 or "think" in text.lower(), (seed, text)
    assert kinds == {"content", "reasoning", "tool_call", "arguments"}


def spaced(text: str, dice: random.Random) -> str:
    """Insert whitespace next to marks, often exactly as much as the parser holds back."""
    places = [match.start() for match in re.finditer(r"[<>\[\]{};]", text)]
    for place in sorted(dice.choices(places or [0], k=3), reverse=True):
        length = dice.choice([1, HEAD - 1, HEAD, HEAD + 1, 2 * HEAD])
        place += dice.randrange(2)
        text = text[:place] + dice.choice([" ", "\n", " \n"]) * length + text[place:]
    return text


@pytest.mark.parametrize("format", [*ALL, None], ids=lambda format: format and format.name)
def test_long_white_space_is_parsed_however_cut(format):
    """Regression: more than 300 blanks after reasoning were kept if they arrived in one piece, and lost if
    they arrived in many."""
    for seed in range(ANSWERS // 8):
        text, _, output_format = make_answer(format or HERMES, seed)
        output_format = output_format._replace(tools=format)
        dice = random.Random(seed)
        text = spaced(text, dice)[: dice.choice([None, dice.randrange(len(text))])]
        how = {"is_thinking": dice.random() < 0.2, "is_single": dice.random() < 0.2}
        parse_however_cut(text, output_format, seed, **how)


SPEECH = OutputFormat(REASONING_MARKS[0], HERMES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Is 3 < 4? <tool_ca", [("content", "Is 3 < 4? <tool_ca")]),
        ("<thi", [("content", "<thi")]),
        ("<think>on and on", [("reasoning", "on and on")]),
        (
            "<think> <tool_call>{} </think> yes",
            [("reasoning", "<tool_call>{}"), ("content", "yes")],
        ),
        ("a <think> in the middle", [("content", "a <think> in the middle")]),
        ("<tool_call>no JSON</tool_call>", [("content", "<tool_call>no JSON</tool_call>")]),
        ('<tool_call>{"name": 5}</tool_call>', [("content", '<tool_call>{"name": 5}</tool_call>')]),
        ("<tool_call>\n", [("content", "<tool_call>\n")]),
        ("a \n<tool_call> b", [("content", "a \n<tool_call> b")]),
        (
            '<tool_call><tool_call>{"name": "add", "arguments": {}}</tool_call></tool_call>',
            [("content", "<tool_call>"), ("tool_call", "add", {}), ("content", "</tool_call>")],
        ),
        ('<tool_call>{"name": "add"}</tool_call>', [("tool_call", "add", {})]),
        ('<tool_call>{"name": "add"}\n</tool_c', [("tool_call", "add", {})]),
        (
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
            [("tool_call", "add", {"a": 1})],
        ),
        ("  white space  \n", [("content", "  white space  \n")]),
        ("", []),
    ],
)
def test_malformed_answers_are_content(text, expected):
    assert told(parse(text, SPEECH)) == expected
    assert told(parse(list(text), SPEECH)) == expected


TEXT = {"add": {"properties": {"a": {"type": "string"}}}}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "MiniCPM",
            '<function name="add"><param name="a"><![CDATA[ </param> ]]></param></function>',
            [("tool_call", "add", {"a": " </param> "})],
        ),
        (
            "MiniCPM",
            '<function name="add"><param name="a"><![CDA</param></function>',
            [("tool_call", "add", {"a": "<![CDA"})],
        ),
        (
            "MiniCPM",
            '<function name="add"></function>!',
            [("tool_call", "add", {}), ("content", "!")],
        ),
        ("GLM", "<tool_call>add</tool_call>", [("tool_call", "add", {})]),
        ("GLM", "<tool_call>no call</tool_call>", [("content", "<tool_call>no call</tool_call>")]),
        ("Qwen 3 Coder", "<tool_call>\n<function=", [("content", "<tool_call>\n<function=")]),
        (
            "Qwen 3 Coder",
            "<tool_call><function=add><parameter=a>\n1\n</parameter>",
            [("tool_call", "add", {"a": "1"})],
        ),
        (
            "Qwen 3 Coder",
            '<tool_call>{"name": "add", "arguments": {"a": "1"}}</tool_call>',
            [("tool_call", "add", {"a": "1"})],
        ),
        (
            "Qwen 3 Coder",
            "<tool_call><function=add><parameter=b>NaN</parameter></function>",
            [("tool_call", "add", {"b": "NaN"})],
        ),
    ],
)
def test_careless_tagged_calls(name, text, expected):
    (format,) = (format for format in TAGGED if format.name == name)
    for pieces in ([text], list(text)):
        parser = OutputParser(OutputFormat(tools=format), TEXT)
        parts = [part for piece in pieces for part in parser.push(piece)]
        assert told(joined(parts + parser.push(None))) == expected


def test_unfinished_arguments():
    parser = OutputParser(SPEECH, TOOLS)
    told = parser.push('<tool_call>{"name": "add", "arguments": {"a": "12')
    assert told == [("tool_call", "add"), ("arguments", '{"a": "12')]
    assert parser.push("34") == [("arguments", "34")] and parser.push(None) == []


def test_call_without_tools_is_content():
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert OutputParser(OutputFormat(REASONING_MARKS[0], HERMES)).push(text) == [("content", text)]
    plain = OutputParser(OutputFormat())
    for piece in (" \n", "<think>", " ", "<tool_call>{"):
        assert plain.push(piece) == [("content", piece)]
    assert plain.push(None) == []


def test_json_answer_is_no_call_of_an_unknown_tool():
    output_format = OutputFormat(None, LLAMA)
    unnamed = '{"name": ["add"], "parameters": {}}'  # used to raise a TypeError
    others = ('{"name": "Ann", "parameters": {"age": 3}}', '{"name": "add", "age": 3}', "{")
    for text in (unnamed, *others):
        assert parse(text, output_format) == [("content", text)] == parse(list(text), output_format)


def test_prompt_may_open_the_reasoning():
    assert SPEECH.is_thinking("<|assistant|>\n<think>\n")
    assert not SPEECH.is_thinking("<|assistant|>\n<think>\n\n</think>\n\n")
    parser = OutputParser(SPEECH, is_thinking=True)
    parser.push("It is late.</think> Good night.")
    assert parser.reasoning_length == len("It is late.</think>")
    parts = parse("It is late.\n</think>\n\nGood night.", SPEECH, is_thinking=True)
    assert parts == [("reasoning", "It is late."), ("content", "Good night.")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{city:<|"|>Par"is" {},<|"|>}', {"city": 'Par"is" {},'}),
        ("{}", {}),
        ('{a:{<|"|>b:c<|"|>:null,d e:None},f:[true,False,[-1.5,<|"|><|"|>]]}',
         {"a": {"b:c": None, "d e": None}, "f": [True, False, [-1.5, ""]]}),
    ],
)  # fmt: skip
def test_strings_between_marks(given, expected):
    text = f"<|tool_call>call:add{given}<tool_call|>"
    for cut in range(len(text) + 1):
        parts = told(parse([text[:cut], text[cut:]], OutputFormat(None, GEMMA)))
        assert parts == [("tool_call", "add", expected)], cut


@pytest.mark.parametrize(
    "given", ["{a}", "{a:NaN}", "{a:b}", '{a:<|"|>x}', "{a:[}", "add", "(a=1)"]
)
def test_call_between_marks_that_cannot_be_read_is_content(given):
    text = f"<|tool_call>call:add{given}<tool_call|>"
    assert parse(list(text), OutputFormat(None, GEMMA)) == [("content", text)]


# --- calls without a mark -------------------------------------------------------------------------

ADD = '{"name": "add", "arguments": {"a": 1}}'
PRETTY = json.dumps({"name": "files.read-all", "arguments": {"path": "a {\n"}}, indent=2)
CALLED = ("tool_call", "add", {"a": 1})
READ = ("tool_call", "files.read-all", {"path": "a {\n"})
BARE = {
    ADD: [CALLED],
    PRETTY: [READ],
    f"\n\n  {ADD}\n": [CALLED],
    f"```json\n{ADD}\n```": [CALLED],
    f"```\n{PRETTY}": [("content", "```"), READ],
    f"```JSON\n{ADD}```": [CALLED],
    f"[{ADD}, {PRETTY}]": [CALLED, READ],
    f"```json\n[\n {ADD},\n {PRETTY}\n]\n```": [CALLED, READ],
    f"```json\n{ADD}\n{ADD}\n```": [CALLED, CALLED],
    f"```json\n{ADD}\n```\n\n```json\n{PRETTY}\n```": [CALLED, READ],
    f"{ADD}\n{PRETTY}": [CALLED, READ],
    f"{ADD}; {PRETTY}": [CALLED, READ],
    f"I look.\n\n{ADD}": [("content", "I look."), CALLED],
    f"I look:\n```json\n{ADD}\n```\nDone.": [("content", "I look:"), CALLED, ("content", "Done.")],
    f"<think>\n{PRETTY}</think>\n{ADD}": [("reasoning", PRETTY), CALLED],
    '{"name":"add","arguments":{}}': [("tool_call", "add", {})],
    '{\n"name" : "add" ,\n"parameters" : { "a": 1 }, "id": "x"}': [CALLED],
    f"An x:\n```json\n[1]\n```\n{ADD}": [("content", "An x:\n```json\n[1]\n```"), CALLED],
    # Qwen 2.5 Coder's template shows a call in doubled braces, and an agent got such calls as content
    f"{{{ADD}}}": [CALLED],
    f"{{{ADD}\n": [CALLED],
    f"```json\n{{{ADD}}}\n```": [CALLED],
}
NO_CALLS = [
    '{"name": "sub", "arguments": {"a": 1}}',
    f"Write {ADD} for a call.",
    f"```python\nx = {ADD}\n```",
    f"```python\n{ADD}"[:10] + f"print({ADD})",
    '{"name": "add", "arguments": [1]}',
    '{"name": "add", "arguments": {...}}',
    '{"name": "add", "arguments": {<args>}}',
    '{"name": "add", "arguments": "a"}',
    '{"name": "add", "value": {"a": 1}}',
    '{"name": "add"}',
    '{"name": "add", "age": 3}',
    '{"Name": "add", "arguments": {"a": 1}}',
    '{"call": {"name": "add", "arguments": {"a": 1}}}',
    '{"name": "add',
    '```json\n{"name": "Ann", "age": 3}\n```',
    "```json\n```",
    "```",
    "[",
    "{",
    "a list:\n[1]\n{\n}\n",
    '["name": "add", "arguments": {"a": 1}]',
    '{{"name": "sub", "arguments": {"a": 1}}',
    '{{{"name": "add", "arguments": {"a": 1}}}}',
]
IN_JSON = [HERMES, MISTRAL, LLAMA, APRIEL]


@pytest.mark.parametrize("format", IN_JSON, ids=lambda format: format.name)
def test_unmarked_call_of_a_known_tool(format):
    """Regression: none of a published model's 16 calls had its mark: it wrote them bare, or in a code
    block. The client received them as content, and its loop ended."""
    output_format = OutputFormat(REASONING_MARKS[0], format)
    for text, expected in BARE.items():
        if format.is_bare:  # its template supports a single call
            first = [part[0] for part in expected].index("tool_call")
            expected = expected[: first + 1]
        for cut in range(len(text) + 1):
            assert told(parse([text[:cut], text[cut:]], output_format)) == expected, (text, cut)
        assert told(parse(list(text), output_format)) == expected, text
        single = [*expected[: [part[0] for part in expected].index("tool_call") + 1]]
        assert told(parse(text, output_format, is_single=True)) == single, text
        assert "tool_call" not in str(parse(text, output_format, is_strict=True)) or format.is_bare


@pytest.mark.parametrize("call", [f"{{{ADD}}}", f"{{{ADD}"], ids=["closed", "open"])
def test_marked_call_in_doubled_braces(call):
    text = f"<tool_call>\n{call}\n</tool_call>"
    for cut in range(len(text) + 1):
        assert told(parse([text[:cut], text[cut:]], OutputFormat(None, HERMES))) == [CALLED], cut
    assert told(parse(f"{text}\n{text}", OutputFormat(None, HERMES))) == [CALLED, CALLED]


@pytest.mark.parametrize("format", IN_JSON, ids=lambda format: format.name)
def test_unmarked_lookalikes_are_content(format):
    output_format = OutputFormat(REASONING_MARKS[0], format)
    for text in NO_CALLS:
        if format.is_bare and text.startswith('{"name": "add", "arguments": {'):
            continue  # in this format it is a call, at the start of an answer
        for cut in range(len(text) + 1):
            found = parse([text[:cut], text[cut:]], output_format)
            assert found == [("content", text)], (text, cut)
        assert parse(list(text), output_format) == [("content", text)]
        parser = OutputParser(output_format)  # without tools
        assert [*parser.push(text), *parser.push(None)] == [("content", text)]


def test_unmarked_calls_are_parsed_however_cut():
    """Texts are complete, truncated, damaged, or cut off by `max_tokens`."""
    pieces = [*BARE, *NO_CALLS, *HOSTILE, "\n\n", "so", "```json\n", "```", "<tool_call>"]
    calls = 0
    for seed in range(10 * ANSWERS):
        dice = random.Random(seed)
        text = "".join(dice.choice(pieces) for _ in range(dice.randrange(1, 5)))
        if dice.random() < 0.5:
            text = text[: dice.randrange(len(text) + 1)]
        if dice.random() < 0.3:
            text = damaged(text, dice)
        how = {"is_single": dice.random() < 0.3, "is_thinking": dice.random() < 0.1}
        output_format = OutputFormat(REASONING_MARKS[0], dice.choice(IN_JSON))
        for is_cut in (False, True):
            parts = parse_however_cut(text, output_format, seed, is_cut=is_cut, **how)
        calls += any(part.kind == "tool_call" for part in parts)
    assert calls > 2 * ANSWERS


@pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)
def test_truncated_call_is_dropped(format):
    """Regression: the beginning of a truncated call was left in the content, as `<tool_call>\\n{"name": "`.
    In an answer that ends by itself it is kept."""
    dice = random.Random(5)
    output_format = OutputFormat(REASONING_MARKS[0], format)
    call = written(format, [("add", {})], dice)
    for text, said in ((call, []), (f"I look.\n{call}", [("content", "I look.")])):
        if said and format.is_bare and not call.startswith("<"):
            continue
        for end in range(len(text)):
            parts = parse(text[:end], output_format, is_cut=True)
            answer = "".join(part.text for part in parts if part.kind == "content")
            expected = text[: min(end, len("I look."))] if said else ""
            assert answer.strip() == expected.strip(), text[:end]
            whole = "".join(part.text for part in parse(text[:end], output_format))
            assert "tool_call" in str(parts) or whole.strip() == text[:end].strip()


def test_truncated_text_is_content():
    wrong = '<tool_call>{"a": 1}</tool_call> was wrong'
    for text in ("so", "so ", "so\n", "3 <", wrong, "```py\nx"):
        expected = text.removesuffix(" <")
        assert parse(text, SPEECH, is_cut=True) == [("content", expected)], text
        assert parse(list(text), SPEECH, is_cut=True) == [("content", expected)], text


def test_single_call_ends_with_its_last_character():
    """The engine stops at that character. Otherwise a model might write calls until max_tokens."""
    for format in ALL:
        for seed in range(20):
            text = written(format, [("add", {}), ("add", {})], random.Random(seed))
            parser = OutputParser(OutputFormat(None, format), TOOLS, is_single=True)
            places = [place for place, letter in enumerate(text) if parser.ends(letter)]
            assert parser.is_over and len(places) > 2, text
            assert text[: places[0] + 1].count("add") == 1, text
            assert OutputParser(OutputFormat(None, format), TOOLS).ends(text) is format.is_bare


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"a":"' * 8_000,
        "<tool_call>" * 8_000,
        '<tool_call>{"name": "add", "arguments": ' + "[" * 60_000,
        "<" * 60_000,
        "<think>" + "</thin" * 15_000,
        " \n" * 30_000,
        '{"name": "add"\n' * 4_000,
        '{"name": "add", "arguments": {}}\n' * 2_000,
        "```json\n[\n" * 6_000,
    ],
    ids=["calls", "marks", "brackets", "halves", "ends", "space", "bodies", "bare", "blocks"],
)
def test_parsing_cost_does_not_grow(text):
    """Parsing an answer as long as a slot does not block the thread that serves all clients. If each
    character were checked again for each mark, it would take minutes."""
    began = time.thread_time()
    pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
    parts = parse(pieces, SPEECH)
    length = sum(len(part.text) for part in parts)
    assert length >= len(text.strip()) - 7 or parts[0].kind == "tool_call"
    assert time.thread_time() - began < 20


@pytest.mark.parametrize("before", ["", "<think>a", "<tool_call>add"])
def test_endless_white_space_streams(before):
    """Regression: a client can force endless whitespace with a logit bias. All whitespace that was held back
    was checked again for each token, and 100,000 tokens took four seconds of the thread that serves all
    clients."""
    for text in (before + " \n" * 800 + "x", before + " \n" * 800 + "<tool_call>x"):
        parser = OutputParser(SPEECH, TOOLS)
        parts = []
        for count, piece in enumerate(text, start=1):
            parts += parser.push(piece)
            assert count - sum(len(part.text) for part in parts) < 700
        parts += parser.push(None)
        assert joined(parts) == parse(text, SPEECH)
        assert joined(parts)[-1].text.endswith("x") and len(text) - len(joined(parts)[-1].text) < 20


# --- Harmony, the format of gpt-oss ---------------------------------------------------------------

GPT_OSS = OutputFormat(HARMONY_REASONING, HARMONY)
THOUGHT = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TO_ADD = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
THINKS = ("reasoning", "I add.")
MESSAGES = {
    f"{THOUGHT}{FINAL}It is 3.": [THINKS, ("content", "It is 3.")],
    f"{FINAL}It is 3.<|return|>": [("content", "It is 3.")],
    f'{THOUGHT}{TO_ADD}{{"a": 1}}': [THINKS, CALLED],
    f'{THOUGHT}{TO_ADD}{{"a": 1}}<|call|>': [THINKS, CALLED],
    # The recipient may precede the channel, and the type may be a word or missing
    f'{THOUGHT} to=functions.add<|channel|>commentary json<|message|>{{"a": 1}}': [THINKS, CALLED],
    ' to=functions.add<|channel|>commentary<|message|>{"a": 1}<|call|>': [CALLED],
    '<|channel|>analysis to=functions.add<|message|>{"a": 1}': [CALLED],
    f'{TO_ADD}{{"a": 1}}<|start|>assistant{TO_ADD}{{"a": 1}}': [CALLED, CALLED],
    f'{TO_ADD}{{"a": 1}}<|call|><|start|>assistant{FINAL}Done.': [CALLED, ("content", "Done.")],
    f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{TO_ADD}{{}}": [
        ("content", "I look."),
        ("tool_call", "add", {}),
    ],
    f"{THOUGHT}{THOUGHT}{FINAL}a <|channel|> b\n\n{{": [
        ("reasoning", "I add.\n\nI add."),
        ("content", "a <|channel|> b\n\n{"),
    ],
    f"{FINAL}One.<|end|><|start|>assistant{FINAL}Two.": [("content", "One.\n\nTwo.")],
    "<|channel|>analysis to=python<|message|>print(1)<|call|>": [("reasoning", "print(1)")],
    "No header at all.": [("content", "No header at all.")],
    f"{THOUGHT}I forgot the header.": [THINKS, ("content", "I forgot the header.")],
    f"{TO_ADD}no JSON": [("content", f"{TO_ADD}no JSON")],
    "<|channel|>commentary to=browser.open<|message|>{}": [
        ("content", "<|channel|>commentary to=browser.open<|message|>{}")
    ],
    "<|start|>user<|message|>Hi": [("content", "<|start|>user<|message|>Hi")],
    "<|channel|>ana": [("content", "<|channel|>ana")],
    "<|start|>assistant": [],
    "<|end|>": [],
    "": [],
}


@pytest.mark.parametrize("text", MESSAGES)
def test_messages_of_harmony_are_parsed_however_cut(text):
    expected = MESSAGES[text]
    for cut in range(len(text) + 1):
        assert told(parse([text[:cut], text[cut:]], GPT_OSS)) == expected, cut
    assert told(parse(list(text), GPT_OSS)) == expected
    if CALLED in expected:
        single = expected[: expected.index(CALLED) + 1]
        assert told(parse(text, GPT_OSS, is_single=True)) == single
        parser = OutputParser(GPT_OSS, TOOLS, is_single=True)
        places = [place for place, letter in enumerate(text) if parser.ends(letter)]
        assert text[: places[0] + 1].endswith("}") and text[: places[0] + 1].count("{") == 1


def test_messages_that_max_tokens_cuts_off():
    """No incomplete header reaches a client."""
    text = f'{THOUGHT}{TO_ADD}{{"a": 1}}'
    for end in range(len(text)):
        parts = parse(text[:end], GPT_OSS, is_cut=True)
        assert all("<|" not in part.text for part in parts), text[:end]
        assert [part.kind for part in parts if part.kind == "content"] == []
    text = "<|start|>assistant<|start|>assist"
    for cut in range(len(text) + 1):
        assert parse([text[:cut], text[cut:]], GPT_OSS, is_cut=True) == [], cut


def test_random_messages_of_harmony_are_parsed_however_cut():
    pieces = [
        *MESSAGES,
        *HARMONY_MARKS,
        *HARMONY_ENDS,
        THOUGHT,
        FINAL,
        TO_ADD,
        *HOSTILE,
        "so",
        " \n",
    ]
    kinds = set()
    for seed in range(ANSWERS):
        dice = random.Random(seed)
        text = "".join(dice.choice(pieces) for _ in range(dice.randrange(1, 5)))
        text = damaged(text, dice) if dice.random() < 0.5 else spaced(text, dice)
        text = text[: dice.choice([None, dice.randrange(len(text) + 1)])]
        how = {"is_single": dice.random() < 0.3, "is_thinking": dice.random() < 0.1}
        for is_cut in (False, True):
            parts = parse_however_cut(text, GPT_OSS, seed, is_cut=is_cut, **how)
            kinds |= {part.kind for part in parts}
    assert kinds == {"content", "reasoning", "tool_call", "arguments"}


def test_harmony_is_detected_from_the_template():
    for rendered in (
        '<|start|>assistant to=functions.is_called<|channel|>commentary json<|message|>{"n": 7}<|call|>',
        f'<|start|>assistant{TO_ADD.replace("add", "is_called")}{{"n": 7}}<|call|>',
    ):
        found = detect_format(HARMONY_REASONING[0], lambda *_, said=rendered: "is_listed" + said)
        assert found == GPT_OSS
    assert GPT_OSS.is_thinking("<|start|>assistant<|channel|>analysis<|message|>")
    found = detect_format(HARMONY_REASONING[0], lambda *_: "no tools")
    assert found.reasoning == HARMONY_REASONING and "does not accept tools" in found.why


@pytest.mark.parametrize("kind", ["letters", "special"])
def test_grammar_of_messages(kind):
    """A required call or JSON answer may follow any reasoning."""
    tokenizer = make_tokenizer()
    if kind == "special":
        tokens = [AddedToken(mark, special=True, normalized=False) for mark in HARMONY_MARKS]
        tokenizer.add_tokens(tokens)
    grammars = Grammars(tokenizer, 320, [257])
    added = {each.content: id for id, each in tokenizer.get_added_tokens_decoder().items()}
    special = grammars.special(added.values())
    marks = {text: id for text, id in added.items() if id in special}

    def can_be(text: str, **how) -> bool:
        rules = tool_call_grammar(GPT_OSS, marks=marks, **how)
        return allows(grammars, rules, tokenizer.encode(text, add_special_tokens=False).ids)

    call = TO_ADD.replace("add", "is_listed") + '{"n": 7}'
    for before in ("", THOUGHT, 2 * THOUGHT):
        assert can_be(before + call, tools=LISTED)
        assert can_be(f'{before}{FINAL}"yes"', tools=[], answer=as_json({"enum": ["yes"]}))
    assert not can_be(f"{THOUGHT}{FINAL}Yes.", tools=LISTED)
    assert not can_be(f"{FINAL}Yes.", tools=[], answer=as_json({"enum": ["yes"]}))
    rest = THOUGHT.removeprefix(HARMONY_REASONING[0])
    assert can_be(rest + call, tools=LISTED, is_thinking=True)
    parts = OutputParser(GPT_OSS, {"is_listed": SCHEMA}).push(call)
    assert told(joined(parts)) == [("tool_call", "is_listed", {"n": 7})]


def test_harmony_without_the_model():
    """Watchers parse the text without the model. So does a server that renders the next prompt, which must
    not contain marks."""
    text = f"{THOUGHT}{FINAL}It is 3."
    assert split_output(text) == [("reasoning", "I add."), ("content", "It is 3.")]
    assert split_reasoning(text) == ("I add.", "It is 3.")
    parts = split_output(f'{THOUGHT}{TO_ADD}{{"a": 1}}')
    assert parts == [THINKS, ("tool_call", 'add{"a": 1}')]


@pytest.mark.parametrize(
    ("output_format", "text"),
    [
        (OutputFormat(None, HERMES), '<tool_call>{"name": "add", "arguments": HERE}</tool_call>'),
        (OutputFormat(None, HERMES), '<tool_call>{"arguments": HERE, "name": "add"}</tool_call>'),
        (OutputFormat(None, MISTRAL), "[TOOL_CALLS]add[ARGS]HERE"),
        (GPT_OSS, f"{TO_ADD}HERE<|call|>"),
    ],
    ids=["Hermes", "late name", "Mistral", "Harmony"],
)
def test_control_characters_in_arguments_are_escaped(output_format, text):
    """Regression: small models write line breaks into a string as they are, and clients got invalid JSON."""
    written = '{"a\t": "x\n\r\n\x01 \\" \\n}",\n"b": [1,\n"\\\\\n"]}'
    text = text.replace("HERE", written)
    expected = {"a\t": 'x\n\r\n\x01 " \n}', "b": [1, "\\\n"]}
    for pieces in (text, [*text]):
        assert told(parse(pieces, output_format)) == [("tool_call", "add", expected)]


def test_escaped_line_break_in_arguments():
    text = '<tool_call>{"name": "add", "arguments": {"a": "x\\\ny"}}</tool_call>'
    (call,) = told(parse([*text], OutputFormat(None, HERMES)))
    assert call == ("tool_call", "add", {"a": "x\ny"})


# --- which format a template uses -----------------------------------------------------------------

RENDERED = {
    "Hermes": '<|im_start|>assistant\n<tool_call>\n{"name": "is_called", "arguments": {"n": 7}}\n</tool_call>',
    "Mistral": '[TOOL_CALLS][{"name": "is_called", "arguments": {"n": 7}, "id": "abcdefghi"}]</s>',
    "Gemma 4": "<|turn>model\n" + IN_GEMMA,
    "Llama 3": 'assistant<|end|>\n\n{"name": "is_called", "parameters": {"n": 7}}<|eot_id|>',
}
RENDERED_OTHERWISE = {  # a rendered call -> its format, or None if it is unknown
    '[TOOL_CALLS]is_called[ARGS]{"n": 7}</s>': "Mistral",
    "<tool_call>\n<function=is_called>\n<parameter=n>7</parameter>": None,  # an incomplete call
    '<|tool_call|>[{"name": "is_called", "arguments": {"n": 7}}]': "Granite 3",
    '<tool_calls>\n{"name": "is_called", "arguments": {"n": 7}}\n</tool_calls>': "Apriel",
    '<|action_start|><|plugin|>\n{"name": "is_called", "parameters": {"n": 7}}<|action_end|>': "InternLM 2",
    '[{"name": "is_called", "arguments": {"n": 7}}]': None,
    '<|tool_call_begin|>is_called<|sep|>{"n": 7}<|tool_call_end|>': None,  # DeepSeek
    "[is_called(n=7)]": None,
}
EXAMPLE = (
    'Answer <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>. Tools: is_listed. '
)


@pytest.mark.parametrize("name", RENDERED)
def test_format_is_detected_from_the_template(name):
    output_format = detect_format("... </think>", lambda messages, tools: EXAMPLE + RENDERED[name])
    assert output_format.tools.name == name and output_format.reasoning == REASONING_MARKS[0]


@pytest.mark.parametrize("rendered", RENDERED_OTHERWISE)
def test_unknown_format_is_quoted(rendered):
    known = RENDERED_OTHERWISE[rendered]
    found = detect_format("{{ messages }}", lambda *_: "Tools: is_listed. " + rendered)
    assert (found.tools and found.tools.name) == known
    assert known or ("is_called" in found.why and "known: Hermes, Mistral" in found.why)


def test_model_without_tools_says_why():
    def refuse(messages, tools):
        raise ValueError("the chat template refuses these messages: no role tool")

    assert "no role tool" in detect_format("{{ x }}", refuse).why
    assert (
        "does not accept tools" in detect_format("{{ x }}", lambda messages, tools: "Call it.").why
    )
    assert (
        "does not write tool calls"
        in detect_format("{{ x }}", lambda messages, tools: "is_listed").why
    )
    assert "no chat template" in detect_format(None, refuse).why


# Name -> the template's key in TEMPLATE_WRITES, and what a model writes where a call is required
REQUIRED = {
    "Hermes": [
        "Hermes",
        '<tool_call>\n{"name": "is_listed", "arguments": {"n": 7}}\n</tool_call>',
    ],
    "Llama 3": ["Llama 3", '{"name": "is_listed", "parameters": {"n": 7}}'],
    "older Mistral": ["Mistral", '[TOOL_CALLS][{"name": "is_listed", "arguments": {"n": 7}}]'],
    "with a space": ["space", '[TOOL_CALLS] [{"name": "is_listed", "arguments": {"n": 7}}]'],
    "newer Mistral": ["newer", '[TOOL_CALLS]is_listed[ARGS]{"n": 7}'],
    "Mistral with ids": ["ids", '[TOOL_CALLS]is_listed[CALL_ID]abcdefghi[ARGS]{"n": 7}'],
    "Gemma 4": ["Gemma 4", IN_GEMMA.replace("is_called", "is_listed")],
    "Mistral without an id": ["ids", '[TOOL_CALLS]is_listed[ARGS]{"n": 7}'],
}
for name, rendered in WRITTEN.items():
    REQUIRED[name] = [name, rendered.replace("is_called", "is_listed")]
TEMPLATE_WRITES = (
    RENDERED
    | WRITTEN
    | {
        "space": RENDERED["Mistral"].replace("[TOOL_CALLS]", "[TOOL_CALLS] "),
        "newer": '[TOOL_CALLS]is_called[ARGS]{"n": 7}</s>',
        "ids": '[TOOL_CALLS]is_called[CALL_ID]abcdefghi[ARGS]{"n": 7}</s>',
    }
)


@cache
def with_marks(kind: str):
    """Return a small tokenizer that has all marks in letters, as special tokens or as other added tokens, its
    grammars, and the ids that a grammar needs."""
    tokenizer = make_tokenizer()
    if kind != "letters":
        is_special = kind == "special"
        tokens = [AddedToken(text, special=is_special, normalized=False) for text in sorted(MARKS)]
        tokenizer.add_tokens(tokens)
    grammars = Grammars(tokenizer, 320, [257])
    added = {each.content: id for id, each in tokenizer.get_added_tokens_decoder().items()}
    special = grammars.special(added.values())
    marks = {text: id for text, id in added.items() if text in MARKS or id in special}
    return tokenizer, grammars, marks


KINDS = ["letters", "special", "added"]  # how a tokenizer represents marks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REQUIRED)
def test_grammar_allows_the_trained_format(name, kind):
    """A required call is written in the format that the model was trained on: in another its tokens are
    unlikely, and the call may be nonsense. Regression: Qwen's <tool_call> is an added token that is not
    special, so no call could be required."""
    template, text = REQUIRED[name]
    rendered = "Tools: is_listed. " + TEMPLATE_WRITES[template]
    output_format = detect_format("", lambda messages, tools: rendered)
    tokenizer, grammars, marks = with_marks(kind)
    rules = tool_call_grammar(output_format, LISTED, marks=marks)
    assert allows(grammars, rules, tokenizer.encode(text, add_special_tokens=False).ids)
    parts = OutputParser(output_format, {"is_listed": SCHEMA}).push(text)
    assert told(joined(parts)) == [("tool_call", "is_listed", {"n": 7})]


@pytest.mark.parametrize("marks", REASONING_MARKS, ids="".join)
@pytest.mark.parametrize("kind", KINDS)
def test_reasoning_mark_under_a_grammar(kind, marks):
    """Regression: </think> was forbidden if it is an added token that is not special, so reasoning went on
    until max_tokens. If it was written in letters, the grammar treated it as reasoning, while the parser took
    the rest for the answer."""
    tokenizer, grammars, ids = with_marks(kind)
    opens, closes = marks
    pieces = [opens, "Hm.", closes, "\n\n", '"yes"']
    for is_thinking in (False, True):
        rules = tool_call_grammar(
            OutputFormat(marks),
            [],
            answer=as_json({"enum": ["yes"]}),
            is_thinking=is_thinking,
            marks=ids,
        )
        tokens = tokenizer.encode("".join(pieces[is_thinking:]), add_special_tokens=False).ids
        assert allows(grammars, rules, tokens)
        # Reasoning cannot continue after a mark that is written in letters
        letters = [token for each in closes for token in tokenizer.encode(each).ids[1:]]
        before = tokenizer.encode("".join(pieces[is_thinking:2]), add_special_tokens=False).ids
        assert not allows(grammars, rules, [*before, *letters, *letters])


@pytest.mark.parametrize("output_format", [OutputFormat(REASONING_MARKS[0]), GPT_OSS])
def test_grammar_of_any_kind_after_reasoning(output_format):
    """Each keeps its own names, and no white space comes before an answer without reasoning."""
    tokenizer, grammars, marks = with_marks("letters")
    before = ["", "<think>Hm.</think>\n"]
    if output_format is GPT_OSS:
        before = [FINAL, THOUGHT + FINAL]
    for kind, source, text in (
        ("choice", ('é "no"\n', "yes"), 'é "no"\n'),
        ("regex", "[0-9]{2}/\n[}]?", "17/\n}"),
        ("regex", "\\\\\n/\\/\\\n", "\\\n//\n"),
        ("lark", 'start: reasoning SPACE\nreasoning: "a" // }\nSPACE: /[}{]/', "a}"),
    ):
        answer = f"%lark {{\n{as_lark(kind, source)}\n}}"
        rules = tool_call_grammar(output_format, [], answer=answer, marks=marks)
        for each in before:
            tokens = tokenizer.encode(each + text, add_special_tokens=False).ids
            assert allows(grammars, rules, tokens), (kind, each)
            assert not allows(grammars, rules, [*tokens, tokens[-1]])
        space = tokenizer.encode("\n" + before[0] + text, add_special_tokens=False).ids
        assert not allows(grammars, rules, space)


def allows(grammars, rules: str, tokens: list[int]) -> bool:
    """Return True if the grammar allows these tokens, followed by the end."""
    held = grammars.grammar({"lark": rules})
    for token in tokens:
        if not int.from_bytes(held.mask(), "little") >> token & 1:
            return False
        held.accept(token)
    return held.is_complete or bool(int.from_bytes(held.mask(), "little") >> 257 & 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", TAGGED, ids=lambda format: format.name)
def test_tagged_string_follows_its_pattern(format, kind):
    """Regression: a pattern was enforced in JSON arguments, but in tags any text could be written."""
    tokenizer, grammars, marks = with_marks(kind)
    start, _, end = format.layout
    start += "pay" + format.tags.after_name
    end = format.tags.end + end

    def can_be(pattern: str, text: str) -> bool:
        parameters = {"properties": {"a": {"type": "string", "pattern": pattern}}}
        tool = {"function": {"name": "pay", "parameters": {**parameters, "required": ["a"]}}}
        rules = tool_call_grammar(OutputFormat(tools=format), [tool], is_single=True, marks=marks)
        before = f"{start}{format.tags.before_key}a{format.tags.after_key}"
        whole = f"{before}{text}{format.tags.after_value}{end}"
        return allows(grammars, rules, tokenizer.encode(whole, add_special_tokens=False).ids)

    assert can_be("^[A-Z]{3}$", "EUR") and not can_be("^[A-Z]{3}$", "EURO")
    assert not can_be("^[A-Z]{3}$", "eur") and can_be("^[A-Z]{3}", "EUR, not USD")
    assert can_be("[0-9]/[^$]", "from\n1/2 on") and not can_be("[0-9]/[^$]", "none")
    assert can_be("a\\/\\$$", "in a/$") and not can_be("a\\/\\$$", "a/$ in")
    assert can_be("^a$|b", "cbc"), "a pattern that cannot be said holds nothing up"
    is_again = can_be("[0-9]", f"none{format.tags.after_value}1")
    assert not is_again, "the first mark ends the text"


def test_numbers_of_gemma():
    """The grammar allows the numbers that can be parsed. Regression: it had no exponents, but zeros in front,
    with which a required call became content."""
    tokenizer, grammars, marks = with_marks("special")
    rules = tool_call_grammar(OutputFormat(tools=GEMMA), LISTED, marks=marks)
    for number in ("7", "-1.5e-3", "0.5", "2E+9", "-0", "007", "-01.5", "1.", "1e", "1e999"):
        text = IN_GEMMA.replace("is_called", "is_listed").replace("7", number)
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        is_number = number in ("7", "-1.5e-3", "0.5", "2E+9", "-0")
        assert allows(grammars, rules, tokens) == is_number, number
        if is_number:
            parts = OutputParser(OutputFormat(tools=GEMMA), {"is_listed": SCHEMA}).push(text)
            assert told(joined(parts)) == [("tool_call", "is_listed", {"n": json.loads(number)})]


LITERAL = {"type": "string", "enum": ["a", "b"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": ["string", "null"], "enum": ["a", None]}, ["a", None], ["b", "nul"]),
        ({"anyOf": [LITERAL, {"type": "null"}]}, ["a", "b", None], ["c"]),
        ({"anyOf": [{"$ref": "#/$defs/E"}, {"type": "null"}]}, ["é", None], ["a"]),
        ({"allOf": [{"$ref": "#/$defs/E"}], "default": "é"}, ["é"], ["a", None]),
        ({"type": "string", "enum": ["a", None, 5]}, ["a"], ["5", None]),
        ({"type": ["string", "null"], "enum": ["a"]}, ["a"], [None]),
        ({"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["c"]),
        ({"enum": ["a", 5, True]}, ["a", 5, True], ["b", 7]),
        ({"anyOf": [LITERAL, {"type": "integer"}]}, ["a", "c", 5], []),
    ],
    ids=str,
)
def test_tagged_string_is_of_its_enum(schema, good, bad):
    """Regression: any text was allowed if a string might be null or its schema was a reference in another, and
    a null among strings was a 400."""
    tokenizer, grammars, marks = with_marks("letters")
    parameters = {"properties": {"a": schema}, "$defs": {"E": {"enum": ["é"]}}, "required": ["a"]}
    tool = {"function": {"name": "pay", "parameters": parameters}}
    for format in TAGGED[:2]:
        rules = tool_call_grammar(OutputFormat(tools=format), [tool], is_single=True, marks=marks)
        for value in [*good, *bad]:
            text = in_tags(format, [("pay", {"a": value})], random.Random(0))
            text = text.replace("None", "null").replace("True", "true")
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            assert allows(grammars, rules, tokens) == (value in good), value
            if value in good:
                parts = OutputParser(OutputFormat(tools=format), {"pay": parameters}).push(text)
                assert told(joined(parts)) == [("tool_call", "pay", {"a": value})]


def test_grammars_of_calls_with_unusual_tools():
    """Regression: a key with a non-ASCII letter was not a valid reference. A schema's colons were counted
    as rules of the grammar, of which 500 are allowed."""
    parameters = {"properties": {"日/%~": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"const": 5}}}
    fields = {name: {"type": "integer"} for name in "abc"}
    many = [{"name": f"t{n}", "parameters": {"properties": fields}} for n in range(60)]
    cases = [(format, [{"name": "pay", "parameters": parameters}]) for format in TAGGED]
    for format, tools in [*cases, (learned(RENDERED["Hermes"]), many)]:
        rules = tool_call_grammar(OutputFormat(tools=format), [{"function": t} for t in tools])
        assert with_marks("letters")[1].grammar({"lark": rules})


# --- for watchers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("Yes.", [("content", "Yes.")]),
        ("<think>\nHm", [("reasoning", "<think>\nHm")]),
        ("Hm.\n</think>\n\nYes.", [("reasoning", "Hm.\n</think>"), ("content", "Yes.")]),
        ("I look.\n[TOOL_CALLS]x", [("content", "I look."), ("tool_call", "[TOOL_CALLS]x")]),
        (
            "<think><tool_call></think>a<tool_call>{}",
            [
                ("reasoning", "<think><tool_call></think>"),
                ("content", "a"),
                ("tool_call", "<tool_call>{}"),
            ],
        ),
    ],
)
def test_split_output_without_the_model(text, expected):
    assert split_output(text) == expected


def test_split_output_of_opened_reasoning():
    for text in ("Hm.", "Hm.\n</think>"):
        assert split_output(text, is_thinking=True) == [("reasoning", text)]
    parts = [("reasoning", "Hm.</think>"), ("content", "Yes.")]
    assert split_output("Hm.</think>\n\nYes.", is_thinking=True) == parts


@pytest.mark.parametrize("marks", REASONING_MARKS)
def test_split_reasoning_drops_the_marks(marks):
    """Regression: <seed:think> and </seed:think> stayed in the reasoning."""
    opens, closes = marks
    assert split_reasoning(f"{opens}Hm.{closes}Yes.") == ("Hm.", "Yes.")


def test_content_after_reasoning_keeps_its_line_breaks():
    """Regression: a conversation lost the line breaks at the end of an answer and before a call. So the
    next prompt differed from what the model had said, and cached rows were prefilled again."""
    assert split_reasoning("<think>Hm.</think>\n\nYes.\n\n") == ("Hm.", "Yes.\n\n")
    assert split_reasoning("I look.\n\n<tool_call>{}\n") == (
        "",
        "I look.\n\n<tool_call>{}\n",
    )
