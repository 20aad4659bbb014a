"""The handle of a request: streamed text, a `Result` at the end, and `Metrics`. Plain Python without MLX.
Observers use snapshots instead (`engine/snapshot.py`)."""

from __future__ import annotations

import math
import random
from array import array
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from base.error_reports import describe, show_fault
from engine.prefill_progress import PrefillClock, PrefillProgress
from engine.snapshot import Metrics, RequestView, percentile
from request import Request
from sampling_params import SamplingParams
from step_output import StepOutput, TokenLogprob, TokenLogprobs, unit_vector

if TYPE_CHECKING:
    from nanobatch import Engine
    from text.grammar import Grammar


class Delta(NamedTuple):
    """The text that was added to an answer since the last delta."""

    text: str
    is_last: bool  # True if the request has ended and no text is left
    has_more: bool  # True if there is more text to take


@dataclass(frozen=True)
class Result:
    text: str
    tokens: list[int]
    finish_reason: str  # "stop" | "length" | "cancelled" | "error"
    metrics: Metrics
    logprobs: list[TokenLogprob] | None
    error: str | None
    vector: array | None = None  # an embedding, not normalized

    def unit_vector(self, dimensions: int | None = None) -> array:
        """Return the vector, or its first `dimensions` numbers, scaled to length 1."""
        if self.vector is None:
            raise RuntimeError(f"a text has no vector: {self.error or self.finish_reason}")
        return unit_vector(self.vector, dimensions)


class Handle:
    """A submitted request. Iterate over it to stream the text, or wait for its `result`. Thread-safe.

    The engine's thread only appends to a handle. It calls no code of the owner except `ends`.
    """

    def __init__(
        self,
        engine: Engine,
        request: Request,
        sampling: SamplingParams,
        prompt: str,  # as text, for observers
        origin: Any = None,  # shown to observers
        grammar: Grammar | None = None,
        is_thinking: bool = False,  # the prompt opens a reasoning block
        ends: Callable[[str], bool] | None = None,  # returns True for the last piece
    ):
        self.id = request.id
        self.request = request
        self.sampling = sampling
        self.prompt = prompt
        self.origin = origin
        self.grammar = grammar
        self.is_thinking = is_thinking
        # True if sampling depends on earlier tokens
        self.needs_last_token = sampling.looks_back or grammar is not None
        self._is_last_piece = ends
        self.seed = (
            random.SystemRandom().getrandbits(64) if sampling.seed is None else sampling.seed
        )
        self.logprobs = TokenLogprobs()
        self.vector: array | None = None
        self.error: str | None = None  # why the request failed, in one line
        self.exception: BaseException | None = None  # the exception that caused `error`
        self._engine = engine
        self.prefill_clock = PrefillClock()
        self._end_tokens = sampling.stop_tokens | (
            frozenset() if sampling.ignore_eos else engine.text.end_tokens
        )
        self._stream = engine.text.stream(sampling.stop_texts)
        # The text in pieces, which never split a character
        self.pieces: list[str] = []
        self._taken = 0  # number of pieces that `take_delta` has returned
        self.lengths: list[int] = []  # number of characters that each token added
        self.times: list[float] = []  # when each token was committed, on the engine's clock
        # Seconds between tokens, kept sorted because observers often request percentiles
        self._gaps: list[float] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def tokens(self) -> list[int]:
        return [] if self.sampling.embeds else self.request.answer

    @property
    def finish_reason(self) -> str | None:
        return self.request.finish_reason

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, or None."""
        return self._stream.stop

    def cancel(self) -> None:
        """Cancel the request, in any phase. Does nothing if it has ended."""
        self._engine.cancel(self)

    def __iter__(self) -> Iterator[str]:
        """Yield the text as it is generated, in pieces that never split a character."""
        seen = 0

        def has_news() -> bool:
            return len(self.pieces) > seen or self.finish_reason is not None

        while True:
            self._wait(has_news)
            if seen == len(self.pieces):
                return
            yield self.pieces[seen]
            seen += 1

    def wait_for_text(self, timeout: float | None = None) -> bool:
        """Wait for the first text or the end of the request. Return False after `timeout` seconds."""
        return self._wait(lambda: bool(self.pieces) or self.finish_reason is not None, timeout)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end of the request. Raise TimeoutError after `timeout` seconds."""
        if not self._wait(lambda: self.request.finish_reason is not None, timeout):
            raise TimeoutError(f"request {self.id} did not finish within {timeout} s")
        logprobs = None if self.sampling.logprobs is None else list(self.logprobs)
        return Result(
            text=self.text,
            tokens=list(self.tokens),
            finish_reason=self.finish_reason,
            metrics=self.metrics,
            logprobs=logprobs,
            error=self.error,
            vector=self.vector,
        )

    def _wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        return self._engine.driver.wait(ready, self._engine.step, timeout)

    @property
    def pending(self) -> int:
        """The number of pieces that `take_delta` has not returned yet."""
        return len(self.pieces) - self._taken

    def take_delta(self, most: int) -> Delta:
        """Return the text since the last call, at most `most` pieces of it. Never waits.

        For a single reader. Commit only appends, so a slow reader gets the rest in the next delta.
        """
        has_ended = self.finish_reason is not None  # read first: no piece is added after the end
        pieces = self.pieces[self._taken : self._taken + most]
        self._taken += len(pieces)
        has_more = self._taken < len(self.pieces)
        return Delta("".join(pieces), has_ended and not has_more, has_more)

    @property
    def metrics(self) -> Metrics:
        r = self.request
        times = self.times
        gaps = self._gaps
        return Metrics(
            queued_s=r.admission.at - r.arrived if r.admission else None,
            ttft_s=times[0] - r.arrived if times else None,
            tokens_per_s=len(gaps) / (times[-1] - times[0])
            if gaps and times[-1] > times[0]
            else None,
            itl_mean_s=sum(gaps) / len(gaps) if gaps else None,
            itl_p95_s=percentile(gaps, 0.95),
            itl_max_s=gaps[-1] if gaps else None,
            prompt_tokens=len(r.prompt),
            cached_tokens=r.prefix.cached,
            output_tokens=len(self.tokens),
            draft_tokens=r.drafting.proposed,
            accepted_tokens=r.drafting.accepted,
            cached_from=r.prefix.cached_from,
            reread_tokens=r.prefix.reread,
        )

    @property
    def prefill(self) -> PrefillProgress:
        """The progress of the prompt's prefill now."""
        return self.prefill_at(self._engine.clock())

    # --- called by the engine and its registry

    def prefill_at(self, now: float) -> PrefillProgress:
        r = self.request
        admitted = r.admission.at if r.admission else now
        found = self.prefill_clock.progress(len(r.prompt), r.prefix.cached, admitted, now)
        # The first token is delivered before its step is recorded, so the clock may lag behind
        return found._replace(done=found.total, left_s=0.0) if r.committed else found

    def view(self) -> RequestView:
        """Return a frozen view of this request for observers."""
        r = self.request
        return RequestView(
            id=r.id,
            prompt=self.prompt,
            client=r.client,
            origin=self.origin,
            policy=r.admission.policy if r.admission else "",
            slot=r.slot,
            arrived=r.arrived,
            metrics=self.metrics,
            ended=r.end.at if r.end else None,
            text=self.text,
            lengths=tuple(self.lengths),
            reason=r.finish_reason,
            error=self.error,
            candidates=self._candidates(),
            is_thinking=self.is_thinking,
            max_tokens=r.max_tokens,
        )

    def _candidates(self) -> tuple[tuple[str, float, bool], ...]:
        """Return the newest token and the tokens that would be most likely without the grammar, as in
        `RequestView.candidates`. Empty without a grammar, and after the end."""
        count = min(len(self.logprobs), len(self.tokens))
        if self.grammar is None or not count or self.finish_reason:
            return ()
        newest = self.logprobs[count - 1]
        token = self.tokens[count - 1]
        allowed = {token, *(id for id, value in newest.top if value > -math.inf)}
        before = list(self.tokens[max(0, count - 5) : count - 1])
        likely = {token: newest.logprob}
        for id, value in newest.free:
            likely.setdefault(id, value)
        texts = self._engine.text.after(before, [*likely])
        seen = []
        for text, (id, value) in zip(texts, likely.items(), strict=True):
            seen.append((text, math.exp(value), id in allowed))
        return tuple(seen)

    def append_token(self, output: StepOutput, now: float) -> str | None:
        """Append a token to the answer. Return the finish reason if the token ends it, else None. (The scheduler
        checks `max_tokens`.)

        For an embedding, keep the vector instead of the token."""
        token = output.token
        if token < 0:
            self.error = "the model computed a number that is not finite"
            if self._engine.model.has_narrow_kv:
                self.error += "; if a key exceeds float16, try --kv float32"
            return "error"
        if self.sampling.embeds:
            self.vector = output.vector
            return "stop"
        if self.times:
            insort(self._gaps, now - self.times[-1])
        self.times.append(now)
        if output.logprob is not None:
            logprob, top, free = output.logprob
            most = self.sampling.logprobs
            self.logprobs.append(TokenLogprob(logprob, top[:most], free[:most]))
        if token in self._end_tokens:
            self.flush()
            return "stop"
        if self.grammar is not None:
            self.grammar.accept(token)
        piece = self._stream.push(token)
        self.lengths.append(len(piece))
        self._show(piece)
        is_whole = self.grammar is not None and self.grammar.is_complete
        is_over = bool(piece) and self._is_last_piece is not None and self._is_last_piece(piece)
        stops = is_whole or is_over or self.stop is not None
        if stops or len(self.tokens) == self.request.max_tokens:
            self.flush()  # may complete a stop string
        return "stop" if stops or self.stop is not None else None

    def close(self, error: BaseException | str | None) -> None:
        """Record the error of a request that ends outside a commit, and append its last text. `error`: the
        failure, or None for a cancel."""
        if isinstance(error, BaseException):
            self.exception = error
            error = describe(error)
        self.error = error
        try:
            self.flush()
        except BaseException as fault:  # a Rust panic in the tokenizer is not an Exception
            show_fault(f"the last text of request {self.id} is lost", fault)

    def flush(self) -> None:
        """At the end of the answer, append the text that the stream still holds back."""
        ended_by_token = self.tokens and self.tokens[-1] in self._end_tokens
        self._show(self._stream.finish(self.tokens[:-1] if ended_by_token else self.tokens))

    def _show(self, piece: str) -> None:
        if piece:
            self.pieces.append(piece)
