"""OpenAI's protocol: chat and text completions.

    POST /v1/chat/completions   {"messages": [{"role": "user", "content": "Why batch?"}]}
    POST /v1/completions        {"prompt": "Once upon a time"}

Clients send null for a missing field, values that have no effect (`"presence_penalty": 0`, `"tools": []`),
and names or metadata (`IGNORED`). All of these are accepted. Any other field is either supported completely,
or refused with a status, a message and the field's name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from server.body_reader import (
    APIError,
    BodyReader,
    Field,
    call_of,
    check_count,
    conversation,
    effort_hint,
    invalid,
    read_form,
    read_stop,
    read_tools,
)
from server.choice import Change, Choice, Item, Word
from server.protocol_adapter import (
    ParsedRequest,
    PromptProgress,
    ProtocolAdapter,
    Usage,
    dump,
    event,
)
from text.tokenizer import ChatPrompt

# Templates do not know "developer", a newer name for the system role
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# Names of an earlier answer's reasoning; `reasoning` is vLLM's, `thinking` Ollama's
REASONING = ("reasoning_content", "reasoning", "thinking")
# Fields of a message that do not affect the prompt: names, cache hints, and copies of the content or the
# reasoning, which may be encrypted
IGNORED_IN_MESSAGES = {
    "name",
    "id",
    "timestamp",
    "cache_control",
    "parsed",
    "reasoning_details",
}
# Limits per request
MAX_N = 16
MAX_CHOICES = 128
MAX_LOGIT_BIASES = 1000
MAX_TOP_LOGPROBS = 20

FIELDS = {
    "n": Field(int, 1, 1, MAX_N),
    "logit_bias": Field(dict, {}),
    "stream": Field(bool, False),
    "stream_options": Field(dict, {}),
    "return_progress": Field(bool, False),
}
CHAT_FIELDS = FIELDS | {
    "logprobs": Field(bool, False),
    "top_logprobs": Field(int, 0, 0, MAX_TOP_LOGPROBS),
    "parallel_tool_calls": Field(bool, False),
    "chat_template_kwargs": Field(dict, {}),
    "reasoning_effort": Field(),
}
LENGTHS = ("max_tokens", "max_completion_tokens")
# Passed to `SamplingParams` unchanged and validated there
PLAIN = ("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos")
PLAIN += ("repetition_penalty", "presence_penalty", "frequency_penalty")
# vLLM's field before 0.12 -> the key in `SamplingParams.grammar`
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "lark",
}
# The same for the fields of `structured_outputs`, which replaced them
STRUCTURED = {name.removeprefix("guided_"): key for name, key in GUIDED.items()}
# Field -> values that have no effect
NEUTRAL = {
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default", "flex"),
    "typical_p": (1,),
    "length_penalty": (1,),
    "reasoning_effort": ("none",),
    "verbosity": ("low", "medium", "high"),  # a hint that no template reads
    "cache_prompt": (True,),
    "add_generation_prompt": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}


# --- requests -------------------------------------------------------------------------------------


def parse_request(request: BodyReader, is_chat: bool) -> ParsedRequest:
    values = request.table(CHAT_FIELDS if is_chat else FIELDS)
    parsed = read_chat(request, values) if is_chat else ParsedRequest(read_prompts(request))
    prompts = len(parsed.prompts)
    n = values["n"]
    if n * prompts > MAX_CHOICES:
        words = f"{prompts} prompts with n = {n} each, but one request has at most {MAX_CHOICES} choices"
        raise invalid("n", words)
    if values["return_progress"] and not values["stream"]:
        words = "return_progress is given without stream; set stream to true"
        raise invalid("return_progress", words)
    lengths = [read_length(request, name) for name in LENGTHS if name in request.fields]
    top = read_top(values) if is_chat else read_logprobs(request)
    grammar_field, grammar = read_grammar(request)
    parsed = parsed._replace(
        settings=read_settings(request, values["logit_bias"]) | grammar | {"logprobs": top},
        grammar_field=grammar_field,
        max_tokens=min(filter(None, lengths), default=None),
        n=n,
        stream=values["stream"],
        usage=read_usage(values["stream_options"]),
        progress=values["return_progress"],
    )
    request.reject_unknown(NEUTRAL | {"best_of": (1, n)})
    return parsed


def read_length(request: BodyReader, name: str) -> int | None:
    """Return a maximum number of tokens. llama.cpp and LM Studio use -1 for no maximum."""
    return None if request.get(name) == -1 else request.whole(name, 1)


def read_usage(options: dict) -> bool:
    """Return True if the stream must end with an event that contains the usage."""
    if not options:
        return False
    request = BodyReader(options, "stream_options")
    usage = request.read("include_usage", bool, False)
    # vLLM's option for usage in every event has no effect
    request.reject_unknown(ignored=["continuous_usage_stats"])
    return usage


def read_settings(request: BodyReader, bias: dict) -> dict[str, Any]:
    """Return the arguments for `SamplingParams`."""
    settings = request.some(PLAIN)
    if type(settings.get("top_k")) is int and settings["top_k"] == -1:
        settings["top_k"] = 0  # other servers use -1 for "all tokens"
    if settings.get("top_p") == 0 and not isinstance(settings["top_p"], bool):
        settings["top_p"] = 1e-9  # keeps only the likeliest token
    if "stop" in request.fields:
        settings["stop"] = read_stop(request, "stop")
    if bias:
        check_count("logit_bias", len(bias), "entries", MAX_LOGIT_BIASES)
    if not all(re.fullmatch(r"-?[0-9]{1,18}", token) for token in bias):
        raise request.bad("logit_bias", "an object that maps token ids, as strings, to numbers")
    settings["logit_bias"] = {int(token): bias[token] for token in bias}
    return settings


def read_grammar(request: BodyReader) -> tuple[str, dict[str, Any]]:
    """Return the field that contains the grammar, and the grammar as an argument for `SamplingParams`."""
    found = [(name, {GUIDED[name]: value}) for name, value in request.some([*GUIDED]).items()]
    if "structured_outputs" in request.fields:
        structured = request.inner("structured_outputs")
        for name, value in structured.some([*STRUCTURED]).items():
            found.append(("structured_outputs", {STRUCTURED[name]: value}))
        structured.reject_unknown()
    # A schema is either enforced or refused, so `strict` has no effect
    has_form = "response_format" in request.fields
    if has_form and (form := read_form(request, "response_format", "json_schema")):
        found.append(("response_format", form))
    if len(found) > 1:
        names = f"response_format, {', '.join(GUIDED)} and the fields of structured_outputs"
        raise invalid(found[-1][0], f"{names} are mutually exclusive; give one of them")
    if not found:
        return "", {}
    name, grammar = found[0]
    return name, {"grammar": grammar}


def read_logprobs(request: BodyReader) -> int | None:
    """Return the number of alternatives per token that /v1/completions requests; None for no log
    probabilities."""
    if request.get("logprobs") is False:
        return None
    return request.whole("logprobs", 0, MAX_TOP_LOGPROBS)


def read_top(values: Mapping[str, Any]) -> int | None:
    """Return the number of alternatives per token that a chat requests; None for no log probabilities."""
    if values["logprobs"]:
        return values["top_logprobs"]
    if values["top_logprobs"]:
        words = "top_logprobs is given without logprobs; set logprobs to true"
        raise invalid("top_logprobs", words)
    return None


def read_chat(request: BodyReader, values: Mapping[str, Any]) -> ParsedRequest:
    """Parse the messages, the tools and the other variables of the chat template."""
    messages = [read_message(message) for message in conversation(request, "messages")]
    effort = values["reasoning_effort"]
    hints = {"enable_thinking": False} if effort == "none" else effort_hint(effort)
    tools, must_call = read_tools(request, "function")
    is_single = not values["parallel_tool_calls"] and bool(tools)
    chat = ChatPrompt(messages, tools, values["chat_template_kwargs"], hints)
    return ParsedRequest([chat], chat, must_call=must_call, is_single=is_single)


def read_message(message: BodyReader) -> dict[str, Any]:
    role = ROLES[message.one_of("role", ROLES)]
    read: dict[str, Any] = {"role": role}
    if role == "tool":
        read["tool_call_id"] = message.read("tool_call_id", str)
    if role == "assistant":
        reasonings = [message.text(name, "") for name in REASONING]
        if reasoning := next(filter(None, reasonings), ""):
            read["reasoning_content"] = reasoning
        for call in message.items("tool_calls", []):
            id = call.read("id", str)
            calls = read.setdefault("tool_calls", [])
            calls.append(call_of(id, call.inner("function")))
    refusal = message.text("refusal", "") if role == "assistant" else None
    read["content"] = message.text("content", refusal)
    message.reject_unknown(ignored=IGNORED_IN_MESSAGES)
    return read


def read_prompts(request: BodyReader, name: str = "prompt", most: int = MAX_CHOICES) -> list:
    """Return the prompts: a string, a list of strings, token ids, or a list of lists of ids."""

    def are_ids(value: Any) -> bool:
        is_list = isinstance(value, list) and bool(value)
        return is_list and all(type(token) is int for token in value)

    prompt = request.get(name)
    prompts = [prompt] if isinstance(prompt, str) or are_ids(prompt) else prompt
    wrong = request.bad(name, "a string, a list of strings, or token ids, none of them empty")
    if not isinstance(prompts, list) or not prompts or "" in prompts:
        raise wrong
    check_count(name, len(prompts), "prompts", most)
    are_texts = all(isinstance(one, str) for one in prompts)
    if not are_texts and not all(map(are_ids, prompts)):
        raise wrong
    return prompts


# --- answers --------------------------------------------------------------------------------------


HOLE = "\0"  # placeholder for the text; no model's name contains it


class Completion(ProtocolAdapter):
    """The adapter for /v1/completions. Stream chunks have the same format as the complete body."""

    parse_request = staticmethod(partial(parse_request, is_chat=False))
    prompt = "prompt"
    prefix = "cmpl-"
    kind = "text_completion"
    kind_of_chunk = "text_completion"
    silence: ClassVar = {"text": ""}  # a chunk without text

    def __init__(self, parsed: ParsedRequest, name: str, model: str):
        super().__init__(parsed, name, model)
        self._usage = {"usage": None} if parsed.usage else {}
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        # Choice -> the bytes before and after the text of its events
        self._around: dict[int, list[bytes]] = {}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict:
        entries = []
        for index, choice in enumerate(choices):
            own = self._own(choice)
            entries.append(self._entry(index, own, choice.words, choice.reason))
        return {
            **self._head,
            "object": self.kind,
            "choices": entries,
            "usage": written(usage),
        }

    def changed(self, index: int, change: Change) -> bytes:
        """Return an event. The part that all events of a choice share is serialized only once."""
        if change.kind != "delta":
            return b""
        if change.words is not None:
            return self._chunk(index, self._said(change.text), change.words)
        if index not in self._around:
            event = self._chunk(index, self._said(HOLE))
            self._around[index] = event.split(dump(HOLE))
        return dump(change.text).join(self._around[index])

    def progress(self, progress: PromptProgress) -> bytes:
        """Return an event in llama.cpp's format, with two more fields for a long prompt."""
        prefill = progress.prefill
        told = {
            "total": prefill.total,
            "cache": prefill.cached,
            "processed": prefill.done,
            "time_ms": round(progress.seconds * 1000),
        }
        if prefill.is_long and prefill.tokens_per_s is not None:
            told["tokens_per_second"] = round(prefill.tokens_per_s, 1)
            if prefill.left_s is not None:
                told["left_ms"] = round(prefill.left_s * 1000)
        return self._chunk(0, self.silence, prompt_progress=told)

    def last(self, index: int, choice: Choice) -> bytes:
        return self._chunk(index, self.silence, reason=choice.reason)

    def close(self, usage: Usage) -> bytes:
        done = event("[DONE]")
        if not self._usage:
            return done
        last = {
            **self._head,
            "object": self.kind_of_chunk,
            "choices": [],
            "usage": written(usage),
        }
        return event(last) + done

    def fail(self, refusal: APIError) -> bytes:
        return event(refusal.body) + event("[DONE]")

    def _own(self, choice: Choice) -> dict:
        return {"text": choice.text("content")}

    def _said(self, text: str) -> dict:
        return {"text": text}

    def _words(self, words: Sequence[Word]) -> dict:
        def best(top: Sequence[tuple[str, float]]) -> dict[str, float]:
            # Reversed, so that the likeliest of several tokens with the same text is kept
            return {text: finite(logprob) for text, logprob in reversed(top)}

        return {
            "tokens": [word.text for word in words],
            "token_logprobs": [finite(word.logprob) for word in words],
            "top_logprobs": [best(word.top) for word in words],
            "text_offset": [word.offset for word in words],
        }

    def _chunk(
        self,
        index: int,
        said: dict,
        words: Sequence[Word] | None = None,
        reason: str | None = None,
        **more: Any,
    ) -> bytes:
        entry = self._entry(index, said, words, reason)
        own = {"object": self.kind_of_chunk, "choices": [entry]}
        return event(self._head | own | self._usage | more)

    def _entry(
        self, index: int, said: dict, words: Sequence[Word] | None, reason: str | None
    ) -> dict:
        logprobs = None if words is None else self._words(words)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}


class ChatCompletion(Completion):
    """The adapter for /v1/chat/completions: a message, or the deltas of a message."""

    parse_request = staticmethod(partial(parse_request, is_chat=True))
    prompt = "messages"
    prefix = "chatcmpl-"
    kind = "chat.completion"
    kind_of_chunk = "chat.completion.chunk"
    silence: ClassVar = {"delta": {}}

    def first(self, choices: int, usage: Callable[[], Usage]) -> bytes:
        """Return each choice's first chunk, which contains the assistant's role."""
        said = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk(index, said) for index in range(choices))

    def changed(self, index: int, change: Change) -> bytes:
        kind, item, text, words = change
        if item.kind == "content":
            return super().changed(index, change)
        if item.kind == "reasoning":
            delta = {"reasoning_content": text}
        else:
            call = called(item) if kind == "start" else {"function": {"arguments": text}}
            delta = {"tool_calls": [{"index": item.nth, **call}]}
        # Reasoning has no start event
        is_told = kind == "delta" or (kind == "start" and item.kind == "tool_call")
        return self._chunk(index, {"delta": delta}, words) if is_told else b""

    def _own(self, choice: Choice) -> dict:
        text = choice.text("content")
        reasoning = choice.text("reasoning")
        calls = [called(item) for item in choice.items if item.kind == "tool_call"]
        message = {"role": "assistant", "content": None if calls and not text else text}
        message["refusal"] = None
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def _said(self, text: str) -> dict:
        return {"delta": {"content": text}}

    def _words(self, words: Sequence[Word]) -> dict:
        def entry(text: str, logprob: float) -> dict:
            spelled = list(text.encode(errors="replace"))
            return {"token": text, "logprob": finite(logprob), "bytes": spelled}

        content = []
        for word in words:
            likely = [entry(text, logprob) for text, logprob in word.top]
            content.append(entry(word.text, word.logprob) | {"top_logprobs": likely})
        return {"content": content, "refusal": None}


def called(item: Item) -> dict:
    """Return a tool call with the arguments received so far."""
    function = {"name": item.name, "arguments": item.text}
    return {"id": item.id, "type": "function", "function": function}


def finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no infinity


def written(usage: Usage) -> dict:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def model(name: str, created: int, max_len: int, quantization: str, **facts: object) -> dict:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "nanobatch",
        "max_model_len": max_len,
        "quantization": quantization,
        **facts,
    }
