"""Anthropic's Messages protocol.

    POST /v1/messages                {"model": "default", "max_tokens": 99, "messages": [...]}
    POST /v1/messages/count_tokens   the same body; returns its number of prompt tokens

A message is a list of *blocks*: text, thinking, tool use. A tool result is a block in the next user
message. A stream sends these events, and repeats the `content_block` events for each block:

    message_start  content_block_start  content_block_delta ...  content_block_stop  message_delta  message_stop

Errors use Anthropic's format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from server.body_reader import (
    APIError,
    BodyReader,
    call_of,
    conversation,
    invalid,
    parse_json,
    read_form,
    read_stop,
    read_tools,
    text_of,
)
from server.choice import Change, Choice, Item
from server.protocol_adapter import ParsedRequest, ProtocolAdapter, Usage, named_event
from text.tokenizer import ChatPrompt

PLAIN = ("temperature", "top_p", "top_k")
KEEP = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
NEUTRAL = {"service_tier": ("auto", "standard_only"), "context_management": (KEEP,)}
# Claude Code's first system block. It contains a hash of the first question, so keeping it would stop
# conversations from sharing a cached prefix
ATTRIBUTION = "x-anthropic-billing-header:"
THINKING = {
    "enabled": {"enable_thinking": True},
    "adaptive": {},
    "disabled": {"enable_thinking": False},
}
CHOICES = {"any": "required", "tool": "function"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def error(refusal: APIError) -> dict:
    kind = ERRORS.get(refusal.status, "invalid_request_error")
    told = {"type": kind, "message": refusal.message}
    if refusal.param == "thread":
        # This code makes Anthropic's client resend the whole conversation
        told["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": told}


# --- requests -------------------------------------------------------------------------------------


def parse_request(request: BodyReader, is_count: bool = False) -> ParsedRequest:
    """Parse a request. `is_count`: only count tokens, so max_tokens is not required."""
    tools, must_call = read_tools(request, "", "input_schema", "custom", CHOICES)
    choice = request.inner("tool_choice")
    # The thinking budget is only a hint, so it is not parsed
    hints = THINKING[request.inner("thinking").one_of("type", THINKING, "adaptive")]
    settings = request.some(PLAIN) | {"stop": read_stop(request, "stop_sequences")}
    # `output_config` may also contain an effort, which is only a hint
    if form := read_form(request.inner("output_config"), "format"):
        settings["grammar"] = form
    if not is_count and request.get("max_tokens") is None:
        raise request.bad("max_tokens", "the maximum number of tokens of an answer")
    chat = ChatPrompt(read_messages(request), tools, hints=hints)
    parsed = ParsedRequest(
        [chat],
        chat,
        settings=settings,
        grammar_field="output_config",
        max_tokens=request.whole("max_tokens", 1),
        stream=request.read("stream", bool, False),
        must_call=must_call,
        is_single=choice.read("disable_parallel_tool_use", bool, True) and bool(tools),
    )
    request.reject_unknown(NEUTRAL)
    return parsed


def read_system(request: BodyReader) -> str:
    if not isinstance(request.get("system"), list):
        return request.text("system", "")
    blocks = request.items("system")
    if text_of(blocks[:1]).startswith(ATTRIBUTION):
        blocks = blocks[1:]
    return text_of(blocks)


def read_messages(request: BodyReader) -> list[dict]:
    found = []
    if system := read_system(request):
        found.append({"role": "system", "content": system})
    for message in conversation(request, "messages"):
        role = message.one_of("role", ("user", "assistant", "system"))
        if role == "system" or isinstance(message.get("content"), str):
            found.append({"role": role, "content": message.text("content")})
        elif role == "assistant":
            found.append(read_own(message.items("content")))
        else:
            found += read_user(message.items("content"))
    if found[-1]["role"] == "assistant":
        words = "the last message is the assistant's, but the client cannot begin an answer"
        raise invalid("messages", words, "unsupported_content")
    return instructions_first(found)


def instructions_first(messages: list[dict]) -> list[dict]:
    """Move system messages that directly follow the first question in front of it.

    Claude Code sends the list of agents and skills in such a message. In front of the question it is part of
    the prefix that conversations share.
    """
    roles = [message["role"] for message in messages]
    first = roles.index("user") if "user" in roles else len(roles)
    rest = first + 1
    while roles[rest : rest + 1] == ["system"]:
        rest += 1
    question, instructions = messages[first : first + 1], messages[first + 1 : rest]
    return messages[:first] + instructions + question + messages[rest:]


def read_user(blocks: list[BodyReader]) -> list[dict]:
    """Convert a user message. Tool results become separate messages before the user's text."""
    found = []
    texts = []
    for block in blocks:
        if block.get("type") == "tool_result":
            id = block.read("tool_use_id", str)
            text = block.text("content", "")
            found.append({"role": "tool", "tool_call_id": id, "content": text})
        else:
            texts.append(block)
    if texts or not found:
        found.append({"role": "user", "content": text_of(texts)})
    return found


def read_own(blocks: list[BodyReader]) -> dict:
    """Convert an assistant message: reasoning, text and tool calls."""
    texts = []
    message: dict[str, Any] = {"role": "assistant"}
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            reasoning = message.get("reasoning_content", "")
            message["reasoning_content"] = reasoning + block.read("thinking", str)
        elif kind == "tool_use":
            call = call_of(block.read("id", str), block, "input")
            message.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":
            texts.append(block)
    return message | {"content": text_of(texts)}


# --- answers --------------------------------------------------------------------------------------

# Item kind -> (delta type, the delta's text field)
DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "tool_call": ("input_json_delta", "partial_json"),
}
# A signature would prove that the model wrote the reasoning, but this server does not check one. Some clients
# drop reasoning that has none
UNSIGNED = ""


class Message(ProtocolAdapter):
    """The adapter for Anthropic's Messages protocol."""

    parse_request = staticmethod(parse_request)
    prompt = "messages"
    prefix = "msg_"
    too_long = "prompt is too long: {tokens} tokens > {longest} maximum"
    _end: Mapping[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict:
        self.last(0, choices[0])
        blocks = [block(item) for item in choices[0].items]
        return self._message(blocks, usage)

    def first(self, choices: int, usage: Callable[[], Usage]) -> bytes:
        message = self._message([], usage())
        return named_event({"type": "message_start", "message": message})

    def changed(self, index: int, change: Change) -> bytes:
        kind, item, text, _ = change
        told = {"type": f"content_block_{kind}", "index": item.place}
        if kind == "start":
            told["content_block"] = block(item)
        if kind == "delta":
            type, field = DELTAS[item.kind]
            told["delta"] = {"type": type, field: text}
        if kind == "stop" and item.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": UNSIGNED}
            signed = {"type": "content_block_delta", "index": item.place, "delta": delta}
            return named_event(signed) + named_event(told)
        return named_event(told)

    def last(self, index: int, choice: Choice) -> bytes:
        self._end = ended(choice)
        return b""

    def close(self, usage: Usage) -> bytes:
        delta = {"type": "message_delta", "delta": self._end, "usage": written(usage)}
        return named_event(delta) + named_event({"type": "message_stop"})

    def fail(self, refusal: APIError) -> bytes:
        return named_event(error(refusal))

    def _message(self, blocks: list[dict], usage: Usage) -> dict:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            **self._end,
            "usage": written(usage),
        }


def block(item: Item) -> dict:
    """Return an item's block with the content received so far."""
    if item.kind == "content":
        return {"type": "text", "text": item.text}
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": item.text, "signature": UNSIGNED}
    values = None
    with suppress(ValueError, RecursionError):  # truncated arguments are not valid JSON
        values = parse_json(item.text)
    values = values if isinstance(values, dict) else {}
    return {"type": "tool_use", "id": item.id, "name": item.name, "input": values}


def ended(choice: Choice) -> dict[str, str | None]:
    stop = choice.handle.stop
    if stop is not None and choice.reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": REASONS[choice.reason], "stop_sequence": None}


def written(usage: Usage) -> dict:
    """Return the usage object. Anthropic does not include cached tokens in the input tokens."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.output,
    }
