"""Render and tokenize the prompts of a request, and check that the model supports what it asks for.

All functions run in a worker thread, because tokenizing a long prompt may take a second. They do not touch
the engine's queue.

Next: `submit.py`, which hands the prompts to the engine.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from base.error_reports import describe
from base.sandbox import BusyError
from base.strings import json_or_none
from request import QueueFull
from sampling_params import SamplingParams
from server.body_reader import TOO_LONG, APIError, invalid, without_folders
from server.model_pool import ServedModel
from server.protocol_adapter import ParsedRequest, ProtocolAdapter, shutting_down
from text.tokenizer import ChatPrompt, Prompt, TooLongError
from text.tool_formats import OutputFormat, as_json, as_lark, tool_call_grammar

if TYPE_CHECKING:
    from nanobatch import Engine

MAX_LOGPROBS = 200_000  # log probabilities in one response, over all choices


class TokenizedRequest(NamedTuple):
    """A request with its tokenized prompts, for `Submission` and `AnswerWriter`."""

    protocol: type[ProtocolAdapter]
    request: ParsedRequest
    choices: list[tuple[Prompt, SamplingParams]]  # `n` entries for each prompt
    composed: Mapping[str, Any] | None = None  # the grammar of reasoning, tool calls and answer

    @property
    def grammar(self) -> Mapping[str, Any] | None:
        """The grammar to compile, the same for all prompts. The settings have the client's own."""
        return self.composed or self.choices[0][1].grammar

    @property
    def is_embedding(self) -> bool:
        """True if the request asks for embeddings, of possibly thousands of texts."""
        return "embeds" in self.request.settings

    def refusal_of(self, error: ValueError | RuntimeError) -> APIError:
        return refusal_of(error, self.request)


def tokenize(
    served: ServedModel, protocol: type[ProtocolAdapter], request: ParsedRequest
) -> TokenizedRequest:
    """Tokenize the prompts of a request and check its settings."""
    engine = served.engine
    asked = TokenizedRequest(protocol, request, [])
    try:
        for prompt in request.prompts:
            tokens = read_prompt(engine, prompt, protocol)
            room = min(engine.sched.max_len - len(tokens.ids), most_tokens(request))
            most = request.max_tokens or served.max_tokens or room
            settings = served.defaults | request.settings | {"max_tokens": min(most, room)}
            composed = composed_grammar(engine, request, tokens)
            if request.must_call:
                settings["grammar"] = composed
            for _ in range(request.n):
                asked.choices.append((tokens, SamplingParams(**settings)))
                # The same seed would make all choices identical
                if type(settings.get("seed")) is int:
                    settings["seed"] += 1
                    if settings["seed"] == 2**64:
                        settings["seed"] = 0
        wanted = len(asked.choices)
        if wanted > engine.sched.max_queue and not asked.is_embedding:
            raise ValueError(
                f"n: {wanted} choices are requested, but the queue holds {engine.sched.max_queue}"
            )
    except ValueError as error:
        raise asked.refusal_of(error) from None
    return asked._replace(composed=composed)


def refusal_of(error: ValueError | RuntimeError, request: ParsedRequest) -> APIError:
    """Convert an error of `SamplingParams` or the engine to one that names the body's field."""
    if isinstance(error, QueueFull):
        return APIError(429, str(error), "rate_limit_exceeded", Retry_After="1")
    if isinstance(error, BusyError):
        return APIError(503, f"the grammar: {error}", "busy", Retry_After="1")
    if isinstance(error, RuntimeError):  # the engine has been closed
        return shutting_down()
    params = {name: name for name in request.settings}
    params["token"] = "logit_bias"
    # A grammar that is not among the settings is the one for tool calls
    params["grammar"] = request.grammar_field if "grammar" in params else "tools"
    subject = re.match(r"\w*", str(error))[0]
    return invalid(params.get(subject), str(error))


def composed_grammar(
    engine: Engine, parsed: ParsedRequest, prompt: Prompt
) -> Mapping[str, Any] | None:
    """Return the grammar of required tool calls, or of an answer with optional tool calls or after reasoning.
    Return None if the request has no grammar, or if its own is enough."""
    given = parsed.settings.get("grammar")
    if not parsed.chat or not (given or parsed.must_call):
        return None
    output_format = engine.text.output_format
    tools, answer = parsed.must_call, None
    if not tools:
        [(kind, source)] = SamplingParams(grammar=given).grammar.items()
        if kind == "json":
            schema = json_or_none(source)
            if not isinstance(schema, dict):
                return None
            tools, answer = parsed.chat.tools, as_json(schema)
        else:
            answer = f"%lark {{\n{as_lark(kind, source)}\n}}"  # its names are its own
        if not (tools or output_format.reasoning):
            return None
    text = tool_call_grammar(
        output_format,
        tools,
        answer=answer,
        is_single=parsed.is_single,
        is_thinking=prompt.is_thinking,
        marks=engine.text.marks,
    )
    return {"lark": text}


def check_tools(output_format: OutputFormat, chat: ChatPrompt, param: str) -> None:
    """Refuse tools and earlier tool calls if the model's tool format is unknown."""
    called = any("tool_calls" in each or each["role"] == "tool" for each in chat.messages)
    if (chat.tools or called) and not output_format.tools:
        field = "tools" if chat.tools else param
        raise invalid(field, output_format.why, "unsupported_parameter")


def most_tokens(parsed: ParsedRequest) -> int:
    """Return the most output tokens of each choice: unlimited, unless log probabilities are requested. A
    response has at most `MAX_LOGPROBS` of them, over all choices."""
    top = parsed.settings.get("logprobs")
    if top is None:
        return sys.maxsize
    return MAX_LOGPROBS // (parsed.n * len(parsed.prompts) * (1 + top))


def read_prompt(
    engine: Engine, prompt: str | list | ChatPrompt, protocol: type[ProtocolAdapter]
) -> Prompt:
    """Tokenize a prompt. Raise APIError unless it fits in a slot with room for one more token."""
    read = encode(engine, prompt, protocol)
    if len(read.ids) >= engine.sched.max_len:
        raise too_long(engine, protocol, str(len(read.ids)))
    return read


def encode(
    engine: Engine, prompt: str | list | ChatPrompt, protocol: type[ProtocolAdapter]
) -> Prompt:
    """Tokenize a prompt. Raise APIError if it is so much longer than a slot that only its start would be
    tokenized."""
    text = engine.text
    param = protocol.prompt
    max_len = engine.sched.max_len
    size = len(prompt)
    if isinstance(prompt, ChatPrompt):
        check_tools(text.output_format, prompt, param)
        size = sum(len(message["content"]) for message in prompt.messages)
        calls = [message["tool_calls"] for message in prompt.messages if "tool_calls" in message]
        size += len(str([prompt.tools, calls]))
    least = size if isinstance(prompt[0], int) else size // text.longest
    try:
        # Skip tokenizing, which is slow, if the prompt is certainly too long
        if least < max_len:
            return text.encode_prompt(prompt, max_len)
    except TooLongError as error:
        least = error.tokens
    except ValueError as error:
        raise invalid(param, without_folders(str(error))) from None
    except BaseException as error:  # a Rust panic is not an Exception
        words = without_folders(describe(error))
        raise invalid(param, f"{param} cannot be read: {words}") from None
    raise too_long(engine, protocol, f"at least {least}")


def too_long(engine: Engine, protocol: type[ProtocolAdapter], tokens: str) -> APIError:
    """Return the error for an oversized prompt, in the words of the protocol."""
    max_len = engine.sched.max_len
    words = protocol.too_long.format(
        param=protocol.prompt, tokens=tokens, max_len=max_len, longest=max_len - 1
    )
    words += "; give less, or start the server with a larger --max-len"
    return invalid(protocol.prompt, words, TOO_LONG)


def count_tokens(
    served: ServedModel, protocol: type[ProtocolAdapter], request: ParsedRequest
) -> int:
    """Return the number of tokens in the prompt, which may be longer than a slot."""
    return len(encode(served.engine, request.prompts[0], protocol).ids)
