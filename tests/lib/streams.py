"""An answer in one form for all routes, streamed or not, so that answers can be compared.

A stream is assembled as a client would do it.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from servers import CHAT, COMPLETIONS, COUNT, EMBEDDINGS, MESSAGES, RESPONSES, Reply, Server

WITHOUT_STREAM = (COUNT, EMBEDDINGS)


class Told(NamedTuple):
    thought: str = ""
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name of the tool and its arguments
    reason: str = ""
    tokens: int = 0


def ask(server: Server, path: str, body: dict, stream: bool) -> Told:
    if stream and path not in WITHOUT_STREAM:
        body = body | {"stream": True}
        if path in (CHAT, COMPLETIONS):
            body |= {"stream_options": {"include_usage": True}}
    reply = server.ask(path, body)
    assert reply.status == 200, (path, body, reply)
    return told(path, reply, stream)


def told(path: str, reply: Reply, stream: bool) -> Told:
    if path == COUNT:
        return Told(tokens=reply.json["input_tokens"])
    if path == EMBEDDINGS:
        vectors = [str(entry["embedding"]) for entry in reply.json["data"]]
        return Told(text=" ".join(vectors), tokens=reply.json["usage"]["total_tokens"])
    if path == RESPONSES:
        return told_response(streamed_response(reply) if stream else reply.json)
    if path == MESSAGES:
        return told_message(streamed_message(reply) if stream else reply.json)
    return told_choice(streamed_choice(reply) if stream else reply.json)


def told_choice(body: dict) -> Told:
    """Parse a choice of a chat, or of a plain completion."""
    (choice,) = body["choices"]
    message = choice.get("message", choice)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return Told(
        thought=message.get("reasoning_content") or "",
        text=message.get("content") or message.get("text") or "",
        calls=tuple((call["name"], call["arguments"]) for call in calls),
        reason=choice["finish_reason"],
        tokens=body["usage"]["completion_tokens"],
    )


def streamed_choice(reply: Reply) -> dict:
    *events, last, done = reply.events
    assert done == "[DONE]", done
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    calls = message["tool_calls"]
    reason = None
    for event in events:
        (choice,) = event["choices"]
        assert reason is None, "something came behind the end"
        reason = choice["finish_reason"]
        delta = choice.get("delta", {"content": choice.get("text")})
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                calls.append(call["function"])
            else:
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
            assert call["index"] == len(calls) - 1
    message["tool_calls"] = [{"function": call} for call in calls]
    return {"choices": [{"message": message, "finish_reason": reason}], "usage": last["usage"]}


def told_response(body: dict) -> Told:
    texts = {"reasoning": "", "message": ""}
    calls = []
    for item in body["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
        else:
            texts[item["type"]] += "".join(part["text"] for part in item["content"])
    tokens = body["usage"]["output_tokens"]
    return Told(texts["reasoning"], texts["message"], tuple(calls), body["status"], tokens)


def streamed_response(reply: Reply) -> dict:
    """Assert that the pieces join to the text in the last event, and return that event's response."""
    events = reply.events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    pieces = [""] * len(last["output"])
    for event in events:
        if event["type"].endswith(".delta"):
            pieces[event["output_index"]] += event["delta"]
    for item, text in zip(last["output"], pieces, strict=True):
        assert text == (
            item.get("arguments") or "".join(p["text"] for p in item.get("content", ()))
        )
    return last


def told_message(body: dict) -> Told:
    texts = {"thinking": "", "text": ""}
    calls = []
    for block in body["content"]:
        if block["type"] == "tool_use":
            calls.append((block["name"], json.dumps(block["input"])))
        else:
            texts[block["type"]] += block[block["type"]]
    tokens = body["usage"]["output_tokens"]
    return Told(texts["thinking"], texts["text"], tuple(calls), body["stop_reason"], tokens)


def streamed_message(reply: Reply) -> dict:
    blocks: list[dict] = []
    end: dict = {}
    for event in reply.events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"pieces": []})
            assert event["index"] == len(blocks) - 1
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            block = blocks[event["index"]]
            if delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
                continue
            field = {"thinking_delta": "thinking", "text_delta": "text"}.get(delta["type"])
            block["pieces"].append(delta[field or "partial_json"])
        elif event["type"] == "message_delta":
            end = {"stop_reason": event["delta"]["stop_reason"], "usage": event["usage"]}
    for block in blocks:
        text = "".join(block.pop("pieces"))
        if block["type"] != "tool_use":
            block[block["type"]] = text
            continue
        try:
            block["input"] = json.loads(text)
        except ValueError:
            block["input"] = {}  # the arguments were truncated
    return {"content": blocks, **end}
