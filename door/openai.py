"""OpenAI's protocol: what a request's body asks for, and the bodies of the answers.

The problem. Every client speaks this protocol, and each in its own way. Some send a field as null
and mean that it is not there, some send wishes that ask for nothing (`"presence_penalty": 0`,
`"tools": []`), and some send wishes that we cannot fulfil. A client that gets an answer to another
question than its own does not notice.

What this file keeps. A body is understood completely, or refused with a status, a message and the
field's name. No field is ignored if it asks for something. Nothing here knows sockets or engines:
dictionaries in, dictionaries out.

Where next: `bridge.py`, which reads and writes them.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from parts.api.handle import TokenLogprob
from parts.api.views import Metrics
from parts.checks import shown, whole
from parts.text.tokens import Text

ROLES = ("system", "developer", "user", "assistant")
# The most of each in one request
N, CHOICES, STOPS, STOP_LENGTH, BIASES, TOP = 16, 128, 16, 1000, 1000, 20
MESSAGES = 2048  # and their parts, together
MARKS = 100_000  # brackets, braces and colons of a body, in texts, too
SCORES = 200_000  # log probabilities in one answer, over all its choices

# These go to `Sampling` as they are, and it checks them.
PLAIN = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "ignore_eos")
KNOWN = {
    *PLAIN,
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stop",
}
# What an answer must be: a name of vLLM's, and what `Sampling.grammar` calls it.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "lark",
}
KNOWN |= {"response_format", *GUIDED}
CHAT = {*KNOWN, "logprobs", "logit_bias", "messages", "top_logprobs"}
COMPLETIONS = {*KNOWN, "logprobs", "logit_bias", "prompt"}
# They change nothing in an answer: a user's name, notes for a bill, hints for a cache.
NO_WISH = {
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
}
# What else asks for nothing. So does everything that is null, false, zero or empty.
NEUTRAL = {
    "best_of": (1,),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "typical_p": (1,),
    "length_penalty": (1,),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "add_generation_prompt": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}


class Refusal(Exception):
    """An answer that is an error. OpenAI's clients make an exception of their own of each
    status."""

    TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}  # noqa: RUF012

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        **headers: str | None,
    ):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = {name.replace("_", "-"): value for name, value in headers.items() if value}

    @property
    def body(self) -> dict:
        kind = self.TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


def ending() -> Refusal:
    return Refusal(503, "the server is ending", "draining", Retry_After="5")


# `json.dumps` would make one each time
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def dump(body: Any) -> bytes:
    """JSON as UTF-8. A message may quote half a surrogate pair, which UTF-8 does not have."""
    return ENCODER.encode(body).encode(errors="replace")


def dump_politely(body: Any) -> bytes:
    """The same bytes, of a body that may be huge: `dump` lets no other thread run until it has
    ended."""
    return "".join(ENCODER.iterencode(body)).encode(errors="replace")


# --- what a body asks for -----------------------------------------------------------------------


class Wish(NamedTuple):
    """What one body asks for. Each prompt is a text, chat messages, or token ids; each gets `n`
    choices."""

    prompts: list
    settings: dict[str, Any]  # for `Sampling`
    max_tokens: int | None
    n: int
    stream: bool
    usage: bool  # at the end of the stream

    @property
    def most_tokens(self) -> int:
        """How long an answer may be. Log probabilities of 20 tokens beside each one take
        kilobytes."""
        top = self.settings["logprobs"]
        if top is None:
            return sys.maxsize
        return SCORES // (self.n * len(self.prompts) * (1 + top))


def understand(body: bytes, chat: bool, names: Sequence[str]) -> Wish:
    """The body of POST /v1/chat/completions, or of POST /v1/completions. `names`: the models that
    are here."""
    given = read_json(body)
    asked = {name: value for name, value in given.items() if value is not None}
    refuse_what_cannot_be_kept(asked, CHAT if chat else COMPLETIONS)
    check_model(asked.get("model", names[0]), names)
    prompts = [read_messages(asked.get("messages"))] if chat else read_prompts(asked.get("prompt"))
    stream, options = boolean(asked, "stream"), asked.get("stream_options", {})
    if not isinstance(options, dict):
        raise bad("stream_options", options, "an object")
    lengths = [
        number(asked, name, 1, 2**63 - 1)
        for name in ("max_tokens", "max_completion_tokens")
        if name in asked
    ]
    n = number(asked, "n", 1, N) if "n" in asked else 1
    if n * len(prompts) > CHOICES:
        words = f"{len(prompts)} prompts with n = {n} each, but one request has at most {CHOICES} choices"
        raise Refusal(400, words, "invalid_value", "n")
    settings = {name: asked[name] for name in PLAIN if name in asked}
    if type(asked.get("top_k")) is int and asked["top_k"] == -1:
        settings["top_k"] = 0  # as other servers write "all"
    if asked.get("top_p") == 0 and not isinstance(asked["top_p"], bool):
        settings["top_p"] = 1e-9  # the likeliest token alone
    settings |= {
        "stop": read_stop(asked.get("stop", [])),
        "logit_bias": read_bias(asked.get("logit_bias", {})),
    }
    if grammar := read_grammar(asked):
        settings["grammar"] = grammar
    settings["logprobs"] = chat_logprobs(asked) if chat else completions_logprobs(asked)
    return Wish(
        prompts,
        settings,
        min(lengths, default=None),
        n,
        stream,
        boolean(options, "include_usage", "stream_options"),
    )


def read_json(body: bytes) -> dict[str, Any]:
    # Of 4 MiB of "[]," Python makes a million lists, and lets no other thread run for half a second
    marks = sum(map(body.count, (b"[", b"{", b":")))
    if marks > MARKS:
        words = f"the body has {marks:,} brackets, braces and colons, but there may be at most {MARKS:,}"
        raise Refusal(413, words, "request_too_large")

    def no_number(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        given = json.loads(body.decode("utf-8-sig"), parse_constant=no_number)
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is no UTF-8 at byte {error.start}", "invalid_json") from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deep", "invalid_json") from None
    except ValueError as error:
        raise Refusal(
            400, f"the body is no valid JSON: {str(error)[:200]}", "invalid_json"
        ) from None
    if not isinstance(given, dict):
        raise Refusal(
            400, f"the body is {shown(given)}, but it must be a JSON object", "invalid_json"
        )
    return given


def refuse_what_cannot_be_kept(asked: dict[str, Any], known: set[str]) -> None:
    for name, value in asked.items():
        if name in known or name in NO_WISH or not value or value in NEUTRAL.get(name, ()):
            continue
        if name == "best_of" and value == asked.get("n"):
            continue
        words = f"{shown(name).strip(chr(39))} = {shown(value)} is not supported here; leave it out"
        raise Refusal(400, words, "unsupported_parameter", name[:100])


def check_model(model: Any, names: Sequence[str]) -> None:
    if not isinstance(model, str):
        raise bad("model", model, "a string")
    if model not in names:
        words = f"the model {shown(model, 200)} does not exist here; there is {names[0]!r}, also as 'default'"
        raise Refusal(404, words, "model_not_found", "model")


def read_messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise bad("messages", messages, "a list of at least one message")
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    parts = sum(len(content) for content in contents if isinstance(content, list))
    # A template takes time for each message, be it empty or not
    check_count("messages", len(messages) + parts, "messages and parts of messages", MESSAGES)
    return [read_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def read_message(place: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise bad(place, message, "an object with a role and a content", "messages")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise bad(f"{place}.role", role, f"one of {', '.join(ROLES)}", "messages")
    for name in message.keys() - {"role", "content", "name"}:
        said = message[name]  # tool_calls, audio, ...
        if any(said.values()) if isinstance(said, dict) else said:
            words = f"{place}.{name[:40]} is not supported here; leave it out"
            raise Refusal(400, words, "unsupported_parameter", "messages")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            words = f"{place} has a part of type {shown(kind)}, but only text can be read here"
            raise Refusal(400, words, "unsupported_content", "messages")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise bad(f"{place}.content", content, "a text or a list of parts of text", "messages")
        texts.append(part["text"])
    # Templates know no developer: it is the newer name of the system's role.
    return {"role": "system" if role == "developer" else role, "content": "".join(texts)}


def read_prompts(prompt: Any) -> list:
    """A text, a list of texts, token ids, or a list of those: as a list of prompts."""
    what = "a text, a list of texts, or token ids"

    def are_ids(value: Any) -> bool:
        return (
            isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
        )

    prompts = [prompt] if isinstance(prompt, str) or are_ids(prompt) else prompt
    if not isinstance(prompts, list) or not prompts:
        raise bad("prompt", prompt, what)
    check_count("prompt", len(prompts), "prompts", CHOICES)
    if not (all(isinstance(one, str) for one in prompts) or all(are_ids(one) for one in prompts)):
        raise bad("prompt", prompt, what)
    if "" in prompts:
        raise Refusal(
            400, "the prompt is empty; give at least one token", "invalid_value", "prompt"
        )
    return prompts


def read_stop(stop: Any) -> list[str]:
    """Texts alone: `Sampling` would take a number for a token id."""
    stops = [stop] if isinstance(stop, str) else stop
    if isinstance(stops, list):
        check_count("stop", len(stops), "texts", STOPS)
    if not isinstance(stops, list) or not all(
        isinstance(text, str) and 0 < len(text) <= STOP_LENGTH for text in stops
    ):
        raise bad(
            "stop",
            stop,
            f"a text or a list of texts, none empty or longer than {STOP_LENGTH:,} characters",
        )
    return stops


def read_bias(bias: Any) -> dict[int, float]:
    if isinstance(bias, dict):
        check_count("logit_bias", len(bias), "entries", BIASES)
    if not isinstance(bias, dict) or not all(re.fullmatch(r"-?[0-9]{1,18}", key) for key in bias):
        raise bad("logit_bias", bias, "an object that maps token ids, as strings, to numbers")
    return {int(key): value for key, value in bias.items()}


def chat_logprobs(asked: dict[str, Any]) -> int | None:
    wanted = boolean(asked, "logprobs")
    top = number(asked, "top_logprobs", 0, TOP) if "top_logprobs" in asked else 0
    if top and not wanted:
        words = "top_logprobs is given without logprobs; set logprobs to true"
        raise Refusal(400, words, "invalid_value", "top_logprobs")
    return top if wanted else None


def completions_logprobs(asked: dict[str, Any]) -> int | None:
    wanted = asked.get("logprobs")  # 0: the tokens' own, and no others beside them
    return None if wanted is None or wanted is False else number(asked, "logprobs", 0, TOP)


def boolean(asked: dict[str, Any], name: str, param: str | None = None) -> bool:
    value = asked.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad(name, value, "true or false", param)
    return bool(value)


def number(asked: dict[str, Any], name: str, least: int, most: int) -> int:
    try:
        return whole(name, asked[name], least, most)
    except ValueError as error:
        raise Refusal(400, str(error), "invalid_value", name) from None


def check_count(name: str, count: int, what: str, most: int) -> None:
    """Refuse too many of something before any of them is looked at."""
    if count > most:
        words = f"{name} has {count:,} {what}, but there may be at most {most:,}"
        raise Refusal(400, words, "invalid_value", name)


def bad(name: str, value: Any, what: str, param: str | None = None) -> Refusal:
    words = (
        f"{name} is missing; give {what}"
        if value is None
        else f"{name} = {shown(value)}, but it must be {what}"
    )
    return Refusal(
        400, words, "missing_parameter" if value is None else "invalid_value", param or name
    )


def read_grammar(asked: dict[str, Any]) -> dict[str, Any] | None:
    """`response_format`, or one of vLLM's four: as `Sampling.grammar`. None if there is none.

    A schema holds, or it is refused: `strict` changes nothing.
    """
    found = {kind: asked[name] for name, kind in GUIDED.items() if name in asked}
    form = asked.get("response_format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_object":
        found["object"] = {"type": "object"}
    elif kind == "json_schema":
        described = form.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise bad("response_format.json_schema.schema", schema, "a schema", "response_format")
        found["schema"] = schema
    elif kind != "text":
        types = '{"type": "json_schema", "json_schema": {"schema": ...}}, "json_object" or "text"'
        raise bad("response_format", form, types)
    if len(found) > 1:
        words = f"response_format and {', '.join(GUIDED)} exclude each other; give one of them"
        raise Refusal(400, words, "invalid_value", "response_format")
    for kind, source in found.items():
        return {"json" if kind in ("object", "schema") else kind: source}
    return None


def of_sampling(error: ValueError, settings: dict[str, Any]) -> Refusal:
    """What `Sampling` or the engine said, with the field that it names."""
    name = re.match(r"\w*", str(error))[0]
    if name == "grammar":
        kind = next(iter(settings["grammar"]))
        name = (
            "response_format"
            if kind == "json"
            else f"guided_{'grammar' if kind == 'lark' else kind}"
        )
    return Refusal(400, str(error), "invalid_value", name if name in CHAT | COMPLETIONS else None)


# --- the tokens of an answer as text ------------------------------------------------------------


class Word(NamedTuple):
    """One token of an answer: its text, where that begins in the answer, and what the model thought
    of it."""

    text: str
    offset: int
    logprob: float
    top: list[tuple[str, float]]


class Words:
    """An answer's tokens as texts that join to the answer, as they come.

    A token is often no text by itself: its bytes may end within a character, and a decoder drops
    the space before a first word. So each token's text is what it adds to those before it. A token
    whose text may be cut off by a stop text waits, as its text does.
    """

    def __init__(self, text: Text):
        self._text, self._stream = text, text.stream(())
        self._tokens: list[int] = []
        self._waiting: list[Word] = []
        # Characters: of all texts so far, and of those that have been shown
        self._length = self._shown = 0

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """The answer's tokens so far, of which only those are looked at that are new.

        The newest may lack its log probability for a moment.
        """
        known = len(self._tokens)
        for token, (logprob, top) in zip(tokens[known:], logprobs[known:], strict=False):
            before = self._tokens[-4:]
            piece = self._stream.push(token)
            others = [id for id, _ in top if id != token]
            texts = dict(zip(others, self._text.after(before, others), strict=True))
            likely = [(texts.get(id, piece), value) for id, value in top]
            self._tokens.append(token)
            self._waiting.append(Word(piece, self._length, logprob, likely))
            self._length += len(piece)

    def release(self, count: int) -> list[Word]:
        """Those whose text has been shown, now that so many more characters have."""
        self._shown += count
        # One without a text of its own waits for the text after it: it may be the end token, which
        # is not shown.
        ends = (w.offset + max(len(w.text), 1) for w in self._waiting)
        ready = sum(1 for _ in takewhile(lambda end: end <= self._shown, ends))
        # If the answer ends within a character, what is shown of that belongs to the last token.
        ready = min(ready, len(self._waiting) - self._stream.open)
        released, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return released

    def finish(self, text: str) -> list[Word]:
        """The rest, when the answer is complete. Tokens behind its end, such as a stop text's, are
        left out."""
        left = [w for w in self._waiting if w.offset < len(text)]
        # Cut off, or what a broken character becomes
        last = [w._replace(text=text[w.offset :]) for w in left[-1:]]
        self._waiting = []
        return left[:-1] + last


def finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no infinity


def chat_words(words: Sequence[Word]) -> dict:
    def entry(text: str, logprob: float) -> dict:
        return {
            "token": text,
            "logprob": finite(logprob),
            "bytes": list(text.encode(errors="replace")),
        }

    content = [
        entry(w.text, w.logprob) | {"top_logprobs": [entry(*likely) for likely in w.top]}
        for w in words
    ]
    return {"content": content, "refusal": None}


def completions_words(words: Sequence[Word]) -> dict:
    def best(top: Sequence[tuple[str, float]]) -> dict[str, float]:
        # Of two with one text, the likelier stays
        return {text: finite(logprob) for text, logprob in reversed(top)}

    return {
        "tokens": [w.text for w in words],
        "token_logprobs": [finite(w.logprob) for w in words],
        "top_logprobs": [best(w.top) for w in words],
        "text_offset": [w.offset for w in words],
    }


# --- the bodies of the answers ------------------------------------------------------------------


HOLE = "\0"  # where a text will be; no model is named so


class Shape:
    """The bodies of one answer. `chat` decides between the two shapes; a stream's chunks differ
    from a whole answer."""

    def __init__(
        self, chat: bool, number: int, suffix: str, model: str, streamed_usage: bool = False
    ):
        self.chat, self.usage = chat, {"usage": None} if streamed_usage else {}
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{number}-{suffix}"
        self.kind = "chat.completion" if chat else "text_completion"
        self.head = {
            "id": self.id,
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }
        # By choice: the event of a piece, but for its text
        self._around: dict[int, list[bytes]] = {}

    def whole(self, choices: list[dict], usage: dict) -> dict:
        return self.head | {"choices": choices, "usage": usage}

    def choice(self, index: int, text: str, reason: str, words: Sequence[Word] | None) -> dict:
        said = (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self.chat
            else {"text": text}
        )
        return {"index": index, **said, "logprobs": self.words(words), "finish_reason": reason}

    def words(self, words: Sequence[Word] | None) -> dict | None:
        if words is None:
            return None
        return chat_words(words) if self.chat else completions_words(words)

    def first(self, index: int) -> dict | None:
        """What a stream says of a choice before its first word: in a chat, who speaks."""
        return (
            self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
            if self.chat
            else None
        )

    def piece(self, index: int, text: str, words: Sequence[Word] | None) -> bytes:
        """The event of a piece of text. A stream has thousands, so what they have in common is
        written once."""
        if words is not None:
            return event(self._piece(index, text, words))
        if index not in self._around:
            self._around[index] = event(self._piece(index, HOLE)).split(dump(HOLE))
        return dump(text).join(self._around[index])

    def _piece(self, index: int, text: str, words: Sequence[Word] | None = None) -> dict:
        return self._chunk(
            index, {"delta": {"content": text}} if self.chat else {"text": text}, words
        )

    def last(self, index: int, reason: str) -> dict:
        return self._chunk(index, {"delta": {}} if self.chat else {"text": ""}, None, reason)

    def total(self, usage: dict) -> dict:
        return self._head() | {"choices": [], "usage": usage}

    def _head(self) -> dict:
        return self.head | ({"object": "chat.completion.chunk"} if self.chat else {})

    def _chunk(
        self, index: int, said: dict, words: Sequence[Word] | None = None, reason: str | None = None
    ) -> dict:
        choice = {"index": index, **said, "logprobs": self.words(words), "finish_reason": reason}
        return self._head() | {"choices": [choice]} | self.usage


def usage(prompts: Sequence[Metrics], answers: Sequence[Metrics]) -> dict:
    """`prompts`: of the first choice of each prompt; `answers`: of all choices."""
    read, written = sum(m.prompt_tokens for m in prompts), sum(m.output_tokens for m in answers)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(m.cached_tokens for m in prompts)},
    }


def models(name: str, created: int, max_len: int) -> dict:
    return {"object": "list", "data": [model(name, created, max_len)]}


def model(name: str, created: int, max_len: int) -> dict:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "nanobatch",
        "max_model_len": max_len,
    }


def event(body: dict | str) -> bytes:
    """One server-sent event."""
    return b"data: " + (body.encode() if isinstance(body, str) else dump(body)) + b"\n\n"
