"""What is answered: to a request's owner, and to whoever watches the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from parts.sampling import Sampling, fresh_seed
from sched import Plan, Request

if TYPE_CHECKING:
    from nanobatch import Engine


@dataclass(frozen=True)
class Metrics:
    """Times in seconds. `itl` is the gap between a token and the next; None where there was no such thing."""

    queued_s: float | None
    ttft_s: float | None  # submit to first token
    tokens_per_s: float | None  # after the first
    itl_mean_s: float | None
    itl_p95_s: float | None
    itl_max_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class TokenLogprob(NamedTuple):
    """What the model thought of a token: its log probability, and the most likely tokens with theirs."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Result:
    text: str
    tokens: list[int]
    finish_reason: str  # "stop" | "length" | "cancelled" | "error"
    metrics: Metrics
    logprobs: list[TokenLogprob] | None
    error: str | None


Listener = Callable[["Handle", str], None]


class Handle:
    """One request as its owner sees it: iterate over it for text, or wait for its `result`. Any thread may."""

    def __init__(self, engine: Engine, request: Request, sampling: Sampling, listener: Listener | None):
        self.id, self.sampling = request.id, sampling
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.error: str | None = None
        self._engine, self._request, self._listener = engine, request, listener
        self._seed = fresh_seed() if sampling.seed is None else sampling.seed
        self._ends = sampling.stop_tokens | (frozenset() if sampling.ignore_eos else engine.text.end_tokens)
        self._text = engine.text.stream(sampling.stop_texts)
        self._pieces: list[str] = []
        self._times: list[float] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def finish_reason(self) -> str | None:
        return self._request.finish_reason

    def cancel(self) -> None:
        """End this request now, whatever it is doing. After its end, this does nothing."""
        self._engine._cancel(self._request)

    def __iter__(self) -> Iterator[str]:
        """The text as it comes, in pieces that never hold half a character."""
        seen = 0
        while True:
            self._engine._wait(lambda seen=seen: len(self._pieces) > seen or self.finish_reason is not None)
            if seen == len(self._pieces):
                return
            yield self._pieces[seen]
            seen += 1

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end. Raises TimeoutError if it does not come within `timeout` seconds."""
        if not self._engine._wait(lambda: self.finish_reason is not None, timeout):
            raise TimeoutError(f"request {self.id} has not ended within {timeout} s")
        logprobs = None if self.sampling.logprobs is None else list(self.logprobs)
        return Result(self.text, list(self.tokens), self.finish_reason, self.metrics, logprobs, self.error)

    @property
    def metrics(self) -> Metrics:
        r, times = self._request, self._times
        gaps = sorted(b - a for a, b in pairwise(times))
        return Metrics(
            queued_s=None if r.admitted is None else r.admitted - r.arrived,
            ttft_s=None if r.first_token is None else r.first_token - r.arrived,
            tokens_per_s=len(gaps) / (times[-1] - times[0]) if gaps and times[-1] > times[0] else None,
            itl_mean_s=sum(gaps) / len(gaps) if gaps else None,
            itl_p95_s=gaps[math.ceil(0.95 * len(gaps)) - 1] if gaps else None,
            itl_max_s=gaps[-1] if gaps else None,
            prompt_tokens=len(r.prompt),
            cached_tokens=r.reused,
            output_tokens=len(self.tokens),
        )

    def _accept(self, token: int, now: float, logprob: TokenLogprob | None) -> str | None:
        """Take a token from commit; says why the answer ends with it, or None."""
        if token < 0:
            self.error = "the model computed a number that is not finite"
            return "error"
        self._times.append(now)
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(TokenLogprob(logprob.logprob, logprob.top[: self.sampling.logprobs]))
        if token in self._ends:
            return "stop"
        self._show(self._text.push(token))
        return "stop" if self._text.stopped else None

    def _flush(self, tell: bool = True) -> None:
        """At the end: the text that was held back. The listener is told if it is a step that ends the answer."""
        ended_by_token = self.tokens and self.tokens[-1] in self._ends
        self._show(self._text.finish(self.tokens[:-1] if ended_by_token else self.tokens), tell)

    def _show(self, piece: str, tell: bool = True) -> None:
        if piece:
            self._pieces.append(piece)
            if tell and self._listener:
                self._listener(self, piece)


@dataclass(frozen=True)
class SlotView:
    """One slot at one moment."""

    slot: int
    phase: str  # "free" | "prefill" | "decode"
    request: int | None
    used: int  # rows in the slab
    prompt_tokens: int
    output_tokens: int
    reused: int  # rows that were taken over from another prompt
    remembered: int  # rows that a free slot still holds


@dataclass(frozen=True)
class StepView:
    """One step as it was run: who did what, and how long each stage took."""

    step: int
    admitted: tuple[tuple[int, int], ...]  # (slot, request)
    prefill: tuple[tuple[int, int, int, int], ...]  # (slot, request, start, stop): which piece of which prompt
    decode: tuple[tuple[int, int], ...]  # (slot, request)
    held: tuple[tuple[int, int], ...]  # (slot, request): in a slot, but without a chunk in this step
    ghosts: tuple[int, ...]  # slots whose request had ended before this step: their tokens were dropped
    waiting: int  # requests left in line
    policy: str  # the one that the step was planned under
    tokens: int  # that were delivered
    cost: int  # of the budget
    began: float  # on the engine's clock: planned
    ended: float  # committed
    plan_s: float
    # Building the graph and starting it. On a CPU MLX keeps few operations in its line, and whoever hands over the next
    # one waits: so nearly all of a step's work is waited for in here.
    build_s: float
    wait_s: float  # waiting for the device
    commit_s: float

    @staticmethod
    def of(plan: Plan, ghosts: tuple[int, ...], **times: float) -> StepView:
        """A plan in plain numbers, once it has been run."""
        return StepView(
            plan.step,
            admitted=tuple((r.slot, r.id) for r in plan.admitted),
            prefill=tuple((c.slot, c.request.id, c.start, c.stop) for c in plan.chunks),
            decode=tuple((d.slot, d.request.id) for d in plan.decodes),
            held=tuple((r.slot, r.id) for r in plan.held),
            ghosts=ghosts,
            waiting=plan.waiting,
            policy=plan.policy,
            tokens=len(plan.emitters) - len(ghosts),
            cost=len(plan.decodes) + sum(chunk.cost for chunk in plan.chunks),
            **times,
        )


@dataclass(frozen=True)
class Snapshot:
    """The engine at one moment, for whoever draws it. Immutable, and made of plain Python."""

    policy: str
    slots: tuple[SlotView, ...]
    queue: tuple[tuple[int, float], ...]  # (request, seconds waited), oldest first
    submitted: int
    finished: int
    output_tokens: int
    steps: tuple[StepView, ...]  # the most recent ones, oldest first


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
