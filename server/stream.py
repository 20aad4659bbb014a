"""Write the answer to one request, as a stream of events or as a single JSON body.

The server's thread serves all clients, so it must never block. After a commit the engine's thread wakes
it once for all answers with new output (`APIServer._on_commit`). Each answer then takes its own deltas.

Next: `choice.py`, which splits the text into items.
"""

from __future__ import annotations

import asyncio
import math
import time

from base.validation import GrammarError
from engine.handle import Handle
from engine.prefill_progress import PrefillProgress
from server.body_reader import APIError, without_folders
from server.http import HTTPRequest, Reply
from server.metrics import ServerMetrics
from server.protocol_adapter import PromptProgress, Usage, dump_large
from server.submit import Submission

PIECES = 64  # maximum number of pieces written at once
PIECE = 256  # approximate size of a piece in memory in bytes
SCORE = 12  # approximate size of a log probability in memory in bytes
WORST = ("error", "cancelled", "length", "stop")  # finish reasons, worst first
LOG_S = 10.0  # seconds between log lines about the same long prompt


class AnswerWriter:
    """Writes the choices of a submitted request to the client. Runs in the server's thread, except for
    `_whole_body`."""

    def __init__(self, submission: Submission, writers: dict[Handle, AnswerWriter]):
        """`writers`: the handle of each choice -> its writer, for all open requests."""
        asked = submission.asked
        self.choices = submission.choices
        self.is_stream = asked.request.stream
        self.has_output = asyncio.Event()
        self._submission = submission
        self._parsed = asked.request
        self._writers = writers
        served = submission.served
        name = f"{self.choices[0].handle.id}-{served.suffix}"
        self._adapter = asked.protocol(asked.request, name, served.name)
        self.id = self._adapter.id
        self._is_read = False  # whether the end of prefill was reported to the client
        self._logged = -math.inf  # time of the last log line about the prompt
        self._listen()

    def _listen(self) -> None:
        """Register for the output of all choices."""
        for choice in self.choices:
            self._writers[choice.handle] = self
        self.has_output.set()  # a commit before the registration did not wake this writer

    async def _output(self) -> None:
        await self.has_output.wait()
        self.has_output.clear()  # before taking the output, so that the next commit sets it again

    async def whole(self) -> Reply:
        """Return the complete answer. The body may be megabytes long, so a worker thread serializes it."""
        while True:
            if self._submission.has_more:
                before = len(self.choices)
                await asyncio.to_thread(self._submission.submit_more)
                if len(self.choices) > before:
                    self._listen()
            if not (self._submission.running or self._submission.has_more):
                break
            await self._output()
        if self._failure():
            raise self._failure()  # a local variable would form a cycle with the traceback
        body = await asyncio.to_thread(self._whole_body)
        return Reply(body, headers={"X-Request-Id": self.id})

    def _whole_body(self) -> bytes:
        for choice in self.choices:
            choice.parse_whole()
        return dump_large(self._adapter.whole(self.choices, self._usage()))

    async def stream(self, request: HTTPRequest) -> None:
        """Send the answer as server-sent events, one for each delta of a choice."""
        if request.status is None:  # otherwise the stream started while the model was being loaded
            request.begin_events(self.id)
        left = dict(enumerate(self.choices))
        said = self._adapter.first(len(left), self._usage)
        if self._parsed.progress:
            said += self._adapter.progress(self._progress)
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
                    request.update_record(reason=failure.code, message=failure.message)
                    await request.write(said + self._adapter.fail(failure))
                    return
                said += self._events(index, None)
                del left[index]
            if self.has_output.is_set():  # let other writers run before this one continues
                await asyncio.sleep(0)
        await request.write(said + self._adapter.close(self._usage()))

    def _events(self, index: int, piece: str | None) -> bytes:
        """Return the events for a piece of text, or for the end of a choice (None)."""
        choice = self.choices[index]
        told = b""
        if self._parsed.progress and not self._is_read:
            self._is_read = True
            told += self._adapter.progress(self._progress)
        for change in choice.grow(piece):
            told += self._adapter.changed(index, change)
        if piece is None:
            told += self._adapter.last(index, choice)
        return told

    @property
    def lag(self) -> int:
        """The approximate number of bytes queued for a client that reads too slowly."""
        if not self._parsed.stream:  # a single body is counted in `HTTPRequest.left`
            return 0
        waiting = sum(choice.handle.pending for choice in self.choices)
        if not waiting:
            return 0
        wanted = self.choices[0].handle.sampling
        scores = 0 if wanted.logprobs is None else wanted.logprobs + 1
        if wanted.grammar:  # log probabilities before masking are stored, too
            scores *= 2
        return waiting * (PIECE + SCORE * scores)

    def progress(self) -> bytes:
        """Return an event or a comment with the prompt's progress; empty after the first token."""
        if self.choices[0].handle.pieces:
            return b""
        progress = self._progress
        return self._adapter.progress(progress) if self._parsed.progress else progress.comment

    @property
    def _progress(self) -> PromptProgress:
        """The progress of the first prompt.

        Rows that another client wrote would confirm a guess at that client's prompt, so they count as
        done only after prefill.
        """
        handle = self.choices[0].handle
        request = handle.request
        waiting = list(self._submission.served.engine.sched.waiting) if request.slot is None else []
        prefill = handle.prefill
        done = prefill.done
        if done < prefill.total:
            done -= prefill.cached - request.prefix.own
        return PromptProgress(
            prefill=prefill._replace(done=done, cached=request.prefix.own),
            before=sum(id < request.id for id in waiting),
            seconds=time.perf_counter() - self._submission.began,
        )

    def prefill_to_log(self, now: float) -> PrefillProgress | None:
        """Return the first prompt's progress if the prompt is long and due for a log line."""
        prefill = self.choices[0].handle.prefill
        if not prefill.is_long or now - self._logged < LOG_S:
            return None
        self._logged = now
        return prefill

    def _usage(self) -> Usage:
        metrics = [choice.handle.metrics for choice in self.choices]
        prompts = metrics[:: self._parsed.n]  # the first choice of each prompt
        return Usage(
            prompt=sum(m.prompt_tokens for m in prompts),
            # Exclude other clients' rows: counting them would confirm a guess at their prompts
            cached=sum(
                choice.handle.request.prefix.own for choice in self.choices[:: self._parsed.n]
            ),
            output=sum(m.output_tokens for m in metrics),
            reasoning=sum(choice.reasoning_tokens for choice in self.choices),
        )

    def _failure(self) -> APIError | None:
        """Return the error to send if a choice has failed."""
        for choice in self.choices:
            handle = choice.handle
            if isinstance(handle.exception, GrammarError):
                return self._submission.asked.refusal_of(ValueError(handle.error))
            if handle.finish_reason == "error":
                words = without_folders(handle.error)
                return APIError(500, f"request {handle.id} failed: {words}", "failed")
            if handle.finish_reason == "cancelled":
                return APIError(
                    503, f"request {handle.id} was cancelled by the server", "cancelled"
                )
        return None

    def account(self, request: HTTPRequest, server_metrics: ServerMetrics) -> None:
        """Add this answer to the records and metrics. Times to the first token include the time before
        submission."""
        total = self._usage()
        model = self._submission.served.name
        metrics = [choice.handle.metrics for choice in self.choices]
        first_tokens = []
        for m, choice in zip(metrics, self.choices, strict=True):
            first_tokens.append(None if m.ttft_s is None else self._submission.read_s + m.ttft_s)
            server_metrics.times(model, first_tokens[-1], choice.handle.times)
        for choice in self.choices[:: self._parsed.n]:
            asked = choice.handle.request
            own = asked.prefix.own
            server_metrics.prompt(model, len(asked.prompt), own, asked.prefix.cached_from)
        reasons = filter(None, [choice.handle.finish_reason for choice in self.choices])
        first = metrics[0]
        reading = (first.ttft_s or 0.0) - (first.queued_s or 0.0)
        request.update_record(
            reason=request.record.reason or min(reasons, key=WORST.index, default=""),
            prompt_tokens=total.prompt,
            cached_tokens=sum(m.cached_tokens for m in metrics[:: self._parsed.n]),
            tokens=total.output,
            draft_tokens=sum(m.draft_tokens for m in metrics),
            accepted_tokens=sum(m.accepted_tokens for m in metrics),
            ttft_s=first_tokens[0],
            prompt_tps=(first.prompt_tokens - first.cached_tokens) / reading
            if reading > 0
            else None,
            generation_tps=first.tokens_per_s,
        )

    def end(self) -> None:
        """Stop listening for output."""
        for choice in self.choices:
            self._writers.pop(choice.handle, None)
