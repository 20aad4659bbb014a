"""From a body to its answer: how a request crosses from the server's thread to the engine's and
back.

The problem. The engine's thread steps for everybody, so it must wait neither for a client nor for a
lock of the server's. The server's thread serves all clients at once, so it must not block either,
and a long prompt takes a second to tokenize.

    worker threads       parse, tokenize, submit
    engine's thread      after each commit, wake the server once if a request has new output
    server's thread      take each request's delta; send it as events, or as one JSON at the end

The invariant: after `Answer.cancel` no choice of the answer holds a slot.

Where next: `choice.py`, where text becomes items.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from base.error_reports import describe
from base.job_process import BusyError
from base.strings import json_or_none
from base.validation import GrammarError
from engine.prefill_progress import UNREAD, PrefillProgress
from request import QueueFull
from sampling_params import SamplingParams
from server.body_reader import APIError, invalid, without_folders
from server.choice import Choice, Words
from server.http import HTTPRequest, Reply
from server.metrics import ServerMetrics
from server.protocol_adapter import (
    ParsedRequest,
    Progress,
    ProtocolAdapter,
    Usage,
    dump_large,
    shutting_down,
)
from text.tokenizer import Chat, Prompt, TooLongError
from text.tool_formats import OutputFormat, tool_call_grammar
from text.tool_parser import OutputParser

if TYPE_CHECKING:
    from nanobatch import Engine
    from text.grammar import Grammar

MAX_LOGPROBS = 200_000  # log probabilities in one response, over all choices
PIECES = 64  # pieces written at once, at most
PIECE = 256  # bytes of a piece in memory, about
SCORE = 12  # and of each of its log probabilities
WORST = ("error", "cancelled", "length", "stop")  # finish reasons, worst first
LOG_S = 10.0  # seconds between two log lines about one long prompt
TOO_LONG = "context_length_exceeded"
# Of this process: so servers behind one balancer never give the same id
SUFFIX = secrets.token_hex(2)


class ServedModel(NamedTuple):
    """The engine and what clients may call its model."""

    engine: Engine
    names: tuple[str, ...]  # the model's names; the first is its own
    defaults: dict[str, float]  # for settings that a request leaves out
    max_tokens: int | None = None  # and for its own limit; None: to the end of the slot


class Answer:
    """The choices of one request."""

    def __init__(
        self,
        served: ServedModel,
        protocol: type[ProtocolAdapter],
        client: str,
        open: dict[int, Answer],
    ):
        """`client`: who asks, for the policy `fair`. `open`: the answers by request id."""
        self.choices: list[Choice] = []
        self._served = served
        self._protocol = protocol
        self._client = client
        self._open = open
        # Parsed, not submitted yet
        self._later: deque[tuple[Prompt, SamplingParams]] = deque()
        self._is_many = False  # embeddings are wanted, perhaps thousands
        self._grammar: Grammar | None = None
        self.adapter: ProtocolAdapter | None = None  # set by `submit`
        self._came = time.perf_counter()
        self._read_s = 0.0  # seconds from the body to submission
        self._is_read = False  # whether the client knows that its prompt is read
        self._logged = -math.inf  # time of the last log line about the prompt
        self._is_over = False  # nobody waits for this answer any more
        self.has_output = asyncio.Event()

    # --- in a worker thread

    def ask(self, body: bytes) -> None:
        """Parse a body and submit its prompts. After an exception, call `cancel`: some choices may
        be submitted already.

        A grammar may take seconds to compile, and requests without one must not wait for it. So a
        request with a grammar is only parsed here, and `submit` is called in another thread.
        """
        engine, names, defaults, most = self._served
        parsed = self.parsed = self._protocol.parse_request(body, names)
        self._is_many = "embeds" in parsed.settings
        asks = self._later
        try:
            for prompt in parsed.prompts:
                read = read_prompt(engine, prompt, self._protocol.prompt)
                room = min(engine.sched.max_len - len(read.ids), most_tokens(parsed))
                settings = (
                    defaults
                    | parsed.settings
                    | {"max_tokens": min(parsed.max_tokens or most or room, room)}
                )
                if held := grammar_of(engine, parsed, read):
                    settings["grammar"] = held
                for _ in range(parsed.n):
                    asks.append((read, SamplingParams(**settings)))
                    # Otherwise the choices would be identical
                    if type(settings.get("seed")) is int:
                        settings["seed"] += 1
                        if settings["seed"] == 2**64:
                            settings["seed"] = 0
            if len(asks) > engine.sched.max_queue and not self._is_many:
                raise ValueError(
                    f"n: {len(asks)} choices are wanted, but the queue holds {engine.sched.max_queue}"
                )
        except ValueError as error:
            raise self._refusal_of(error) from None
        if not asks[0][1].grammar:
            self.submit()

    def submit(self) -> None:
        """Submit the parsed prompts. With a grammar this may take seconds."""
        source = self._later[0][1].grammar  # all prompts of a request have the same
        try:
            self._grammar = source and self._served.engine.text.grammar(source)
        except (ValueError, RuntimeError) as error:
            raise self._refusal_of(error) from None
        self._submit_next()
        name = f"{self.choices[0].handle.id}-{SUFFIX}"
        self.adapter = self._protocol(self.parsed, name, self._served.names[0])
        self._read_s = time.perf_counter() - self._came

    def _submit_next(self) -> int:
        """Submit the next prompts; of many texts only some at a time, so that others need not wait
        for all. Return the number of choices that have not ended."""
        running = sum(choice.handle.finish_reason is None for choice in self.choices)
        at_once = 2 * self._served.engine.sched.slots if self._is_many else math.inf
        while self._later and running < at_once:
            try:
                self._begin(*self._later[0])
            except (ValueError, RuntimeError) as error:
                if running and self.adapter:
                    break  # until the next of its own has ended
                raise self._refusal_of(error) from None
            self._later.popleft()
            running += 1
        return running

    def _begin(self, prompt: Prompt, sampling: SamplingParams) -> None:
        engine = self._served.engine
        grammar = self._grammar and self._grammar.copy()
        # A second parser, in the engine's thread: it stops the answer after its one call
        ends = self._parser(prompt).ends if self.parsed.is_single else None
        handle = engine.submit(prompt, sampling, client=self._client, grammar=grammar, ends=ends)
        words = None if sampling.logprobs is None else Words(engine.text, handle)
        self.choices.append(Choice(handle, self._parser(prompt), words))
        self._open[handle.id] = self
        if handle.pieces or handle.request.finish_reason:
            self.has_output.set()  # a commit before this line did not find us
        if self._is_over:  # meanwhile
            self.cancel()
            self.forget()

    def _parser(self, prompt: Prompt) -> OutputParser:
        chat = self.parsed.chat
        if not chat:
            return OutputParser(OutputFormat())
        functions = [tool["function"] for tool in chat.tools]
        tools = {function["name"]: function["parameters"] for function in functions}
        output_format = self._served.engine.text.output_format
        is_strict = "grammar" in self.parsed.settings  # the answer may be JSON that is no call
        return OutputParser(
            output_format, tools, prompt.is_thinking, self.parsed.is_single, is_strict
        )

    # --- in the server's thread

    async def _output(self) -> None:
        await self.has_output.wait()
        self.has_output.clear()  # before the output is taken: the next commit sets it again

    @property
    def lag(self) -> int:
        """Bytes waiting for a client that reads too slowly, about."""
        if not self.choices or not self.parsed.stream:  # not parsed yet, or one JSON
            return 0
        waiting = sum(choice.handle.pending for choice in self.choices)
        if not waiting:
            return 0
        wanted = self.choices[0].handle.sampling
        scores = 0 if wanted.logprobs is None else wanted.logprobs + 1
        if wanted.grammar:  # the scores before the mask are kept, too
            scores *= 2
        return waiting * (PIECE + SCORE * scores)

    async def whole(self) -> Reply:
        """One JSON. It may have megabytes, so another thread makes it."""
        while self._submit_next():
            await self._output()
        if self._failure():
            raise self._failure()  # without a name: a name would refer to its own traceback
        body = await asyncio.to_thread(self._body)
        return Reply(body, headers={"X-Request-Id": self.adapter.id})

    def _body(self) -> bytes:
        for choice in self.choices:
            choice.read()
        return dump_large(self.adapter.whole(self.choices, self._usage()))

    async def stream(self, request: HTTPRequest) -> None:
        """Server-sent events, one for each delta of a choice."""
        request.begin_events(self.adapter.id)
        left = dict(enumerate(self.choices))
        said = self.adapter.first(len(left), self._usage)
        if self.parsed.progress:
            said += self.adapter.progress(self._progress)
        while left:
            if said:
                await request.write(said)
            await self._output()
            said = b""
            for index, choice in list(left.items()):
                text, is_last, has_more = choice.handle.take_delta(PIECES)
                if text:
                    said += self._events(index, text)
                if has_more:
                    self.has_output.set()
                if not is_last:
                    continue
                if failure := self._failure():
                    request.note(reason=failure.code, message=failure.message)
                    await request.write(said + self.adapter.fail(failure))
                    return
                said += self._events(index, None)
                del left[index]
            if self.has_output.is_set():  # the rest later, so that other answers get a turn
                await asyncio.sleep(0)
        await request.write(said + self.adapter.close(self._usage()))

    def _events(self, index: int, piece: str | None) -> bytes:
        """The events of a piece, or of a choice's end."""
        choice = self.choices[index]
        told = b""
        if self.parsed.progress and not self._is_read:
            self._is_read = True
            told += self.adapter.progress(self._progress)
        for change in choice.grow(piece):
            told += self.adapter.changed(index, change)
        if piece is None:
            told += self.adapter.last(index, choice)
        return told

    def _usage(self) -> Usage:
        metrics = [choice.handle.metrics for choice in self.choices]
        prompts = metrics[:: self.parsed.n]  # of each prompt's first choice
        return Usage(
            prompt=sum(m.prompt_tokens for m in prompts),
            # Only rows of the same client: others' would confirm a guess at their prompts
            cached=sum(
                choice.handle.request.prefix.own for choice in self.choices[:: self.parsed.n]
            ),
            output=sum(m.output_tokens for m in metrics),
            reasoning=sum(choice.reasoning_tokens for choice in self.choices),
        )

    @property
    def _progress(self) -> Progress:
        """Of the first prompt. Rows that another client wrote would confirm a guess at its prompt,
        so they count when the whole prompt has been read."""
        handle = self.choices[0].handle
        request = handle.request
        waiting = list(self._served.engine.sched.waiting) if request.slot is None else []
        prefill = handle.prefill
        done = prefill.done
        if done < prefill.total:
            done -= prefill.cached - request.prefix.own
        return Progress(
            prefill=prefill._replace(done=done, cached=request.prefix.own),
            before=sum(id < request.id for id in waiting),
            seconds=time.perf_counter() - self._came,
        )

    def prefill_to_log(self, now: float) -> PrefillProgress | None:
        """Progress of the first prompt, if it is long and due for a log line."""
        prefill = self.choices[0].handle.prefill if self.choices else UNREAD
        if not prefill.is_long or now - self._logged < LOG_S:
            return None
        self._logged = now
        return prefill

    def progress(self) -> bytes:
        """While the prompt is read: an event or a comment with its progress."""
        if self.choices[0].handle.pieces:
            return b""
        progress = self._progress
        return self.adapter.progress(progress) if self.parsed.progress else progress.comment

    def _failure(self) -> APIError | None:
        """The error to send if a choice has failed."""
        for choice in self.choices:
            handle = choice.handle
            if isinstance(handle.exception, GrammarError):
                return self._refusal_of(ValueError(handle.error))
            if handle.finish_reason == "error":
                words = without_folders(handle.error)
                return APIError(500, f"request {handle.id} failed: {words}", "failed")
            if handle.finish_reason == "cancelled":
                return APIError(
                    503, f"request {handle.id} was cancelled by the server", "cancelled"
                )
        return None

    # --- in any thread

    def _refusal_of(self, error: ValueError | RuntimeError) -> APIError:
        """An error of `SamplingParams` or the engine, with the body's field that it is about."""
        if isinstance(error, QueueFull):
            return APIError(429, str(error), "rate_limit_exceeded", Retry_After="1")
        if isinstance(error, BusyError):
            return APIError(503, f"the grammar: {error}", "busy", Retry_After="1")
        if isinstance(error, RuntimeError):  # the engine has been closed
            return shutting_down()
        settings = self.parsed.settings
        # A grammar that the body does not name is the one for tool calls
        kind = next(iter(settings.get("grammar", ())), "calls")
        grammars = {"calls": "tools", "json": self._protocol.form, "lark": "guided_grammar"}
        params = {name: name for name in settings}
        params["token"] = "logit_bias"
        params["grammar"] = grammars.get(kind, f"guided_{kind}")
        subject = re.match(r"\w*", str(error))[0]
        return invalid(params.get(subject), str(error))

    def cancel(self) -> None:
        """End every choice that still runs."""
        self._is_over = True
        for choice in list(self.choices):
            choice.handle.cancel()

    def forget(self) -> None:
        """Route no more output here."""
        for choice in list(self.choices):
            self._open.pop(choice.handle.id, None)

    def account(self, request: HTTPRequest, server_metrics: ServerMetrics) -> None:
        """Write this answer into the records and metrics. Times are the engine's, plus the time
        before submission."""
        total = self._usage()
        metrics = [choice.handle.metrics for choice in self.choices]
        first_tokens = []
        for m, choice in zip(metrics, self.choices, strict=True):
            first_tokens.append(None if m.ttft_s is None else self._read_s + m.ttft_s)
            server_metrics.times(first_tokens[-1], choice.handle.times)
        for choice in self.choices[:: self.parsed.n]:
            asked = choice.handle.request
            server_metrics.prompt(len(asked.prompt), asked.prefix.own, asked.prefix.cached_from)
        reasons = filter(None, [choice.handle.finish_reason for choice in self.choices])
        first = metrics[0]
        reading = (first.ttft_s or 0.0) - (first.queued_s or 0.0)
        request.note(
            reason=request.record.reason or min(reasons, key=WORST.index, default=""),
            prompt_tokens=total.prompt,
            cached_tokens=sum(m.cached_tokens for m in metrics[:: self.parsed.n]),
            tokens=total.output,
            draft_tokens=sum(m.draft_tokens for m in metrics),
            accepted_tokens=sum(m.accepted_tokens for m in metrics),
            ttft_s=first_tokens[0],
            prompt_tps=(first.prompt_tokens - first.cached_tokens) / reading
            if reading > 0
            else None,
            generation_tps=first.tokens_per_s,
        )


def most_tokens(parsed: ParsedRequest) -> int:
    """Maximum length of an answer: 20 log probabilities per token take kilobytes."""
    top = parsed.settings.get("logprobs")
    if top is None:
        return sys.maxsize
    return MAX_LOGPROBS // (parsed.n * len(parsed.prompts) * (1 + top))


def check_tools(output_format: OutputFormat, chat: Chat, param: str) -> None:
    """Refuse tools, unless we know how this model calls them."""
    called = any("tool_calls" in each or each["role"] == "tool" for each in chat.messages)
    if (chat.tools or called) and not output_format.tools:
        field = "tools" if chat.tools else param
        raise invalid(field, output_format.why, "unsupported_parameter")


def grammar_of(engine: Engine, parsed: ParsedRequest, prompt: Prompt) -> Mapping[str, Any] | None:
    """The grammar of an answer: calls that must come; or the request's own grammar, with optional
    calls, and reasoning before it."""
    given = parsed.settings.get("grammar")
    if not parsed.chat:
        return given
    output_format = engine.text.output_format
    answer = None
    if not parsed.must_call:
        answer = given and given.get("json")
        if isinstance(answer, str):
            answer = json_or_none(answer)
        if not isinstance(answer, dict) or not (parsed.chat.tools or output_format.reasoning):
            return given
    text = tool_call_grammar(
        output_format,
        parsed.must_call or parsed.chat.tools,
        answer=answer,
        is_single=parsed.is_single,
        is_thinking=prompt.is_thinking,
        marks=engine.text.marks,
    )
    return {"lark": text}


def count(
    served: ServedModel, parse_request: Callable[[bytes, Sequence[str]], ParsedRequest], body: bytes
) -> int:
    """The number of tokens of a prompt."""
    parsed = parse_request(body, served.names)
    return len(read_prompt(served.engine, parsed.prompts[0], "messages").ids)


def read_prompt(engine: Engine, prompt: str | list | Chat, param: str) -> Prompt:
    """Tokenize a prompt, if a slot has room for it and one more token. `param`: the body's field."""
    text = engine.text
    max_len = engine.sched.max_len
    size = len(prompt)
    if isinstance(prompt, Chat):
        check_tools(text.output_format, prompt, param)
        size = sum(len(message["content"]) for message in prompt.messages)
        calls = [message["tool_calls"] for message in prompt.messages if "tool_calls" in message]
        size += len(str([prompt.tools, calls]))
    least = size if isinstance(prompt[0], int) else size // text.longest
    try:
        # A prompt that is certainly too long is not tokenized, which would take long
        read = text.read(prompt, max_len) if least < max_len else None
    except TooLongError as error:
        read = None
        least = error.tokens
    except ValueError as error:
        raise invalid(param, without_folders(str(error))) from None
    except BaseException as error:  # a Rust panic is no Exception
        words = without_folders(describe(error))
        raise invalid(param, f"{param} cannot be read: {words}") from None
    if read is None or len(read.ids) >= max_len:
        tokens = f"at least {least:,}" if read is None else f"{len(read.ids):,}"
        words = (
            f"this model's maximum context length is {max_len:,} tokens, but {param} has {tokens}"
        )
        words += "; give less, or start the server with a larger --max-len"
        raise invalid(param, words, TOO_LONG)
    return read
