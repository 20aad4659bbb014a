"""Random requests with tools, in each protocol, and rules that their answers must follow.

Used by the suite, with a model of random weights, and by the tests with a published model.
"""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

import streams as told
from jsonschema import Draft202012Validator
from schemas import random_schema
from servers import CHAT, MESSAGES, RESPONSES, Server
from streams import Told

PATHS = (CHAT, RESPONSES, MESSAGES)
NAMES = ["get_weather", "a", "files.read-all", "run_2", "X-y.z_0", "name", "arguments"]
FORM = {"enum": ["none", {"name": "a", "arguments": {}}]}


class Ask(NamedTuple):
    """A random request."""

    path: str
    body: dict[str, Any]
    schemas: dict[str, dict]  # by name of the tool
    choice: str  # "auto", "required", or the name of a tool
    is_parallel: bool | None  # None if not sent
    has_form: bool


def random_ask(seed: int, max_tokens: int, tools: int = 3) -> Ask:
    dice = random.Random(seed)
    schemas = {}
    for name in dice.sample(NAMES, dice.randint(1, tools)):
        schema = random_schema(dice.randrange(10**6))
        if schema.get("type") != "object":
            defs = schema.pop("$defs", {})
            schema = {"properties": {"x": schema}, "$defs": defs}
        schemas[name] = schema
    choice = dice.choice(["required", *schemas, "auto"])
    has_form = dice.random() < 0.4 or choice == "auto"
    is_parallel = dice.choice([None, None, True, False])
    path = PATHS[seed % 3]
    said = dice.choice(["Call a tool.", "What now?", "Hello."])
    settings = {"temperature": dice.choice([0, 0.7, 1])}
    write = {CHAT: for_chat, RESPONSES: for_responses, MESSAGES: for_messages}[path]
    body = settings | write(said, schemas, choice, is_parallel, has_form, max_tokens)
    if path == CHAT:
        body["seed"] = seed
    return Ask(path, body, schemas, choice, is_parallel, has_form)


def for_chat(said, schemas, choice, is_parallel, has_form, max_tokens) -> dict:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in schemas.items()
    ]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": said}], "tools": tools}
    named = {"type": "function", "function": {"name": choice}}
    body["tool_choice"] = named if choice in schemas else choice
    if is_parallel is not None:
        body["parallel_tool_calls"] = is_parallel
    if has_form:
        inner = {"name": "form", "schema": FORM}
        body["response_format"] = {"type": "json_schema", "json_schema": inner}
    return body | {"max_tokens": max_tokens}


def for_responses(said, schemas, choice, is_parallel, has_form, max_tokens) -> dict:
    tools = [
        {"type": "function", "name": name, "parameters": schema} for name, schema in schemas.items()
    ]
    body: dict[str, Any] = {"input": said, "tools": tools}
    named = {"type": "function", "name": choice}
    body["tool_choice"] = named if choice in schemas else choice
    if is_parallel is not None:
        body["parallel_tool_calls"] = is_parallel
    if has_form:
        body["text"] = {"format": {"type": "json_schema", "name": "form", "schema": FORM}}
    return body | {"max_output_tokens": max_tokens}


def for_messages(said, schemas, choice, is_parallel, has_form, max_tokens) -> dict:
    tools = [{"name": name, "input_schema": schema} for name, schema in schemas.items()]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": said}], "tools": tools}
    kinds = {"auto": {"type": "auto"}, "required": {"type": "any"}}
    body["tool_choice"] = {"type": "tool", "name": choice}
    if choice not in schemas:
        body["tool_choice"] = dict(kinds[choice])
    if is_parallel is not None:
        body["tool_choice"]["disable_parallel_tool_use"] = not is_parallel
    if has_form:
        body["output_config"] = {"format": {"type": "json_schema", "schema": FORM}}
    return body | {"max_tokens": max_tokens}


def check(server: Server, ask: Ask) -> Told:
    """Send the request twice, streamed and not. With temperature 0 or a seed, both answers must be equal."""
    found, again = (told.ask(server, ask.path, ask.body, stream) for stream in (False, True))
    if ask.path == CHAT or not ask.body["temperature"]:
        assert again == found, (ask, again, found)
    for answer in (found, again):
        judge(ask, answer)
    return found


def judge(ask: Ask, found: Told) -> None:
    is_cut = found.reason in ("length", "max_tokens", "incomplete")
    for index, (name, given) in enumerate(found.calls):
        assert name in ask.schemas and ask.choice in (name, "required", "auto"), (ask, found)
        if not (is_cut and index == len(found.calls) - 1):
            schema = {"type": "object", **ask.schemas[name]}
            Draft202012Validator(schema).validate(json.loads(given))
    assert ask.is_parallel or len(found.calls) <= 1, (ask, found)
    if is_cut:
        assert "<tool_call" not in found.text + found.thought, found
    elif found.calls:
        assert not found.text, found
    else:
        assert ask.choice == "auto" and ask.has_form, (ask, found)
        assert json.loads(found.text) in FORM["enum"], found
