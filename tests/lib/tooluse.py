"""Random requests with tools, in each protocol, and what their answers have to keep.

Shared by the suite, with a model of random weights, and by the tests with a published model.
"""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

from doors import CHAT, MESSAGES, RESPONSES, Reply, Server
from jsonschema import Draft202012Validator
from schemas import random_schema

PATHS = (CHAT, RESPONSES, MESSAGES)
NAMES = ["get_weather", "a", "files.read-all", "run_2", "X-y.z_0", "name", "arguments"]
FORM = {"enum": ["none", {"name": "a", "arguments": {}}]}


class Found(NamedTuple):
    """What an answer says, in the same words for each protocol."""

    text: str
    thought: str
    calls: list[tuple[str, str]]  # names and arguments
    reason: str


class Ask(NamedTuple):
    """A random request."""

    path: str
    body: dict[str, Any]
    schemas: dict[str, dict]  # by a tool's name
    choice: str  # "auto", "required", or a name
    is_parallel: bool | None  # None: not said
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


# --- answers --------------------------------------------------------------------------------------


def whole(path: str, reply: Reply) -> Found:
    assert reply.status == 200, reply
    body = reply.json
    if path == CHAT:
        (choice,) = body["choices"]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls", [])]
        found = [(call["name"], call["arguments"]) for call in calls]
        thought = message.get("reasoning_content", "")
        return Found(message["content"] or "", thought, found, choice["finish_reason"])
    if path == RESPONSES:
        return of_items(body)
    kinds = {"text": "", "thinking": ""}
    found = []
    for block in body["content"]:
        if block["type"] == "tool_use":
            found.append((block["name"], json.dumps(block["input"])))
        else:
            kinds[block["type"]] += block[block["type"]]
    return Found(kinds["text"], kinds["thinking"], found, body["stop_reason"])


def of_items(body: dict) -> Found:
    kinds = {"message": "", "reasoning": ""}
    found = []
    for item in body["output"]:
        if item["type"] == "function_call":
            found.append((item["name"], item["arguments"]))
        else:
            kinds[item["type"]] += "".join(part["text"] for part in item["content"])
    return Found(kinds["message"], kinds["reasoning"], found, body["status"])


def streamed(path: str, reply: Reply) -> Found:
    events = [event for event in reply.events if event != "[DONE]"]
    read = {CHAT: of_chunks, RESPONSES: of_events, MESSAGES: of_blocks}[path]
    return read(events)


def of_chunks(events: list[dict]) -> Found:
    text = thought = reason = ""
    calls: list[list[str]] = []
    for event in events:
        (choice,) = event["choices"]
        delta = choice["delta"]
        text += delta.get("content") or ""
        thought += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return Found(text, thought, [tuple(call) for call in calls], reason)


def of_events(events: list[dict]) -> Found:
    """The deltas, which have to be what the last event says once more."""
    last = of_items(events[-1]["response"])
    names = {
        event["item"]["id"]: event["item"]["name"]
        for event in events
        if event["type"] == "response.output_item.added" and "name" in event["item"]
    }
    texts: dict[str, str] = {}
    kinds: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            kind = event["type"].removeprefix("response.").removesuffix(".delta")
            id = event["item_id"]
            texts[id] = texts.get(id, "") + event["delta"]
            kinds[id] = kind
    calls = [(name, texts.get(id, "")) for id, name in names.items()]
    said = "".join(texts[id] for id, kind in kinds.items() if kind == "output_text")
    thought = "".join(texts[id] for id, kind in kinds.items() if kind == "reasoning_text")
    assert (said, thought, calls) == last[:3], (said, thought, calls, last)
    return last


def of_blocks(events: list[dict]) -> Found:
    kinds = {"text": "", "thinking": ""}
    calls: list[list[str]] = []
    reason = ""
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls.append([event["content_block"]["name"], ""])
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                calls[-1][1] += delta["partial_json"]
            else:
                kind = delta["type"].removesuffix("_delta")
                kinds[kind] += delta[kind]
        if event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    found = [(name, json.dumps(loads(given))) for name, given in calls]
    return Found(kinds["text"], kinds["thinking"], found, reason)


def loads(text: str) -> Any:
    """Anthropic's client, too, takes a call that was cut off for one without arguments."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def check(server: Server, ask: Ask) -> Found:
    """Ask twice, whole and streamed. At temperature 0, and with a seed, both are the same."""
    found = whole(ask.path, server.ask(ask.path, ask.body))
    again = streamed(ask.path, server.ask(ask.path, ask.body | {"stream": True}))
    if ask.path == CHAT or not ask.body["temperature"]:
        assert again == found, (ask, again, found)
    for answer in (found, again):
        judge(ask, answer)
    return found


def judge(ask: Ask, found: Found) -> None:
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
