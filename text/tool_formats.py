"""How model families write tool calls and mark reasoning, as data.

A `ToolFormat` describes calls as JSON (`{"name": "add", "arguments": {"a": 1}}`) or in tags
(`<function=add><parameter=a>1</parameter></function>`), between two marks. The exact layout is
learned from a call that the model's own chat template renders (`detect_format` in `tool_parser.py`).
`tool_call_grammar` writes the grammar of an answer that must call a tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from types import NoneType
from typing import Any, NamedTuple
from urllib.parse import quote


class Tags(NamedTuple):
    """The text around the name, the keys and the values of a call in tags, including whitespace."""

    before_name: str
    after_name: str
    before_key: str
    after_key: str
    after_value: str
    end: str


class ToolFormat(NamedTuple):
    """A family's notation for calls: a JSON body, or tags. The fields from `key` on are learned from
    the model's chat template."""

    name: str
    opens: str  # the mark before a call
    closes: str  # the mark after a call; may be empty
    # The answer may begin with a call that has no mark. Then the template accepts only one call
    is_bare: bool = False
    is_named: bool = False  # the tool's name may precede a body that contains only the arguments
    # Mark around strings in a notation other than JSON: call:name{key:<|"|>text<|"|>,other:[7,true]}
    quote: str = ""
    wrap: tuple[str, str] = ("", "")  # marks that may enclose a value in tags
    key: str = "arguments"  # the JSON key of the arguments
    # The text before the first body, between two bodies, and after the last body
    layout: tuple[str, str, str] = ("", "", "")
    # The text between a tool's name and its arguments, if the name precedes the body
    after_name: str | None = None
    tags: Tags | None = None


FORMATS = (
    ToolFormat("Hermes", "<tool_call>", "</tool_call>"),
    ToolFormat("Mistral", "[TOOL_CALLS]", "]", is_named=True),
    ToolFormat("Apriel", "<tool_calls>", "</tool_calls>"),
    ToolFormat("Nemotron Nano", "<TOOLCALL>", "</TOOLCALL>"),
    ToolFormat("Granite 3", "<|tool_call|>", "<|/tool_call|>"),
    ToolFormat("Granite 20B", "<function_call>", ""),
    ToolFormat("GigaChat", "<|function_call|>", ""),
    ToolFormat("InternLM 2", "<|action_start|><|plugin|>", "<|action_end|>"),
    ToolFormat("Seed", "<seed:tool_call>", "</seed:tool_call>"),
    ToolFormat("MiniMax", "<minimax:tool_call>", "</minimax:tool_call>"),
    ToolFormat("MiniCPM", '<function name="', "</function>", wrap=("<![CDATA[", "]]>")),
    ToolFormat("Gemma 4", "<|tool_call>", "<tool_call|>", quote='<|"|>'),
    ToolFormat("Llama 3", "<|python_tag|>", "", is_bare=True, key="parameters"),
)
SILENT = ToolFormat("none", "", "")  # calls are not parsed
REASONING_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)
# The format of gpt-oss. An answer is a sequence of messages: <|start|>, a header with a channel, <|message|>, a
# body, <|end|>. The prompt ends with <|start|>assistant. <|return|> or <|call|> ends the last message and the answer
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
HARMONY_ENDS = ("<|return|>", "<|call|>")
HARMONY = ToolFormat("Harmony", "<|start|>assistant", "<|call|>", is_named=True)
HARMONY_REASONING = ("<|channel|>analysis<|message|>", "<|end|>")
# Tokens that are shown even if they are special tokens, which are otherwise hidden
MARKS = frozenset(
    [
        "[ARGS]",
        "[CALL_ID]",
        '<|"|>',
        "<|action_start|>",
        "<|plugin|>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        *(format.opens for format in FORMATS),
        *(format.closes for format in FORMATS if len(format.closes) > 1),
        *chain(*REASONING_MARKS),
    ]
)


class OutputFormat(NamedTuple):
    """One model's notation for reasoning and tool calls."""

    reasoning: tuple[str, str] | None = None  # the marks around reasoning
    tools: ToolFormat | None = None
    why: str = ""  # why the model cannot use tools, if `tools` is None

    @property
    def is_harmony(self) -> bool:
        return self.reasoning == HARMONY_REASONING

    def is_thinking(self, prompt: str) -> bool:
        """True if the prompt ends with an opening reasoning mark, which some templates write."""
        return bool(self.reasoning) and prompt.rstrip().endswith(self.reasoning[0])


# Mistral's templates require ids of nine letters
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


# Matches the text after the name of a call in tags whose only argument is n = 7
TAGGED = re.compile(
    r"(?P<after_name>[^<]{0,20})"
    r"(?P<before_key><[^<]{1,40}?)\bn\b(?P<after_key>\W.{0,60}?)\b7\b"
    r"(?P<after_value>\s*</[^<>]{1,40}>\s*)(?P<end>.{0,40}?)",
    re.DOTALL,
)


def with_layout(format: ToolFormat, call: str, place: int) -> ToolFormat:
    """Return the format with the layout of a call.

    `call`: the text from the opening mark on.
    `place`: the index of the tool's name in it.
    """
    start = call[:place]
    rest = call[place + len("is_called") :]
    if format.is_named and not start.endswith('"'):
        return format._replace(layout=(start, start, ""), after_name=rest.partition("{")[0])
    if format.quote:
        return format._replace(layout=(start, format.closes + start, format.closes))
    closes = ""
    if format.closes:
        rest, closes, _ = rest.partition(format.closes)
    tagged = TAGGED.fullmatch(rest) if closes else None
    if tagged:
        tags = Tags(before_name=start.removeprefix(format.opens), **tagged.groupdict())
        line = "\n" if tags.before_name.startswith("\n") else ""
        return format._replace(tags=tags, layout=(start, closes + line + start, closes))
    start = start.partition("{")[0]
    after = rest.rpartition("}")[2] + closes if closes else ""
    between = f"{after}\n{start}"
    if start.rstrip().endswith("["):
        between = ", "
        after = after or "]"
    key = format.key if f'"{format.key}"' in rest else "parameters"
    return format._replace(key=key, layout=(start, between, after))


# --- the grammar of calls -------------------------------------------------------------------------

# Whitespace in JSON is fixed, because some models would otherwise write it endlessly
FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY = "(?s:.*)"  # any text


def tool_call_grammar(
    output_format: OutputFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    answer: str | None = None,
    is_single: bool = False,
    is_thinking: bool = False,
    marks: Mapping[str, int] = {},
) -> str:
    """Write the grammar (`grammar.py`) of an answer that calls these tools, after reasoning if the
    model reasons.

    `answer`: the rule of an answer that is allowed instead of calls.
    `marks`: ids of the marks that are tokens. The model must write them as tokens, as in its
    training.
    """

    spelled = partial(spell, marks)
    rules = {}

    if output_format.is_harmony:
        return harmony_grammar(tools, answer, is_thinking, marks)
    if answer is not None:
        rules["answer"] = answer
    if tools:
        tags = output_format.tools.tags

        def value(form: str) -> str:
            name = "value" if form == ANY else f"value_{len(rules)}"
            rules.update(up_to(name, "", tags.after_value, marks, form))
            return name

        if quote := output_format.tools.quote:
            rules |= quoted_rules(quote, marks)

        def body(function: Mapping[str, Any]) -> str:
            if quote:
                return f"{spelled(function['name'])} arguments"
            if tags:
                return tagged_rule(tags, function, spelled, value)
            return body_rule(output_format.tools, function, spelled)

        bodies = [body(tool["function"]) for tool in tools]
        start, between, end = output_format.tools.layout
        more = f"({spelled(between)} body)*"
        if is_single or output_format.tools.is_bare:
            more = ""
        rules["calls"] = f"{spelled(start)} body {more} {spelled(end)}"
        rules["body"] = " | ".join(bodies)
    ways = " | ".join(name for name in ("answer", "calls") if name in rules)
    if not output_format.reasoning:
        rules["start"] = ways
    else:
        opens, closes = output_format.reasoning
        rules["start"] = f"(reasoning SPACE){'' if is_thinking else '?'} ({ways})"
        rules["SPACE"] = r"/[ \n]{0,4}/"
        rules |= up_to("reasoning", "" if is_thinking else opens, closes, marks)
    return "\n".join(f"{name}: {rule}" for name, rule in rules.items())


def harmony_grammar(
    tools: Sequence[Mapping[str, Any]],
    answer: str | None,
    is_thinking: bool,
    marks: Mapping[str, int],
) -> str:
    """Write the grammar of any number of reasoning messages, followed by one call or the answer."""
    ways = []
    if answer is not None:
        ways.append(f"{spell(marks, '<|channel|>final<|message|>')} {answer}")
    for tool in tools:
        name = tool["function"]["name"]
        parameters = {"$id": f"tool:{name}", "type": "object", **tool["function"]["parameters"]}
        header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        ways.append(f"{spell(marks, header)} {as_json(parameters)}")
    opens, closes = HARMONY_REASONING
    closes += "<|start|>assistant"
    rules = {"start": f"{'opened ' * is_thinking}reasoning* ({' | '.join(ways)})"}
    rules |= up_to("reasoning", opens, closes, marks)
    if is_thinking:
        rules |= up_to("opened", "", closes, marks)
    return "\n".join(f"{name}: {rule}" for name, rule in rules.items())


def up_to(
    name: str, opens: str, closes: str, marks: Mapping[str, int], form: str = ANY
) -> dict[str, str]:
    """Write rules for a text of this form between two marks. The first closing mark ends the text,
    whether it is a token or spelled out, because the parser reads text and sees no difference."""
    before = spell(marks, opens)
    tokens = [mark for mark in marks if mark in closes]
    if tokens:
        without = "".join(f" & ~{as_regex(ANY + re.escape(mark) + ANY)}" for mark in tokens)
        text = as_regex(form) + without
        return {name: f"{before} {name.upper()} {spell(marks, closes)}", name.upper(): text}
    end = re.escape(closes)
    beyond = as_regex(f"{ANY}{end}(?s:.+)")
    return {
        name: f"{before} {name}_end",
        f"{name}_end[lazy]": f"{as_regex(form + end)} & ~{beyond}",
    }


def spell(marks: Mapping[str, int], text: str) -> str:
    """Return the text in the grammar's syntax, with marks replaced by token ids."""
    inside = sorted((mark for mark in marks if mark in text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, inside))})", text) if inside else [text]
    known = {mark: f"<[{marks[mark]}]>" for mark in inside}
    return " ".join(known.get(piece, json.dumps(piece)) for piece in pieces if piece)


def body_rule(
    format: ToolFormat, function: Mapping[str, Any], spelled: Callable[[str], str]
) -> str:
    name = function["name"]
    # With an id the schema is a document of its own, so that "#" refers to it even when nested
    parameters = {"$id": f"tool:{name}", "type": "object", **function["parameters"]}
    if format.after_name is not None:
        before, id, after = format.after_name.partition(CALL["id"])
        after = spelled(after)
        before = f"({spelled(before)} /[a-zA-Z0-9]{{9}}/)?" if id else spelled(before)
        return f"{spelled(name)} {before} {after} {as_json(parameters)}"
    key = format.key
    body = {"type": "object", "properties": {"name": {"const": name}, key: parameters}}
    return as_json({**body, "required": ["name", key], "additionalProperties": False})


def tagged_rule(
    tags: Tags,
    function: Mapping[str, Any],
    spelled: Callable[[str], str],
    value: Callable[[str], str],
) -> str:
    """Write the rule of a call in tags.

    Arguments come in the order of the schema. For a string, only enumerated values or a pattern are
    enforced, and no pattern if it may be null.

    `value`: adds the rule for a text of this form, and returns its name.
    """
    schema = function["parameters"]
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise ValueError("grammar: the schema's properties must be an object, and required a list")
    rules = [spelled(function["name"] + tags.after_name)]
    for key in properties:
        kinds = kinds_of(schema, key)
        values = [values_of(option) for option in options_of(schema, key)]
        if kinds and "string" not in kinds:
            said = f"{as_json(alone(schema, key))} {spelled(tags.after_value)}"
        elif all(values):
            texts = [each if isinstance(each, str) else json.dumps(each) for each in chain(*values)]
            said = f"({' | '.join(map(json.dumps, texts))}) {spelled(tags.after_value)}"
        else:
            said = value(form_of(schema_of(schema, key)) if kinds == {"string"} else ANY)
        rule = f"{spelled(tags.before_key + key + tags.after_key)} {said}"
        rules.append(rule if key in required else f"({rule})?")
    return " ".join([*rules, spelled(tags.end)])


def quoted_rules(quote: str, marks: Mapping[str, int]) -> dict[str, str]:
    """Return rules for arguments whose strings are between marks: they accept any that can be parsed."""
    return up_to("quoted", quote, quote, marks) | {
        "arguments": '"{" (pair ("," pair)*)? "}"',
        "pair": 'KEY ":" value',
        "value": 'quoted | NUMBER | "true" | "false" | "null" | "[" (value ("," value)*)? "]" | arguments',
        "KEY": r"/[^\s\"{}\[\],:<>]+/",
        # 1e999 is JSON, but no float
        "NUMBER": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?/",
    }


# A pattern without anchors, except at its ends
ANCHORED = re.compile(r"(\^?)((?:\\.|\[(?:\\.|[^]\\])*\]|[^\\[^$])*)(\$?)", re.DOTALL)


def form_of(schema: Mapping[str, Any]) -> str:
    """Return a schema's pattern, extended to match the entire text. llguidance has no anchors, so a
    pattern with an anchor in the middle, such as "^a$|b", is ignored."""
    pattern = schema.get("pattern")
    found = isinstance(pattern, str) and ANCHORED.fullmatch(pattern)
    if not found:
        return ANY
    first, inner, last = found.groups()
    return f"{'' if first else ANY}(?:{inner}){'' if last else ANY}"


def as_regex(pattern: str) -> str:
    """Write a pattern in the grammar's notation, on one line."""
    changed = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    found = re.sub(r"\\.|/|\n", lambda m: changed.get(m[0], m[0]), pattern, flags=re.DOTALL)
    return f"/{found}/"


def alone(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the schema of one argument, including the definitions that it refers to."""
    value = schema["properties"][key]
    if '"$ref"' not in json.dumps(value):
        return value
    own = {name: value for name, value in schema.items() if name != "$id"}
    whole = json.dumps(own).replace('"$ref": "#', '"$ref": "#/$defs/whole')
    place = quote(key.replace("~", "~0").replace("/", "~1"))
    return {"$ref": f"#/$defs/whole/properties/{place}", "$defs": {"whole": json.loads(whole)}}


def as_json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': FORM})}"


def as_lark(kind: str, source: str | Sequence[str]) -> str:
    """Translate a grammar of `SamplingParams` into Lark's notation, unless it is a JSON schema."""
    if not isinstance(source, str):
        choices = [json.dumps(choice, ensure_ascii=False) for choice in source]
        # A terminal is one automaton. In a rule, each choice would be an alternative to track.
        return f"start: CHOICE\nCHOICE: {' | '.join(choices)}"
    return f"start: {as_regex(source)}" if kind == "regex" else source


# --- JSON schemas of arguments --------------------------------------------------------------------

PYTHONS = {"True": "true", "False": "false", "None": "null"}  # some templates write Python's names
JSONS = {
    NoneType: "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    str: "string",
}
OPTIONS = 100  # maximum number of alternatives in a value's schema; with more, any value is allowed


def schema_of(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an argument's schema with references resolved; empty (any value) if it is invalid."""
    properties = schema.get("properties")
    return resolved(schema, properties.get(key)) if isinstance(properties, Mapping) else {}


def resolved(schema: Mapping[str, Any], value: Any) -> Mapping[str, Any]:
    """Resolve references, alone or as the only part of an `allOf`; empty (any value) if they are invalid."""
    try:
        for _ in range(8):  # a reference may lead to another reference, or to itself
            match value:
                case {"$ref": place}:
                    value = schema
                    for name in place.removeprefix("#/").split("/"):
                        value = value[name]
                case {"allOf": [part], **others}:
                    value = {**others, **part}
                case _:
                    break
    except (LookupError, TypeError, AttributeError):
        return {}
    return value if isinstance(value, Mapping) else {}


def options_of(schema: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return the alternatives of an argument's schema. An empty one allows any value."""
    value = schema_of(schema, key)
    options = value.get("anyOf") or value.get("oneOf")
    if not isinstance(options, list):
        return [value]
    return [resolved(schema, each) for each in options] if len(options) <= OPTIONS else [{}]


def kinds_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """Return the JSON types that an argument may have. Empty means any type."""
    kinds = [
        types_of(each) or set(map(kind_of, values_of(each))) for each in options_of(schema, key)
    ]
    return set().union(*kinds) if all(kinds) else set()


def types_of(schema: Mapping[str, Any]) -> set[str]:
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    return {name for name in types if isinstance(name, str)}


def kind_of(value: Any) -> str:
    return JSONS[type(value)]


def values_of(schema: Mapping[str, Any]) -> list:
    """Return all allowed values if the schema enumerates them, else an empty list."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    values = values if isinstance(values, list) else []
    types = types_of(schema)
    if types == {"null"}:
        return [None]
    types |= {"integer"} if "number" in types else set()
    return [value for value in values if not types or kind_of(value) in types]
