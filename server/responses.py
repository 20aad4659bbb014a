"""OpenAI's Responses protocol.

    POST /v1/responses   {"model": "default", "input": "Why batch?"}

An answer is a list of *items*: reasoning, a message, function calls. A stream sends events for each:

    response.created  in_progress
    response.output_item.added      content_part.added  output_text.delta ...  output_text.done  content_part.done
    response.output_item.done
    response.completed              repeats the complete response

The server is stateless: each request contains the whole conversation, and what refers to stored state
(`previous_response_id`, an `item_reference`) is refused. `store` is accepted, and answered with false.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from base.validation import shown
from server.body_reader import (
    TOO_LONG,
    APIError,
    BodyReader,
    call_of,
    conversation,
    effort_hint,
    read_form,
    read_tools,
)
from server.choice import Change, Choice, Item
from server.protocol_adapter import ParsedRequest, ProtocolAdapter, Usage, named_event
from text.tokenizer import ChatPrompt

PLAIN = ("temperature", "top_p")
NEUTRAL = {
    "include": (["reasoning.encrypted_content"],),  # reasoning is never encrypted
    "service_tier": ("auto", "default", "flex"),
    "stream_options": ({"include_obfuscation": False},),
    "truncation": ("disabled",),
}
# Fields that need stored state
MEMORY = ("previous_response_id", "conversation", "background")
TEXTS = ("input_text", "output_text", "text")
ITEMS = ("message", "reasoning", "function_call", "function_call_output")
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


# --- requests -------------------------------------------------------------------------------------


def parse_request(request: BodyReader) -> ParsedRequest:
    for name in MEMORY:
        if value := request.get(name):
            words = f"= {shown(value)} needs stored state, and this server is stateless"
            words += "; leave it out, and send the whole conversation as input"
            raise request.unsupported(name, words)
    tools, must_call = read_tools(request)
    # `effort` is only a hint. `summary` is ignored: reasoning is sent in full
    effort = request.inner("reasoning").get("effort")
    hints = {} if effort is None else {"enable_thinking": effort != "none", **effort_hint(effort)}
    settings = request.some(PLAIN)
    if form := read_form(request.inner("text"), "format"):
        settings["grammar"] = form
    chat = ChatPrompt(read_input(request), tools, hints=hints)
    parsed = ParsedRequest(
        [chat],
        chat,
        settings=settings,
        grammar_field="text",
        max_tokens=request.whole("max_output_tokens", 1),
        stream=request.read("stream", bool, False),
        must_call=must_call,
        is_single=not request.read("parallel_tool_calls", bool, False) and bool(tools),
        fields=request.fields,
    )
    request.reject_unknown(NEUTRAL)
    return parsed


def read_input(request: BodyReader) -> list[dict]:
    """Convert the input to messages."""
    messages = []
    if instructions := request.text("instructions", "", TEXTS):
        messages.append({"role": "system", "content": instructions})
    if isinstance(request.get("input"), str):
        messages.append({"role": "user", "content": request.get("input")})
        return messages
    for item in conversation(request, "input"):
        read_item(item, messages)
    return messages


def read_item(item: BodyReader, messages: list[dict]) -> None:
    """Append an item to the messages. Consecutive reasoning, message and call items become one message,
    as templates expect."""
    if item.get("type") == "item_reference":
        words = "= 'item_reference', but nothing is stored here; set store to false"
        raise item.unsupported("type", f"{words}, so that the client sends the item itself")
    kind = item.one_of("type", ITEMS, "message")
    if kind == "message":
        role = ROLES[item.one_of("role", ROLES)]
        text = item.text("content", kinds=TEXTS)
        if role == "assistant":
            own_message(messages, "content")["content"] = text
        else:
            messages.append({"role": role, "content": text})
    elif kind == "reasoning":
        name = "content" if item.get("content") else "summary"
        text = item.text(name, "", ("reasoning_text", "summary_text"))
        own_message(messages, "reasoning_content")["reasoning_content"] = text
    elif kind == "function_call":
        call = call_of(item.read("call_id", str), item)
        own_message(messages, "").setdefault("tool_calls", []).append(call)
    else:
        id = item.read("call_id", str)
        text = item.text("output", kinds=TEXTS)
        messages.append({"role": "tool", "tool_call_id": id, "content": text})


def own_message(messages: list[dict], field: str) -> dict:
    """Return the assistant message that an item belongs to. Append a new one unless the last message is the
    assistant's, lacks this `field` and has no tool calls. An empty `field` is for a call, which may follow
    others."""
    last = messages[-1] if messages else {}
    is_open = last.get("role") == "assistant" and not last.get(field)
    if not is_open or (field and "tool_calls" in last):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


# --- answers --------------------------------------------------------------------------------------

# Item kind -> (type, prefix of the id, type of its text)
KINDS = {
    "content": ("message", "msg", "output_text"),
    "reasoning": ("reasoning", "rs", "reasoning_text"),
    "tool_call": ("function_call", "fc", "function_call_arguments"),
}
# Status -> error code of a failed response
CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
# Request fields that the response repeats -> their defaults
ECHO = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": False,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
}


class Response(ProtocolAdapter):
    """The adapter for OpenAI's Responses protocol."""

    parse_request = staticmethod(parse_request)
    prompt = "input"
    prefix = "resp_"

    def __init__(self, parsed: ParsedRequest, name: str, model: str):
        super().__init__(parsed, name, model)
        self._body = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "store": False,
            "usage": None,
        }
        for name, value in ECHO.items():
            self._body[name] = parsed.fields.get(name, value)
        self._sent = 0  # number of events sent so far

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict:
        self.last(0, choices[0])
        return self._body | {"usage": written(usage)}

    def first(self, choices: int, usage: Callable[[], Usage]) -> bytes:
        body = self._body
        return self._event("created", response=body) + self._event("in_progress", response=body)

    def changed(self, index: int, change: Change) -> bytes:
        return b"".join(self._event(kind, **fields) for kind, fields in self._events(change))

    def _events(self, change: Change) -> Iterator[tuple[str, dict]]:
        kind, item, text, _ = change
        is_text = item.kind != "tool_call"
        place = {"output_index": item.place}
        inner = place | {"item_id": self._id(item)}
        if is_text:
            inner["content_index"] = 0
        words = {"logprobs": []} if item.kind == "content" else {}
        type = KINDS[item.kind][2]
        if kind == "start":
            yield "output_item.added", place | {"item": self._item(item)}
            if is_text:
                yield "content_part.added", inner | {"part": part(item)}
        if kind == "delta":
            yield f"{type}.delta", inner | words | {"delta": text}
        if kind == "stop":
            whole = {"name": item.name, "arguments": item.text}
            if is_text:
                whole = {"text": item.text}
            yield f"{type}.done", inner | words | whole
            if is_text:
                yield "content_part.done", inner | {"part": part(item)}
            yield "output_item.done", place | {"item": self._item(item)}

    def last(self, index: int, choice: Choice) -> bytes:
        self._body["status"] = "completed"
        self._body["output"] = [self._item(item) for item in choice.items]
        if choice.reason == "length":
            self._body["status"] = "incomplete"
            self._body["incomplete_details"] = {"reason": "max_output_tokens"}
        return b""

    def close(self, usage: Usage) -> bytes:
        self._body["usage"] = written(usage)
        return self._event(self._body["status"], response=self._body)

    def fail(self, refusal: APIError) -> bytes:
        self._body["status"] = "failed"
        code = CODES.get(refusal.status, "server_error")
        # Codex looks for this code, which OpenAI does not list
        code = TOO_LONG if refusal.code == TOO_LONG else code
        self._body["error"] = {"code": code, "message": refusal.message}
        return self._event("failed", response=self._body)

    def _id(self, item: Item) -> str:
        return f"{KINDS[item.kind][1]}_{self._name}_{item.place}"

    def _item(self, item: Item) -> dict:
        """Return an item as JSON with the content received so far."""
        own = {"type": KINDS[item.kind][0], "id": self._id(item), "status": item.status}
        if item.kind == "tool_call":
            return own | {"call_id": item.id, "name": item.name, "arguments": item.text}
        own["content"] = [part(item)] if item.text else []
        if item.kind == "reasoning":
            return own | {"summary": []}
        return own | {"role": "assistant"}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": f"response.{kind}", "sequence_number": self._sent, **fields}
        self._sent += 1
        return named_event(body)


def part(item: Item) -> dict:
    """Return the single content part of a message or a reasoning item."""
    own = {"type": KINDS[item.kind][2], "text": item.text}
    if item.kind == "content":
        own |= {"annotations": [], "logprobs": []}
    return own


def written(usage: Usage) -> dict:
    return {
        "input_tokens": usage.prompt,
        # As in Messages, nobody pays for the writes of this cache, so they are not counted
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.output,
    }
