"""What is told: to the owner of a request, and to those who watch the engine. Plain Python, without MLX.

The problem. An engine has two kinds of readers. The owner of a request wants its text as it comes, and its result. A
watcher, such as a screen or a server's metrics, wants to know everything that goes on, and owns nothing. Neither may
make the engine wait.

The owner holds a `Handle`: text that streams, a `Result` at the end, `Metrics`. A watcher asks `Engine.snapshot()`, and
gets a `Snapshot`: a view of each slot, of each request that can be seen, and of each step since the watcher looked
last. The `Ledger` keeps what both are told.

The invariant: nothing here refers to an array. A `Snapshot` is frozen and complete, so a screen can draw it while the
engine goes on, and a server can send it to another machine.

Where next: `parts/loop.py`, the thread that steps while owners wait and watchers look.
"""

from __future__ import annotations

import math
import random
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from sched import Plan, Request, Scheduler

if TYPE_CHECKING:  # they need MLX
    from nanobatch import Engine
    from parts.sampling import Sampling


# --- to the owner of a request -------------------------------------------------------------------------------------


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


class Handle:
    """One request as its owner sees it: iterate over it for text, or wait for its `result`. Any thread may.

    `listener` and `ended` are the owner's functions. They are called with the handle, by the thread that steps or ends
    the request, and may neither step nor wait (`tell`).
    """

    def __init__(
        self,
        engine: Engine,
        request: Request,
        sampling: Sampling,
        prompt: str,  # as a person would read it
        origin: Any = None,
        listener: Listener | None = None,
        ended: Callable[[Handle], None] | None = None,
    ):
        self.id, self.request, self.sampling, self.prompt, self.origin = request.id, request, sampling, prompt, origin
        self.seed = random.SystemRandom().getrandbits(64) if sampling.seed is None else sampling.seed
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.error: str | None = None
        self._engine, self._listener, self._ended = engine, listener, iter([ended] if ended else ())
        self._ends = sampling.stop_tokens | (frozenset() if sampling.ignore_eos else engine.text.end_tokens)
        self._stream = engine.text.stream(sampling.stop_texts)
        self._pieces: list[str] = []
        self.lengths: list[int] = []  # so many characters came with each token
        self.times: list[float] = []  # when each token came, on the engine's clock
        self._gaps: list[float] = []  # between a token and the next, the shortest first: watchers ask often

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def finish_reason(self) -> str | None:
        return self.request.finish_reason

    def cancel(self) -> None:
        """End this request now, whatever it is doing. After its end, this does nothing."""
        self._engine.cancel(self)

    def __iter__(self) -> Iterator[str]:
        """The text as it comes, in pieces that never hold half a character."""
        seen, request = 0, self.request
        while True:
            self._engine.wait(lambda seen=seen: len(self._pieces) > seen or request.finish_reason)
            if seen == len(self._pieces):
                return
            yield self._pieces[seen]
            seen += 1

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end. Raises TimeoutError if it does not come within `timeout` seconds."""
        if not self._engine.wait(lambda: self.request.finish_reason is not None, timeout):
            raise TimeoutError(f"request {self.id} has not ended within {timeout} s")
        logprobs = None if self.sampling.logprobs is None else list(self.logprobs)
        return Result(self.text, list(self.tokens), self.finish_reason, self.metrics, logprobs, self.error)

    @property
    def metrics(self) -> Metrics:
        r, times, gaps = self.request, self.times, self._gaps
        return Metrics(
            queued_s=None if r.admitted is None else r.admitted - r.arrived,
            ttft_s=times[0] - r.arrived if times else None,
            tokens_per_s=len(gaps) / (times[-1] - times[0]) if gaps and times[-1] > times[0] else None,
            itl_mean_s=sum(gaps) / len(gaps) if gaps else None,
            itl_p95_s=gaps[math.ceil(0.95 * len(gaps)) - 1] if gaps else None,
            itl_max_s=gaps[-1] if gaps else None,
            prompt_tokens=len(r.prompt),
            cached_tokens=r.reused,
            output_tokens=len(self.tokens),
        )

    # --- what the engine calls

    def take(self, token: int, now: float, logprob: TokenLogprob | None) -> str | None:
        """Take a token from commit; says why the answer ends with it, or None."""
        if token < 0:
            self.error = "the model computed a number that is not finite"
            return "error"
        if self.times:
            insort(self._gaps, now - self.times[-1])
        self.times.append(now)
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(TokenLogprob(logprob.logprob, logprob.top[: self.sampling.logprobs]))
        if token in self._ends:
            self.flush()
            return "stop"
        piece = self._stream.push(token)
        self.lengths.append(len(piece))
        self._show(piece)
        if self._stream.stopped or len(self.tokens) == self.request.max_tokens:
            self.flush()
        return "stop" if self._stream.stopped else None

    def flush(self, quietly: bool = False) -> None:
        """At the end: the text that was held back. Told to the listener if it is a step that ends the answer."""
        ended_by_token = self.tokens and self.tokens[-1] in self._ends
        self._show(self._stream.finish(self.tokens[:-1] if ended_by_token else self.tokens), quietly)

    def _show(self, piece: str, quietly: bool = False) -> None:
        if piece:
            self._pieces.append(piece)
            if self._listener and not quietly:
                tell(self._listener, self, piece)

    def tell_end(self) -> None:
        """Once, however many threads come here.

        subtle: the function is taken in the line that calls it. If Ctrl-C comes before, the next call finds it still.
        """
        self._listener = None
        tell(lambda: next(self._ended, lambda handle: None)(self))


Listener = Callable[[Handle, str], None]


class Here(threading.local):
    """What is going on in this thread."""

    def __init__(self) -> None:
        self.listens = False  # does an owner's function run?
        self.owes: dict[Ledger, None] = {}  # where requests have ended whose owners are to be told by this thread


here = Here()


class ListenerError(RuntimeError):
    """An owner's function steps or waits, or a wish waits (`parts/loop.py`).

    A step inside a listener would commit the next step half-way through this one, and waiting there would never end.
    """

    def __init__(self, what: str):
        super().__init__(f"{what} inside a listener or a wish: the engine waits for it; use a thread of your own")


def tell(listener: Callable, *arguments: Any) -> None:
    """Call an owner's function. The engine waits for it, so it must not wait for an engine."""
    before, here.listens = here.listens, True
    try:
        listener(*arguments)
    finally:
        here.listens = before


def is_ctrl_c(error: BaseException) -> bool:
    """Is it meant for the whole program? Python raises it in the main thread; elsewhere a function has made its own."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


# --- to those who watch ---------------------------------------------------------------------------------------------


class Limits(NamedTuple):
    """What an engine was made with."""

    slots: int
    max_len: int
    chunk: int
    budget: int
    far: int
    max_queue: int
    hurry: bool


class RanksView(NamedTuple):
    """The processes that share the model (`ranks.py`)."""

    backend: str = ""  # empty: there is one process
    memory: tuple[int, ...] = ()  # bytes of weights and slab, of each rank
    sums_ms: float | None = None  # of a step: how long its sums took, and waiting for the slowest rank


@dataclass(frozen=True)
class SlotView:
    """One slot at one moment."""

    slot: int
    phase: str  # "free" | "blocked" (free, but the policy keeps it from those who wait) | "prefill" | "decode"
    request: int | None
    used: int  # rows in the slab
    prompt_tokens: int
    output_tokens: int
    reused: int  # rows that were taken over from an earlier prompt and its answer
    remembered: int  # rows that a free slot still holds: of the last prompt in it, and of the answer

    @staticmethod
    def of(slot: int, owner: Request | None, sched: Scheduler, blocked: bool) -> SlotView:
        if owner is None:
            return SlotView(slot, "blocked" if blocked else "free", None, 0, 0, 0, 0, sched.prefixes.rows[slot])
        used = owner.prefilled + max(0, owner.committed - 1)  # the newest token's key and value are not there yet
        return SlotView(slot, owner.phase, owner.id, used, len(owner.prompt), owner.committed, owner.reused, 0)


@dataclass(frozen=True)
class RequestView:
    """One request at one moment, its text included."""

    id: int
    prompt: str
    origin: Any  # what was given to `submit`
    policy: str  # the one that admitted it; empty as long as it waits
    slot: int | None
    arrived: float
    metrics: Metrics
    ended: float | None = None
    text: str = ""
    lengths: tuple[int, ...] = ()  # so many characters of the text came with each token
    reason: str | None = None
    error: str | None = None

    @staticmethod
    def of(handle: Handle) -> RequestView:
        r, h = handle.request, handle
        said = {"text": h.text, "lengths": tuple(h.lengths), "reason": r.finish_reason, "error": h.error}
        return RequestView(r.id, h.prompt, h.origin, r.policy, r.slot, r.arrived, h.metrics, r.ended, **said)


@dataclass(frozen=True)
class StepView:
    """One step as it was run: which request did what, and how long each stage took."""

    step: int
    admitted: tuple[tuple[int, int], ...]  # (slot, request)
    why: tuple[str, ...]  # for each of these: why this slot
    prefill: tuple[tuple[int, int, int, int], ...]  # (slot, request, start, stop): which piece of which prompt
    decode: tuple[tuple[int, int], ...]  # (slot, request)
    held: tuple[tuple[int, int], ...]  # (slot, request): in a slot, but without a chunk in this step
    ghosts: tuple[int, ...]  # slots whose request had ended before this step: their tokens were dropped
    blocked: tuple[int, ...]  # slots that were free, but kept from those who waited
    waiting: int  # requests left in line
    policy: str  # the one that the step was planned under
    tokens: int  # that were delivered
    cost: int  # of the budget
    began: float  # on the engine's clock: planned
    ended: float  # committed
    # Where the time of the thread that steps went. The five add up to `seconds`.
    plan_s: float  # Python decided what the step does
    build_s: float  # Python built the step's graph
    # MLX took the graph's operations into its queue (`mx.async_eval`). On a CPU the queue is short: Python stands still
    # until the device has made room, so the device does nearly all of its work in this time. On a GPU this is work of
    # the processor's: MLX launches kernels, and the device's own time is in `wait_s`. (No GPU has been measured.)
    device_s: float
    wait_s: float  # Python waited until the device had done the rest (`mx.eval`), and read the tokens
    commit_s: float  # Python handed out the tokens

    @staticmethod
    def of(
        plan: Plan,
        ghosts: tuple[int, ...],
        *,
        started: float,
        build_s: float,
        device_s: float,
        wait_s: float,
        read: float,
        ended: float,
    ) -> StepView:
        """A plan in plain numbers, once it has been run."""
        return StepView(
            plan.step,
            admitted=tuple((r.slot, r.id) for r in plan.admitted),
            why=tuple(r.why for r in plan.admitted),
            prefill=tuple((c.slot, c.request.id, c.start, c.stop) for c in plan.chunks),
            decode=tuple((d.slot, d.request.id) for d in plan.decodes),
            held=tuple((r.slot, r.id) for r in plan.held),
            ghosts=ghosts,
            blocked=plan.blocked,
            waiting=plan.waiting,
            policy=plan.policy,
            began=plan.at,
            tokens=len(plan.emitters) - len(ghosts),
            cost=len(plan.decodes) + sum(chunk.cost for chunk in plan.chunks),
            ended=ended,
            plan_s=started - plan.at,
            build_s=build_s,
            device_s=device_s,
            wait_s=wait_s,
            commit_s=ended - read,
        )

    @property
    def python_s(self) -> float:
        """Python's own work on the step."""
        return self.plan_s + self.build_s + self.commit_s

    @property
    def seconds(self) -> float:
        """What it took of the engine's time. From `began` to `ended` is longer: the next step is planned meanwhile."""
        return self.python_s + self.device_s + self.wait_s


class Seen(NamedTuple):
    """How far a watcher has seen: so many steps, ends and faults, and requests up to this one."""

    steps: int = 0
    ended: int = 0
    faults: int = 0
    request: int = -1


@dataclass(frozen=True)
class Snapshot:
    """The engine at one moment, and what has happened since a watcher looked last."""

    now: float
    limits: Limits
    policy: str
    draining_to: str | None  # the policy that takes over when all that runs has ended
    slots: tuple[SlotView, ...]
    waiting: int  # the length of the line
    queue: tuple[tuple[int, float], ...]  # its head: (request, seconds waited), oldest first
    requests: tuple[RequestView, ...]  # those that are in a slot now, and those in line that came since
    ended: tuple[RequestView, ...]  # since, oldest first
    missed_ends: int  # ends since that are no longer kept
    steps: tuple[StepView, ...]  # since, oldest first
    missed: int  # steps since that are no longer kept
    faults: tuple[str, ...]  # what went wrong since outside of any request: in an `ended`, or in a wish of a watcher
    planned: int  # the newest step; it may be on the device still, and in no record yet
    submitted: int
    finished: int
    output_tokens: int
    steps_s: float  # the seconds of all steps so far
    seen: Seen
    ranks: RanksView


class Log:
    """The newest entries of a long list, and how many there have been in all."""

    def __init__(self, kept: int):
        self.count, self._entries = 0, deque(maxlen=kept)

    def add(self, entry: Any) -> None:
        self._entries.append(entry)
        self.count += 1

    def since(self, count: int) -> tuple:
        """All but the first `count` entries, oldest first, as far as they are kept."""
        new = min(self.count - count, len(self._entries))
        return tuple(reversed(tuple(islice(reversed(self._entries), new))))


class Ledger:
    """The handles of all open requests, and what has happened so far: kept in bounded memory for those who watch."""

    QUEUE = 32  # of the line, so many are shown

    def __init__(self) -> None:
        self.open: dict[int, Handle] = {}
        self.steps, self.ended, self.faults = Log(4096), Log(500), Log(100)
        self.output_tokens, self.steps_s = 0, 0.0
        self.farewells: dict[int, Handle] = {}  # of all that has ended, and whose owner has not been told yet

    def deliver(
        self, logprobs: Mapping[int, TokenLogprob], clock: Callable[[], float], request: Request, token: int
    ) -> str | None:
        """Hand a request its token; says why it ends with it, or None. What goes wrong here is its own failure."""
        handle = self.open[request.id]
        self.output_tokens += 1
        try:
            return handle.take(token, clock(), logprobs.get(request.slot))
        except BaseException as error:  # a panic in the tokenizer's Rust is no Exception, nor is a listener's sys.exit
            if is_ctrl_c(error):
                raise
            if request.finish_reason:  # the listener has cancelled it before it raised: what is final stays as it is
                self.faults.add(f"the listener of request {request.id} raised {describe(error)}")
            else:
                handle.error = describe(error)
            return "error"

    def record(self, step: StepView) -> None:
        self.steps.add(step)
        self.steps_s += step.seconds

    def retire(self, id: int) -> None:
        """Forget a request that has ended. Its owner is told when no lock is held any more (`say_farewell`)."""
        if handle := self.open.get(id):
            self.farewells[id] = handle
            self.ended.add(RequestView.of(handle))  # a handle would keep the engine, and all its log probabilities
            del self.open[id]

    def say_farewell(self) -> None:
        """Call `ended` of all that have ended. What it raises changes no request; those who watch will see it.

        Inside an owner's function this does nothing yet: the call around it goes on here when it holds no lock any
        more. It may be another engine's, if a listener of that one has cancelled a request of this one.
        """
        here.owes[self] = None
        while here.owes and not here.listens:
            ledger = next(iter(here.owes))
            for handle in list(ledger.farewells.values()):
                try:
                    handle.tell_end()
                except BaseException as error:
                    if is_ctrl_c(error):
                        raise
                    ledger.faults.add(f"`ended` of request {handle.id} raised {describe(error)}")
                ledger.farewells.pop(handle.id, None)  # not before: Ctrl-C may come at any line
            if not ledger.farewells:
                here.owes.pop(ledger, None)

    def snapshot(
        self, sched: Scheduler, blocked: Collection[int], ranks: RanksView, now: float, since: Snapshot | None
    ) -> Snapshot:
        """`blocked`: the slots that the newest plan has kept shut."""
        seen = Seen() if since is None else since.seen
        owners = {request.slot: request for request in sched.running.values()}
        shut = blocked if sched.waiting else ()
        if since is None:
            came = list(islice(sched.waiting, self.QUEUE))
        else:
            came = list(takewhile(lambda id: id > seen.request, reversed(sched.waiting)))
        steps, ended = self.steps.since(seen.steps), self.ended.since(seen.ended)
        newest = max(seen.request, next(reversed(sched.waiting), -1))
        return Snapshot(
            now=now,
            limits=Limits(*(getattr(sched, name) for name in Limits._fields)),
            policy=sched.policy,
            draining_to=sched.draining_to,
            slots=tuple(SlotView.of(slot, owners.get(slot), sched, slot in shut) for slot in range(sched.slots)),
            waiting=len(sched.waiting),
            queue=tuple((r.id, now - r.arrived) for r in islice(sched.waiting.values(), self.QUEUE)),
            requests=tuple(RequestView.of(self.open[id]) for id in sorted([*sched.running, *came])),
            ended=ended,
            missed_ends=self.ended.count - seen.ended - len(ended),
            steps=steps,
            missed=self.steps.count - seen.steps - len(steps),
            faults=self.faults.since(seen.faults),
            planned=sched.steps,
            submitted=sched.submitted,
            finished=sched.submitted - len(sched.waiting) - len(sched.running),
            output_tokens=self.output_tokens,
            steps_s=self.steps_s,
            seen=Seen(self.steps.count, self.ended.count, self.faults.count, newest),
            ranks=ranks,
        )
