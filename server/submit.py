"""Submit the prompts of one request to the engine.

The engine's thread steps for all requests, so a worker thread does the slow work: it parses and
tokenizes the body (`tokenize_request.py`), compiles a grammar, and submits.

The invariant: after `Submission.cancel` no choice of the request holds a slot.

Next: `stream.py`, which writes the answer.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from sampling_params import SamplingParams
from server.body_reader import read_json
from server.choice import Choice, Words
from server.model_pool import ModelPool, ServedModel, Ticket
from server.protocol_adapter import ParsedRequest, ProtocolAdapter
from server.tokenize_request import TokenizedRequest, tokenize
from text.tokenizer import Prompt
from text.tool_formats import OutputFormat
from text.tool_parser import OutputParser

if TYPE_CHECKING:
    from text.grammar import Grammar


class Submission:
    """The submission of one request. Runs in worker threads; `cancel` may be called from any thread."""

    def __init__(self, models: ModelPool, protocol: type[ProtocolAdapter], client: str):
        """`client`: the client's address, for the policy `fair`."""
        self.model = ""  # the model's name
        self.request: ParsedRequest | None = None  # set by `parse_and_submit`
        self.served: ServedModel | None = None  # the borrowed model
        self.ticket: Ticket | None = None  # the place in the queue for a model that is not loaded
        self.asked: TokenizedRequest | None = None
        self.choices: list[Choice] = []  # submitted so far; the list only grows
        self.began = time.perf_counter()
        self.read_s = 0.0  # seconds from receiving the body to submission
        self._models = models
        self._protocol = protocol
        self._client = client
        # Tokenized prompts that are not submitted yet
        self._left: deque[tuple[Prompt, SamplingParams]] = deque()
        self._grammar: Grammar | None = None
        self._is_cancelled = False  # set by `cancel`: nobody waits for the answer any more
        self._lock = threading.Lock()  # guards borrowing and giving back
        self._is_given_back = False  # set by `give_back`: nothing may be borrowed any more

    def parse_and_submit(self, body: bytes) -> None:
        """Parse a body and submit its prompts, unless they need a grammar.

        If the model is not loaded, set `ticket` and return. Once the model is in `served`, the caller
        continues with `parse_prompts`. After an exception the caller must call `cancel`, because some
        choices may already be submitted.
        """
        reader = read_json(body)
        model = self._models.named(reader.get("model"))
        self.model = model.name
        self.request = self._protocol.parse_request(reader)
        with self._lock:
            if self._is_given_back:  # the client hung up while this thread parsed the body
                return
            lent = self._models.borrow(model)
            if isinstance(lent, Ticket):
                self.ticket = lent
                return
            self.served = lent
        self.parse_prompts()

    def parse_prompts(self) -> None:
        """Tokenize the prompts, and submit them unless they need a grammar.

        A grammar may take seconds to compile, and requests without one must not wait for it. So the
        caller runs `submit` for a request with a grammar in a different thread pool.
        """
        self.asked = tokenize(self.served, self._protocol, self.request)
        self._left.extend(self.asked.choices)
        if not self.asked.grammar:
            self.submit()

    def submit(self) -> None:
        """Submit the tokenized prompts. Compiling a grammar may take seconds."""
        source = self.asked.grammar
        try:
            self._grammar = source and self.served.engine.text.grammar(source)
        except (ValueError, RuntimeError) as error:
            raise self.asked.refusal_of(error) from None
        self._submit_prompts(is_first=True)
        self.read_s = time.perf_counter() - self.began

    @property
    def has_more(self) -> bool:
        """True while some prompts wait until others of the same request have finished."""
        return bool(self._left)

    @property
    def running(self) -> int:
        """The number of submitted choices that have not finished."""
        return sum(choice.handle.finish_reason is None for choice in self.choices)

    def submit_more(self) -> None:
        """Submit more prompts in place of those that have finished."""
        self._submit_prompts(is_first=False)

    def _submit_prompts(self, is_first: bool) -> None:
        """Submit prompts. Only a few embeddings run at a time, so that other requests do not wait for
        thousands of them."""
        running = self.running
        at_once = 2 * self.served.engine.sched.slots if self.asked.is_embedding else math.inf
        while self._left and running < at_once:
            try:
                self._submit_prompt(*self._left[0])
            except (ValueError, RuntimeError) as error:
                if running and not is_first:
                    break  # try again when one of this request's prompts has finished
                raise self.asked.refusal_of(error) from None
            self._left.popleft()
            running += 1

    def _submit_prompt(self, prompt: Prompt, sampling: SamplingParams) -> None:
        engine = self.served.engine
        grammar = self._grammar and self._grammar.copy()
        # A second parser, which runs in the engine's thread and stops the answer after its first call
        ends = self._parser(prompt).ends if self.asked.request.is_single else None
        handle = engine.submit(prompt, sampling, client=self._client, grammar=grammar, ends=ends)
        words = None if sampling.logprobs is None else Words(engine.text, handle)
        self.choices.append(Choice(handle, self._parser(prompt), words))
        if self._is_cancelled:  # `cancel` was called before the choice was in the list
            handle.cancel()

    def _parser(self, prompt: Prompt) -> OutputParser:
        chat = self.asked.request.chat
        if not chat:
            return OutputParser(OutputFormat())
        functions = [tool["function"] for tool in chat.tools]
        tools = {function["name"]: function["parameters"] for function in functions}
        output_format = self.served.engine.text.output_format
        # With a grammar the answer may be JSON that is not a tool call
        is_strict = "grammar" in self.asked.request.settings
        return OutputParser(
            output_format, tools, prompt.is_thinking, self.asked.request.is_single, is_strict
        )

    def cancel(self) -> None:
        """Cancel all running choices. May be called from any thread."""
        self._is_cancelled = True
        for choice in list(self.choices):
            choice.handle.cancel()

    def give_back(self) -> None:
        """Return the borrowed model to the pool after the request has finished, or leave the queue for it."""
        with self._lock:
            self._is_given_back = True
        if self.ticket:
            self._models.leave(self.ticket)
        elif self.served:
            self._models.give_back(self.served)
